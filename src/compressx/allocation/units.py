"""Units of an allocation, groups of linears that share one sparsity, and the exact spread of zeros over them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from compressx.allocation.spread import PIECES, Curve, fitted, in_steps, shares
from compressx.api.patterns import NM, Structured, Unstructured, nearest, zeros_in
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.recipe.sections import MAX_SPARSITY, Sharing
from compressx.runtime.errors import RecipeError


@dataclass(frozen=True, eq=False)
class Part:
    """Linears that share one pattern: a single one, or all of a rule that needs one pattern for them.

    Attributes:
        linears: in the model's order, of one rule.
    """

    linears: tuple[PlannedLinear, ...]

    @property
    def pattern(self) -> Unstructured | NM:
        """The kind of pattern."""
        pattern = self.linears[0].pattern
        if isinstance(pattern, Structured):
            raise TypeError(f"{pattern}: no sparsities of units are allocated")
        return pattern

    @cached_property
    def weights(self) -> int:
        """Number of weights."""
        return sum(x.weights for x in self.linears)

    @cached_property
    def step(self) -> int:
        """Granularity of the number of zeros: one zero in each group of weights that compete."""
        pattern = self.pattern
        if isinstance(pattern, NM):
            return self.weights // pattern.of
        if pattern.group == "joint":
            return 1
        return self.weights // math.gcd(*(x.shape[1] if pattern.group == "row" else x.weights for x in self.linears))

    def most(self) -> int:
        """Return the largest number of zeros; at least one weight is kept in each group that competes."""
        return min(self.weights - self.step, math.floor(MAX_SPARSITY * self.weights) // self.step * self.step)

    def with_zeros(self, zeros: int) -> Unstructured | NM:
        """Return the pattern for a number of zeros, a multiple of `step`."""
        if isinstance(self.pattern, NM):
            return NM(self.pattern.of - zeros // self.step, self.pattern.of)
        return Unstructured(zeros / self.weights, self.pattern.group)


@dataclass(frozen=True, eq=False)
class Unit:
    """Linears of one block that share one sparsity.

    Attributes:
        block: fully qualified name of the block; empty outside the blocks.
        linears: in the model's order.
    """

    block: str
    linears: tuple[PlannedLinear, ...]

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(x.weights for x in self.linears)

    @property
    def label(self) -> str:
        """The pruners of its rules."""
        return ", ".join(dict.fromkeys(x.rule.label for x in self.linears))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The linears grouped by pattern, the coarsest steps first."""
        members: dict[object, list[PlannedLinear]] = defaultdict(list)
        for linear in self.linears:
            members[linear.rule if _tied(linear) else linear.name].append(linear)
        return tuple(sorted((Part(tuple(m)) for m in members.values()), key=lambda part: -part.step))

    def most(self) -> int:
        """Return the largest number of zeros of the unit."""
        return sum(part.most() for part in self.parts)

    def points(self, curve: Curve) -> list[tuple[int, float]]:
        """Return possible counts of zeros with their errors; N:M patterns with one M allow only a few."""
        of = {x.pattern.of if isinstance(x.pattern, NM) else 0 for x in self.linears}
        most = self.most()
        steps = most * max(of) // self.weights if len(of) == 1 else 0
        return curve.points(self.weights, most, steps or PIECES)

    def at(self, sparsity: float) -> tuple[float, dict[PlannedRule, dict[str, Unstructured | NM]]]:
        """Return the total sparsity and the patterns, by rule and name, that are nearest to a sparsity."""
        patterns: dict[PlannedRule, dict[str, Unstructured | NM]] = defaultdict(dict)
        for x in self.linears:
            patterns[x.rule][x.name] = nearest(x.pattern, sparsity)
        reached = {x.name: patterns[x.rule][x.name].sparsity for x in self.linears}
        if len(set(reached.values())) > 1:
            sparsity = sum(reached[x.name] * x.weights for x in self.linears) / self.weights
        else:
            sparsity = reached[self.linears[0].name]
        return sparsity, dict(patterns)


def units_of(plan: Plan, kind: Sharing) -> tuple[Unit, ...]:
    """Group a plan's linears into units, in the model's order."""
    members: dict[tuple[object, ...], list[PlannedLinear]] = defaultdict(list)
    for x in plan.linears:
        members[x.block, x.rule if kind == "rule" else None].append(x)
    return tuple(Unit(linears[0].block, tuple(linears)) for linears in members.values())


def _tied(linear: PlannedLinear) -> bool:
    """Return whether all linears of the rule in this block must share one pattern."""
    joint = isinstance(linear.pattern, Unstructured) and linear.pattern.group == "joint"
    return joint or not linear.rule.separable


