"""What a recipe's rules do in one block: gather statistics, ask the pruners, check their answers, write weights.

Pruning decides once for each block; who measures sparsities asks again and again, and puts the weights back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compressx.api.patterns import FixedMask, Pattern, RulePattern
from compressx.api.pruner import AnyPruner, Block, Linear, PruneResult, Statistic, statistic_of
from compressx.blocks.contract import Checksums, ask
from compressx.blocks.exchange import combine, exchange
from compressx.blocks.observe import Observed, is_routed, observe, place_after, refuse_missed
from compressx.models.access import new_weight
from compressx.planning.plan import PlannedRule
from compressx.runtime.errors import UnsupportedModelError, memory_named
from compressx.runtime.finite import refuse_damage
from compressx.runtime.ranks import ALONE, Ranks, assign
from compressx.runtime.timing import synchronize

Built: TypeAlias = Mapping[PlannedRule, tuple[AnyPruner, AnyPruner | None]]
"""The pruners of each rule: the selecting one, and the reconstructing one if there is one."""

ByRule: TypeAlias = Mapping[PlannedRule, Mapping[str, RulePattern]]
"""What each of a rule's linears in one block has to become, by name."""

Stats: TypeAlias = dict[str, dict[str, Observed]]
"""What the pruners of a block observed, by linear name, then by the role that asked."""

PreparedValues: TypeAlias = dict[tuple[PlannedRule, str], dict[Observed, Any]]
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
        before: calibration windows of the processes before this one.

    Returns:
        By linear name, then by the role that asked.

    Raises:
        ArtifactError: a weight that is not finite; the message names it.
        CalibrationError: an input that is not finite, or a linear that no batch reached.
    """
    refuse_damage(block.module, block.fqn)
    wanted: Stats = {}
    asking: dict[tuple[str, str], Callable[[], Statistic | None]] = {}
    for rule, names in by_rule.items():
        for name in names:
            specs = (rule.pruner, rule.reconstructor)
            ask = {
                role: partial(statistic_of, spec.name, pruner, block, name)
                for role, spec, pruner in zip(_ROLES, specs, pruners[rule], strict=True)
                if spec is not None and pruner is not None
            }
            by = {role: spec.name for role, spec in zip(_ROLES, specs, strict=True) if spec is not None}
            wanted[name] = {role: Observed(s, by[role]) for role, fresh in ask.items() if (s := fresh()) is not None}
            asking |= {(name, role): fresh for role, fresh in ask.items()}
            for observed in wanted[name].values() if before else ():
                place_after(observed.statistic, before)
    with memory_named(f"statistics of {block.fqn}"):
        reached = observe(block.linears, wanted, passes)
    if ranks.size > 1:
        reached = set().union(*ranks.all_gather(sorted(reached)))
        _combine(block, wanted, asking, ranks)
    missable = {n for n, stats in wanted.items() if all(is_routed(x.statistic) for x in stats.values())}
    refuse_missed(wanted.keys() - missable, reached)
    return wanted


def _combine(
    block: Block, wanted: Stats, asking: Mapping[tuple[str, str], Callable[[], Statistic | None]], ranks: Ranks
) -> None:
    """Replace every statistic by that of all processes."""
    holders: dict[Observed, list[tuple[str, str]]] = {}
    for name, stats in wanted.items():
        for role, observed in stats.items():
            holders.setdefault(observed, []).append((name, role))
    groups = list(holders.values())
    named = [[f"{role} {name}" for name, role in group] for group in groups]
    if any(other != named for other in ranks.all_gather(named)):
        raise UnsupportedModelError(
            f"{block.fqn}: its linears share inputs in one process and not in another, so that statistics cannot be "
            "added up; use one process"
        )
    for observed, group in holders.items():
        merged = Observed(combine(ranks, observed.statistic, asking[group[0]]))
        for name, role in group:
            wanted[name][role] = merged


def decide_all(
    block: Block, by_rule: ByRule, pruners: Built, stats: Stats, ranks: Ranks, kept: PreparedValues | None = None
) -> Iterator[tuple[str, Decision]]:
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

    Raises:
        PluginError: as `decide`, or a pruner has changed what it was not asked about.
    """
    tasks = [(rule, names) for rule, patterns in by_rule.items() for names in _split(rule, patterns, stats)]
    tasks.sort(key=lambda task: task[0].separable)
    first = sum(not rule.separable for rule, _ in tasks)
    turns = [tasks[:first], *([task] for task in tasks[first:])] if ranks.size == 1 else [tasks]
    untouched = Checksums(block, [rule.label for rule in by_rule])
    synchronize(_device(block))  # what gathering and summing left to do is not a pruner's time
    for turn in turns:
        for name, decision in _in_turn(block, turn, by_rule, pruners, stats, untouched, ranks, kept):
            yield name, decision
            untouched.written(name)
    untouched.refuse_changes()


