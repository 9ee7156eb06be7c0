"""Score the decoder blocks of a dense model, so that those of the lowest scores can be dropped."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import accumulate
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import Block, DepthPruner, PruneResult, StreamStatistic
from compressx.blocks.exchange import reduce_
from compressx.blocks.fisher import ROW_WINDOWS, gradients
from compressx.blocks.observe import unchanged
from compressx.blocks.select import restored
from compressx.models.access import Access
from compressx.models.architecture import find_blocks, survey, text_config
from compressx.models.blockwise import Keep, Run, capture, each_block, in_memory
from compressx.planning.plan import PlannedDepth
from compressx.runtime.errors import PluginError, UnsupportedModelError, blamed_on
from compressx.runtime.finite import finite, refuse_damage
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.transfer import to_device, written_behind


@torch.no_grad()
def score_blocks(
    access: Access, depth: PlannedDepth, batches: Sequence[Tensor], keep: Keep = in_memory, ranks: Ranks = ALONE,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, float]:  # fmt: skip
    """Run the dense model once, and score every block that may go.

    Args:
        access: a transformers causal language model in evaluation mode, with its dense weights; unchanged afterwards.
            With a base, a block that is dropped becomes the base's.
        depth: which blocks may go, and whose pruner scores them.
        batches: token ids, each [batch, tokens]; this process's share.
        keep: where to keep hidden states between blocks.
        ranks: the processes; all get the same scores.
        progress: called with the number of blocks scored, and of all.

    Returns:
        The scores by block name, in the order of `depth.blocks`.

    Raises:
        PluginError: a pruner that fails, or returns no statistic or no finite number; the message names the block.
        UnsupportedModelError: a block that changes the hidden states though all its linears are zero, so that dropping
            it is not the same as zeros; hidden states that are not finite.
        ArtifactError: a weight that is not finite.
    """
    found = survey(access.model)
    name, pruner = depth.rule.pruner.name, depth.rule.build_depth()
    reads = getattr(pruner, "reads_gradients", False)
    slopes = gradients(access, found, depth.blocks, _first(batches, ranks), keep) if reads else {}
    states, calls = capture(access, found, batches, keep)
    scores: dict[str, float] = {}
    last = max(list(found.blocks).index(fqn) for fqn in depth.blocks)
    for block, runs in each_block(access, found, calls, list(found.blocks)[: last + 1]):
        statistic = None
        if block.fqn in depth.blocks:
            refuse_damage(block.module, block.fqn)
            if access.base is None:
                _refuse_remainder(block, runs[0], states[0])
            statistic = _fresh(name, pruner, block)
        with written_behind() as put:
            for i, (run, state) in enumerate(zip(runs, states, strict=True)):
                after = finite(run(state), block.fqn)
                slope = [to_device(x, after.device) for x in slopes[block.fqn][i : i + 1]] if slopes else []
                if statistic is not None and len(slope) == bool(slopes):
                    before = to_device(_without(access, block, run, state), after.device)
                    with (
                        unchanged(name, block.fqn, before, after, *slope),
                        blamed_on(f"update of the statistic of pruner {name!r} failed on {block.fqn}"),
                    ):
                        statistic.update(before, after, *slope)
                put(state, after)
        if statistic is not None:
            scores[block.fqn] = _score(name, pruner, block, statistic, ranks)
            progress(len(scores), len(depth.blocks))
    return scores


def _first(batches: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return this process's batches whose gradients are measured: all blocks' are kept at the same time."""
    seen = accumulate((len(batch) for batch in batches), initial=0)
    return [batch for batch, before in zip(batches, seen, strict=False) if before < ROW_WINDOWS / ranks.size]


def _without(access: Access, block: Block, run: Run, state: Tensor) -> Tensor:
    """Return the hidden states after a block that is dropped: what enters it, or what the base's block makes of it."""
    if access.base is None:
        return state
    return finite(replace(run, module=access.base.model.get_submodule(block.fqn))(state), f"{block.fqn} of the base")


def refuse_needed(model: Any, dropped: Collection[str]) -> None:
    """Refuse to drop a block whose keys and values a block that stays uses again, as the last ones of Gemma 4 do.

    Args:
        model: a transformers causal language model; its weights are not read.
        dropped: names of the blocks that go.

    Raises:
        UnsupportedModelError: the first such block.
    """
    config, order = text_config(model), list(find_blocks(model))
    modes = getattr(config, "kv_sharing_modes", ())  # of a kind of layer one stores, and the later ones reuse
    users = {config.layer_types[i]: order[i] for i, x in enumerate(modes) if x == "reuse" and order[i] not in dropped}
    for i, mode in enumerate(modes):
        if mode == "store" and order[i] in dropped and (user := users.get(config.layer_types[i])):
            raise UnsupportedModelError(
                f"{order[i]} has one of the lowest scores, but {user} uses its keys and values again, so it cannot be "
                f"dropped; leave it out by ignore: [layers: {i}]"
            )


def decide_whole(block: Block, depth: PlannedDepth, names: Sequence[str]) -> dict[str, PruneResult]:
    """Return what a rule that drops whole blocks means for its linears in one of them: all zeros, or all weights."""
    kept, info = block.fqn not in depth.dropped, {"importance": depth.scores[block.fqn]}
    results = {}
    for name in names:
        weight, bias = block.linears[name].held, block.linears[name].bias
        keep = torch.full(weight.shape, kept, device=weight.device)
        results[name] = PruneResult(keep, info=info, bias=None if kept or bias is None else torch.zeros_like(bias))
    return results


def _fresh(plugin: str, pruner: DepthPruner, block: Block) -> StreamStatistic:
    with blamed_on(f"observe_block of pruner {plugin!r} failed on {block.fqn}"):
        statistic = pruner.observe_block(block)
        if isinstance(statistic, type) or not callable(getattr(statistic, "update", None)):
            raise PluginError(
                f"observe_block of pruner {plugin!r} on {block.fqn} must return a statistic with update(before, "
                f"after) and tensors(); got {statistic!r:.80}"
            )
        return statistic


def _score(plugin: str, pruner: DepthPruner, block: Block, statistic: StreamStatistic, ranks: Ranks) -> float:
    if ranks.size > 1:
        tensors = statistic.tensors()
        if others := [name for name, (_, reduction) in tensors.items() if reduction not in ("sum", "max")]:
            raise PluginError(
                f"pruner {plugin!r} on {block.fqn}: tensor {others[0]!r} of its statistic has reduction "
                f"{tensors[others[0]][1]!r}; of what passes through a block there are sum and max"
            )
        reduce_(ranks, tensors)
    with blamed_on(f"score_block of pruner {plugin!r} failed on {block.fqn}"):
        score = pruner.score_block(block, statistic)
    if not isinstance(score, Real) or not math.isfinite(score):
        raise PluginError(
            f"score_block of pruner {plugin!r} on {block.fqn} must return a finite number, got {score!r:.80}"
        )
    return float(score)


def _refuse_remainder(block: Block, run: Run, state: Tensor) -> None:
    """Refuse a block that is not the identity when all its linears are zero, such as one that ends in a norm."""
    with restored(block.linears.values()) as tensors:
        for x in tensors:
            x.zero_()
        out = run(state)
    if not torch.equal(out, state.to(out.device)):
        change = float((out.double() - state.to(out.device).double()).abs().max())
        raise UnsupportedModelError(
            f"{block.fqn}: with all its linears zero it changes the hidden states by up to {change:.3g}, expected 0; "
            "blocks can be dropped where attention and feed-forward are added to the hidden states and nothing else is "
            "done to them. Prune neurons or kv-groups instead"
        )
