"""The block loop: observe a still unpruned block, prune it, apply, reconstruct it, and compute the next block's input.

Statistics of a block come from one forward of the unpruned block over the outputs of the already pruned ones; where a
recipe is true-sequential, from one forward for each stage of it. The walk knows no concrete pruner, and it counts what
it wrote.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.pruner import Block, BlockCall, Linear, sparsity_of
from compressx.api.record import BlockReport, LayerReport
from compressx.blocks.fisher import Fisher
from compressx.blocks.order import stages
from compressx.blocks.select import Built, ByRule, Decision, decide_all, gather, is_apart, write
from compressx.blocks.sensitivity import by_loss
from compressx.masks.maskset import MaskEntry, weight_sha256
from compressx.models.access import Access
from compressx.models.architecture import Architecture, survey, text_config
from compressx.models.capture import capture_calls, replay, run_around
from compressx.models.hidden import Keep, Streams, in_memory
from compressx.models.shards import OUTSIDE
from compressx.numerics.output_error import channel_weights, relative_errors
from compressx.planning.plan import Plan
from compressx.runtime.errors import RecipeError
from compressx.runtime.finite import finite
from compressx.runtime.ranks import ALONE, Ranks
from compressx.training.reconstruct import Passage, reconstruct

_MEASURED_TOKENS = 2048
"""Calibration tokens, at least, on which a block's error is measured: a few, since each is two more passes."""


@dataclass(frozen=True, eq=False)
class PrunedBlock:
    """What the walk did to one block: its report, and by linear name its masks and the matrices to be seen.

    Objects that a pruner gave to several linears are one object here, too. `streams` is what enters the next block, and
    the walk goes on to change it.
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
    access: Access,
    plan: Plan,
    batches: Sequence[Tensor],
    finished: Finished | None = None,
    keep: Keep = in_memory,
    ranks: Ranks = ALONE,
    fisher: Fisher | None = None,
) -> Iterator[PrunedBlock]:
    """Prune a model in place, block by block.

    Args:
        access: a transformers causal language model in evaluation mode.
        plan: what to do.
        batches: calibration token ids, each [batch, tokens]; empty when the plan needs no calibration.
        finished: where an interrupted run had got to; from the start when absent.
        keep: where hidden states are kept between blocks.
        ranks: the processes, each with batches of its own; all end with the same weights.
        fisher: of the dense model's loss on these batches: the sensitivities that pruners read, and what errors of
            the blocks' outputs count in block reconstruction; absent, they count by the sizes of channels.

    Yields:
        One value for each block that the plan touches, after it was pruned and while its weights are still there, and
        at the end one for linears outside the blocks if the plan names any.

    Raises:
        PluginError: a pruner that returns what it must not; the message names it and the layer.
        UnsupportedModelError: a model whose blocks cannot be run one at a time, or whose numbers are not finite.
    """
    model, fisher = access.model, fisher or Fisher()
    found = survey(model)
    batches = [b.to(access.device) for b in batches] if plan.needs_calibration else []
    # Where an interrupted run goes on, what enters the first block is not wanted.
    states, calls = capture(access, found, batches, keep if finished is None else lambda state: state[:0])
    order = [*found.blocks, OUTSIDE]
    if finished is None:
        streams, start = Streams(states, [keep(x.clone()) for x in states] if plan.reconstruct_block else ()), 0
    else:
        streams, start = finished.streams, order.index(finished.fqn) + 1
    del states
    pruners = {rule: rule.build() for rule in plan.rules}
    last = max((i for i, fqn in enumerate(order) if plan.in_block(fqn)), default=-1)
    for index, fqn in list(enumerate(found.blocks))[start : last + 1]:
        started = time.perf_counter()
        with access.materialise(fqn) as module:
            with torch.no_grad():
                linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
                runs = [partial(replay_at, access, module, call=c) for c in calls[fqn]]
                if plan.reconstruct_block:
                    _advance(streams.dense, runs, fqn)
                passes = [partial(run, x) for run, x in zip(runs, streams.pruned, strict=True)]
                read = plan.sensitive_to("block")
                reacting = {n: x for n, x in linears.items() if n in read}
                sensitive = by_loss(fisher.linears, reacting, runs, streams.pruned, ranks)
                block = Block(index, fqn, module, linears, tuple(calls[fqn]), text_config(model), sensitive)
                seen = passes[: _first(streams.pruned)] if plan.in_block(fqn) else []
                dense = [run() for run in seen]
                layers, masks, images = _prune_block(block, plan, pruners, passes, ranks)
                error, reconstruction = _output_error(seen, dense), None
                if plan.reconstruct_block and layers:
                    passages = [Passage(*x) for x in zip(streams.pruned, streams.dense, runs, strict=True)]
                    channels = fisher.channels.get(fqn)
                    reconstruction = reconstruct(model, fqn, masks, passages, plan.reconstruct_block, ranks, channels)
                if index < last:
                    _advance(streams.pruned, runs, fqn)
            if layers:
                report = BlockReport(index, fqn, layers, time.perf_counter() - started, error, reconstruction)
                yield PrunedBlock(report, masks, images, streams)
            del layers, masks, images  # not to be held while the next block needs the room
    if plan.in_block(OUTSIDE) and start < len(order):
        with access.materialise(OUTSIDE):
            yield _prune_outside(model, plan, pruners, found, streams.pruned, batches, ranks)


def capture(
    access: Access, found: Architecture, batches: Sequence[Tensor], keep: Keep = in_memory
) -> tuple[list[Tensor], dict[str, list[BlockCall]]]:
    """Return the hidden states that enter the first block and the arguments of every block, as `capture_calls` does."""
    if not batches:
        return [], {fqn: [] for fqn in found.blocks}
    with access.materialise(OUTSIDE):
        return capture_calls(access.model, found.blocks, batches, keep)


def replay_at(access: Access, module: nn.Module, state: Tensor, *, call: BlockCall) -> Tensor:
    """Run a block as `replay`, wherever its input is kept."""
    return replay(module, state.to(access.device), call)


def _first(states: Sequence[Tensor]) -> int:
    """Return how many batches, from the first, hold the tokens that a block's error is measured on."""
    tokens = accumulate(math.prod(state.shape[:-1]) for state in states)
    return next((i for i, seen in enumerate(tokens, start=1) if seen >= _MEASURED_TOKENS), len(states))


