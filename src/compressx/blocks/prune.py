"""Block by block pruning: observe a dense block, decide, write, reconstruct, compute the next block's input.

Statistics of a block come from one forward pass of the dense block over the outputs of the pruned blocks before it.
Reported sparsities are counted from the masks that were written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from compressx.api.patterns import RulePattern, Structured, sparsity_of
from compressx.api.pruner import Block, BlockCall, Linear, PruneResult
from compressx.api.record import BlockReport, LayerReport
from compressx.blocks.contract import refuse_lost_zeros
from compressx.blocks.depth import decide_whole
from compressx.blocks.fisher import FisherDiagonal
from compressx.blocks.select import Built, ByRule, Decision, decide_all, gather, write
from compressx.masks.file import MaskEntry, WeightHashes
from compressx.models.access import Access, differences, in_place_of
from compressx.models.architecture import Architecture, architecture_of, text_config
from compressx.models.blockwise import (
    BlockRun,
    HiddenStates,
    KeepStates,
    advance,
    capture,
    copy_shared_states,
    each_block,
    in_memory,
    passes,
    run_around,
    shared_states,
)
from compressx.models.shards import OUTSIDE
from compressx.models.units import leave_out
from compressx.numerics.output_error import channel_weights, relative_errors
from compressx.planning.plan import Plan, PlannedRule
from compressx.runtime.errors import UnsupportedModelError, memory_named
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.timing import synchronize
from compressx.runtime.transfer import to_device, to_host
from compressx.training.reconstruct import BlockBatch, reconstruct

MEASURED_TOKENS = 2048
"""Minimum of calibration tokens to measure a block's error on; few, since they cost two more forward passes."""


@dataclass(frozen=True, eq=False)
class PrunedBlock:
    """The result of pruning one block: its report, and its masks and images by linear name.

    `hidden` holds the inputs of the next block; pruning that block modifies them.
    """

    report: BlockReport
    masks: Mapping[str, MaskEntry] = field(default_factory=dict)
    images: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    hidden: HiddenStates = field(default_factory=lambda: HiddenStates(()))


def prune_model(
    access: Access, plan: Plan, batches: Sequence[Tensor], finished: tuple[str, HiddenStates] | None = None,
    keep: KeepStates = in_memory, ranks: Ranks = ALONE, fisher: FisherDiagonal | None = None,
) -> Iterator[PrunedBlock]:  # fmt: skip
    """Prune a model in place, block by block.

    Args:
        access: a transformers causal language model in evaluation mode.
        plan: the patterns and pruners of its linears; its blocks are scored where a rule drops some.
        batches: calibration token ids, each [batch, tokens]; empty when the plan needs no calibration.
        finished: of an interrupted run the last pruned block, and the inputs of the next; from the start when absent.
        keep: where to keep hidden states between blocks.
        ranks: the processes, each with its own batches; all end with the same weights.
        fisher: mean squared gradients of the dense model's loss on these batches: sensitivities of linears' outputs for
            the pruners that need them, and error weights of blocks' output channels for block reconstruction. Without
            the latter, channels are weighted by their size.

    Yields:
        The result for each block that the plan changes, while the block's weights are still loaded, and finally one for
        the linears outside the blocks if the plan has any.
    """
    found = architecture_of(access.model)
    batches = [ids.to(access.device) for ids in batches] if plan.needs_calibration else []
    hidden, calls = _entering(access, found, plan, batches, finished, keep)
    order = [*found.blocks, OUTSIDE]
    start = 0 if finished is None else order.index(finished[0]) + 1
    last = max((i for i, fqn in enumerate(order) if plan.in_block(fqn)), default=-1)
    copies: dict[int, Any] = {}
    dense = {fqn: [copy_shared_states(call, copies) for call in made] for fqn, made in calls.items()}
    before = sum(ranks.all_gather(sum(map(len, batches)))[: ranks.rank])
    pruning = _Pruning(access, plan, plan.build(), ranks, before, fisher or FisherDiagonal(), last, dense)
    started = time.perf_counter()
    for block, runs in each_block(access, found, calls, list(found.blocks)[start : last + 1]):
        with memory_named(f"running and pruning {block.fqn}"):
            pruned = pruning.inside(block, runs, hidden, started)
        if pruned.report.layers:
            yield pruned
        del pruned  # free its memory before the next block
        started = time.perf_counter()
    if plan.in_block(OUTSIDE) and start < len(order):
        with access.materialise(OUTSIDE), differences(access, OUTSIDE, found.outside) as linears:
            yield pruning.outside(found, linears, batches, hidden.pruned)


