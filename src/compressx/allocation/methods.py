"""The methods of allocation: what each measures, the sparsities that it chooses from that, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from compressx.recipe.sections import OUTLIER_THRESHOLD, SPREAD, Allocation, OwlAllocation

Measured: TypeAlias = Mapping[str, Any]
"""By the first linear of a unit its sparsities and their divergences, or by block its outlier ratio; JSON types."""

_Choose: TypeAlias = Callable[[Sequence[Unit], int], list[int]]
"""Distributes zeros over units."""

_Details: TypeAlias = Callable[[Unit, float], Mapping[str, Any]]
"""What the report says of a unit at its sparsity: further fields of `UnitReport`."""


def measured(
    access: Access, plan: Plan, settings: Allocation, batches: Sequence[Tensor],
    sensitivities: Mapping[str, Tensor] = MappingProxyType({}), keep: KeepStates = in_memory,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _note: None,
    earlier: Measured = MappingProxyType({}), record: Callable[[Measured], None] = lambda _: None,
) -> Measured:  # fmt: skip
    """Measure what a method needs of the units of a plan. No target is in it, so it serves all.

    Args:
        access: the model with its dense weights, unchanged afterwards.
        plan: the plan, with sparsities still open.
        settings: the recipe's `allocation` section.
        batches: calibration token ids, each [batch, tokens].
        sensitivities: as for `measure`.
        keep: as for `measure`.
        progress: called with the blocks measured, their total, and a note.
        earlier: what `record` got last in a run that was interrupted; that is not measured again.
        record: called after each block with all that is measured.
    """
    units = [u for u in units_of(plan, settings.unit) if u.block]
    outliers = isinstance(settings, OwlAllocation)
    left = [u for u in units if (u.block if outliers else u.linears[0].name) not in earlier]
    total, remaining = (len({u.block for u in some}) for some in (units, left))
    found = dict(earlier)

    def tell(sequences: int, of: int) -> None:
        progress(total - remaining, total, f"gradients at {sequences} of {of} sequences")

    def blocks() -> Iterator[Measured]:
        if isinstance(settings, OwlAllocation):
            drawn = torch.split(torch.cat(tuple(batches))[: settings.samples], len(batches[0]))
            for unit, ratio in measure_outliers(access, left, drawn, OUTLIER_THRESHOLD, keep):
                yield {unit.block: ratio}
        else:
            seen, held_out = split_batches(batches, settings.samples)
            for block in measure(access, left, seen, held_out, settings.sparsities, sensitivities, keep, tell):
                yield {m.unit.linears[0].name: [[*m.sparsities], [*m.divergences]] for m in block}

    progress(0, total, "")
    for done, block in enumerate(blocks(), start=total - remaining + 1):
        record(found := found | dict(block))
        progress(done, total, "")
    return found


def chosen(plan: Plan, settings: Allocation, found: Measured) -> tuple[Plan, AllocationReport]:
    """Return the plan with the sparsity that the method chooses for every linear, and a report."""
    by_method = _by_outliers if isinstance(settings, OwlAllocation) else _by_divergence
    choose, details = by_method(found)
    final = plan.allocated(spread(units_of(plan, settings.unit), settings.fraction, choose))
    reports = []
    for unit in units_of(final, settings.unit):
        names, sparsity = tuple(x.name for x in unit.linears), zeros_of(unit.linears) / unit.weights
        reports.append(UnitReport(unit.block, unit.label, names, unit.weights, sparsity, **details(unit, sparsity)))
    weights, zeros = sum(x.weights for x in final.linears), zeros_of(final.linears)
    report = AllocationReport(settings.method, settings.fraction, settings.unit, weights, zeros, tuple(reports))
    return final, report


def _by_divergence(found: Measured) -> tuple[_Choose, _Details]:
    """Choose the sparsities with the lowest summed divergence."""
    curves = {name: Curve(tuple(at), tuple(costs)) for name, (at, costs) in found.items() if at}

    def choose(group: Sequence[Unit], zeros: int) -> list[int]:
        able = [(x, curves[name]) for x in group if (name := x.linears[0].name) in curves]  # a single group has to stay
        finest = min(x.step for x, _ in able)
        counts = cheapest([x.points(c) for x, c in able], round(zeros / finest) * finest, [x.step for x, _ in able])
        given = dict(zip([x for x, _ in able], counts, strict=True))
        return [given.get(unit, 0) for unit in group]

    def details(unit: Unit, sparsity: float) -> dict[str, Any]:
        if (curve := curves.get(unit.linears[0].name)) is None:
            return {}
        return {"divergence": curve.error(sparsity), "sparsities": curve.sparsities, "divergences": curve.errors}

    return choose, details


def _by_outliers(ratios: Measured) -> tuple[_Choose, _Details]:
    """Choose lower sparsities for blocks with more outliers."""

    def choose(group: Sequence[Unit], zeros: int) -> list[int]:
        weights = [u.weights for u in group]
        sparsities = outlier_weighed([ratios[u.block] for u in group], weights, zeros / sum(weights), SPREAD)
        return [round(s * w) for s, w in zip(sparsities, weights, strict=True)]

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


def split_batches(batches: Sequence[Tensor], samples: int) -> tuple[list[Tensor], list[Tensor]]:
    """Split off the last quarter of `samples` sequences to measure on."""
    sequences = torch.cat(tuple(batches))[:samples]
    held_out = held_out_of(samples, len(sequences))
    seen, unseen = sequences[:-held_out], sequences[-held_out:]
    size = len(batches[0])
    return list(torch.split(seen, size)), list(torch.split(unseen, size))