def _sharing(units: Sequence[Unit]) -> list[list[Unit]]:
    """Group the units that share the target: those of all blocks, and each one outside the blocks by itself."""
    groups: dict[Unit | None, list[Unit]] = defaultdict(list)
    for unit in units:
        groups[None if unit.block else unit].append(unit)
    return list(groups.values())


def spread(
    units: Sequence[Unit],
    target: float,
    choose: Callable[[Sequence[Unit], int], Sequence[int]],
) -> dict[str, Unstructured | NM]:
    """Choose the pattern of every linear, with `round(target * weights)` zeros in total.

    Linears with coarse steps (N:M, and patterns by row) are rounded first, and the others absorb the remainder. If all
    have coarse steps, the total is as close as the finest step allows.

    Args:
        units: the units of a plan.
        target: fraction of zeros.
        choose: distributes zeros among the units of the blocks; its sum need not be exact. Each unit outside the blocks
            has the target.

    Returns:
        Patterns by linear name.
    """
    # Groups with the finest steps come last, to absorb the remainder of the others.
    groups = sorted(_sharing(units), key=_finest, reverse=True)
    spreading: list[tuple[list[Part], list[int]]] = []
    left = 0
    for group, zeros in zip(groups, shares([sum(u.weights for u in g) for g in groups], target), strict=True):
        allotted = [zeros] if len(group) == 1 else choose(group, zeros)
        parts = [part for unit in group for part in unit.parts]
        wanted = [n for unit, count in zip(group, allotted, strict=True) for n in _within(unit, count)]
        counts = _whole(parts, wanted, zeros + left)
        left += zeros - sum(counts)
        spreading.append((parts, counts))
    patterns: dict[str, Unstructured | NM] = {}
    for parts, given in reversed(spreading):  # earlier groups may have room for what the last ones could not take
        counts = _whole(parts, given, sum(given) + left)
        left += sum(given) - sum(counts)
        patterns |= {x.name: p.with_zeros(n) for p, n in zip(parts, counts, strict=True) for x in p.linears}
    return patterns


def _finest(group: Sequence[Unit]) -> int:
    return min(part.step for unit in group for part in unit.parts)


def _within(unit: Unit, zeros: int) -> list[int]:
    """Distribute a unit's zeros over its parts in proportion to their weights, within their limits."""
    weights = [part.weights for part in unit.parts]
    return fitted(shares(weights, zeros / unit.weights), [part.most() for part in unit.parts], zeros)


def _whole(parts: Sequence[Part], wanted: Sequence[int], total: int) -> list[int]:
    """Round counts of zeros to the steps of their parts, the coarsest first; the others share the remainder."""
    counts = dict(enumerate(wanted))
    most = [part.most() for part in parts]
    given = 0
    for level in range(3):
        rest = [i for i, part in enumerate(parts) if _level(part) >= level]
        counts |= zip(rest, fitted([counts[i] for i in rest], [most[i] for i in rest], total - given), strict=True)
        mine = [i for i in rest if _level(parts[i]) == level]
        rounded = in_steps([counts[i] for i in mine], [most[i] for i in mine], [parts[i].step for i in mine])
        counts |= zip(mine, rounded, strict=True)
        given += sum(rounded)
    return list(counts.values())


def _level(part: Part) -> int:
    return 0 if isinstance(part.pattern, NM) else 1 if part.step > 1 else 2


def zeros_of(linears: Iterable[PlannedLinear]) -> int:
    """Count the zeros of planned patterns; linears that compete jointly are rounded in total, not each."""
    count = 0
    joint: dict[object, float] = defaultdict(float)
    for x in linears:
        zeros = zeros_in(x.pattern, *x.shape)
        count += zeros or 0
        if zeros is None:
            joint[x.block, x.rule] += x.pattern.sparsity * x.weights
    return count + sum(map(round, joint.values()))


def check_allocation(plan: Plan) -> None:
    """Check that an allocation can reach its target.

    Raises:
        RecipeError: a target that the patterns cannot reach, or nothing to choose.
    """
    settings = plan.allocation
    if settings is None:
        return
    groups = _sharing(units_of(plan, settings.unit))
    for group in groups:
        weights, most = sum(u.weights for u in group), sum(u.most() for u in group)
        if round(settings.target * weights) > most:
            alone = "" if group[0].block else f" of {group[0].linears[0].name}"
            raise RecipeError(
                f"target {settings.target:g} cannot be reached: the patterns{alone} allow at most "
                f"{most / weights:.6g}; N:M keeps at least one of M, a row one of its weights, and an allocation "
                f"{1 - MAX_SPARSITY:.0%} of each linear"
            )
    if all(len(group) == 1 for group in groups):
        raise RecipeError(
            f"{settings.method} has nothing to choose, because each of the {len(groups)} targets applies to a single "
            "unit; use smaller units, or give the rules their sparsities"
        )
