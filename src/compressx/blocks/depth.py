"""Choose by trial which decoder blocks of a dense model to remove, and solve for the linears beside them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import Block, Linear, PruneResult
from compressx.blocks.fisher import groups
from compressx.blocks.observe import linears_watched
from compressx.blocks.select import restored
from compressx.models.access import Access, in_place_of
from compressx.models.architecture import architecture_of, find_blocks, text_config
from compressx.models.arithmetic import matmuls_in
from compressx.models.blockwise import (
    BlockRun,
    KeepStates,
    advance,
    capture,
    copy_shared_states,
    each_block,
    in_memory,
    run_around,
    shared_states,
)
from compressx.models.shards import OUTSIDE
from compressx.models.units import find_units
from compressx.numerics.least_squares import Correction
from compressx.numerics.obs import refused
from compressx.planning.plan import Plan, PlannedDepth
from compressx.runtime.errors import PluginError, UnsupportedModelError, blamed_on
from compressx.runtime.finite import finite, refuse_damage
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.transfer import to_device


def choose_blocks(
    access: Access, depth: PlannedDepth, batches: Sequence[Tensor], ranks: Ranks = ALONE,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[dict[str, float], dict[str, float]]:  # fmt: skip
    """Let a pruner choose the blocks to remove, and measure them.

    Args:
        access: a transformers causal language model in evaluation mode, with its dense weights; unchanged afterwards.
        depth: which blocks may go, and whose pruner chooses them.
        batches: token ids, each [batch, tokens]; this process's share.
        ranks: the processes; all get the same.
        progress: called with the number of blocks of the largest trial, and of those to remove.

    Returns:
        By name, the divergence without each block that can go alone; and the names that were chosen, in their order,
        each with the divergence without it and those before it.
    """
    name, pruner, count = depth.rule.label, depth.rule.build_depth(), depth.pattern.dropped
    some = torch.split(torch.cat([*batches])[: math.ceil(pruner.windows / ranks.size)], len(batches[0]))
    trials = Trials(access, depth.blocks, some, ranks, lambda done: progress(done, count))
    with blamed_on(f"choose of pruner {name!r} failed"):
        chosen = [*pruner.choose(depth.blocks, count, trials)]
    if len(chosen) != count or len({*depth.blocks}.intersection(chosen)) != count:
        raise PluginError(
            f"choose of pruner {name!r} must return {count} different names of the {len(depth.blocks)} blocks, got "
            f"{chosen!r:.80}"
        )
    alone = zip(depth.blocks, trials([[fqn] for fqn in depth.blocks]), strict=True)
    reached = {}
    for i, fqn in enumerate(chosen):
        # Where it and those before cannot go without later ones, that of the first step that is possible.
        steps = trials([chosen[: j + 1] for j in range(i, count)])
        reached[fqn] = next((x for x in steps if math.isfinite(x)), steps[-1])
    return {fqn: x for fqn, x in alone if math.isfinite(x)}, reached


class Trials:
    """Runs a model without some of its blocks; a `compressx.Divergences`.

    The trials of a call go through the blocks together. What enters a block is the same for all that have dropped the
    same blocks before it, so each block runs once for each different beginning, and nothing is kept between calls but
    the divergences.

    Args:
        access: as for `choose_blocks`.
        blocks: names of those that may go.
        batches: token ids, each [batch, tokens]; this process's share.
        ranks: the processes, all of which ask for the same.
        progress: called after each call with the size of the largest trial.
    """

    def __init__(
        self, access: Access, blocks: Sequence[str], batches: Sequence[Tensor], ranks: Ranks = ALONE,
        progress: Callable[[int], None] = lambda _done: None,
    ) -> None:  # fmt: skip
        self._access, self._found, self._blocks, self._ranks = access, architecture_of(access.model), blocks, ranks
        self._batches, self._progress = batches, progress
        self._left_out = {fqn for fqn in blocks if in_place_of(access, fqn) is None}
        self._unchecked = {*self._left_out}
        self._known = {frozenset[str](): 0.0}

    def __call__(self, trials: Sequence[Collection[str]]) -> list[float]:
        """Return the divergence of each trial."""
        asked = [frozenset(trial) for trial in trials]
        if unknown := frozenset[str]().union(*asked).difference(self._blocks):
            raise PluginError(f"a trial without {min(unknown)!r:.80}; expected names of {', '.join(self._blocks)}")
        fresh = [trial for trial in dict.fromkeys(asked) if trial not in self._known]
        # No more at a time than there are blocks, for which the batches that are run together are meant.
        for some in (fresh[i : i + len(self._found.blocks)] for i in range(0, len(fresh), len(self._found.blocks))):
            self._known |= dict.fromkeys(some, math.inf)
            able = []
            for trial in some:
                with suppress(UnsupportedModelError):
                    refuse_needed(self._access.model, trial & self._left_out)
                    able.append(trial)
            self._known |= zip(able, self._measured(able) if able else [], strict=True)
            self._progress(max(map(len, some)))
        return [self._known[trial] for trial in asked]

    @torch.no_grad()
    def _measured(self, trials: Sequence[frozenset[str]]) -> list[float]:
        totals = torch.zeros(len(trials) + 1, dtype=torch.float64)  # the sums, in nats, and the number of tokens
        for group in groups(self._access, self._found, self._batches):
            ids = [batch.to(self._access.device) for batch in group]
            totals += self._summed(ids, self._after_blocks(ids, trials), trials).cpu()
        self._ranks.all_reduce_(totals)
        means: list[float] = (totals[:-1] / totals[-1]).nan_to_num(nan=math.inf).tolist()
        return means

    def _after_blocks(
        self, ids: Sequence[Tensor], trials: Sequence[frozenset[str]]
    ) -> dict[frozenset[str], Sequence[Tensor]]:
        """Return what leaves the last block, for each batch, by trial; without any block dropped as well."""
        access, before = self._access, frozenset[str]()
        states, calls = capture(access, self._found, ids)
        reached = {before: _Reached(states, [{} for _ in ids])}
        for block, runs in each_block(access, self._found, calls):
            refuse_damage(block.module, block.fqn)
            if block.fqn in self._unchecked:
                self._unchecked.remove(block.fqn)
                _refuse_remainder(block, runs[0], reached[frozenset()].states[0])
            upto = before | {block.fqn}
            leaving = {}
            for path in dict.fromkeys(trial & upto for trial in (frozenset[str](), *trials)):
                leaving[path] = reached[path & before].after(access, block, runs, without=block.fqn in path)
            reached, before = leaving, upto
        return {path: x.states for path, x in reached.items()}

    def _summed(
        self, ids: Sequence[Tensor], after: Mapping[frozenset[str], Sequence[Tensor]], trials: Sequence[frozenset[str]]
    ) -> Tensor:
        """Return the sum over tokens of each trial's divergence, and the number of tokens, float64 [trials + 1]."""
        sums = torch.zeros(len(trials) + 1, dtype=torch.float64, device=self._access.device)
        with self._access.materialise(OUTSIDE):
            for i, batch in enumerate(ids):
                for j, sequence in enumerate(torch.split(batch, 1)):  # one at a time: its logits are large
                    dense = self._logits(sequence, after[frozenset()][i][j : j + 1]).log_softmax(dim=-1)
                    finite(dense, "the dense model's predictions")
                    expected = dense.exp()
                    entropy = torch.linalg.vecdot(expected, dense)  # [tokens], negative
                    for number, trial in enumerate(trials):
                        logits = self._logits(sequence, after[trial][i][j : j + 1])
                        # log q = logits - their logsumexp, so no second matrix of log-probabilities is made.
                        each = entropy - torch.linalg.vecdot(expected, logits) + logits.logsumexp(dim=-1)
                        sums[number] += each.double().sum()
                sums[-1] += batch.numel()
        return sums

    def _logits(self, sequence: Tensor, state: Tensor) -> Tensor:
        """Return the predictions of one sequence [1, tokens], at least float32 [tokens, vocabulary]."""
        access = self._access
        with matmuls_in(access.matmul_dtype, access.model, access.device):
            logits: Tensor = run_around(access.model, self._found.blocks, sequence, state).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


