"""Errors, gradients and probes of the attention matrix, against whole matrices, autograd and closed forms."""

from __future__ import annotations

import pytest
import torch
from tests.compressx_attnprune.memory import Largest
from tests.compressx_attnprune.signs import Signs, gauss_newton_matrix
from torch import Tensor

from compressx_attnprune import attention as attention_module
from compressx_attnprune.attention import Attention, Projection

SINKS = torch.tensor([-1.0, 0.3, 0.7, 1.5], dtype=torch.float64)
GEOMETRIES = {
    "own key heads": Attention(Projection(2), Projection(2), head_dim=4, scaling=0.7),
    "shared key heads": Attention(Projection(4), Projection(2), head_dim=4, scaling=0.7),
    "one key head": Attention(Projection(3), Projection(1), head_dim=2, scaling=1.3),
    "a window": Attention(Projection(2), Projection(2), head_dim=4, scaling=0.7, window=3),
    "a window of one row block": Attention(Projection(2), Projection(1), head_dim=4, scaling=0.7, window=4),
    "a softcap": Attention(Projection(2), Projection(1), head_dim=4, scaling=0.7, softcap=1.5),
    "a softcap and a window": Attention(Projection(2), Projection(1), head_dim=4, scaling=0.7, window=5, softcap=1.5),
    "sinks": Attention(Projection(4), Projection(2), head_dim=4, scaling=0.7, sinks=SINKS),
    "sinks, a softcap and a window": Attention(
        Projection(4), Projection(2), head_dim=4, scaling=0.7, window=5, softcap=1.5, sinks=SINKS
    ),
}
each_geometry = pytest.mark.parametrize("attention", GEOMETRIES.values(), ids=GEOMETRIES)
TOKENS = 9


@pytest.fixture(autouse=True)
def _short_row_blocks(monkeypatch: pytest.MonkeyPatch):
    """Several blocks, the last of them shorter, even for the few tokens of a test."""
    monkeypatch.setattr(attention_module, "ROWS", 4)


