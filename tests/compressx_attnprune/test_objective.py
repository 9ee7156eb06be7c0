"""Loss, gradient and Gauss-Newton statistics against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from tests.compressx_attnprune import blocks
from torch import Tensor

from compressx_attnprune import layer, objective, solver
from compressx_attnprune.geometry import Attention, Projection, queries_and_keys


@pytest.fixture(autouse=True)
def _short_row_blocks(monkeypatch: pytest.MonkeyPatch):
    """Several blocks, the last of them shorter, even for the few tokens of a test; and the same numbers each time."""
    torch.manual_seed(0)
    monkeypatch.setattr(objective, "ROWS", 12)


def drop_some(weights: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (w * (torch.rand(w.shape, generator=generator) < 0.6) for w in weights)
    return query, key


@pytest.mark.parametrize("architecture", blocks.CHECKED)
def test_the_closed_form_gradient_equals_autograd(architecture: str):
    recorded = blocks.record(architecture, index=0)
    attention = layer.describe(recorded.block, torch.float64)
    x, dense = recorded.x.double(), blocks.weights(recorded.block, torch.float64)
    pruned = tuple(w.requires_grad_() for w in drop_some(dense))

    p = objective.attention_matrices(attention, *queries_and_keys(attention, x, *dense))
    p_pruned = objective.attention_matrices(attention, *queries_and_keys(attention, x, *pruned))
    ratios = (p_pruned - p).square().sum(dim=(0, 2, 3)) / p.square().sum(dim=(0, 2, 3))  # [heads]
    expected = ratios.mean() / 2
    expected_grads = torch.autograd.grad(expected, pruned)

    loss, grads = solver.loss_and_gradients(attention, x, dense, (pruned[0].detach(), pruned[1].detach()))
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    assert loss > 1e-3
    for grad, wanted in zip(grads, expected_grads, strict=True):
        assert (grad - wanted).norm() <= 1e-9 * wanted.norm()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2"])
def test_norms_and_errors_in_row_blocks_equal_those_of_whole_matrices(architecture: str):
    recorded = blocks.record(architecture, index=0)
    attention = layer.describe(recorded.block, torch.float64)
    x, dense = recorded.x.double(), blocks.weights(recorded.block, torch.float64)
    before, after = (queries_and_keys(attention, x, *w) for w in (dense, drop_some(dense)))
    p, p_pruned = (objective.attention_matrices(attention, *qk) for qk in (before, after))
    torch.testing.assert_close(objective.squared_norms(attention, *before), p.square().sum(dim=(0, 2, 3)))
    torch.testing.assert_close(
        objective.squared_errors(attention, before, after), (p_pruned - p).square().sum(dim=(0, 2, 3))
    )


GEOMETRIES = {
    "shared key heads": Attention(Projection(4), Projection(2), head_dim=4, scaling=0.7),
    "a window": Attention(Projection(2), Projection(2), head_dim=4, scaling=0.7, window=5),
    "a softcap": Attention(Projection(2), Projection(1), head_dim=4, scaling=0.7, softcap=1.5),
    "a softcap and a window": Attention(Projection(2), Projection(1), head_dim=4, scaling=0.7, window=9, softcap=1.5),
}


@pytest.mark.parametrize("attention", GEOMETRIES.values(), ids=GEOMETRIES)
def test_gauss_newton_diagonals_equal_the_squared_jacobian(attention: Attention):
    tokens, sequences = 29, 2
    q = torch.randn(sequences, attention.query.heads, tokens, attention.head_dim, dtype=torch.float64)
    k = torch.randn(sequences, attention.key.heads, tokens, attention.head_dim, dtype=torch.float64)
    expected_q, expected_k = torch.zeros_like(q), torch.zeros_like(k)
    for s in range(sequences):
        by_q, by_k = torch.autograd.functional.jacobian(
            lambda a, b: objective.attention_matrices(attention, a[None], b[None])[0], (q[s], k[s]), vectorize=True
        )  # [h, tokens, tokens, heads, tokens, head_dim]
        expected_q[s], expected_k[s] = by_q.square().sum(dim=(0, 1, 2)), by_k.square().sum(dim=(0, 1, 2))
    of_queries, of_keys = objective.gauss_newton(attention, q, k)
    torch.testing.assert_close(of_queries, expected_q, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(of_keys, expected_k, rtol=1e-9, atol=1e-12)


def test_a_shift_common_to_all_keys_costs_no_precision():
    """Keys of real models share a mean far larger than their spread; float32 must not lose the spread in it."""
    attention = Attention(Projection(2), Projection(1), head_dim=8, scaling=0.3)
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 1, 40, 8) + 300.0
    q = q - q.mean(dim=-1, keepdim=True)  # the shift then leaves every score as it is
    exact, _ = objective.gauss_newton(attention, q.double(), k.double())
    got, _ = objective.gauss_newton(attention, q, k)
    assert (got - exact).norm() <= 1e-3 * exact.norm()


def test_a_token_that_sees_only_itself_has_no_weight():
    attention = Attention(Projection(2), Projection(1), head_dim=4, scaling=1.0)
    q, k = torch.randn(3, 2, 6, 4, dtype=torch.float64), torch.randn(3, 1, 6, 4, dtype=torch.float64)
    traces = objective.gauss_newton(attention, q, k)[0].sum(dim=-1)  # [batch, h, tokens]
    assert traces[:, :, 0].max() < 1e-12
    assert traces[:, :, 1:].min() > 1e-9
