"""What pruning one block costs: its statistics, and what its rules' pruners count of themselves. Pure counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from compressx.api.patterns import Asked, FixedMask, Pattern, Structured
from compressx.api.pruner import AnyPruner, Block, CountedPruner, PreparingPruner, PrunerSpec, statistic_of
from compressx.api.work import Windows, Work
from compressx.blocks.select import is_apart
from compressx.costs.forward import Passed
from compressx.costs.gathered import Filled, Gathered
from compressx.planning.plan import Plan, PlannedRule
from compressx.runtime.errors import blamed_on


@dataclass(frozen=True, eq=False)
class Task:
    """What is decided at once, by one process: a rule's linears that share statistics, or all of them.

    Attributes:
        names: of the linears.
        separable: whether the rule's pruners decide linears apart.
        weights: of its linears, by which tasks are shared out among processes; their masks have a byte for each.
        prepared: what each pruner prepares of statistics.
        pruned: what each pruner's answer takes.
        returned: bytes of the new weights.
        held: the most bytes that each pruner holds beside statistics, its answer and what it prepares included.
        largest: bytes of the largest weight, which is made anew to be checked and to be written.
    """

    names: frozenset[str]
    separable: bool
    weights: int
    prepared: Mapping[str, Work]
    pruned: Mapping[str, Work]
    returned: float
    held: Mapping[str, float]
    largest: float

    @property
    def answer(self) -> float:
        """Bytes of masks and new weights."""
        return self.weights + self.returned


@dataclass(frozen=True, eq=False)
class BlockCost:
    """What the rules of a recipe do in one block.

    Attributes:
        statistics: updates of all statistics on the whole text; its memory is what they hold together, and what the
            block computes while they take in a batch.
        observed: one batch through the block up to the last linear that has a statistic.
        tasks: what is decided, in the order of a run.
        gathered: the statistics.
        sizes: bytes that each of them holds.
    """

    statistics: Work = field(default_factory=Work)
    observed: Work = field(default_factory=Work)
    tasks: tuple[Task, ...] = ()
    gathered: tuple[Gathered, ...] = ()
    sizes: tuple[float, ...] = ()

    def peaks(self, processes: int) -> tuple[dict[str, float], float]:
        """Return the most bytes of statistics and answers: by pruner while it is asked, and while answers are written.

        A statistic goes when the last of its linears is decided. Answers are held until all of a turn are there: those
        of what pruners see whole, and with several processes of the whole block.
        """
        found: dict[str, float] = {}
        written = answers = 0.0
        left = {name for task in self.tasks for name in task.names}
        for task in self.tasks:
            sizes = zip(self.gathered, self.sizes, strict=True)
            statistics = sum(size for shared, size in sizes if not left.isdisjoint(shared.names))
            for name, held in task.held.items():
                found[name] = max(found.get(name, 0.0), statistics + answers + held)
            left -= task.names
            sizes = zip(self.gathered, self.sizes, strict=True)
            after = sum(size for shared, size in sizes if not left.isdisjoint(shared.names))
            written = max(written, after + answers + task.answer + task.largest)
            answers += 0.0 if task.separable and processes == 1 else task.answer
        return found, written

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
        self.filled = Filled()

    def block(
        self, block: Block, passed: Passed, text: Windows, whole: Windows,
        wanted: Mapping[PlannedRule, Mapping[str, Asked]],
    ) -> BlockCost:  # fmt: skip
        """Count what a block's rules do.

        Args:
            block: the block, without weights and calls.
            passed: its forward pass, which tells who shares an input.
            text: calibration windows of the first process.
            whole: those of all processes.
            wanted: what each of a rule's linears has to become, by name.
        """
        observed, at_first, at_last = Work(), 0.0, 0.0
        sizes: list[float] = []  # of what processes have put together
        temporary: dict[str, float] = {}
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
                        own = min(work.memory, self.held(shared, block, text))
                        sizes.append(min(self._updates(shared, whole).memory, self.held(shared, block, whole)))
                        at_first += min(own, self.held(shared, block, replace(text, count=text.batch)))
                        at_last += own
                        entering = temporary.get(shared.of, 0.0)
                        temporary[shared.of] = max(entering, work.memory - own)
                        observed = observed + work
            groups = _parted(rule, patterns, of_roles)
            tasks += [self._task(rule, block, some, of_roles, passed, whole) for some in groups]
        tasks.sort(key=lambda task: task.separable)
        # A run leaves the block once it has seen what it asked for.
        asked = [name for shared in taken for name in shared.names]
        before = [passed.inputs[name].before if name in passed.inputs else Work() for name in asked]
        # The first batch runs the whole block.
        first = at_first + max(passed.work.memory, passed.holding(temporary, temporary, leave=False))
        later = at_last + passed.holding(temporary, temporary, leave=True) * (text.batches > 1)
        reached = max(before, key=lambda w: w.flops, default=passed.work)
        return BlockCost(replace(observed, memory=max(first, later)), reached, tuple(tasks), tuple(taken), tuple(sizes))

    def held(self, shared: Gathered, block: Block, text: Windows) -> float:
        """Return the bytes of a statistic's tensors; infinity if that cannot be told without numbers."""
        tensors = self.filled(shared, block, text)
        return math.inf if tensors is None else float(sum(tensor.nbytes for tensor, _ in tensors.values()))

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
        weights = {name: block.linears[name].weight for name in patterns}
        masks = sum(weight.numel() for weight in weights.values())
        largest = max(float(weight.numel() * weight.element_size()) for weight in weights.values())
        prepared: dict[str, Work] = {}
        pruned: dict[str, Work] = {}
        held: dict[str, float] = {}
        returned = selected = 0.0
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
            kept = max((work.returned for work in made), default=0.0)  # one at a time
            checked = masks + decided.returned + (largest if decided.returned else 0.0)
            if any(isinstance(pattern, Structured) for pattern in given.values()):
                checked += masks  # made of whole units, and compared
            most = max(checked, kept + decided.memory, *(work.memory for work in made))
            held[spec.name] = max(held.get(spec.name, 0.0), selected + most)
            prepared[spec.name] = sum(made, prepared.get(spec.name, Work()))
            pruned[spec.name] = pruned.get(spec.name, Work()) + decided
            returned = decided.returned  # a reconstructing pruner's in place of the selecting one's
            selected = masks + returned
        return Task(frozenset(patterns), rule.separable, masks, prepared, pruned, returned, held, largest)

    def _prepared(
        self, spec: PrunerSpec, pruner: CountedPruner, block: Block, mine: Iterable[Gathered], text: Windows
    ) -> list[Work]:
        """Return what it takes to prepare each of some statistics."""
        if not isinstance(pruner, PreparingPruner):
            return []
        count = getattr(pruner, "prepare_work", None)
        if count is None:
            self.unknown[f"what pruner {spec.name} prepares"] = None
            return []
        done = []
        for shared in mine:
            with blamed_on(f"prepare_work of pruner {spec.name!r} failed on {shared.names[0]}"):
                done.append(_checked(count(block, shared.names[0], replace(text, share=shared.share))))
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
