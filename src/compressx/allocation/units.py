"""Units of an allocation, groups of linears that share one sparsity, and the exact distribution of zeros over them.

A unit has a curve of error against zeros. The summed error is minimal where one more zero costs the same in every unit;
along convex curves, taking the cheapest zeros first ends there (Fox, "Discrete optimization via marginal analysis",
Management Science 13:210, 1966).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from compressx.api.patterns import NM, RulePattern, Structured, Unstructured, of_units
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.recipe.sections import MAX_SPARSITY, Sharing
from compressx.runtime.errors import RecipeError

PIECES = 380
"""Pieces of a curve between dense and 95% sparsity: 0.25% each."""

_SMALLEST = 1e-15  # replaces an error of zero, which has no logarithm


@dataclass(frozen=True, eq=False)
class UnitPart:
    """Linears that share one pattern: a single one, or all of a rule that needs one pattern for them.

    Attributes:
        linears: in the model's order, of one rule. With whole units those of all its sets, such as experts, which all
            lose the same fraction.
    """

    linears: tuple[PlannedLinear, ...]

    @property
    def pattern(self) -> RulePattern:
        """The kind of pattern."""
        return self.linears[0].pattern

    @cached_property
    def weights(self) -> int:
        """Number of weights."""
        return sum(x.weights for x in self.linears)

    @cached_property
    def step(self) -> int:
        """How many zeros one step adds: one in each group of competing weights, or the weights of `multiple` units."""
        pattern = self.pattern
        if isinstance(pattern, Structured):
            sets = of_units(x.pattern for x in self.linears)
            return self.weights // math.gcd(*(p.units.count // p.multiple for p in sets))
        sizes = [groups[0] for x in self.linears if (groups := x.pattern.groups(*x.shape))]
        return self.weights // math.gcd(*sizes) if sizes else 1

    def max_zeros(self) -> int:
        """Return the largest number of zeros; at least one weight is kept in each group that competes."""
        return min(self.weights - self.step, math.floor(MAX_SPARSITY * self.weights) // self.step * self.step)

    def with_zeros(self, zeros: int) -> Unstructured | NM:
        """Return the pattern for a number of zeros, a multiple of `step`; for units only its sparsity is used."""
        if isinstance(self.pattern, NM):
            return NM(self.pattern.of - zeros // self.step, self.pattern.of)
        return Unstructured(zeros / self.weights, getattr(self.pattern, "group", "row"))


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
    def parts(self) -> tuple[UnitPart, ...]:
        """The linears grouped by pattern, the coarsest steps first."""
        members: dict[object, list[PlannedLinear]] = defaultdict(list)
        for linear in self.linears:
            shared = linear.pattern.together or not linear.rule.separable  # one pattern for all of the rule
            members[linear.rule if shared else linear.name].append(linear)
        return tuple(sorted((UnitPart(tuple(m)) for m in members.values()), key=lambda part: -part.step))

    def max_zeros(self) -> int:
        """Return the largest number of zeros of the unit."""
        return sum(part.max_zeros() for part in self.parts)

    def points(self, curve: Curve) -> list[tuple[int, float]]:
        """Return counts of zeros with their errors: all that whole units, or N:M with one M, allow; else `PIECES`."""
        of = {x.pattern.of if isinstance(x.pattern, NM) else 0 for x in self.linears}
        most = self.max_zeros()
        steps = most * max(of) // self.weights if len(of) == 1 else 0
        return curve.points(self.weights, most, most // self.step if self.step > 1 else steps or PIECES)

    @property
    def step(self) -> int:
        """How many zeros one step adds if all parts are one set of whole units; else 1."""
        return self.parts[0].step if len(self.parts) == 1 and isinstance(self.parts[0].pattern, Structured) else 1

    def at(self, sparsity: float) -> tuple[float, dict[PlannedRule, dict[str, RulePattern]]]:
        """Return the total sparsity and the patterns, by rule and name, that are nearest to a sparsity."""
        patterns: dict[PlannedRule, dict[str, RulePattern]] = defaultdict(dict)
        for part in self.parts:
            steps = min(max(round(sparsity * part.weights / part.step), 1), part.max_zeros() // part.step)
            for x in part.linears:
                whole = isinstance(x.pattern, Structured)  # a sparsity that all sets can have
                patterns[x.rule][x.name] = x.pattern.at(steps * part.step / part.weights if whole else sparsity)
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


def _with_one_target(units: Sequence[Unit]) -> list[list[Unit]]:
    """Group the units that reach the target together: all those in blocks; each one outside is its own group."""
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
    """
    # Groups with the finest steps come last, to absorb the remainder of the others.
    groups = sorted(_with_one_target(units), key=lambda g: min(part.step for u in g for part in u.parts), reverse=True)
    distributed: list[tuple[list[UnitPart], list[int]]] = []
    remaining = 0
    for group, zeros in zip(groups, shares([sum(u.weights for u in g) for g in groups], target), strict=True):
        allotted = [zeros] if len(group) == 1 else choose(group, zeros)
        parts = [part for unit in group for part in unit.parts]
        wanted = []
        for unit, count in zip(group, allotted, strict=True):  # over its parts, in proportion to their weights
            by_weight = shares([part.weights for part in unit.parts], count / unit.weights)
            wanted += fitted(by_weight, [part.max_zeros() for part in unit.parts], count)
        counts = _rounded(parts, wanted, _reachable(parts, zeros + remaining))
        remaining += zeros - sum(counts)
        distributed.append((parts, counts))
    patterns: dict[str, Unstructured | NM] = {}
    for parts, given in reversed(distributed):  # earlier groups may have room for what the last ones could not take
        counts = _rounded(parts, given, _reachable(parts, sum(given) + remaining))
        remaining += sum(given) - sum(counts)
        patterns |= {x.name: p.with_zeros(n) for p, n in zip(parts, counts, strict=True) for x in p.linears}
    return patterns


