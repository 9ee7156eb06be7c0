"""Choosing counts of zeros under one total: the mathematics, on plain numbers.

What gets one sparsity is a unit here: so many weights, and a curve that says what their zeros cost. The summed cost is
least where one more zero costs the same everywhere; taking the cheapest zeros first, along convex curves, ends there
(Fox, "Discrete optimization via marginal analysis", Management Science 13:210, 1966).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

PIECES = 380
"""Of a curve, between dense and 95%: 0.25% each."""

_SMALLEST = 1e-15  # what counts as no error, so that it has a logarithm


@dataclass(frozen=True)
class Curve:
    """Error against sparsity, through measured points: 0 when dense, never falling, smooth in between.

    Between the points it is a monotone cubic of log error over log sparsity, beyond them a power of the sparsity.

    Attributes:
        sparsities: rising, in (0, 1); from a single one the error is in proportion.
        errors: measured at them, finite and not negative. Those that fall are averaged with what they fall from.
    """

    sparsities: tuple[float, ...]
    errors: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sparsities) != len(self.errors) or not self.errors:
            raise ValueError(f"a curve needs as many errors as sparsities, got {self.sparsities} with {self.errors}")
        if any(a >= b for a, b in pairwise((0.0, *self.sparsities, 1.0))):
            raise ValueError(f"sparsities rise from each to the next within (0, 1), got {self.sparsities}")
        if not all(math.isfinite(e) and e >= 0 for e in self.errors):
            raise ValueError(f"errors are finite and not negative, got {self.errors}")

    def error(self, sparsity: float) -> float:
        """Return the error at a sparsity in [0, 1)."""
        return 0.0 if sparsity == 0 else math.exp(self._logarithm(math.log(sparsity)))

    def points(self, weights: int, most: int, pieces: int = PIECES) -> list[tuple[int, float]]:
        """Return counts of zeros of so many weights, from none to `most` in equal pieces, each with its error."""
        counts = sorted({most * i // pieces for i in range(pieces + 1)})
        return [(count, self.error(count / weights)) for count in counts]

    @cached_property
    def _logarithm(self) -> _MonotoneCubic:
        errors = [max(e, _SMALLEST) for e in isotonic(self.errors)]
        return _MonotoneCubic(tuple(map(math.log, self.sparsities)), tuple(map(math.log, errors)))


@dataclass(frozen=True)
class _MonotoneCubic:
    """Cubic Hermite interpolation that rises where its points do, and a straight line beyond them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @cached_property
    def slopes(self) -> tuple[float, ...]:
        """At each point: between two secants their weighted harmonic mean (Fritsch and Butland, 1984)."""
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
    """Return the nearest values, by squares, that never fall (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # sum and number of values that became one
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before = pools.pop()
            total, count = total + before[0], count + before[1]
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


def cheapest(curves: Sequence[Sequence[tuple[int, float]]], zeros: int) -> list[int]:
    """Spread zeros over units at the least summed error.

    Exact for convex curves; others are replaced by their lower convex hull. More zeros in all never mean fewer
    anywhere.

    Args:
        curves: for each unit, rising counts of zeros from 0, each with its error; straight lines in between.
        zeros: how many in all.

    Returns:
        The zeros of each unit. They sum to `zeros`, or to as many as all curves hold when those are fewer.
    """
    counts = [0] * len(curves)
    pieces = sorted((slope, unit, length) for unit, points in enumerate(curves) for slope, length in _hull(points))
    for _, unit, length in pieces:
        taken = min(length, zeros)
        counts[unit] += taken
        zeros -= taken
    return counts


def _hull(points: Sequence[tuple[int, float]]) -> Iterator[tuple[float, int]]:
    """Yield the pieces of the lower convex hull of rising points, each by its slope and length."""
    corners: list[tuple[int, float]] = []
    for point in points:
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) >= _slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return ((_slope(a, b), b[0] - a[0]) for a, b in pairwise(corners))


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def shares(weights: Sequence[int], fraction: float) -> list[int]:
    """Return the zeros that each part gets of a fraction of all weights; they sum to `round(fraction * all)`."""
    bounds = [round(fraction * total) for total in accumulate(weights, initial=0)]
    return [b - a for a, b in pairwise(bounds)]


def fitted(wanted: Sequence[int], most: Sequence[int], total: int) -> list[int]:
    """Change counts so that they sum to a total, each by its share of what it has, or has room for.

    Args:
        wanted: counts, none negative.
        most: the largest that each result can be.
        total: what the results sum to; as near to it as 0 and `most` allow.
    """
    counts = list(map(min, wanted, most))
    missing = total - sum(counts)
    room = [m - c for m, c in zip(most, counts, strict=True)] if missing > 0 else counts
    if not any(room):
        return counts
    moved = shares(room, min(abs(missing) / sum(room), 1.0))
    return [c + m if missing > 0 else c - m for c, m in zip(counts, moved, strict=True)]


def in_steps(wanted: Sequence[int], most: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Round counts of zeros to multiples, what rounding adds or leaves going on to the next count.

    What is left after the last, since others had no room for it, goes to those with the finest steps that have.

    Args:
        wanted: counts of zeros.
        most: the largest that each result can be.
        steps: what each result is a multiple of.

    Returns:
        Counts, in sum as near to the sum of those wanted as the finest steps allow.
    """
    counts = list(wanted)
    carry = 0
    # What rounds the first time stays the second, unless more is left than half of its step.
    for i in [*range(len(steps)), *sorted(range(len(steps)), key=lambda i: -steps[i])]:
        count = min(max(round((counts[i] + carry) / steps[i]), 0), most[i] // steps[i]) * steps[i]
        carry += counts[i] - count
        counts[i] = count
    return counts