def _output_error(passes: Sequence[Callable[[], Tensor]], dense: Sequence[Tensor]) -> float | None:
    """Return how far the pruned block's output is from the dense block's, as `BlockReport` has it."""
    if not dense:
        return None
    channels = channel_weights(dense)
    errors = [relative_errors(run(), wanted, channels).flatten() for run, wanted in zip(passes, dense, strict=True)]
    return float(torch.cat(errors).mean())


def _advance(states: Sequence[Tensor], runs: Sequence[Callable[[Tensor], Tensor]], fqn: str) -> None:
    """Replace what enters a block by what leaves it."""
    for state, run in zip(states, runs, strict=True):
        state.copy_(finite(run(state), fqn))


def _prune_outside(
    model: Any, plan: Plan, pruners: Built, found: Architecture, states: Sequence[Tensor], batches: Sequence[Tensor],
    ranks: Ranks,
) -> PrunedBlock:  # fmt: skip
    """Prune what lies outside the blocks: run the model around them, the last block giving its recorded output."""
    started = time.perf_counter()
    block = Block(len(found.blocks), OUTSIDE, model, found.outside, (), text_config(model))
    passes = [
        lambda ids=ids, state=state: run_around(model, found.blocks, ids, state.to(ids.device))
        for ids, state in zip(batches, states, strict=True)
    ]
    with torch.no_grad():
        layers, masks, images = _prune_block(block, plan, pruners, passes, ranks)
    return PrunedBlock(BlockReport(block.index, OUTSIDE, layers, time.perf_counter() - started), masks, images)


