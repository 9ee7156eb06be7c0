"""Stable ranks and changes: their definitions by float64 SVDs of whole matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressx.numerics.spectra import Change, squared_singular_values, stable_rank, stable_ranks_of_heads
from compressx.runtime.errors import UnsupportedModelError


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MATRICES = {
    "wide": normal(12, 40),
    "tall": normal(40, 12),
    "square": normal(16, 16),
    "transposed": normal(40, 12).T,
    "rank three of twelve": normal(12, 3) @ normal(3, 40, seed=1),
    "rank one, with zero rows": torch.cat([normal(5, 1) @ normal(1, 9), torch.zeros(3, 9, dtype=torch.float64)]),
    "of many scales": normal(30, 30) * torch.logspace(0, -12, 30, dtype=torch.float64),
    "a row": normal(1, 7),
    "a number": normal(1, 1),
    "float32": normal(20, 8).float(),
    "bfloat16": normal(20, 8).bfloat16(),
    "zero": torch.zeros(6, 9),
}


def rank_by_definition(matrix: Tensor) -> float:
    """Return ||W||_F^2 / ||W||_2^2."""
    norm = float(torch.linalg.matrix_norm(matrix.double(), 2))
    return float(torch.linalg.matrix_norm(matrix.double()) ** 2) / norm**2 if norm else 0.0


@pytest.mark.parametrize("name", MATRICES)
def test_singular_values_and_stable_rank_are_those_of_an_svd(name):
    matrix = MATRICES[name]
    squares = squared_singular_values(matrix)
    expected = torch.linalg.svdvals(matrix.double()).square()
    assert squares.shape == (min(matrix.shape),)
    torch.testing.assert_close(squares, expected, rtol=0, atol=1e-13 * max(1e-300, float(expected[0])))
    assert bool((squares >= 0).all())
    assert float(stable_rank(squares)) == pytest.approx(rank_by_definition(matrix), rel=1e-12)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31), st.floats(-15, 15))
def test_a_stable_rank_is_between_one_and_the_rank_whatever_the_scale(rows, columns, seed, exponent):
    matrix = normal(rows, columns, seed=seed)
    found = float(stable_rank(squared_singular_values(matrix)))
    assert 1 - 1e-12 <= found <= min(rows, columns) * (1 + 1e-12)
    scaled = float(stable_rank(squared_singular_values(10**exponent * matrix)))
    assert scaled == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("name", MATRICES)
def test_a_change_is_described_by_its_definition(name):
    tau, base = MATRICES[name].double(), normal(*MATRICES[name].shape, seed=7)
    found = Change.of(base + tau, base, spectrum=True)
    tau = (base + tau) - base  # as it was rounded
    assert found.relative == pytest.approx(float(tau.norm() / base.norm()), rel=1e-12)
    assert found.largest == float(tau.abs().max())
    assert found.unchanged == float((tau == 0).double().mean())
    assert found.stable_rank == pytest.approx(rank_by_definition(tau), rel=1e-9)
    squares = torch.linalg.svdvals(tau).square()
    held = [float(squares[:r].sum() / squares.sum()) >= 0.9 for r in range(1, len(squares) + 1)]
    assert found.r90 == (held.index(True) + 1 if bool((squares > 0).any()) else 0)
    plain = Change.of(base + tau, base, spectrum=False)
    assert (plain.relative, plain.largest, plain.unchanged) == (found.relative, found.largest, found.unchanged)
    assert (plain.stable_rank, plain.r90) == (None, None)


def test_nine_equal_singular_values_of_ten_hold_ninety_percent():
    assert Change.of(torch.eye(10), torch.zeros(10, 10), spectrum=True) == Change(None, 1.0, 0.9, 10.0, 9)


def test_nothing_changed_is_zero_also_where_the_base_is_zero():
    for weight in (torch.zeros(3, 4), torch.ones(3, 4)):
        assert Change.of(weight, weight, spectrum=True) == Change(0.0, 0.0, 1.0, 0.0, 0)


def test_weights_of_two_dtypes_are_compared_as_they_are_stored():
    base = normal(8, 8).float()
    rounded = base.bfloat16()
    found = Change.of(rounded, base, spectrum=False)
    assert found.largest == float((rounded.double() - base.double()).abs().max()) > 0
    assert found.unchanged == float((rounded.float() == base).double().mean())


@pytest.mark.parametrize(("heads", "key_heads", "head_dim", "width"), [
    (4, 4, 8, 32), (6, 2, 4, 20), (4, 1, 8, 24), (1, 1, 5, 9), (4, 2, 12, 7), (2, 1, 1, 6),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_stable_ranks_of_heads_are_those_of_the_products_themselves(heads, key_heads, head_dim, width, dtype):
    query = normal(heads * head_dim, width).to(dtype)
    key = normal(width, key_heads * head_dim, seed=1).to(dtype).T  # as a Conv1D stores it
    ranks = stable_ranks_of_heads(query, key, head_dim)
    for head in range(heads):
        q = query[head * head_dim : (head + 1) * head_dim].double()
        start = head // (heads // key_heads) * head_dim
        expected = rank_by_definition(q.T @ key[start : start + head_dim].double())
        assert float(ranks[head]) == pytest.approx(expected, rel=1e-11)
    assert ranks.shape == (heads,)


def test_heads_that_are_zero_or_of_low_rank_have_finite_stable_ranks():
    query, key = normal(16, 20), normal(8, 20, seed=1)
    query[:4] = 0.0  # the first head
    query[4:8] = normal(4, 1) @ normal(1, 20)
    ranks = stable_ranks_of_heads(query, key, 4)
    assert float(ranks[0]) == 0.0
    assert float(ranks[1]) == pytest.approx(1.0)
    key[4:] = 0.0  # that of the last two
    assert stable_ranks_of_heads(query, key, 4)[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("queries", "keys"), [(16, 10), (18, 8), (12, 8)])
def test_rows_that_are_no_heads_are_refused(queries, keys):
    with pytest.raises(UnsupportedModelError, match=rf"^{queries} features of queries and {keys} of keys are no heads"):
        stable_ranks_of_heads(normal(queries, 20), normal(keys, 20), 4)
