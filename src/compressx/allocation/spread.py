"""Distribution of a total number of zeros over units, on plain numbers.

A unit is a number of weights with a curve of error against zeros. The summed error is minimal where one more zero costs
the same in every unit; along convex curves, taking the cheapest zeros first ends there (Fox, "Discrete optimization via
marginal analysis", Management Science 13:210, 1966).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

PIECES = 380
"""Pieces of a curve between dense and 95% sparsity: 0.25% each."""

_SMALLEST = 1e-15  # replaces an error of zero, which has no logarithm


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
        if len(self.sparsities) != len(self.errors) or not self.errors:
            raise ValueError(f"a curve needs as many errors as sparsities, got {self.sparsities} with {self.errors}")
        if any(a >= b for a, b in pairwise((0.0, *self.sparsities, 1.0))):
            raise ValueError(f"sparsities must increase within (0, 1), got {self.sparsities}")
        if not all(math.isfinite(e) and e >= 0 for e in self.errors):
            raise ValueError(f"errors must be finite and non-negative, got {self.errors}")

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


def cheapest(curves: Sequence[Sequence[tuple[int, float]]], zeros: int) -> list[int]:
    """Distribute zeros over units at the lowest summed error.

    Exact for convex curves; others are replaced by their lower convex hull, and the sum exceeds the least one by at
    most what one curve exceeds its hull by. A larger total never gives a unit fewer zeros.

    Args:
        curves: for each unit, increasing counts of zeros from 0 with their errors; linear in between.
        zeros: the total.

    Returns:
        The zeros of each unit, which sum to `zeros`, or to the capacity of all curves if that is less.
    """
    counts = [0] * len(curves)
    pieces = sorted((slope, unit, length) for unit, points in enumerate(curves) for slope, length in _hull(points))
    for _, unit, length in pieces:
        taken = min(length, zeros)
        counts[unit] += taken
        zeros -= taken
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
    """Adjust counts to a total, in proportion to their size when reducing and to their room when increasing.

    Args:
        wanted: non-negative counts.
        most: upper limit of each result.
        total: the sum of the results, as close as the limits 0 and `most` allow.
    """
    counts = list(map(min, wanted, most))
    missing = total - sum(counts)
    room = [m - c for m, c in zip(most, counts, strict=True)] if missing > 0 else counts
    if not any(room):
        return counts
    moved = shares(room, min(abs(missing) / sum(room), 1.0))
    return [c + m if missing > 0 else c - m for c, m in zip(counts, moved, strict=True)]


def in_steps(wanted: Sequence[int], most: Sequence[int], steps: Sequence[int]) -> list[int]:
    """Round counts of zeros to multiples, carrying the rounding error to the next count.

    A remainder after the last count goes to those with the finest steps that have room.

    Args:
        wanted: counts of zeros.
        most: upper limit of each result.
        steps: each result is a multiple of its step.

    Returns:
        Counts whose sum is as close to that of `wanted` as the finest steps allow.
    """
    counts = list(wanted)
    carry = 0
    # The second pass changes a count only if the remainder exceeds half of its step.
    for i in [*range(len(steps)), *sorted(range(len(steps)), key=lambda i: -steps[i])]:
        count = min(max(round((counts[i] + carry) / steps[i]), 0), most[i] // steps[i]) * steps[i]
        carry += counts[i] - count
        counts[i] = count
    return counts
