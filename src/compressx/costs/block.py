"""What pruning one block costs: its statistics, and what its rules' pruners count of themselves. Pure counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from compressx.api.patterns import Asked, FixedMask, Pattern
from compressx.api.pruner import AnyPruner, Block, CountedPruner, PreparingPruner, PrunerSpec, Statistic, statistic_of
from compressx.api.work import Windows, Work
from compressx.blocks.select import is_apart
from compressx.costs.forward import Passed
from compressx.planning.plan import Plan, PlannedRule
from compressx.runtime.errors import blamed_on


@dataclass(frozen=True, eq=False)
class Task:
    """What is decided at once, by one process: a rule's linears that share statistics, or all of them.

    Attributes:
        separable: whether the rule's pruners decide linears apart.
        weights: of its linears, by which tasks are shared out among processes; their masks have a byte for each.
        prepared: what each pruner prepares of statistics.
        pruned: what each pruner's answer takes.
        returned: bytes of the new weights.
    """

    separable: bool
    weights: int
    prepared: Mapping[str, Work]
    pruned: Mapping[str, Work]
    returned: float


@dataclass(frozen=True, eq=False)
class Gathered:
    """A statistic, and the linears that have it.

    Attributes:
        of: the first linear that is handed its input.
        statistic: fresh, on the meta device.
        spec: of the pruner that asked for it.
        names: of the linears.
        share: fraction of the tokens that reaches them.
    """

    of: str
    statistic: Statistic
    spec: PrunerSpec
    names: list[str]
    share: float


@dataclass(frozen=True, eq=False)
class BlockCost:
    """What the rules of a recipe do in one block.

    Attributes:
        statistics: updates of all statistics on the whole text; its memory is what they hold together.
        observed: one batch through the block up to the last linear that has a statistic.
        tasks: what is decided, in the order of a run.
        gathered: the statistics.
    """

    statistics: Work = field(default_factory=Work)
    observed: Work = field(default_factory=Work)
    tasks: tuple[Task, ...] = ()
    gathered: tuple[Gathered, ...] = ()

    @property
    def prepared(self) -> dict[str, Work]:
        """What pruners prepare once of each statistic, by pruner."""
        return summed(task.prepared for task in self.tasks)

    @property
    def pruned(self) -> dict[str, Work]:
        """One decision for every linear, by pruner."""
        return summed(task.pruned for task in self.tasks)


def summed(works: Iterable[Mapping[str, Work]]) -> dict[str, Work]:
    """Add works up by name."""
    found: dict[str, Work] = {}
    for some in works:
        for name, work in some.items():
            found[name] = found.get(name, Work()) + work
    return found


class Costs:
    """Asks pruners and statistics what they cost.

    Attributes:
        unknown: what does not tell, in words, in the order in which it was met.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.built = plan.build()
        self.unknown: dict[str, None] = {}

    def block(
        self, block: Block, passed: Passed, text: Windows, wanted: Mapping[PlannedRule, Mapping[str, Asked]]
    ) -> BlockCost:
        """Count what a block's rules do.

        Args:
            block: the block, without weights and calls.
            passed: its forward pass, which tells who shares an input.
            text: calibration windows.
            wanted: what each of a rule's linears has to become, by name.
        """
        observed = Work()
        tasks: list[Task] = []
        taken: list[Gathered] = []
        for rule, patterns in wanted.items():
            of_roles: list[list[Gathered]] = []
            for spec, pruner in self._roles(rule):
                mine = self._statistics(spec, pruner, block, patterns, passed, taken)
                of_roles.append(mine)
                for shared in mine:
                    if shared not in taken:
                        taken.append(shared)
                        work = self._updates(shared, text)
                        observed = replace(observed + work, memory=observed.memory + work.memory)
            groups = _parted(rule, patterns, of_roles)
            tasks += [self._task(rule, block, some, of_roles, passed, text) for some in groups]
        tasks.sort(key=lambda task: task.separable)
        # A run leaves the block once it has seen what it asked for.
        asked = [name for shared in taken for name in shared.names]
        before = [passed.inputs[name].before if name in passed.inputs else Work() for name in asked]
        return BlockCost(observed, max(before, key=lambda w: w.flops, default=passed.work), tuple(tasks), tuple(taken))

    def _roles(self, rule: PlannedRule) -> list[tuple[PrunerSpec, AnyPruner]]:
        pairs = zip((rule.pruner, rule.reconstructor), self.built[rule], strict=True)
        return [(spec, pruner) for spec, pruner in pairs if spec is not None and pruner is not None]

    def _statistics(
        self, spec: PrunerSpec, pruner: AnyPruner, block: Block, names: Iterable[str], passed: Passed,
        taken: list[Gathered],
    ) -> list[Gathered]:  # fmt: skip
        """Return the distinct statistics of some linears, those that others have taken already included."""
        mine: list[Gathered] = []
        for name in names:
            with torch.device("meta"):  # they are not filled
                statistic = statistic_of(spec.name, pruner, block, name)
            if statistic is None:
                continue
            inputs = passed.inputs.get(name)
            of, share = (inputs.of, inputs.share) if inputs is not None else (name, 1.0)
            known = next((s for s in (*mine, *taken) if s.of == of and s.statistic == statistic), None)
            if known is None:
                mine.append(Gathered(of, statistic, spec, [name], share))
                continue
            known.names.append(name)
            mine += [] if known in mine else [known]
        return mine

    def _updates(self, shared: Gathered, text: Windows) -> Work:
        count = getattr(shared.statistic, "work", None)
        if count is None:
            self.unknown[f"{type(shared.statistic).__name__}, a statistic of pruner {shared.spec.name}"] = None
            return Work()
        with blamed_on(
            f"work of {type(shared.statistic).__name__}, a statistic of pruner {shared.spec.name!r}, failed"
        ):
            return _checked(count(replace(text, share=shared.share)))

    def _task(
        self, rule: PlannedRule, block: Block, patterns: Mapping[str, Asked], of_roles: list[list[Gathered]],
        passed: Passed, text: Windows,
    ) -> Task:  # fmt: skip
        """Count what one process decides at once."""
        prepared: dict[str, Work] = {}
        pruned: dict[str, Work] = {}
        returned = 0.0
        for (spec, pruner), gathered in zip(self._roles(rule), of_roles, strict=True):
            given: dict[str, Pattern] = {
                n: p if spec is rule.pruner else _fixed(block, n, p) for n, p in patterns.items()
            }
            if not isinstance(pruner, CountedPruner):
                self.unknown[f"pruner {spec.name}"] = None
                continue
            mine = [shared for shared in gathered if not given.keys().isdisjoint(shared.names)]
            inputs = passed.inputs.get(next(iter(given)))
            with blamed_on(f"work of pruner {spec.name!r} failed on {block.fqn or 'the model'}"):
                decided = _checked(pruner.work(block, given, replace(text, share=inputs.share if inputs else 1.0)))
            made = self._prepared(spec, pruner, block, mine, text)
            prepared[spec.name] = prepared.get(spec.name, Work()) + made
            pruned[spec.name] = pruned.get(spec.name, Work()) + decided
            returned = decided.returned  # a reconstructing pruner's in place of the selecting one's
        weights = sum(block.linears[name].weight.numel() for name in patterns)
        return Task(rule.separable, weights, prepared, pruned, returned)

    def _prepared(
        self, spec: PrunerSpec, pruner: CountedPruner, block: Block, mine: Iterable[Gathered], text: Windows
    ) -> Work:
        done = Work()
        if not isinstance(pruner, PreparingPruner):
            return done
        count = getattr(pruner, "prepare_work", None)
        if count is None:
            self.unknown[f"what pruner {spec.name} prepares"] = None
            return done
        for shared in mine:
            with blamed_on(f"prepare_work of pruner {spec.name!r} failed on {shared.names[0]}"):
                done = done + _checked(count(block, shared.names[0], replace(text, share=shared.share)))
        return done


def _parted(
    rule: PlannedRule, patterns: Mapping[str, Asked], of_roles: Iterable[Iterable[Gathered]]
) -> Iterator[Mapping[str, Asked]]:
    """Part a rule's linears as a run does: those that share all statistics are decided together."""
    if not is_apart(rule, patterns):
        yield patterns
        return
    groups: dict[tuple[object, ...], dict[str, Asked]] = {}
    for name, pattern in patterns.items():
        key = tuple(id(shared) for gathered in of_roles for shared in gathered if name in shared.names)
        groups.setdefault(key or (name,), {})[name] = pattern
    yield from groups.values()


def _fixed(block: Block, name: str, pattern: Asked) -> FixedMask:
    """Return a mask that has only its shape."""
    return FixedMask(torch.empty(block.linears[name].weight.shape, dtype=torch.bool, device="meta"), pattern)


def _checked(work: object) -> Work:
    if not isinstance(work, Work):
        raise TypeError(f"expected a Work, got {work!r:.80}")
    return work
