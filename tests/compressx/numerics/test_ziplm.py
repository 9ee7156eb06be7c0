"""Removing units, held against least squares on the data in float64, every unit tried at every step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressx.numerics.obs import NotPositiveDefiniteError
from compressx.numerics.ziplm import _choose_few_, choose_, members_of, remove_units

TINY = 1e-8


def problem(units: int, size: int, rows: int = 6, tokens: int = 400, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, correlated inputs of different scales [tokens, units * size], and whose column is whose, mixed up."""
    generator = torch.Generator().manual_seed(seed)
    columns = units * size
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-1, 1, columns, dtype=torch.float64)[torch.randperm(columns, generator=generator)]
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ mix * scale
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, x, torch.arange(units).repeat_interleave(size)[torch.randperm(columns, generator=generator)]


def solved(weight: Tensor, x: Tensor, kept: Tensor) -> tuple[Tensor, float]:
    """Fit the outputs by the columns that stay: the weight, zero elsewhere, and the squared error."""
    new = torch.zeros_like(weight)
    new[:, kept] = torch.linalg.lstsq(x[:, kept], x @ weight.T, driver="gelsd").solution.T
    return new, float((x @ (new - weight).T).square().sum())


def greedy(weight: Tensor, x: Tensor, unit: Tensor, dropped: int) -> Tensor:
    """Remove, one after the other, the unit whose removal leaves the smallest error of a new fit."""
    keep = torch.ones(int(unit.max()) + 1, dtype=torch.bool)
    for _ in range(dropped):
        errors = {}
        for u in keep.nonzero().view(-1).tolist():
            keep[u] = False
            errors[u] = solved(weight, x, keep[unit])[1]
            keep[u] = True
        keep[min(errors, key=errors.__getitem__)] = False
    return keep


def removed(weight: Tensor, x: Tensor, unit: Tensor, dropped: int, **how):
    return remove_units(weight, lambda: x.T @ x, unit, dropped, **{"damping": TINY, **how})


@pytest.mark.parametrize(("units", "size", "dropped"), [(14, 1, 6), (6, 3, 3), (4, 8, 1), (5, 2, 4), (3, 4, 0)])
def test_the_units_and_the_weight_are_those_of_trying_every_unit_with_a_new_fit(units, size, dropped):
    for seed in range(3):
        weight, x, unit = problem(units, size, seed=seed)
        keep = greedy(weight, x, unit, dropped)
        found = removed(weight, x, unit, dropped)
        assert torch.equal(found.keep, keep)
        expected, error = solved(weight, x, keep[unit])
        torch.testing.assert_close(found.weight, expected, rtol=1e-4, atol=1e-4)
        assert float(found.error) == pytest.approx(error / float((x @ weight.T).square().sum()), rel=1e-4, abs=1e-9)


@given(st.integers(2, 40), st.integers(1, 3), st.floats(0, 0.9), st.integers(0, 99), st.integers(1, 9))
@settings(max_examples=25)
def test_rounds_among_all_units_choose_as_one_at_a_time_whatever_they_remove_at_once(units, size, share, seed, columns):
    weight, x, unit = problem(units, size, seed=seed)
    dropped = int(share * units)
    inverse, members = torch.linalg.inv(x.T @ x), members_of(unit)
    one = choose_(weight.clone(), inverse.clone(), members, dropped, candidates=units * size, columns=1)
    many = choose_(weight.clone(), inverse.clone(), members, dropped, candidates=units * size, columns=columns * size)
    assert torch.equal(one, many)
    assert int((~one).sum()) == dropped


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_carried_from_one_removal_to_the_next_is_the_gram_matrix_of_the_weight_that_is_left(size):
    weight, x, _ = problem(8, size)
    gram, first = weight.T @ weight, torch.linalg.inv(x.T @ x)
    gone = _choose_few_(first.clone(), gram, size, 3)
    columns = (gone[:, None] * size + torch.arange(size)).flatten()
    left = torch.linalg.solve(first[columns][:, columns], first[columns])
    stays = torch.ones(8 * size, dtype=torch.bool)
    stays[columns] = False
    new = (weight - weight[:, columns] @ left)[:, stays]
    torch.testing.assert_close(gram[stays][:, stays], new.T @ new, rtol=1e-6, atol=1e-6)


def test_more_columns_than_are_inverted_at_once_are_chosen_by_the_whole_inverse():
    weight, x, unit = problem(300, 1, tokens=900)
    inverse = torch.linalg.inv(x.T @ x)
    keep = choose_(weight.clone(), inverse, members_of(unit), 40, candidates=300)
    assert torch.equal(removed(weight, x, unit, 40, candidates=300).keep, keep)