def _entering(
    access: Access,
    found: Architecture,
    plan: Plan,
    batches: Sequence[Tensor],
    finished: tuple[str, HiddenStates] | None,
    keep: KeepStates,
) -> tuple[HiddenStates, Mapping[str, Sequence[BlockCall]]]:
    """Return the inputs of the first unfinished block, and the arguments of every block."""
    if finished is not None:  # the inputs of the first block are not needed
        calls = capture(access, found, batches, lambda state: state.new_empty(0))[1]
        if not resumable(access.model, calls):
            raise UnsupportedModelError(
                f"{type(access.model).__name__}: its blocks use keys and values of earlier ones again, which an "
                "interrupted run does not keep, so it cannot be resumed; start it anew, without --resume"
            )
        return finished[1], calls
    states, calls = capture(access, found, batches, keep)
    return HiddenStates(states, [keep(x.clone()) for x in states] if plan.hidden_copies > 1 else ()), calls


def resumable(model: Any, calls: Mapping[str, Sequence[BlockCall]]) -> bool:
    """Return whether a later block can be pruned without running the ones before it, given its inputs."""
    # A Gemma 4 none of whose blocks uses keys and values of earlier ones passes the same object.
    shared = getattr(text_config(model), "num_kv_shared_layers", None) != 0
    return not (shared and any(map(shared_states, chain(*calls.values()))))


@dataclass(frozen=True, eq=False)
class _Pruning:
    """The inputs that are common to all blocks.

    Attributes:
        access: the model.
        plan: the patterns and pruners of its linears.
        pruners: the pruner of each rule.
        ranks: the processes.
        before: calibration sequences of the processes before this one.
        fisher: mean squared gradients of the dense model's loss.
        last: index of the last block to prune; hidden states are not needed after it.
        dense: each block's calls by the dense model, with what dense blocks hand one another.
    """

    access: Access
    plan: Plan
    pruners: Built
    ranks: Ranks
    before: int
    fisher: FisherDiagonal
    last: int
    dense: Mapping[str, Sequence[BlockCall]]

    @torch.no_grad()
    def inside(self, block: Block, runs: Sequence[BlockRun], hidden: HiddenStates, started: float) -> PrunedBlock:
        """Prune and reconstruct a decoder block if the plan does, and advance the hidden states."""
        block = replace(block, sensitivities=self.fisher.linears)
        if self.plan.hidden_copies > 1:
            on_dense = [replace(run, call=call) for run, call in zip(runs, self.dense[block.fqn], strict=True)]
            advance(block.fqn, on_dense, hidden.dense)
        observing = passes(runs, hidden.pruned)
        measured = observing[: _first(hidden.pruned)] if self.plan.in_block(block.fqn) else []
        dense = [run() for run in measured]
        layers, masks, images = self.prune(block, observing)
        error, reconstruction = _output_error(measured, dense), None
        dropped = block.fqn in self.plan.dropped
        if self.plan.block_training and layers and not dropped:
            # Apart, or keys and values for later blocks would hold the graphs of the training's last steps.
            trained = [run.isolated for run in runs]
            passages = [BlockBatch(*x) for x in zip(hidden.pruned, hidden.dense, trained, strict=True)]
            channels = self.fisher.channels.get(block.fqn)
            with memory_named(f"training {block.fqn}"):
                reconstruction = reconstruct(
                    self.access.model, block.fqn, masks, passages, self.plan.block_training, self.ranks, channels
                )
        if block.index < self.last and not (dropped and in_place_of(self.access, block.fqn) is None):  # the same states
            advance(block.fqn, runs, hidden.pruned)
        refuse_lost_zeros(block, masks)
        synchronize(next(block.module.parameters()).device)
        seconds = time.perf_counter() - started
        return PrunedBlock(
            BlockReport(block.index, block.fqn, layers, seconds, error, reconstruction), masks, images, hidden
        )

    @torch.no_grad()
    def outside(
        self, found: Architecture, linears: Mapping[str, Linear], batches: Sequence[Tensor], states: Sequence[Tensor]
    ) -> PrunedBlock:
        """Prune the linears outside the blocks, running the model with the last block's recorded output."""
        started = time.perf_counter()
        block = Block(len(found.blocks), OUTSIDE, self.access.model, linears, (), text_config(self.access.model))
        observing = [
            lambda ids=ids, state=state: run_around(self.access.model, found.blocks, ids, to_device(state, ids.device))
            for ids, state in zip(batches, states, strict=True)
        ]
        layers, masks, images = self.prune(block, observing)
        refuse_lost_zeros(block, masks)
        return PrunedBlock(BlockReport(block.index, OUTSIDE, layers, time.perf_counter() - started), masks, images)

    def prune(
        self, block: Block, observing: Sequence[Callable[[], Any]]
    ) -> tuple[tuple[LayerReport, ...], dict[str, MaskEntry], dict[str, Mapping[str, Tensor]]]:
        """Observe a block, decide masks and weights of its linears, and write them."""
        by_rule = self.plan.in_block(block.fqn)
        asked = self.plan.decided_in(block.fqn)
        stats = gather(block, asked, self.pruners, observing, self.ranks, self.before)
        layers: dict[str, LayerReport] = {}
        keeps: dict[str, Tensor] = {}
        images = {}
        firsts: dict[tuple[PlannedRule, str], tuple[str, PruneResult]] = {}  # of each group, whose figures count
        decisions = decide_all(block, asked, self.pruners, stats, self.ranks) if asked else iter(())
        with WeightHashes() as hashes:
            for name, decision in chain(decisions, self._whole(block, by_rule)):
                rule, result, linear = decision.rule, decision.result, block.linears[name]
                hashes.add(linear)
                keeps[name] = to_host(result.keep)
                write(linear, result)
                of = firsts.setdefault((rule, result.group), (name, result)) if result.group else (name, result)
                layers[name] = _layer_report(name, by_rule[rule][name], decision, *of)
                images[name] = of[1].images
            masks = {
                name: MaskEntry(keeps[name], layers[name].pattern, layers[name].pruner, *hashes[name])
                for patterns in by_rule.values()
                for name in patterns
            }
        if block.fqn in self.plan.dropped and (other := in_place_of(self.access, block.fqn)) is not None:
            block.module.load_state_dict(other.state_dict())  # its norms, too
        hold_routers(block, asked, keeps)
        return tuple(layers[n] for n in masks), masks, {n: images[n] for n in masks}

    def _whole(self, block: Block, by_rule: ByRule) -> Iterator[tuple[str, Decision]]:
        """Yield what the rule that drops whole blocks means for its linears, if there is one."""
        depth = self.plan.depth
        if depth is not None and depth.rule in by_rule:
            for name, result in decide_whole(block, depth, list(by_rule[depth.rule])).items():
                yield name, Decision(depth.rule, result, 0.0)


