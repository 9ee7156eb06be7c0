"""The measured allocation methods, and the plan and report that they produce."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compressx.allocation.measure import measure, measure_outliers
from compressx.allocation.units import Curve, Unit, cheapest, spread, units_of, zeros_of
from compressx.api.record import AllocationReport, UnitReport
from compressx.models.access import Access
from compressx.models.blockwise import KeepStates, in_memory
from compressx.planning.plan import Plan
from compressx.recipe.sections import (
    OUTLIER_THRESHOLD,
    SPREAD,
    Allocation,
    AttentionAware,
    DivergenceAllocation,
    OwlAllocation,
)

Curves: TypeAlias = Mapping[str, Sequence[Sequence[float]]]
"""The sparsities of each measured unit, and their divergences, by the name of its first linear; JSON types."""


def allocate(
    access: Access,
    plan: Plan,
    settings: Allocation,
    batches: Sequence[Tensor],
    sensitivities: Mapping[str, Tensor] = MappingProxyType({}),
    progress: Callable[[int, int, str], None] = lambda _done, _total, _note: None,
    keep: KeepStates = in_memory,
    remembered: Callable[[Callable[[], Curves]], Curves] = lambda compute: compute(),
    earlier: Mapping[str, Any] = MappingProxyType({}),
    record: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> tuple[Plan, AllocationReport]:
    """Measure the units of a plan, and set the sparsity of every linear by the method.

    Args:
        access: the model with its dense weights, unchanged afterwards.
        plan: the plan, with sparsities still open.
        settings: the recipe's `allocation` section.
        batches: calibration token ids, each [batch, tokens].
        sensitivities: as for `measure`.
        progress: called with the blocks measured, their total, and a note.
        keep: as for `measure`.
        remembered: returns what its argument computes, or what that computed before for the same model, text and rules.
        earlier: what `record` got last in a run that was interrupted; those units are not measured again.
        record: called after each block with all that is measured, in JSON types.

    Returns:
        The final plan, and a report of measurements and sparsities.

    Raises:
        CompressxError: as `measure` and `measure_outliers`.
    """
    units = units_of(plan, settings.unit)
    total = len({u.block for u in units if u.block})

    def tell(done: int, note: str = "") -> None:
        progress(done, total, note)

    tell(0)
    if isinstance(settings, OwlAllocation):
        choose, details = _by_outliers(_outliers(access, settings, units, batches, tell, keep, earlier, record))
    else:

        def measured() -> Curves:
            return _curves(access, settings, units, batches, sensitivities, tell, keep, earlier, record)

        choose, details = _by_divergence(remembered(measured))
    final = plan.allocated(spread(units, settings.fraction, choose))
    reports = []
    for unit in units_of(final, settings.unit):
        names, sparsity = tuple(x.name for x in unit.linears), zeros_of(unit.linears) / unit.weights
        reports.append(UnitReport(unit.block, unit.label, names, unit.weights, sparsity, **details(unit, sparsity)))
    weights = sum(x.weights for x in final.linears)
    report = AllocationReport(
        settings.method, settings.fraction, settings.unit, weights, zeros_of(final.linears), tuple(reports)
    )
    return final, report


_Choose: TypeAlias = Callable[[Sequence[Unit], int], list[int]]
"""Distributes zeros over units."""

_Details: TypeAlias = Callable[[Unit, float], Mapping[str, Any]]
"""What the report says of a unit at its sparsity: further fields of `UnitReport`."""


def _curves(
    access: Access, settings: DivergenceAllocation | AttentionAware, units: Sequence[Unit], batches: Sequence[Tensor],
    sensitivities: Mapping[str, Tensor], tell: Callable[..., None], keep: KeepStates,
    earlier: Curves, record: Callable[[Curves], None],
) -> Curves:  # fmt: skip
    """Measure what each sparsity of each unit costs; no target is in it, so it serves all."""
    seen, held_out = _parts(batches, settings.samples)
    found = dict(earlier)
    left = [u for u in units if u.linears[0].name not in found]
    before = len({u.block for u in units if u.block} - {u.block for u in left})
    blocks = measure(
        access, left, seen, held_out, settings.sparsities, sensitivities, keep,
        progress=lambda done, sequences: tell(before, f"gradients at {done} of {sequences} sequences"),
    )  # fmt: skip
    for done, block in enumerate(blocks, start=before + 1):
        found |= {m.unit.linears[0].name: [[*m.sparsities], [*m.divergences]] for m in block}
        record(found)
        tell(done)
    return found


def _by_divergence(measured: Curves) -> tuple[_Choose, _Details]:
    """Choose the sparsities with the lowest summed divergence."""
    curves = {name: Curve(tuple(at), tuple(costs)) for name, (at, costs) in measured.items() if at}

    def choose(group: Sequence[Unit], zeros: int) -> list[int]:
        able = [(x, curves[name]) for x in group if (name := x.linears[0].name) in curves]  # a single group has to stay
        finest = min(x.step for x, _ in able)
        chosen = cheapest([x.points(c) for x, c in able], round(zeros / finest) * finest, [x.step for x, _ in able])
        given = dict(zip([x for x, _ in able], chosen, strict=True))
        return [given.get(unit, 0) for unit in group]

    def details(unit: Unit, sparsity: float) -> dict[str, Any]:
        if (curve := curves.get(unit.linears[0].name)) is None:
            return {}
        return {"divergence": curve.error(sparsity), "sparsities": curve.sparsities, "divergences": curve.errors}

    return choose, details


def _outliers(
    access: Access, settings: OwlAllocation, units: Sequence[Unit], batches: Sequence[Tensor],
    tell: Callable[[int], None], keep: KeepStates, earlier: Mapping[str, float],
    record: Callable[[Mapping[str, float]], None],
) -> Mapping[str, float]:  # fmt: skip
    """Measure the outlier ratio of each block."""
    sequences = torch.cat(tuple(batches))[: settings.samples]
    ratios = dict(earlier)
    left = [u for u in units if u.block not in ratios]
    for unit, ratio in measure_outliers(access, left, torch.split(sequences, len(batches[0])), OUTLIER_THRESHOLD, keep):
        ratios[unit.block] = ratio
        record(ratios)
        tell(len(ratios))
    return ratios


def _by_outliers(ratios: Mapping[str, float]) -> tuple[_Choose, _Details]:
    """Choose lower sparsities for blocks with more outliers."""

    def choose(group: Sequence[Unit], zeros: int) -> list[int]:
        weights = [u.weights for u in group]
        chosen = outlier_weighed([ratios[u.block] for u in group], weights, zeros / sum(weights), SPREAD)
        return [round(s * w) for s, w in zip(chosen, weights, strict=True)]

    return choose, lambda unit, _: {"outliers": ratios.get(unit.block)}


def outlier_weighed(ratios: Sequence[float], weights: Sequence[int], target: float, spread: float) -> list[float]:
    """Return sparsities that decrease linearly with outlier ratios, within target +- spread (OWL, arXiv 2310.05175).

    The paper bounds sparsities by target +- lambda. The authors' code stretches the ratios over a range of 2 lambda and
    then shifts their mean to the target, which exceeds the bound on the long side of a skewed distribution. Here ratios
    are scaled about their mean, so the bound holds.

    Args:
        ratios: outlier ratio of each block.
        weights: number of weights of each block.
        target: mean sparsity over all weights.
        spread: lambda, the deviation from the target of the block with the most extreme ratio.
    """
    mean = sum(r * w for r, w in zip(ratios, weights, strict=True)) / sum(weights)
    farthest = max(abs(r - mean) for r in ratios)
    if farthest <= 1e-12:  # one block, or equal ratios
        return [target] * len(ratios)
    return [target - spread * (r - mean) / farthest for r in ratios]


def stored_sequences(plan: Plan, settings: Allocation, sequences: int) -> int:
    """Return of how many sequences an allocation keeps hidden states or gradients, given the calibration sequences."""
    states = 2 * min(settings.samples, sequences)  # before and after a block
    if isinstance(settings, OwlAllocation):
        return states
    return states + held_out_of(settings.samples, sequences) * len({x.block for x in plan.linears if x.block})


def held_out_of(samples: int, sequences: int) -> int:
    """Return how many calibration sequences divergences are measured on: the last quarter of `samples`."""
    return math.ceil(min(samples, sequences) / 4)


def _parts(batches: Sequence[Tensor], samples: int) -> tuple[list[Tensor], list[Tensor]]:
    """Split off the last quarter of `samples` sequences to measure on."""
    sequences = torch.cat(tuple(batches))[:samples]
    held_out = held_out_of(samples, len(sequences))
    seen, unseen = sequences[:-held_out], sequences[-held_out:]
    size = len(batches[0])
    return list(torch.split(seen, size)), list(torch.split(unseen, size))
