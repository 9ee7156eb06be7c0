"""The methods of allocation at work: what they measure, and the plan and report that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from compressx.allocation.measure import Measured, measure, measure_outliers
from compressx.allocation.owl import sparsities
from compressx.allocation.spread import Curve, cheapest
from compressx.allocation.units import Unit, spread, units_of, zeros_of
from compressx.api.record import AllocationReport, UnitReport
from compressx.models.access import Access
from compressx.models.hidden import Keep, in_memory
from compressx.planning.plan import Plan
from compressx.recipe.methods import Allocation, AttentionAware, DivergenceAllocation, MeasuredAllocation, OwlAllocation


def allocate(
    access: Access,
    plan: Plan,
    settings: MeasuredAllocation,
    batches: Sequence[Tensor],
    sensitivities: Mapping[str, Tensor] = MappingProxyType({}),
    progress: Callable[[int, int, str], None] = lambda _done, _total, _note: None,
    keep: Keep = in_memory,
) -> tuple[Plan, AllocationReport]:
    """Measure the units of a plan, and give every linear the sparsity that the method chooses.

    Args:
        access: the model with its dense weights, which are as they were afterwards.
        plan: the plan, its sparsities still open.
        settings: as the recipe has them.
        batches: calibration token ids, each [batch, tokens].
        sensitivities: as `measure` takes them.
        progress: called with how many blocks are measured, how many there are, and what else there is to say.
        keep: as `measure` takes it.

    Returns:
        The final plan, and what was measured and chosen.

    Raises:
        CompressxError: as `measure` and `measure_outliers`.
    """
    units = units_of(plan, settings.unit)
    total = len({u.block for u in units if u.block})

    def tell(done: int, note: str = "") -> None:
        progress(done, total, note)

    tell(0)
    if isinstance(settings, OwlAllocation):
        return _by_outliers(access, plan, settings, units, batches, tell, keep)
    return _by_divergence(access, plan, settings, units, batches, sensitivities, tell, keep)


def report_on(
    final: Plan, settings: Allocation, tell: Callable[[Unit, float], Mapping[str, Any]] = lambda _u, _s: {}
) -> AllocationReport:
    """Report what an allocation gave to each unit.

    Args:
        final: the plan with its final patterns.
        settings: as the recipe has them.
        tell: what else there is to say of a unit at its sparsity, by field of `UnitReport`.
    """
    zeros = zeros_of(final.linears)
    return AllocationReport(
        method=settings.method,
        target=settings.target,
        unit=settings.unit,
        scope=settings.scope,
        weights=sum(x.weights for x in final.linears),
        zeros=zeros,
        units=tuple(_unit_report(u, tell) for u in units_of(final, settings.unit)),
    )


def _unit_report(unit: Unit, tell: Callable[[Unit, float], Mapping[str, Any]]) -> UnitReport:
    sparsity = zeros_of(unit.linears) / unit.weights
    names = tuple(x.name for x in unit.linears)
    return UnitReport(unit.block, unit.label, names, unit.weights, sparsity, **tell(unit, sparsity))


def _by_divergence(
    access: Access, plan: Plan, settings: DivergenceAllocation | AttentionAware, units: Sequence[Unit],
    batches: Sequence[Tensor], sensitivities: Mapping[str, Tensor], tell: Callable[..., None], keep: Keep,
) -> tuple[Plan, AllocationReport]:  # fmt: skip
    """Take zeros where they raise the summed divergence least."""
    seen, held_out = _parts(batches, settings.samples)
    measured: dict[str, Measured] = {}  # by the name of the unit's first linear
    blocks = measure(
        access, units, seen, held_out, settings.sparsities, sensitivities, keep,
        progress=lambda done, windows: tell(0, f"gradients at {done} of {windows} windows"),
    )  # fmt: skip
    for done, block in enumerate(blocks, start=1):
        measured |= {m.unit.linears[0].name: m for m in block}
        tell(done)
    curves = {name: Curve(m.sparsities, m.divergences) for name, m in measured.items()}

    def choose(group: Sequence[Unit], zeros: int) -> list[int]:
        return cheapest([unit.points(curves[unit.linears[0].name]) for unit in group], zeros)

    def told(unit: Unit, sparsity: float) -> dict[str, Any]:
        if (m := measured.get(unit.linears[0].name)) is None:
            return {}
        return {
            "divergence": curves[unit.linears[0].name].error(sparsity),
            "sparsities": m.sparsities,
            "divergences": m.divergences,
        }

    final = plan.allocated(spread(units, settings.target, choose, scope=settings.scope))
    return final, report_on(final, settings, told)


def _by_outliers(
    access: Access, plan: Plan, settings: OwlAllocation, units: Sequence[Unit], batches: Sequence[Tensor],
    progress: Callable[[int], None], keep: Keep,
) -> tuple[Plan, AllocationReport]:  # fmt: skip
    """Keep more of the blocks with more outliers."""
    windows = torch.cat(tuple(batches))[: settings.samples]
    ratios: dict[str, float] = {}  # by block
    threshold = settings.outlier_threshold
    for unit, ratio in measure_outliers(access, units, torch.split(windows, len(batches[0])), threshold, keep):
        ratios[unit.block] = ratio
        progress(len(ratios))

    def choose(group: Sequence[Unit], zeros: int) -> list[int]:
        weights = [u.weights for u in group]
        chosen = sparsities([ratios[u.block] for u in group], weights, zeros / sum(weights), settings.spread)
        return [round(s * w) for s, w in zip(chosen, weights, strict=True)]

    final = plan.allocated(spread(units, settings.target, choose))
    return final, report_on(final, settings, lambda unit, _: {"outliers": ratios.get(unit.block)})


def windows_kept(plan: Plan, settings: MeasuredAllocation, windows: int) -> int:
    """Return how many windows of hidden states, or what is as large, measuring on calibration text of so many keeps."""
    states = 2 * min(settings.samples, windows)  # before and after a block
    if isinstance(settings, OwlAllocation):
        return states
    return states + _held_out(settings.samples, windows) * len({x.block for x in plan.linears if x.block})


def _held_out(samples: int, windows: int) -> int:
    """Return how many of so many calibration windows divergences are measured on: the last quarter of `samples`."""
    return math.ceil(min(samples, windows) / 4)


def _parts(batches: Sequence[Tensor], samples: int) -> tuple[list[Tensor], list[Tensor]]:
    """Take the first windows to learn from, and the last quarter of `samples` to measure on; a single one does both."""
    windows = torch.cat(tuple(batches))[:samples]
    held_out = _held_out(samples, len(windows))
    seen, unseen = windows[:-held_out] if len(windows) > 1 else windows, windows[-held_out:]
    size = len(batches[0])
    return list(torch.split(seen, size)), list(torch.split(unseen, size))
