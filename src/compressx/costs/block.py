"""What pruning one block costs: its statistics, and what its rules' pruners count of themselves. Pure counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from compressx.api.patterns import Asked, FixedMask, Pattern, is_together
from compressx.api.pruner import AnyPruner, Block, CountedPruner, PreparingPruner, PrunerSpec, Statistic, statistic_of
from compressx.api.work import Windows, Work
from compressx.costs.forward import Passed
from compressx.planning.plan import Plan, PlannedRule
from compressx.runtime.errors import blamed_on


@dataclass(frozen=True, eq=False)
class BlockCost:
    """What the rules of a recipe do in one block.

    Attributes:
        statistics: updates of all statistics on the whole text; its memory is what they hold together.
        observed: one batch through the block up to the last linear that has a statistic.
        prepared: what pruners prepare once of each statistic, by pruner.
        pruned: one decision for every linear, by pruner.
    """

    statistics: Work = field(default_factory=Work)
    observed: Work = field(default_factory=Work)
    prepared: Mapping[str, Work] = field(default_factory=dict)
    pruned: Mapping[str, Work] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Shared:
    """A statistic, and the linears that have it."""

    of: str
    statistic: Statistic
    spec: PrunerSpec
    names: list[str]
    share: float


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
        prepared: dict[str, Work] = {}
        pruned: dict[str, Work] = {}
        taken: list[_Shared] = []
        asked: list[str] = []
        for rule, patterns in wanted.items():
            for spec, pruner in self._roles(rule):
                given = {n: p if spec is rule.pruner else _fixed(block, n, p) for n, p in patterns.items()}
                mine = self._statistics(spec, pruner, block, given, passed, taken)
                asked += [name for shared in mine for name in shared.names]
                for shared in mine:
                    if shared.spec is spec and shared not in taken:
                        taken.append(shared)
                        work = self._updates(shared, text)
                        observed = replace(observed + work, memory=observed.memory + work.memory)
                if isinstance(pruner, CountedPruner):
                    made = self._prepared(spec, pruner, block, mine, text)
                    decided = self._decided(spec, pruner, block, given, passed, text)
                    prepared[spec.name] = prepared.get(spec.name, Work()) + made
                    pruned[spec.name] = pruned.get(spec.name, Work()) + decided
                else:
                    self.unknown[f"pruner {spec.name}"] = None
        # A run leaves the block once it has seen what it asked for.
        before = [passed.inputs[name].before if name in passed.inputs else Work() for name in asked]
        return BlockCost(observed, max(before, key=lambda w: w.flops, default=passed.work), prepared, pruned)

    def _roles(self, rule: PlannedRule) -> Iterable[tuple[PrunerSpec, AnyPruner]]:
        pairs = zip((rule.pruner, rule.reconstructor), self.built[rule], strict=True)
        return [(spec, pruner) for spec, pruner in pairs if spec is not None and pruner is not None]

    def _statistics(
        self, spec: PrunerSpec, pruner: AnyPruner, block: Block, names: Iterable[str], passed: Passed,
        taken: list[_Shared],
    ) -> list[_Shared]:  # fmt: skip
        """Return the distinct statistics of some linears, those that others have taken already included."""
        mine: list[_Shared] = []
        for name in names:
            with torch.device("meta"):  # they are not filled
                statistic = statistic_of(spec.name, pruner, block, name)
            if statistic is None:
                continue
            inputs = passed.inputs.get(name)
            of, share = (inputs.of, inputs.share) if inputs is not None else (name, 1.0)
            known = next((s for s in (*mine, *taken) if s.of == of and s.statistic == statistic), None)
            if known is None:
                mine.append(_Shared(of, statistic, spec, [name], share))
                continue
            known.names.append(name)
            mine += [] if known in mine else [known]
        return mine

    def _updates(self, shared: _Shared, text: Windows) -> Work:
        count = getattr(shared.statistic, "work", None)
        if count is None:
            self.unknown[f"{type(shared.statistic).__name__}, a statistic of pruner {shared.spec.name}"] = None
            return Work()
        with blamed_on(
            f"work of {type(shared.statistic).__name__}, a statistic of pruner {shared.spec.name!r}, failed"
        ):
            return _checked(count(replace(text, share=shared.share)))

    def _prepared(
        self, spec: PrunerSpec, pruner: CountedPruner, block: Block, mine: Iterable[_Shared], text: Windows
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

    def _decided(
        self, spec: PrunerSpec, pruner: CountedPruner, block: Block, patterns: Mapping[str, Pattern], passed: Passed,
        text: Windows,
    ) -> Work:  # fmt: skip
        """Count a pruner's answers: of one linear at a time where it decides them apart, as a run asks."""
        apart = spec.separable and not is_together(patterns)
        asked = [{n: p} for n, p in patterns.items()] if apart else [dict(patterns)]
        done = Work()
        for some in asked:
            inputs = passed.inputs.get(next(iter(some)))
            with blamed_on(f"work of pruner {spec.name!r} failed on {block.fqn or 'the model'}"):
                done = done + _checked(pruner.work(block, some, replace(text, share=inputs.share if inputs else 1.0)))
        return done


def _fixed(block: Block, name: str, pattern: Asked) -> FixedMask:
    """Return a mask that has only its shape."""
    return FixedMask(torch.empty(block.linears[name].weight.shape, dtype=torch.bool, device="meta"), pattern)


def _checked(work: object) -> Work:
    if not isinstance(work, Work):
        raise TypeError(f"expected a Work, got {work!r:.80}")
    return work