@pytest.mark.parametrize("size", [1, 2])
def test_among_few_candidates_hardly_more_is_lost_and_one_removal_at_a_time_sees_every_loss(size):
    weight, x, unit = problem(120 // size, size, rows=12, tokens=2000)
    exact = removed(weight, x, unit, 40 // size, candidates=120, columns=1)
    quick = removed(weight, x, unit, 40 // size, candidates=48, columns=8)
    assert float(quick.error) < 1.05 * float(exact.error)
    cheapest = removed(weight, x, unit, 40 // size, candidates=size, columns=size)
    assert torch.equal(cheapest.keep, exact.keep), "with the losses of all anew for each removal one candidate does"


def test_a_unit_that_another_can_stand_in_for_goes_first_and_nothing_is_lost():
    weight, x, _ = problem(8, 1)
    x[:, 5] = 3 * x[:, 2]
    found = removed(weight, x, torch.arange(8), 1, damping=1e-9)
    gone = int((~found.keep).nonzero())
    assert gone in (2, 5)
    torch.testing.assert_close(x @ found.weight.T, x @ weight.T, rtol=1e-4, atol=1e-3)
    assert float(found.error) < 1e-9


def test_features_that_never_fire_cost_nothing_and_keep_their_weights_where_they_stay():
    weight, x, _ = problem(8, 2)
    unit = torch.arange(8).repeat_interleave(2)
    x[:, 6:8] = 0.0  # the whole of unit 3
    x[:, [10, 12]] = 0.0  # half of units 5 and 6
    weight[:, [6, 7, 10, 12]] = 1e6
    weight[:, 11] *= 1e3
    found = removed(weight, x, unit, 3)
    assert torch.equal(found.keep, greedy(weight, x, unit, 3))
    assert not found.keep[3]
    assert found.keep[5]
    assert torch.equal(found.weight[:, 10], weight[:, 10])
    everything = removed(weight, torch.zeros_like(x), unit, 3)
    assert int((~everything.keep).sum()) == 3
    assert float(everything.error) == 0.0
    assert torch.equal(everything.weight, torch.where(everything.keep[unit], weight, 0.0))


def test_the_scale_of_features_and_outputs_does_not_matter():
    weight, x, unit = problem(20, 1)
    scale = torch.logspace(-3, 3, 20, dtype=torch.float64)
    plain = removed(weight, x, unit, 8, damping=0.05)
    scaled = removed(weight / scale, x * scale, unit, 8, damping=0.05)
    assert torch.equal(plain.keep, scaled.keep)
    torch.testing.assert_close(scaled.weight * scale, plain.weight, rtol=1e-6, atol=1e-6)


def test_damping_is_a_ridge_on_the_change_of_the_weight():
    weight, x, unit = problem(10, 1)
    found = removed(weight, x, unit, 4, damping=0.3)
    kept, hessian = found.keep[unit], x.T @ x
    inner = hessian[kept][:, kept] + 0.3 * torch.diag(hessian.diagonal()[kept])
    change = torch.linalg.solve(inner, hessian[kept][:, ~kept] @ weight[:, ~kept].T).T
    torch.testing.assert_close(found.weight[:, kept], weight[:, kept] + change, rtol=1e-8, atol=1e-8)
    assert not found.weight[:, ~kept].any()
    assert found.damping == 0.3


def test_fewer_tokens_than_features_and_narrow_weights_are_solved_in_float32():
    weight, x, unit = problem(24, 1, tokens=7)
    x = x.float()
    for dtype in (torch.float32, torch.bfloat16):
        found = remove_units(weight.to(dtype), lambda: x.T @ x, unit, 12, damping=0.01)
        assert int((~found.keep).sum()) == 12
        assert found.weight.dtype == torch.float32
        assert found.weight.isfinite().all()
        assert 0 <= float(found.error) < 0.1


def test_numbers_that_are_none_and_units_of_different_sizes_are_refused():
    weight, x, unit = problem(6, 1)
    bad = weight.clone()
    bad[0, 3] = torch.nan
    with pytest.raises(ValueError, match="scores must be finite"):
        removed(bad, x, unit, 2)
    x[0, 0] = torch.inf
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinite"):
        removed(weight, x, unit, 2)
    with pytest.raises(ValueError, match=r"units must have as many columns each, got \[1, 3\]"):
        members_of(torch.tensor([0, 1, 1, 1]))