@dataclass(frozen=True, eq=False)
class _Reached:
    """What trials that have dropped the same blocks have in common so far, for each batch."""

    states: Sequence[Tensor]  # that enter the next block
    shared: Sequence[dict[int, Any]]  # copies of the blocks' `shared_states`, by id

    def after(self, access: Access, block: Block, runs: Sequence[BlockRun], *, without: bool) -> _Reached:
        """Return what they have in common after a block, or where it is dropped, after what takes its place."""
        other = in_place_of(access, block.fqn)
        states, shared = [], [{key: copy.copy(value) for key, value in of.items()} for of in self.shared]
        for run, state, copies in zip(runs, self.states, shared, strict=True):
            own = replace(run, call=copy_shared_states(run.call, copies))
            if not without:
                states.append(own(state))
            elif other is None:
                states.append(state)
            else:
                states.append(finite(replace(own, module=other)(state), f"what takes the place of {block.fqn}"))
        return _Reached(states, shared)


def refuse_needed(model: Any, dropped: Collection[str]) -> None:
    """Refuse to drop a block whose keys and values a block that stays uses again, as the last ones of Gemma 4 do.

    Args:
        model: a transformers causal language model; its weights are not read.
        dropped: names of the removed blocks.
    """
    config, order = text_config(model), list(find_blocks(model))
    modes = getattr(config, "kv_sharing_modes", ())  # of a kind of layer one stores, and the later ones reuse
    users = {config.layer_types[i]: order[i] for i, x in enumerate(modes) if x == "reuse" and order[i] not in dropped}
    for i, mode in enumerate(modes):
        if mode == "store" and order[i] in dropped and (user := users.get(config.layer_types[i])):
            raise UnsupportedModelError(
                f"{order[i]} was chosen to go, but {user} uses its keys and values again, so it cannot be "
                f"dropped; leave it out by ignore: [layers: {i}]"
            )