def _reachable(parts: Sequence[UnitPart], zeros: int) -> int:
    """Round zeros to a total that parts of one step can reach; else the rest would go to a part that costs more."""
    step, *others = {part.step if isinstance(part.pattern, Structured) else 0 for part in parts}
    return zeros if others or not step else round(zeros / step) * step


def _rounded(parts: Sequence[UnitPart], wanted: Sequence[int], total: int) -> list[int]:
    """Round counts of zeros to the steps of their parts, the coarsest first; the others share the remainder."""
    counts = dict(enumerate(wanted))
    most = [part.max_zeros() for part in parts]
    given = 0
    for level in range(3):
        rest = [i for i, part in enumerate(parts) if _level(part) >= level]
        counts |= zip(rest, fitted([counts[i] for i in rest], [most[i] for i in rest], total - given), strict=True)
        mine = [i for i in rest if _level(parts[i]) == level]
        rounded = in_steps([counts[i] for i in mine], [most[i] for i in mine], [parts[i].step for i in mine])
        counts |= zip(mine, rounded, strict=True)
        given += sum(rounded)
    return list(counts.values())


def _level(part: UnitPart) -> int:
    return 0 if isinstance(part.pattern, NM) else 1 if part.step > 1 else 2


def zeros_of(linears: Iterable[PlannedLinear]) -> int:
    """Count the zeros of planned patterns; linears that are decided together are rounded in total, not each."""
    count = 0
    joint: dict[object, float] = defaultdict(float)
    for x in linears:
        zeros = x.pattern.zeros(*x.shape)
        count += zeros or 0
        if zeros is None:
            units = x.pattern if isinstance(x.pattern, Structured) else None
            joint[x.block, x.rule] += x.weights * (units.dropped / units.units.count if units else x.pattern.sparsity)
    return count + sum(map(round, joint.values()))


def check_allocation(plan: Plan) -> None:
    """Check that an allocation can reach its target."""
    settings = plan.allocation
    if settings is None:
        return
    groups = _with_one_target(units_of(plan, settings.unit))
    for group in groups:
        weights, most = sum(u.weights for u in group), sum(u.max_zeros() for u in group)
        if round(settings.fraction * weights) > most:
            alone = "" if group[0].block else f" of {group[0].linears[0].name}"
            raise RecipeError(
                f"target {settings.fraction:g} cannot be reached: the patterns{alone} allow at most "
                f"{most / weights:.6g}; N:M keeps at least one of M, a row one of its weights, units one multiple, and "
                f"an allocation {1 - MAX_SPARSITY:.0%} of each linear"
            )
    if all(len(group) == 1 for group in groups):
        raise RecipeError(
            f"{settings.method} has nothing to choose, because each of the {len(groups)} targets applies to a single "
            "unit; use smaller units, or give the rules their sparsities"
        )