def _prune_block(
    block: Block, plan: Plan, pruners: Built, passes: Sequence[Callable[[], Any]], ranks: Ranks
) -> tuple[tuple[LayerReport, ...], dict[str, MaskEntry], dict[str, Mapping[str, Tensor]]]:
    """Observe and prune one block, as a whole or stage by stage."""
    by_rule = plan.in_block(block.fqn)
    layers: dict[str, LayerReport] = {}
    masks, images = {}, {}
    # By the identity of what a pruner may share between linears: a copy, and itself, so that no other takes its place.
    infos: dict[int, tuple[dict[str, float], object]] = {}
    histories: dict[int, tuple[dict[str, tuple[float, ...]], object]] = {}
    for name, decision in _decisions(block, plan, by_rule, pruners, passes, ranks):
        rule, result, seconds = decision.rule, decision.result, decision.seconds
        linear, pattern = block.linears[name], by_rule[rule][name]
        masks[name] = MaskEntry(result.keep.cpu(), str(pattern), rule.label, weight_sha256(linear.weight))
        write(linear, result)
        shape = (linear.out_features, linear.in_features)
        info, _ = infos.setdefault(id(result.info), ({k: float(v) for k, v in result.info.items()}, result.info))
        curves = {k: tuple(map(float, v)) for k, v in result.history.items()}
        history, _ = histories.setdefault(id(result.history), (curves, result.history))
        layers[name] = LayerReport(
            name, rule.label, str(pattern), shape, pattern.sparsity, sparsity_of(result.keep), seconds, info, history
        )
        images[name] = result.images
    order = [name for patterns in by_rule.values() for name in patterns]
    return tuple(layers[n] for n in order), {n: masks[n] for n in order}, {n: images[n] for n in order}


def _decisions(
    block: Block, plan: Plan, by_rule: ByRule, pruners: Built, passes: Sequence[Callable[[], Any]], ranks: Ranks
) -> Iterator[tuple[str, Decision]]:
    """Yield what is decided for each linear, to be written before the next is asked for."""
    parts: list[ByRule] = [by_rule]
    if plan.true_sequential and passes:
        order = ranks.broadcast(_stages(block.linears, by_rule, passes[0]) if ranks.first else [])
        parts = [
            {
                rule: mine
                for rule, patterns in by_rule.items()
                if (mine := {n: patterns[n] for n in names if n in patterns})
            }
            for names in order
        ]
    for part in parts:
        yield from decide_all(block, part, pruners, gather(block, part, pruners, passes, ranks), ranks)


def _stages(linears: Mapping[str, Linear], by_rule: ByRule, run: Callable[[], Any]) -> list[list[str]]:
    """Return what is decided one after the other in a block: the names of each stage."""
    taken = {n: linears[n] for patterns in by_rule.values() for n in patterns}
    together = [list(patterns) for rule, patterns in by_rule.items() if not is_apart(rule, patterns)]
    return stages(taken, run, together)


def refuse_one_stage(access: Access, plan: Plan, batches: Sequence[Tensor]) -> None:
    """Refuse `true_sequential` where every block is decided in one stage, so that it would change nothing.

    Args:
        access: the dense model.
        plan: what to do.
        batches: as for `prune_model`; the first is run through one block.

    Raises:
        RecipeError: rules alike in all blocks, and one stage in the first.
    """
    if not (plan.true_sequential and batches):
        return
    found = survey(access.model)
    planned = {fqn: by_rule for fqn in found.blocks if (by_rule := plan.in_block(fqn))}
    alike = [
        {rule.index: {n.removeprefix(fqn) for n in names} for rule, names in by_rule.items()}
        for fqn, by_rule in planned.items()
    ]
    if not planned or any(other != alike[0] for other in alike):
        return
    fqn, by_rule = next(iter(planned.items()))
    (state,), calls = capture(access, found, [batches[0].to(access.device)])
    with access.materialise(fqn) as module, torch.no_grad():
        order = _stages(found.linears, by_rule, partial(replay_at, access, module, state, call=calls[fqn][0]))
    if len(order) > 1:
        return
    joint = [rule.label for rule, patterns in by_rule.items() if len(patterns) > 1 and not is_apart(rule, patterns)]
    raise RecipeError(
        "it would change nothing: of each block everything that the rules take is decided at once"
        + (f" (jointly, by {' and by '.join(joint)})" if joint else "")
        + "; leave it out, or take linears that read one another's output, with group: row or layer"
    )
