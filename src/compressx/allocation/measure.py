"""What allocation measures on the dense model, block by block: what sparsity costs the predictions, and outliers.

What happens to a unit is what pruning does to it: observe the block, let the unit's own pruners decide, write. Then the
block is run, and its weights are put back, so that the next block's input is the dense block's output and every unit is
measured alone. What the change of the block's output does to the predictions is read off gradients, so that no later
block is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from compressx.allocation.units import Unit
from compressx.api.patterns import RulePattern
from compressx.api.pruner import Block, Linear
from compressx.api.statistics import FeatureNorms
from compressx.blocks.fisher import divergences, gradients
from compressx.blocks.observe import SharedStatistic, observe, refuse_missed
from compressx.blocks.select import Decision, PreparedValues, decide_all, gather, restored, write
from compressx.models.access import Access
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import BlockRun, KeepStates, advance, capture, each_block, in_memory, passes
from compressx.numerics.obs import wanda_scores
from compressx.planning.plan import PlannedRule
from compressx.runtime.errors import CalibrationError
from compressx.runtime.finite import refuse_damage
from compressx.runtime.transfer import to_device

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class UnitCurve:
    """What the sparsities of one unit cost, each measured with everything else dense.

    Attributes:
        unit: the unit.
        sparsities: that it was pruned to.
        divergences: of the model's predictions from the dense model's, as `compressx.blocks.fisher.divergences` has
            them, nats, the mean over tokens.
    """

    unit: Unit
    sparsities: tuple[float, ...]
    divergences: tuple[float, ...]


def measure(
    access: Access, units: Sequence[Unit], seen: Sequence[Tensor], held_out: Sequence[Tensor],
    sparsities: Sequence[float], sensitivities: Mapping[str, Tensor] = MappingProxyType({}),
    keep: KeepStates = in_memory, progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[tuple[UnitCurve, ...]]:  # fmt: skip
    """Yield a value for each unit of each decoder block. Weights are restored to the bit, also after an error.

    Args:
        access: a transformers causal language model in evaluation mode, with its dense weights.
        units: the units of a plan; those outside the blocks are skipped.
        seen: token ids that the pruners learn from, each [batch, tokens].
        held_out: token ids that divergences are measured on: a pruner that overfits looks too good on its own text.
        sparsities: to measure; for N:M and units the nearest possible.
        sensitivities: that pruners read, by linear, as in `Block`.
        keep: where hidden states before and after a block are kept, and the gradients of `held_out` for all blocks.
        progress: called before the first block with the number of sequences of `held_out` done, and of all.
    """
    inside = [x for u in units if u.block for x in u.linears]
    pruners = {rule: rule.build() for rule in dict.fromkeys(x.rule for x in inside)}
    blocks = {u.block for u in units if u.block}
    output_gradients = gradients(access, architecture_of(access.model), blocks, held_out, keep, progress)
    learnt = len(seen)

    def visit(dense: _Dense) -> tuple[UnitCurve, ...]:
        mine = [u for u in units if u.block == dense.block.fqn]
        by_rule: dict[PlannedRule, list[str]] = {}
        for linear in (x for u in mine for x in u.linears):
            by_rule.setdefault(linear.rule, []).append(linear.name)
        block = replace(dense.block, sensitivities=sensitivities)
        stats = gather(block, by_rule, pruners, dense.passes[:learnt])
        unseen = [*zip(dense.passes[learnt:], dense.outputs[learnt:], output_gradients.pop(block.fqn), strict=True)]
        prepared: PreparedValues = {}

        def ask(patterns: Mapping[PlannedRule, Mapping[str, RulePattern]]) -> Iterator[tuple[str, Decision]]:
            return decide_all(block, patterns, pruners, dict(stats), kept=prepared)  # a copy: it drops statistics

        def divergence() -> float:
            """Return that of the predictions with the block as it now is, the mean over tokens."""
            of_batches = [
                divergences((out := run()).float() - to_device(was, out.device).float(), gradient).flatten()
                for run, was, gradient in unseen
            ]
            return float(torch.cat(of_batches).double().mean())

        return tuple(_measure(unit, sparsities, block.linears, ask, divergence) for unit in mine)

    return _over_blocks(access, blocks, [*seen, *held_out], visit, keep)


def measure_outliers(
    access: Access, units: Sequence[Unit], batches: Sequence[Tensor], threshold: float, keep: KeepStates = in_memory
) -> Iterator[tuple[Unit, float]]:
    """Yield each decoder block's unit with the `outlier_ratio` of its linears, on the dense model's hidden states."""

    def visit(dense: _Dense) -> tuple[Unit, float]:
        (unit,) = (u for u in units if u.block == dense.block.fqn)
        linears = {x.name: dense.block.linears[x.name] for x in unit.linears}
        refuse_damage(dense.block.module, dense.block.fqn)
        norms = {n: {"norms": SharedStatistic(FeatureNorms(x.in_features))} for n, x in linears.items()}
        refuse_missed(linears, observe(linears, norms, dense.passes))
        pairs = []
        for name, linear in linears.items():
            statistic = norms[name]["norms"].statistic
            assert isinstance(statistic, FeatureNorms)  # noqa: S101 - equal statistics may have been shared
            pairs.append((linear.weight, statistic.norms))
        return unit, outlier_ratio(pairs, threshold)

    return _over_blocks(access, {u.block for u in units}, batches, visit, keep)


@dataclass(frozen=True, eq=False)
class _Dense:
    """A dense block with its weights there, what enters it, how to run it on a batch, and room for what leaves it."""

    block: Block
    states: Sequence[Tensor]
    runs: Sequence[BlockRun]
    room: Sequence[Tensor]

    @cached_property
    def passes(self) -> list[Callable[[], Tensor]]:
        return passes(self.runs, self.states)

    @cached_property
    def outputs(self) -> Sequence[Tensor]:
        advance(self.block.fqn, self.runs, self.states, self.room)
        return self.room


def _over_blocks(
    access: Access, wanted: Collection[str], batches: Sequence[Tensor], visit: Callable[[_Dense], _T], keep: KeepStates
) -> Iterator[_T]:
    """Run the dense model block by block and yield what `visit` returns for each block that is wanted."""
    found = architecture_of(access.model)
    states: Sequence[Tensor]
    states, calls = capture(access, found, batches, keep)
    room: Sequence[Tensor] = [keep(torch.empty_like(x)) for x in states]
    last = max((i for i, fqn in enumerate(found.blocks) if fqn in wanted), default=-1)
    for block, runs in each_block(access, found, calls, list(found.blocks)[: last + 1]):
        with torch.no_grad():
            dense = _Dense(block, states, runs, room)
            results = [visit(dense)] if block.fqn in wanted else []
            if block.index < last:
                states, room = dense.outputs, states
        yield from results


def _measure(
    unit: Unit,
    sparsities: Sequence[float],
    linears: Mapping[str, Linear],
    ask: Callable[[Mapping[PlannedRule, Mapping[str, RulePattern]]], Iterator[tuple[str, Decision]]],
    divergence: Callable[[], float],
) -> UnitCurve:
    """Prune a unit to one sparsity after the other, each time from its dense weights."""
    found: dict[float, float] = {}
    for wanted in sparsities:
        sparsity, patterns = unit.at(wanted)
        if sparsity <= max(found, default=0.0):  # N:M and units cannot express every sparsity
            continue
        with restored(linears[x.name] for x in unit.linears):
            for name, decision in ask(patterns):
                write(linears[name], decision.result)
            found[sparsity] = divergence()
        if not math.isfinite(found[sparsity]):
            raise CalibrationError(
                f"{unit.block}: with {unit.linears[0].name} at sparsity {sparsity} ({unit.label}) the divergence "
                "of the predictions is not finite; leave that sparsity out of allocation.sparsities"
            )
    return UnitCurve(unit, tuple(found), tuple(found.values()))


def outlier_ratio(pairs: Sequence[tuple[Tensor, Tensor]], threshold: float) -> float:
    """Return the fraction of scores |W_ij| * ||X_j||_2 above `threshold`, the paper's M, times their mean.

    Args:
        pairs: weights [out_features, in_features] with the norms of their input features [in_features]; scores of all
            pairs form one distribution.
        threshold: the paper's M.
    """
    weights = sum(weight.numel() for weight, _ in pairs)
    total = sum(float(wanda_scores(*pair).sum(dtype=torch.float64)) for pair in pairs)
    return sum(int((wanda_scores(*pair) > threshold * total / weights).sum()) for pair in pairs) / weights
