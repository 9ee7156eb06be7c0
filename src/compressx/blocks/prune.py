"""Pruning, block by block: observe a still unpruned block, decide, write, reconstruct, give the next block its input.

Statistics of a block come from one forward of the unpruned block over the outputs of the already pruned ones. No
concrete pruner is known here, and what was written is counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import Block, BlockCall, sparsity_of
from compressx.api.record import BlockReport, LayerReport
from compressx.blocks.fisher import FisherDiagonal
from compressx.blocks.select import Built, decide_all, gather, write
from compressx.masks.maskset import MaskEntry, weight_sha256
from compressx.models.access import Access
from compressx.models.architecture import Architecture, survey, text_config
from compressx.models.blockwise import Run, advance, capture, each_block, passes
from compressx.models.capture import run_around
from compressx.models.hidden import Keep, Streams, in_memory
from compressx.models.shards import OUTSIDE
from compressx.numerics.output_error import channel_weights, relative_errors
from compressx.planning.plan import Plan
from compressx.runtime.ranks import ALONE, Ranks
from compressx.training.reconstruct import Passage, reconstruct

_MEASURED_TOKENS = 2048
"""Calibration tokens, at least, on which a block's error is measured: a few, since each is two more passes."""


@dataclass(frozen=True, eq=False)
class PrunedBlock:
    """What was done to one block: its report, and by linear name its masks and the matrices to be seen.

    Objects that a pruner gave to several linears are one object here, too. `streams` is what enters the next block;
    pruning that one changes it.
    """

    report: BlockReport
    masks: Mapping[str, MaskEntry] = field(default_factory=dict)
    images: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    streams: Streams = field(default_factory=lambda: Streams(()))


@dataclass(frozen=True, eq=False)
class Finished:
    """Where an interrupted run had got to.

    Attributes:
        fqn: the last block that was pruned.
        streams: what enters the next one.
    """

    fqn: str
    streams: Streams


def prune_model(
    access: Access, plan: Plan, batches: Sequence[Tensor], finished: Finished | None = None, keep: Keep = in_memory,
    ranks: Ranks = ALONE, fisher: FisherDiagonal | None = None,
) -> Iterator[PrunedBlock]:  # fmt: skip
    """Prune a model in place, block by block.

    Args:
        access: a transformers causal language model in evaluation mode.
        plan: what to do.
        batches: calibration token ids, each [batch, tokens]; empty when the plan needs no calibration.
        finished: where an interrupted run had got to; from the start when absent.
        keep: where hidden states are kept between blocks.
        ranks: the processes, each with batches of its own; all end with the same weights.
        fisher: mean squared gradients of the dense model's loss on these batches: of linears' outputs for the pruners
            that read them, of blocks' outputs as what errors there count in block reconstruction; absent, they count
            by the sizes of channels.

    Yields:
        One value for each block that the plan touches, after it was pruned and while its weights are still there, and
        at the end one for linears outside the blocks if the plan names any.

    Raises:
        PluginError: a pruner that returns what it must not; the message names it and the layer.
        UnsupportedModelError: a model whose blocks cannot be run one at a time, or whose numbers are not finite.
    """
    found = survey(access.model)
    batches = [ids.to(access.device) for ids in batches] if plan.needs_calibration else []
    streams, calls = _entering(access, found, plan, batches, finished, keep)
    order = [*found.blocks, OUTSIDE]
    start = 0 if finished is None else order.index(finished.fqn) + 1
    last = max((i for i, fqn in enumerate(order) if plan.in_block(fqn)), default=-1)
    pruning = _Pruning(access.model, plan, {r: r.build() for r in plan.rules}, ranks, fisher or FisherDiagonal(), last)
    started = time.perf_counter()
    for block, runs in each_block(access, found, calls, list(found.blocks)[start : last + 1]):
        pruned = pruning.inside(block, runs, streams, started)
        if pruned.report.layers:
            yield pruned
        del pruned  # not to be held while the next block needs the room
        started = time.perf_counter()
    if plan.in_block(OUTSIDE) and start < len(order):
        with access.materialise(OUTSIDE):
            yield pruning.outside(found, batches, streams.pruned)


def _entering(
    access: Access, found: Architecture, plan: Plan, batches: Sequence[Tensor], finished: Finished | None, keep: Keep
) -> tuple[Streams, Mapping[str, Sequence[BlockCall]]]:
    """Return what enters the first block that is not finished, and the arguments of every block."""
    if finished is not None:  # what enters the first block is not wanted
        return finished.streams, capture(access, found, batches, lambda state: state[:0])[1]
    states, calls = capture(access, found, batches, keep)
    return Streams(states, [keep(x.clone()) for x in states] if plan.reconstruct_block else ()), calls