def _layer_report(name: str, pattern: RulePattern, decision: Decision, first: str, shown: PruneResult) -> LayerReport:
    """Report a pruned linear, with the figures of the first linear of its group."""
    result = decision.result
    return LayerReport(
        name, decision.rule.label, str(pattern), (result.keep.shape[0], result.keep.shape[1]),
        target=pattern.sparsity, sparsity=sparsity_of(result.keep), seconds=decision.seconds,
        info={k: float(v) for k, v in shown.info.items()},
        history={k: tuple(map(float, v)) for k, v in shown.history.items()}, group=first if result.group else "",
    )  # fmt: skip


def hold_routers(block: Block, by_rule: ByRule, masks: Mapping[str, Tensor]) -> None:
    """Let the routers of a block choose only among the experts that are kept, where rules drop some."""
    patterns = [p for some in by_rule.values() for p in some.values()]
    for units in {id(p.units): p.units for p in patterns if isinstance(p, Structured) and p.unit == "experts"}.values():
        leave_out(block, units, units.kept(masks))


def _first(states: Sequence[Tensor]) -> int:
    """Return how many of the first batches are needed for `MEASURED_TOKENS` tokens."""
    tokens = accumulate(math.prod(state.shape[:-1]) for state in states)
    return next((i for i, seen in enumerate(tokens, start=1) if seen >= MEASURED_TOKENS), len(states))


def _output_error(observing: Sequence[Callable[[], Tensor]], dense: Sequence[Tensor]) -> float | None:
    """Return the relative error of the pruned block's output, see `BlockReport`."""
    if not dense:
        return None
    channels = channel_weights(dense)
    errors = [relative_errors(run(), wanted, channels).flatten() for run, wanted in zip(observing, dense, strict=True)]
    return float(torch.cat(errors).mean())
