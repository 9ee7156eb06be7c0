"""Queries and keys from weights, and back: against the models themselves and autograd."""

from __future__ import annotations

import pytest
import torch
from tests.compressx_attnprune import blocks

from compressx_attnprune import geometry, layer
from compressx_attnprune.objective import attention_matrices


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("architecture", blocks.CHECKED)
def test_dense_attention_matrices_are_the_models_own(architecture: str, index: int):
    recorded = blocks.record(architecture, index=index)
    attention = layer.describe(recorded.block)
    q, k = geometry.queries_and_keys(attention, recorded.x, *blocks.weights(recorded.block))
    ours = attention_matrices(attention, q, k)
    assert recorded.attentions.max(dim=-1).values.mean() > 0.1  # not flat
    torch.testing.assert_close(ours, recorded.attentions, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", blocks.CHECKED)
def test_the_gradient_through_norm_and_rotary_embedding_equals_autograd(architecture: str):
    recorded = blocks.record(architecture)
    attention = layer.describe(recorded.block, torch.float64)
    for side, weight in zip(
        (attention.query, attention.key), blocks.weights(recorded.block, torch.float64), strict=True
    ):
        u = geometry.project(attention, side, recorded.x.double(), weight).requires_grad_()
        placed = geometry.place(attention, side, u)
        grad = torch.randn(placed.shape, generator=torch.Generator().manual_seed(0), dtype=placed.dtype)
        (expected,) = torch.autograd.grad(placed, u, grad)
        torch.testing.assert_close(geometry.place_backward(attention, side, u, grad), expected, rtol=1e-9, atol=1e-12)


def test_a_diagonal_is_averaged_over_rotary_partners_and_the_rest_of_the_head_left_alone():
    """Over all angles of a full turn the exact diagonal averages to the mean of the two partners."""
    angles = torch.arange(360, dtype=torch.float64).deg2rad()
    cos, sin = (f(angles)[:, None].expand(-1, 4) for f in (torch.cos, torch.sin))
    side = geometry.Projection(1)
    attention = geometry.Attention(side, side, head_dim=6, scaling=1.0, rotary=(cos, sin))
    diagonal = torch.rand(6, dtype=torch.float64).expand(1, 1, 360, 6)
    u = torch.zeros(1, 1, 360, 6, dtype=torch.float64)

    jacobian = torch.stack(
        [geometry.place_backward(attention, side, u, e.expand_as(u)) for e in torch.eye(6, dtype=torch.float64)], dim=-2
    )  # [..., rotated feature, feature]
    exact = (jacobian.square() * diagonal[..., :, None]).sum(dim=-2)
    approximate = geometry.place_backward_diagonal(attention, side, u, diagonal)
    torch.testing.assert_close(approximate[0, 0, 0], exact.mean(dim=2)[0, 0])


def test_a_diagonal_passes_the_norm_by_its_gain_over_the_root_mean_square():
    norm = geometry.HeadNorm(torch.tensor([1.0, 2.0, 0.5, 3.0]), eps=0.1)
    side = geometry.Projection(1, norm=norm)
    attention = geometry.Attention(side, side, head_dim=4, scaling=1.0)
    u = torch.tensor([1.0, -1.0, 3.0, 1.0]).view(1, 1, 1, 4)
    got = geometry.place_backward_diagonal(attention, side, u, torch.ones(1, 1, 1, 4))
    torch.testing.assert_close(got.flatten(), torch.tensor([1.0, 4.0, 0.25, 9.0]) / 3.1)