@dataclass(frozen=True, eq=False)
class _Pruning:
    """What stays the same from block to block.

    Attributes:
        model: the model.
        plan: what to do.
        pruners: of each rule.
        ranks: the processes.
        fisher: mean squared gradients of the dense model's loss.
        last: index of the last block that is pruned, after which nobody wants hidden states.
    """

    model: Any
    plan: Plan
    pruners: Built
    ranks: Ranks
    fisher: FisherDiagonal
    last: int

    @torch.no_grad()
    def inside(self, block: Block, runs: Sequence[Run], streams: Streams, started: float) -> PrunedBlock:
        """Prune a decoder block where the plan touches it, train its survivors where asked, and advance the streams."""
        block = replace(block, sensitivities=self.fisher.linears)
        if self.plan.reconstruct_block:
            advance(block.fqn, runs, streams.dense)
        observing = passes(runs, streams.pruned)
        measured = observing[: _first(streams.pruned)] if self.plan.in_block(block.fqn) else []
        dense = [run() for run in measured]
        layers, masks, images = self.prune(block, observing)
        error, reconstruction = _output_error(measured, dense), None
        if self.plan.reconstruct_block and layers:
            passages = [Passage(*x) for x in zip(streams.pruned, streams.dense, runs, strict=True)]
            channels = self.fisher.channels.get(block.fqn)
            reconstruction = reconstruct(
                self.model, block.fqn, masks, passages, self.plan.reconstruct_block, self.ranks, channels
            )
        if block.index < self.last:
            advance(block.fqn, runs, streams.pruned)
        seconds = time.perf_counter() - started
        return PrunedBlock(
            BlockReport(block.index, block.fqn, layers, seconds, error, reconstruction), masks, images, streams
        )

    @torch.no_grad()
    def outside(self, found: Architecture, batches: Sequence[Tensor], states: Sequence[Tensor]) -> PrunedBlock:
        """Prune what lies outside the blocks: run the model around them, the last block giving its recorded output."""
        started = time.perf_counter()
        block = Block(len(found.blocks), OUTSIDE, self.model, found.outside, (), text_config(self.model))
        observing = [
            lambda ids=ids, state=state: run_around(self.model, found.blocks, ids, state.to(ids.device))
            for ids, state in zip(batches, states, strict=True)
        ]
        layers, masks, images = self.prune(block, observing)
        return PrunedBlock(BlockReport(block.index, OUTSIDE, layers, time.perf_counter() - started), masks, images)

    def prune(
        self, block: Block, observing: Sequence[Callable[[], Any]]
    ) -> tuple[tuple[LayerReport, ...], dict[str, MaskEntry], dict[str, Mapping[str, Tensor]]]:
        """Observe a block, decide for its linears and write what was decided."""
        by_rule = self.plan.in_block(block.fqn)
        stats = gather(block, by_rule, self.pruners, observing, self.ranks)
        layers: dict[str, LayerReport] = {}
        masks, images = {}, {}
        # By the identity of what a pruner may share between linears: a copy, and itself, so that no other takes its
        # place.
        infos: dict[int, tuple[dict[str, float], object]] = {}
        histories: dict[int, tuple[dict[str, tuple[float, ...]], object]] = {}
        for name, decision in decide_all(block, by_rule, self.pruners, stats, self.ranks):
            rule, result, seconds = decision.rule, decision.result, decision.seconds
            linear, pattern = block.linears[name], by_rule[rule][name]
            masks[name] = MaskEntry(result.keep.cpu(), str(pattern), rule.label, weight_sha256(linear.weight))
            write(linear, result)
            shape = (linear.out_features, linear.in_features)
            info, _ = infos.setdefault(id(result.info), ({k: float(v) for k, v in result.info.items()}, result.info))
            curves = {k: tuple(map(float, v)) for k, v in result.history.items()}
            history, _ = histories.setdefault(id(result.history), (curves, result.history))
            zeros = sparsity_of(result.keep)
            layers[name] = LayerReport(
                name, rule.label, str(pattern), shape, pattern.sparsity, zeros, seconds, info, history
            )
            images[name] = result.images
        order = [name for patterns in by_rule.values() for name in patterns]
        return tuple(layers[n] for n in order), {n: masks[n] for n in order}, {n: images[n] for n in order}


def _first(states: Sequence[Tensor]) -> int:
    """Return how many batches, from the first, hold the tokens that a block's error is measured on."""
    tokens = accumulate(math.prod(state.shape[:-1]) for state in states)
    return next((i for i, seen in enumerate(tokens, start=1) if seen >= _MEASURED_TOKENS), len(states))


def _output_error(observing: Sequence[Callable[[], Tensor]], dense: Sequence[Tensor]) -> float | None:
    """Return how far the pruned block's output is from the dense block's, as `BlockReport` has it."""
    if not dense:
        return None
    channels = channel_weights(dense)
    errors = [relative_errors(run(), wanted, channels).flatten() for run, wanted in zip(observing, dense, strict=True)]
    return float(torch.cat(errors).mean())
