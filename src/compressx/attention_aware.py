"""The allocation method `attention-aware`: sparsity where it costs a decoder block's output least."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compressx.access import Access
from compressx.allocation import Curve
from compressx.measure import Measured, measure
from compressx.planning import Plan
from compressx.recipe import AttentionAware
from compressx.report import AllocationReport, UnitReport
from compressx.units import Unit, spread, units_of


def allocate(
    access: Access,
    plan: Plan,
    settings: AttentionAware,
    batches: Sequence[Tensor],
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[Plan, AllocationReport]:
    """Measure what sparsity costs each unit of a plan, and give every linear the sparsity that costs least in sum.

    Args:
        access: the model with its dense weights, which are as they were afterwards.
        plan: the plan, its sparsities still open.
        settings: as the recipe has them.
        batches: calibration token ids, each [batch, tokens].
        progress: called with how many blocks are measured, and how many there are.

    Returns:
        The final plan, and what was measured and chosen.

    Raises:
        CompressxError: as `measure`.
    """
    units = units_of(plan)
    total = len({u.block for u in units if u.block})
    progress(0, total)
    measured: dict[Unit, Measured] = {}
    seen, held_out = _parts(batches, settings.samples)
    for done, block in enumerate(measure(access, units, seen, held_out, settings.sparsities), start=1):
        measured |= {m.unit: m for m in block}
        progress(done, total)
    # Against the residual stream, which later blocks read: a block that adds little to it may be wrong about that.
    curves = {u: Curve(m.sparsities, m.output_errors) for u, m in measured.items()}
    final = plan.allocated(spread(units, curves, settings.target, settings.scope))
    # Of linears that compete jointly only the total is a whole number.
    given = {x.name: x.pattern.sparsity * x.weights for x in final.linears}
    zeros = {u: round(sum(given[x.name] for x in u.linears)) for u in units}
    report = AllocationReport(
        method=settings.method,
        target=settings.target,
        scope=settings.scope,
        weights=sum(u.weights for u in units),
        zeros=sum(zeros.values()),
        units=tuple(_unit_report(u, zeros[u], curves.get(u), measured.get(u)) for u in units),
    )
    return final, report


def _parts(batches: Sequence[Tensor], samples: int) -> tuple[list[Tensor], list[Tensor]]:
    """Take the first windows to learn from, and the last quarter of `samples` to measure on; a single one does both."""
    windows = torch.cat(tuple(batches))[:samples]
    held_out = math.ceil(len(windows) / 4)
    seen, unseen = windows[:-held_out] if len(windows) > 1 else windows, windows[-held_out:]
    size = len(batches[0])
    return list(torch.split(seen, size)), list(torch.split(unseen, size))


def _unit_report(unit: Unit, zeros: int, curve: Curve | None, measured: Measured | None) -> UnitReport:
    sparsity = zeros / unit.weights
    return UnitReport(
        block=unit.block,
        pruner=unit.rule.label,
        linears=tuple(x.name for x in unit.linears),
        weights=unit.weights,
        sparsity=sparsity,
        error=None if curve is None else curve.error(sparsity),
        sparsities=() if measured is None else measured.sparsities,
        update_errors=() if measured is None else measured.update_errors,
        output_errors=() if measured is None else measured.output_errors,
    )