@dataclass(frozen=True)
class Curve:
    """Error against sparsity through measured points: zero when dense, non-decreasing and smooth.

    Between the points it is a monotone cubic of log error over log sparsity, beyond them a power law.

    Attributes:
        sparsities: increasing, in (0, 1); with a single one, the error is proportional to the sparsity.
        errors: measured errors, finite and non-negative; values that decrease are averaged (`isotonic`).
    """

    sparsities: tuple[float, ...]
    errors: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise((0.0, *self.sparsities, 1.0)))
        able = all(math.isfinite(e) and e >= 0 for e in self.errors)
        if not (rising and able and 0 < len(self.errors) == len(self.sparsities)):
            raise ValueError(
                f"expected sparsities that increase within (0, 1), and for each a finite error of at least 0; got "
                f"{self.sparsities} with {self.errors}"
            )

    def error(self, sparsity: float) -> float:
        """Return the error at a sparsity in [0, 1)."""
        return 0.0 if sparsity == 0 else math.exp(self._logarithm(math.log(sparsity)))

    def points(self, weights: int, most: int, pieces: int = PIECES) -> list[tuple[int, float]]:
        """Return counts of zeros from none to `most` in equal pieces, each with its error."""
        counts = sorted({most * i // pieces for i in range(pieces + 1)})
        return [(count, self.error(count / weights)) for count in counts]

    @cached_property
    def _logarithm(self) -> _MonotoneCubic:
        errors = [max(e, _SMALLEST) for e in isotonic(self.errors)]
        return _MonotoneCubic(tuple(map(math.log, self.sparsities)), tuple(map(math.log, errors)))


@dataclass(frozen=True)
class _MonotoneCubic:
    """Monotone cubic Hermite interpolation, linear beyond its points."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @cached_property
    def slopes(self) -> tuple[float, ...]:
        """Slope at each point: the weighted harmonic mean of the two secants (Fritsch and Butland, 1984)."""
        widths = [b - a for a, b in pairwise(self.xs)]
        secants = [(b - a) / w for (a, b), w in zip(pairwise(self.ys), widths, strict=True)] or [1.0]
        inner = [
            3 * (h0 + h1) / ((h0 + 2 * h1) / s0 + (2 * h0 + h1) / s1) if s0 * s1 > 0 else 0.0
            for (s0, s1), (h0, h1) in zip(pairwise(secants), pairwise(widths), strict=True)
        ]
        return (secants[0], *inner, secants[-1])

    def __call__(self, x: float) -> float:
        i = bisect_right(self.xs, x) - 1
        if i < 0:
            return self.ys[0] + self.slopes[0] * (x - self.xs[0])
        if i >= len(self.xs) - 1:
            return self.ys[-1] + self.slopes[-1] * (x - self.xs[-1])
        width = self.xs[i + 1] - self.xs[i]
        t = (x - self.xs[i]) / width
        s = 1 - t
        return (
            self.ys[i] * s * s * (1 + 2 * t)
            + self.ys[i + 1] * t * t * (3 - 2 * t)
            + width * t * s * (self.slopes[i] * s - self.slopes[i + 1] * t)
        )


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence nearest in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # sum and count of pooled values
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def cheapest(curves: Sequence[Sequence[tuple[int, float]]], zeros: int, steps: Sequence[int] = ()) -> list[int]:
    """Distribute zeros over units at the lowest summed error.

    Exact for convex curves with equal steps; others are replaced by their lower convex hull, and the sum exceeds the
    least one by at most what one curve exceeds its hull by. A larger total never gives a unit fewer zeros while steps
    are equal.

    Args:
        curves: for each unit, increasing counts of zeros from 0 with their errors; linear in between.
        zeros: the total.
        steps: of each unit, of which its zeros are a multiple; all 1 when absent.

    Returns:
        The zeros of each unit, which sum to `zeros`, or to the capacity of all curves if that is less; with steps to
        less than the finest of them below that.
    """
    counts, steps = [0] * len(curves), [*(steps or [1] * len(curves))]
    pieces = sorted((slope, unit, length) for unit, points in enumerate(curves) for slope, length in _hull(points))
    for _, unit, length in pieces:
        taken = min(length, zeros) // steps[unit] * steps[unit]
        counts[unit] += taken
        zeros -= taken
        if taken < length:  # what is next of this unit costs more, but comes after what did not fit
            steps[unit] = zeros + 1
    return counts


def _hull(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, int]]:
    """Yield slope and length of the pieces of the lower convex hull of points with increasing x."""
    corners: list[tuple[int, float]] = []
    for point in points:
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return ((_slope(a, b), b[0] - a[0]) for a, b in pairwise(corners))


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def shares(weights: Sequence[int], fraction: float) -> list[int]:
    """Return each part's number of zeros at a sparsity; they sum to `round(fraction * sum(weights))`."""
    bounds = [round(fraction * total) for total in accumulate(weights, initial=0)]
    return [b - a for a, b in pairwise(bounds)]


def fitted(wanted: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Adjust counts to a total, as close as the limits 0 and `most` allow.

    They fall in proportion to their size, and rise in proportion to their room.
    """
    counts = list(map(min, wanted, most))
    missing = total - sum(counts)
    room = [m - c for m, c in zip(most, counts, strict=True)] if missing > 0 else counts
    if not any(room):
        return counts
    moved = shares(room, min(abs(missing) / sum(room), 1.0))
    return [c + m if missing > 0 else c - m for c, m in zip(counts, moved, strict=True)]


def in_steps(wanted: Sequence[int], most: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Round counts of zeros to multiples of their steps, at most `most`, carrying the rounding error to the next count.

    A remainder after the last count goes to those with the finest steps that have room, so the sum is as close to that
    of `wanted` as these allow.
    """
    counts = list(wanted)
    carry = 0
    # The second pass changes a count only if the remainder exceeds half of its step.
    for i in [*range(len(steps)), *sorted(range(len(steps)), key=lambda i: -steps[i])]:
        count = min(max(round((counts[i] + carry) / steps[i]), 0), most[i] // steps[i]) * steps[i]
        carry += counts[i] - count
        counts[i] = count
    return counts
