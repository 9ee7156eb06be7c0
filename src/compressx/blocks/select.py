"""What a recipe's rules do in one block: gather statistics, ask the pruners, check their answers, write weights.

Pruning decides once for each block; who measures sparsities asks again and again, and puts the weights back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from compressx.api.patterns import FixedMask, Pattern, RulePattern
from compressx.api.pruner import AnyPruner, Block, Linear, PruneResult, statistic_of
from compressx.blocks.contract import ask
from compressx.blocks.observe import SharedStatistic, is_routed, observe, refuse_missed
from compressx.models.access import new_weight
from compressx.planning.plan import PlannedRule
from compressx.runtime.errors import UnsupportedModelError, memory_named
from compressx.runtime.finite import refuse_damage
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.timing import synchronize

Built: TypeAlias = Mapping[PlannedRule, tuple[AnyPruner, ...]]
"""The pruners of each rule: the selecting one, and the reconstructing one if there is one."""

ByRule: TypeAlias = Mapping[PlannedRule, Mapping[str, RulePattern]]
"""What each of a rule's linears in one block has to become, by name."""

Stats: TypeAlias = dict[str, dict[str, SharedStatistic]]
"""What the pruners of a block observed, by linear name, then by the role that asked."""

PreparedValues: TypeAlias = dict[tuple[PlannedRule, str], dict[SharedStatistic, Any]]
"""What the pruners of a block have prepared, by rule and role, kept for when they are asked again."""

_ROLES = ("selects", "reconstructs")


@dataclass(frozen=True, eq=False)
class Decision:
    """What was decided for a linear: by which rule, what, and its share of the seconds that this took."""

    rule: PlannedRule
    result: PruneResult
    seconds: float


def gather(
    block: Block, by_rule: Mapping[PlannedRule, Iterable[str]], pruners: Built, passes: Sequence[Callable[[], Any]],
    ranks: Ranks = ALONE, before: int = 0,
) -> Stats:  # fmt: skip
    """Run a block and gather the statistics that its rules' pruners ask for.

    Args:
        block: the block.
        by_rule: the names of the linears that each rule took in it.
        pruners: of each rule.
        passes: each runs the block on one batch.
        ranks: the processes, each with batches of its own; statistics are those of all.
        before: calibration sequences of the processes before this one.

    Returns:
        By linear name, then by the role that asked.
    """
    refuse_damage(block.module, block.fqn)
    wanted: Stats = {}
    for rule, names in by_rule.items():
        asking = zip(_ROLES, rule.pruners, pruners[rule], strict=False)
        both = [(role, spec.name, pruner) for role, (spec, _), pruner in asking]
        for name in names:
            wanted[name] = {}
            for role, plugin, pruner in both:
                fresh = partial(statistic_of, plugin, pruner, block, name)
                if (statistic := fresh()) is not None:
                    wanted[name][role] = SharedStatistic(statistic, plugin, fresh)
    if before:
        _place_after(wanted, before)
    with memory_named(f"statistics of {block.fqn}"):
        reached = observe(block.linears, wanted, passes)
    if ranks.size > 1:
        reached = set().union(*ranks.all_gather(sorted(reached)))
        _combine(block, wanted, ranks)
    missable = {n for n, stats in wanted.items() if all(is_routed(x.statistic) for x in stats.values())}
    refuse_missed(wanted.keys() - missable, reached)
    return wanted


def _place_after(wanted: Stats, sequences: int) -> None:
    """Tell statistics that want to know how many sequences other processes see before this one's."""
    for observed in chain(*(stats.values() for stats in wanted.values())):
        after: Callable[[int], None] | None = getattr(observed.statistic, "after", None)
        if after is not None:
            after(sequences)


def _combine(block: Block, wanted: Stats, ranks: Ranks) -> None:
    """Replace every statistic by that of all processes."""
    holders: dict[SharedStatistic, list[tuple[str, str]]] = {}
    for name, stats in wanted.items():
        for role, observed in stats.items():
            holders.setdefault(observed, []).append((name, role))
    named = [[f"{role} {name}" for name, role in group] for group in holders.values()]
    if any(other != named for other in ranks.all_gather(named)):
        raise UnsupportedModelError(
            f"{block.fqn}: its linears share inputs in one process and not in another, so that statistics cannot be "
            "added up; use one process"
        )
    for observed, group in holders.items():
        merged = combined(ranks, observed)
        for name, role in group:
            wanted[name][role] = merged


def combined(ranks: Ranks, observed: SharedStatistic) -> SharedStatistic:
    """Return a statistic of all processes.

    Sums are added in float64, so that the number of processes hardly affects them, and written into this process's
    tensors. Tensors to concatenate (`cat`) update a fresh statistic in the order of the processes.
    """
    tensors = observed.statistic.tensors().values()
    for tensor, reduction in tensors:
        if reduction != "cat":
            wide = tensor.double() if reduction == "sum" else tensor
            ranks.all_reduce_(wide, reduction)
            tensor.copy_(wide)
    joined = [tensor for tensor, reduction in tensors if reduction == "cat"]
    if not joined:
        return observed
    merged = observed.fresh()
    assert merged is not None  # noqa: S101 - `statistic` was created the same way
    for tensor in joined:
        for part in ranks.all_gather(tensor):
            merged.update(part.to(tensor.device))
    return replace(observed, statistic=merged)