def _in_turn(
    block: Block, tasks: Sequence[tuple[PlannedRule, Sequence[str]]],
    by_rule: ByRule, pruners: Built, stats: Stats, untouched: Checksums, ranks: Ranks, kept: PreparedValues | None,
) -> Iterator[tuple[str, Decision]]:  # fmt: skip
    """Decide some tasks, each on one process, and only then yield what was decided."""
    sizes = [sum(block.linears[n].held.numel() for n in names) for _, names in tasks]
    owners = assign(sizes, ranks.size)
    mine: dict[int, Mapping[str, PruneResult]] = {}
    seconds = [0.0] * len(tasks)
    for i, (rule, names) in enumerate(tasks):
        if owners[i] == ranks.rank:
            started = time.perf_counter()
            patterns = {n: by_rule[rule][n] for n in names}
            mine[i] = decide(rule, pruners[rule], block, patterns, stats, untouched, kept)
            synchronize(_device(block))
            seconds[i] = time.perf_counter() - started
        for name in names:
            del stats[name]
    seconds = [sum(each) for each in zip(*ranks.all_gather(seconds), strict=True)]
    for i, results in enumerate(exchange(ranks, owners, mine, _device(block))):
        for name, result in results.items():
            part = seconds[i] * block.linears[name].held.numel() / sizes[i]
            yield name, Decision(tasks[i][0], result, part)


def _device(block: Block) -> torch.device:
    return next(iter(block.linears.values())).held.device


def _split(rule: PlannedRule, patterns: Mapping[str, RulePattern], stats: Stats) -> list[list[str]]:
    """Split a rule's linears so that each part can be decided by itself; those that share statistics stay together."""
    if not rule.separable or any(p.together for p in patterns.values()):
        return [list(patterns)]
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in patterns:
        groups.setdefault(tuple(stats[name].values()) or (name,), []).append(name)
    return list(groups.values())


def decide(
    rule: PlannedRule,
    built: tuple[AnyPruner, AnyPruner | None],
    block: Block,
    patterns: Mapping[str, RulePattern],
    stats: Stats,
    untouched: Checksums,
    kept: PreparedValues | None = None,
) -> Mapping[str, PruneResult]:
    """Ask a rule's selector, then its reconstructor if it has one, and check each answer.

    Raises:
        PluginError: an answer that breaks the contract of `compressx.Pruner`; the message names plugin and linear.
    """

    def asked(role: str, plugin: str, pruner: AnyPruner, patterns: Mapping[str, Pattern]) -> Mapping[str, PruneResult]:
        observed = {n: stats[n][role] for n in patterns if role in stats[n]}
        mine = None if kept is None else kept.setdefault((rule, role), {})
        return ask(plugin, pruner, block, patterns, observed, untouched, mine)

    selector, reconstructor = built
    selected = asked("selects", rule.pruner.name, selector, patterns)
    if reconstructor is None:
        return selected
    fixed = {n: FixedMask(r.keep, patterns[n]) for n, r in selected.items()}
    assert rule.reconstructor is not None  # noqa: S101 - built together
    return _joined(selected, asked("reconstructs", rule.reconstructor.name, reconstructor, fixed))


def _joined(selected: Mapping[str, PruneResult], rebuilt: Mapping[str, PruneResult]) -> dict[str, PruneResult]:
    """Add the selector's figures to the reconstructor's answer; a group stays one if all figures are its."""

    def join(first: PruneResult, second: PruneResult) -> PruneResult:
        shown = [x for x in (first, second) if x.info or x.images or x.history]
        groups = {x.group for x in shown}
        return replace(
            second, info={**first.info, **second.info}, images={**first.images, **second.images},
            history={**first.history, **second.history}, group=groups.pop() if len(groups) == 1 else "",
        )  # fmt: skip

    return {name: join(selected[name], result) for name, result in rebuilt.items()}


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