def decide_whole(block: Block, depth: PlannedDepth, names: Sequence[str]) -> dict[str, PruneResult]:
    """Return what a rule that drops whole blocks means for its linears in one of them: all zeros, or all weights."""
    kept, results = block.fqn not in depth.chosen, {}
    for name in names:
        weight, bias = block.linears[name].held, block.linears[name].bias
        keep = torch.full(weight.shape, kept, device=weight.device)
        new, share = depth.solved.get(name, (None, None))
        figures = {"importance": depth.scores.get(block.fqn), "missing": share}
        bias = None if kept or bias is None else torch.zeros_like(bias)
        info = {key: x for key, x in figures.items() if x is not None}
        results[name] = PruneResult(keep, new, info=info, bias=bias)
    return results


def _refuse_remainder(block: Block, run: BlockRun, state: Tensor) -> None:
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


@torch.no_grad()
def solved_beside(
    access: Access, plan: Plan, batches: Sequence[Tensor], keep: KeepStates = in_memory, ranks: Ranks = ALONE
) -> dict[str, tuple[Tensor, float]]:
    """Solve the linear that ends each block before removed blocks, so that it adds what they would have added.

    Each such block runs on what is left of the model before it, with earlier linears solved already. Its output is
    brought to the dense model's hidden states behind the gap. An error at a token counts relative to their norm, since
    the next block divides by it first.

    Args:
        access: as for `choose_blocks`.
        plan: with its blocks measured. Linears that other rules prune are left to them.
        batches: as there.
        keep: where to keep hidden states between blocks.
        ranks: as there.

    Returns:
        By name of a linear, its new weight [out_features, in_features], and which share is left of what was missing.
        Nothing of blocks whose last linear is not added to the hidden states as it is, such as those with a norm behind
        it or with experts; nor of models whose blocks hand one another keys and values.
    """
    assert plan.depth is not None  # noqa: S101 - the caller has asked
    found, dropped = architecture_of(access.model), {*plan.dropped}
    mine = {x.name for x in plan.linears if x.rule == plan.depth.rule and x.block not in dropped}
    dense, calls = capture(access, found, batches, keep)
    if any(map(shared_states, chain(*calls.values()))):
        return {}
    order, solved = list(found.blocks), dict[str, tuple[Tensor, float]]()
    left: list[Tensor] = []
    entered = [keep(torch.empty_like(x)) for x in dense]
    numbers = [order.index(fqn) for fqn in dropped]
    first, last = min(numbers), max(numbers)
    previous: tuple[Block, list[BlockRun]] | None = None
    for block, runs in each_block(access, found, calls, order[: last + 1]):
        if block.index == max(first - 1, 0):  # up to here nothing is missing
            left = [keep(x.clone()) for x in dense]
        advance(block.fqn, runs, dense)
        next_goes = block.index < last and order[block.index + 1] in dropped
        if block.fqn not in dropped and block.index >= first - 1:
            if next_goes:
                previous = block, runs
                for before, x in zip(entered, left, strict=True):
                    before.copy_(x)
            advance(block.fqn, runs, left)
        elif block.fqn in dropped and not next_goes and previous is not None:
            with access.materialise(previous[0].fqn):
                solved |= _solved(access, *previous, mine, entered, dense, left, ranks)
    return solved