def decide_all(
    block: Block, by_rule: ByRule, pruners: Built, stats: Stats, ranks: Ranks = ALONE,
    kept: PreparedValues | None = None,
) -> Iterator[tuple[str, Decision]]:  # fmt: skip
    """Decide for all linears of a block, each process for its share of them.

    What pruners need to see whole is decided first. The other decisions are yielded one by one, so that a caller who
    writes each at once holds one new weight at a time.

    Args:
        block: the block; its weights may be changed to what was yielded.
        by_rule: what each of a rule's linears in the block has to become.
        pruners: of each rule.
        stats: what `gather` returned; those of a linear are given up when it is decided.
        ranks: the processes; all get to know every decision.
        kept: what pruners have prepared in this block, for when they are asked again; nothing is kept when absent.

    Yields:
        Each linear's name and what was decided for it.
    """
    tasks = [(rule, names) for rule, patterns in by_rule.items() for names in _split(rule, patterns, stats)]
    tasks.sort(key=lambda task: task[0].separable)
    sizes = [sum(block.linears[n].held.numel() for n in names) for _, names in tasks]
    device = next(iter(block.linears.values())).held.device

    def work(task: tuple[PlannedRule, Sequence[str]]) -> tuple[Mapping[str, PruneResult], float]:
        rule, names = task
        started = time.perf_counter()
        results = decide(rule, pruners[rule], block, {n: by_rule[rule][n] for n in names}, stats, kept)
        synchronize(device)
        for name in names:
            del stats[name]
        return results, time.perf_counter() - started

    synchronize(device)  # what gathering and summing left to do is not a pruner's time
    decided = ranks.divided(tasks, sizes, work)
    whole = [*islice(decided, sum(not rule.separable for rule, _ in tasks))]  # before any of them is written
    for (rule, _), size, (results, seconds) in zip(tasks, sizes, chain(whole, decided), strict=True):
        for name, told in results.items():
            result = _received(told, device)
            yield name, Decision(rule, result, seconds * result.keep.numel() / size)


def _received(result: Any, device: torch.device) -> PruneResult:
    """Return a result, on a device where another process has sent it."""
    if isinstance(result, PruneResult):
        return result
    return PruneResult(**tree_map_only(Tensor, lambda x: x.to(device), result))


def _split(rule: PlannedRule, patterns: Mapping[str, RulePattern], stats: Stats) -> list[list[str]]:
    """Split a rule's linears so that each part can be decided by itself; those that share statistics stay together."""
    if not rule.separable or any(p.together for p in patterns.values()):
        return [list(patterns)]
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in patterns:
        groups.setdefault(tuple(stats[name].values()) or (name,), []).append(name)
    return list(groups.values())


def decide(
    rule: PlannedRule, built: tuple[AnyPruner, ...], block: Block, patterns: Mapping[str, RulePattern],
    stats: Stats, kept: PreparedValues | None = None,
) -> Mapping[str, PruneResult]:  # fmt: skip
    """Ask a rule's selector, then its reconstructor if it has one, and check each answer."""
    results: Mapping[str, PruneResult] = {}
    asked: Mapping[str, Pattern] = patterns
    for role, (spec, _), pruner in zip(_ROLES, rule.pruners, built, strict=False):
        observed = {n: stats[n][role] for n in asked if role in stats[n]}
        mine = None if kept is None else kept.setdefault((rule, role), {})
        answer = ask(spec.name, pruner, block, asked, observed, mine)
        results = {name: _joined(results[name], new) for name, new in answer.items()} if results else answer
        asked = {n: FixedMask(r.keep, patterns[n]) for n, r in results.items()}
    return results


def _joined(first: PruneResult, second: PruneResult) -> PruneResult:
    """Add the selector's figures to the reconstructor's result; a group stays one if all figures are its."""
    groups = {x.group for x in (first, second) if x.info or x.images or x.history}
    return replace(
        second, info={**first.info, **second.info}, images={**first.images, **second.images},
        history={**first.history, **second.history}, group=groups.pop() if len(groups) == 1 else "",
    )  # fmt: skip


def write(linear: Linear, result: PruneResult) -> None:
    """Write what a result makes of a linear's weight, and the bias."""
    linear.held.copy_(new_weight(linear, result.keep, result.weight))
    if result.bias is not None and linear.bias is not None:
        linear.bias.copy_(result.bias)


@contextmanager
def restored(linears: Iterable[Linear]) -> Iterator[list[Tensor]]:
    """Yield weights and biases of linears, and put them back to the bit at the end, whatever happens."""
    tensors = [x for linear in linears for x in (linear.held, linear.bias) if x is not None]
    dense = [x.clone() for x in tensors]
    try:
        yield tensors
    finally:
        for tensor, value in zip(tensors, dense, strict=True):
            tensor.copy_(value)
