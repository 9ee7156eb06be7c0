"""The mathematics of allocation: exact totals, least cost against brute force, and more zeros never mean fewer."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressx.allocation.units import Curve, _hull, _MonotoneCubic, cheapest, fitted, in_steps, isotonic, shares
from compressx.recipe.sections import MAX_SPARSITY

GRID = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)


@st.composite
def convex(draw: st.DrawFn) -> list[tuple[int, float]]:
    """Draw a convex cost of 0, 1, 2, ... zeros; costs are whole numbers, so that sums of them are exact."""
    rises = sorted(draw(st.lists(st.integers(0, 20), min_size=1, max_size=5)))
    return list(enumerate(accumulate(map(float, rises), initial=0.0)))


def measured(errors: st.SearchStrategy[float]) -> st.SearchStrategy[Curve]:
    return st.lists(errors, min_size=len(GRID), max_size=len(GRID)).map(lambda e: Curve(GRID, tuple(e)))


def points(curve: Curve, weights: int) -> list[tuple[int, float]]:
    return curve.points(weights, math.floor(MAX_SPARSITY * weights))


CURVES = measured(st.floats(0, 1e6))


# --- the cheapest split


@given(st.lists(convex(), min_size=1, max_size=4), st.data())
def test_no_other_split_of_the_zeros_costs_less(curves: list[list[tuple[int, float]]], data: st.DataObject) -> None:
    zeros = data.draw(st.integers(0, sum(len(c) - 1 for c in curves)))
    counts = cheapest(curves, zeros)
    assert sum(counts) == zeros
    splits = (s for s in product(*(range(len(c)) for c in curves)) if sum(s) == zeros)
    best = min(sum(c[n][1] for c, n in zip(curves, split, strict=True)) for split in splits)
    assert sum(c[n][1] for c, n in zip(curves, counts, strict=True)) == best


@st.composite
def dented(draw: st.DrawFn) -> list[tuple[int, float]]:
    """Draw a cost of 0, 1, 2, ... zeros that rises in any way."""
    rises = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    return list(enumerate(accumulate(map(float, rises), initial=0.0)))


@given(st.lists(dented(), min_size=1, max_size=4))
def test_of_curves_with_dents_no_split_costs_less_by_more_than_one_of_them_lies_above_its_hull(curves) -> None:
    """And none costs less at all where the total ends with a whole piece of a hull."""
    corners = [[0, *accumulate(length for _, length in _hull(curve))] for curve in curves]
    above = max(
        cost - (curve[a][1] + (curve[b][1] - curve[a][1]) * (n - a) / (b - a))
        for curve, of in zip(curves, corners, strict=True)
        for a, b in pairwise(of)
        for n, cost in curve[a : b + 1]
    )
    least: dict[int, float] = {}
    for split in product(*curves):
        zeros, costs = (sum(x) for x in zip(*split, strict=True))
        least[int(zeros)] = min(costs, least.get(int(zeros), math.inf))
    for zeros, lowest in least.items():
        counts = cheapest(curves, zeros)
        cost = sum(c[n][1] for c, n in zip(curves, counts, strict=True))
        assert lowest <= cost <= lowest + above + 1e-9
        if all(n in of for n, of in zip(counts, corners, strict=True)):
            assert cost == lowest


@given(st.lists(st.tuples(CURVES, st.integers(1, 5000)), min_size=1, max_size=5), st.data())
def test_more_zeros_in_all_never_mean_fewer_anywhere(units: list[tuple[Curve, int]], data: st.DataObject) -> None:
    costs = [points(curve, weights) for curve, weights in units]
    room = sum(c[-1][0] for c in costs)
    few, many = sorted(data.draw(st.tuples(st.integers(0, room), st.integers(0, room))))
    less, more = cheapest(costs, few), cheapest(costs, many)
    assert (sum(less), sum(more)) == (few, many)
    assert all(a <= b for a, b in zip(less, more, strict=True))


def test_a_dent_in_a_curve_is_bridged_what_does_nothing_goes_first_and_too_many_zeros_fill_every_unit() -> None:
    dented = [(0, 0.0), (1, 5.0), (10, 5.0)]  # after the first dear zero come nine free ones
    steady = [(n, 1.0 * n) for n in range(11)]  # whose price is the worse bargain
    assert cheapest([dented, steady], 10) == [10, 0]
    useless, useful = (points(Curve(GRID, e), 1000) for e in ((0.0,) * 6, GRID))
    assert cheapest([useless, useful], 950) == [950, 0]
    assert cheapest([points(Curve(GRID, GRID), 100)], 99) == [95]


# --- curves


@given(CURVES)
def test_a_curve_never_falls_and_begins_at_no_error(curve: Curve) -> None:
    errors = [curve.error(i / 200) for i in range(191)]
    assert errors[0] == 0.0
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(errors))


@given(st.lists(st.floats(1e-6, 1e3), min_size=len(GRID), max_size=len(GRID)))
def test_a_curve_passes_through_errors_that_do_not_fall(errors: list[float]) -> None:
    curve = Curve(GRID, tuple(sorted(errors)))
    assert [curve.error(s) for s in GRID] == pytest.approx(curve.errors)


def test_a_power_of_the_sparsity_is_drawn_through_two_of_its_points_and_a_proportion_through_one() -> None:
    for sparsity in (0.05, 0.3, 0.4, 0.75, 0.9, 0.95):
        assert Curve((0.3, 0.9), (2 * 0.3**3, 2 * 0.9**3)).error(sparsity) == pytest.approx(2 * sparsity**3)
        assert Curve((0.5,), (0.2,)).error(sparsity) == pytest.approx(0.4 * sparsity)  # all that one of 1:2 can know


def test_a_curve_has_no_kink_at_a_measured_point() -> None:
    """A kink would draw every unit to the sparsities that happened to be measured."""
    curve = Curve(GRID, (1e-4, 1e-3, 4e-3, 1e-2, 5e-2, 0.2))
    for s in GRID[1:-1]:
        left, right = curve.error(s) - curve.error(s - 1e-5), curve.error(s + 1e-5) - curve.error(s)
        assert left == pytest.approx(right, rel=1e-3)


def test_a_slope_is_nearer_to_that_of_the_narrower_side() -> None:
    """Fritsch and Butland: (w0 + w1) / (w0 / s0 + w1 / s1) with w0 = h0 + 2 h1 and w1 = 2 h0 + h1."""
    assert _MonotoneCubic((0.0, 1.0, 3.0), (0.0, 1.0, 2.0)).slopes[1] == pytest.approx(9 / (5 / 1.0 + 4 / 0.5))


def test_errors_that_fall_are_averaged_with_what_they_fall_from() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 2.0, 1.0, 9.0]) == [2.0, 2.0, 2.0, 9.0]
    assert Curve((0.5, 0.7, 0.9), (1.0, 3.0, 2.0)).error(0.7) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("sparsities", "errors"),
    [((), ()), ((0.5, 0.6), (1.0,)), ((0.6, 0.5), (1.0, 2.0)), ((0.0, 0.5), (1.0, 2.0)), ((0.5, 1.0), (1.0, 2.0)),
     ((0.5, 0.6), (1.0, math.nan)), ((0.5, 0.6), (-1.0, 1.0))],
)  # fmt: skip
def test_what_is_no_curve_is_refused(sparsities: tuple[float, ...], errors: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="expected sparsities that increase within"):
        Curve(sparsities, errors)


# --- whole numbers


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.floats(0, 1))
def test_shares_sum_to_the_rounded_whole_and_none_is_off_by_more_than_one(parts: list[int], fraction: float) -> None:
    given_out = shares(parts, fraction)
    assert sum(given_out) == round(fraction * sum(parts))
    assert all(abs(g - fraction * p) <= 1 + 1e-6 for g, p in zip(given_out, parts, strict=True))


@given(st.lists(st.tuples(st.floats(0.1, 0.8), st.integers(50, 200), st.integers(1, 8)), min_size=1, max_size=12))
def test_what_rounding_to_steps_leaves_goes_on_to_the_next(parts: list[tuple[float, int, int]]) -> None:
    weights = [rows * columns for _, columns, rows in parts]
    steps = [rows for *_, rows in parts]
    wanted = [int(s * w) for (s, *_), w in zip(parts, weights, strict=True)]
    most = [math.floor(MAX_SPARSITY * w) for w in weights]
    counts = in_steps(wanted, most, steps)
    assert all(count % step == 0 for count, step in zip(counts, steps, strict=True))
    assert abs(sum(wanted) - sum(counts)) <= min(steps) / 2
    assert sum(in_steps([*wanted, 500], [*most, 950], [*steps, 1])) == sum(wanted) + 500


@pytest.mark.parametrize(
    ("wanted", "most", "steps", "counts"),
    [([60] * 5, [75] * 5, [25] * 5, [50, 75, 50, 75, 50]),  # not one N for the first layers, another for the last
     ([50, 8, 95], [75, 20, 100], [25, 4, 100], [50, 4, 100]),  # no room is left: to what had its turn
     ([19, 0], [19, 95], [10, 1], [10, 9])],  # all of a row of two would be 100%
)  # fmt: skip
def test_rounding_alternates_and_leaves_what_has_no_room_to_the_others(
    wanted: list[int], most: list[int], steps: list[int], counts: list[int]
) -> None:
    assert in_steps(wanted, most, steps) == counts


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=12), st.integers(0, 10**7)
)
def test_fitted_counts_sum_to_the_total_or_to_all_that_there_is_room_for(
    parts: list[tuple[int, int]], total: int
) -> None:
    wanted, most = zip(*parts, strict=True)
    counts = fitted(wanted, most, total)
    assert sum(counts) == min(total, sum(most))
    assert all(0 <= count <= limit for count, limit in zip(counts, most, strict=True))
    fitting = [min(part) for part in parts]
    assert fitted(fitting, most, sum(fitting)) == fitting


def test_what_is_added_or_taken_is_shared_by_room_and_by_size() -> None:
    assert fitted([50, 50, 95], [100, 100, 95], 215) == [60, 60, 95]
    assert fitted([60, 20, 20], [100, 100, 100], 50) == [30, 10, 10]