def draw(attention: Attention, *, sequences: int = 2, tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw queries and keys in float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (
        torch.randn(sequences, side.heads, tokens, attention.head_dim, generator=generator, dtype=torch.float64)
        for side in (attention.query, attention.key)
    )
    return q, k


def reference(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Compute the attention matrices the plain way, [batch, h, tokens, tokens]."""
    scores = attention.scaling * q @ k.repeat_interleave(attention.groups, dim=1).transpose(2, 3)
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    i = torch.arange(q.shape[2])
    hidden = i[:, None] < i
    if attention.window is not None:
        hidden = hidden | (i[:, None] - i >= attention.window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if attention.sinks is None:
        return scores.softmax(dim=-1)
    return scores.exp() / (scores.exp().sum(dim=-1, keepdim=True) + attention.sinks.exp()[:, None, None])


@each_geometry
def test_the_matrices_are_the_softmax_of_the_masked_scores(attention: Attention):
    q, k = draw(attention)
    torch.testing.assert_close(attention_module.attention_matrices(attention, q, k), reference(attention, q, k))


@each_geometry
def test_errors_norms_and_gradients_in_row_blocks_are_those_of_whole_matrices_by_autograd(attention: Attention):
    dense, other = draw(attention), draw(attention, seed=2)
    q, k = (t.requires_grad_() for t in draw(attention, seed=1))
    p = reference(attention, *dense)
    squares = (reference(attention, q, k) - p).square()
    wanted_gradients = torch.autograd.grad(squares.sum() / 2, (q, k))
    pruned = (q.detach(), k.detach())
    errors, norms, gradients = attention_module.matrix_gradients(attention, dense, pruned)
    by_head = squares.detach().sum(dim=(0, 2, 3))
    torch.testing.assert_close(errors, by_head)
    for got, wanted in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)
    several, again = attention_module.squared_errors(attention, dense, [pruned, other])
    of_other = (reference(attention, *other) - p).square().sum(dim=(0, 2, 3))
    torch.testing.assert_close(several, torch.stack([by_head, of_other]))
    none, alone = attention_module.squared_errors(attention, dense, [])
    assert none.shape == (0, attention.query.heads)
    for norm in (norms, again, alone):
        torch.testing.assert_close(norm, p.square().sum(dim=(0, 2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_queries_and_keys_have_no_error_at_all(dtype: torch.dtype):
    attention = GEOMETRIES["a softcap and a window"]
    q, k = (t.to(dtype) for t in draw(attention))
    assert not attention_module.squared_errors(attention, (q, k), [(q, k)])[0].any()
    errors, _, (dq, dk) = attention_module.matrix_gradients(attention, (q, k), (q.clone(), k.clone()))
    assert not errors.any()
    assert not dq.any()
    assert not dk.any()


def test_signs_of_a_real_generator_come_near_the_expectation():
    """2000 draws: a sum over all tokens has a standard deviation of 1% to 2%, and a wrong factor of two 50% or 100%."""
    attention = GEOMETRIES["shared key heads"]
    q, k = draw(attention, sequences=1)
    generator = torch.Generator().manual_seed(0)
    many = q.expand(2000, -1, -1, -1), k.expand(2000, -1, -1, -1)
    drawn = attention_module.matrix_probe(attention, *many, generator)
    expected = gauss_newton_matrix(lambda a, b: reference(attention, a[None], b[None]), q[0], k[0])
    for gradients, wanted in zip(drawn, expected, strict=True):
        got = torch.einsum("shtd,shte->hde", gradients, gradients) / len(gradients)
        assert (got - wanted.sum(dim=1)).norm() <= 0.08 * wanted.sum(dim=1).norm()
        # Signs are drawn anew for every sequence and row: the mean goes to zero like one over the root of the draws.
        assert gradients.mean(dim=0).square().sum() <= 3 / 2000 * gradients.square().sum() / 2000


def test_a_shift_common_to_all_keys_costs_no_precision():
    """Keys of real models share a mean far larger than their spread; float32 must not lose the spread in it."""
    attention = Attention(Projection(2), Projection(1), head_dim=8, scaling=0.3)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 40, 8, generator=generator) for h in (2, 1, 1))
    q, k = q - q.mean(dim=-1, keepdim=True), k + 300.0  # the shift then leaves every score as it is
    signs = torch.randint(2, (2 * 40 * 40,), generator=generator)
    results = []
    for dtype in (torch.float64, torch.float32):
        with Signs(signs):
            probes = attention_module.matrix_probe(attention, q.to(dtype), k.to(dtype), torch.Generator())
        results.append((*probes, attention_module.mixed_by_rows(attention, q.to(dtype), k.to(dtype), v.to(dtype))))
    for exact, got in zip(*results, strict=True):
        assert (got - exact).norm() <= 1e-6 * exact.norm()


@each_geometry
def test_values_are_mixed_and_gradients_carried_back_as_by_whole_matrices(attention: Attention):
    q, k = (t.requires_grad_() for t in draw(attention))
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(2, attention.key.heads, TOKENS, 5, generator=generator, dtype=torch.float64)
    expected = reference(attention, q, k) @ v.repeat_interleave(attention.groups, dim=1)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, (q, k), grad)
    with torch.no_grad():
        torch.testing.assert_close(attention_module.mixed_by_rows(attention, q, k, v), expected, rtol=1e-10, atol=1e-12)
        for got, want in zip(attention_module.mixed_backward(attention, q, k, v, grad), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


OPERATIONS = {
    "errors": lambda attention, dense, pruned: attention_module.squared_errors(attention, dense, [pruned, dense]),
    "gradients": attention_module.matrix_gradients,
    "probe": lambda attention, dense, _: attention_module.matrix_probe(
        attention, *dense, torch.Generator().manual_seed(0)
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("window", [None, 9])
def test_memory_grows_with_the_tokens_and_not_with_their_square(operation, window: int | None):
    attention = Attention(Projection(4), Projection(2), head_dim=2, scaling=1.0, window=window)
    for tokens in (128, 256):
        largest = Largest()
        with largest:
            operation(attention, *(draw(attention, sequences=1, tokens=tokens, seed=s) for s in (0, 1)))
        rows = 4 * attention_module.ROWS  # of all heads
        assert 0 < largest.of_softmax <= rows * (tokens if window is None else window + attention_module.ROWS - 1)
        assert largest.of_any <= rows * tokens  # a 64th, or a 16th of one head, of what whole matrices take