_DAMPING = 0.01
"""Of the least squares."""

_ROUNDING = 0.05
"""By how much what is added may differ from the linear's product, relative, where matmuls are of 8 bits."""


def _solved(
    access: Access, block: Block, runs: Sequence[BlockRun], names: Collection[str], entered: Sequence[Tensor],
    wanted: Sequence[Tensor], left: Sequence[Tensor], ranks: Ranks,
) -> dict[str, tuple[Tensor, float]]:  # fmt: skip
    """Solve a block's last linear, and advance `left` to what the block then gives; nothing where it has none."""
    if (linear := last_linear(block)) is None or linear.name not in names:
        return {}
    correction = Correction(linear.out_features, linear.in_features, linear.held.device)
    inputs: list[Tensor] = []
    wide = torch.promote_types(linear.held.dtype, torch.float32)

    def tokens(x: Tensor) -> Tensor:
        return to_device(x, access.device).flatten(0, -2).to(wide)

    with linears_watched({linear.name: linear}, lambda _, x: inputs.append(tokens(x))):
        whole = runs[0](entered[0])
        with restored([linear]) as (weight, *_):
            weight.zero_()
            added = tokens(whole - runs[0](entered[0]))
        expected = inputs[0] @ linear.held.to(wide).T
        if (added - expected).norm() > _ROUNDING * expected.norm():
            return {}
        for run, state, behind in zip(runs, entered, map(tokens, wanted), strict=True):
            inputs.clear()
            missing = behind - tokens(run(state))
            correction.update(inputs[0], missing, 1 / behind.norm(dim=-1))
    for tensor in (correction.gram, correction.cross, correction.missing):
        ranks.all_reduce_(tensor)
    with refused(linear.name):
        change, share = correction.solved(_DAMPING)
    new = (linear.held.double() + change).to(linear.held.dtype)
    with restored([linear]):
        linear.held.copy_(new)
        advance(block.fqn, runs, entered, left)
    return {linear.name: (new, share)}


def last_linear(block: Block) -> Linear | None:
    """Return the linear that reads all feed-forward neurons of a block; None if there are several, or none."""
    with suppress(UnsupportedModelError):
        names = [name for one in find_units("neurons", block) for name, own in one.owners.items() if own.dim == 1]
        return block.linears[names[0]] if len(names) == 1 else None
    return None
