"""Queries, keys and values from weights, and back: against the models themselves and autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.pairs import pairs
from torch import Tensor

from compressx.testing import TINY_CONFIGS
from compressx_attnprune import attention as attention_module
from compressx_attnprune import layer
from compressx_attnprune.attention import Attention, Norm, Projection, attention_matrices

HEADS, HEAD_DIM, TOKENS = 3, 8, 5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tables(rotary_dim: int, *, interleaved: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of random angles, both partners of a pair having the same."""
    angles = draw(TOKENS, rotary_dim // 2, seed=7)
    both = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angles, angles], dim=-1)
    return scale * both.cos(), scale * both.sin()


def test_every_tiny_architecture_with_softmax_attention_is_checked():
    # The attention of llama and of mistral, one refused, and one that is here with keys in every block.
    others = {"llama-tied", "mixtral", "bloom", "gemma4"}
    assert set(TINY_CONFIGS) - others <= set(blocks.EVERY)


# Granite's matrices are told before its sinks take their part.
@pytest.mark.parametrize("architecture", [name for name in blocks.EVERY if name != "granite-swa"])
def test_dense_attention_matrices_are_the_models_own(architecture: str):
    """In the last two blocks, which differ where layers do: by their window, or by having no positions."""
    for index in (1, 2):
        recorded = blocks.record(architecture, index=index)
        attention = layer.describe(recorded.block)
        q, k = attention_module.queries_and_keys(attention, recorded.x, *blocks.weights(recorded.block))
        ours = attention_matrices(attention, q, k)
        assert recorded.attentions.max(dim=-1).values.mean() > 0.12  # not flat: a row of 32 equal ones has 1/32
        torch.testing.assert_close(ours, recorded.attentions, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "centered", "whole", "own", "shifted", "last"),
    pairs([0, 4, HEAD_DIM], *[[False, True]] * 6),
)
def test_every_norm_under_every_rotary_embedding_has_the_gradient_of_autograd(
    rotary_dim: int, interleaved: bool, centered: bool, whole: bool, own: bool, shifted: bool, last: bool
):
    shape = (HEADS, 1, HEAD_DIM) if own else (HEAD_DIM,)
    shift = draw(*shape, seed=1) if shifted else None
    norm = Norm(draw(*shape), 1e-3, shift, centered=centered, whole=whole, last=last)
    side = Projection(HEADS, norm=norm)
    rotary = tables(rotary_dim, interleaved=interleaved, scale=1.3) if rotary_dim else None
    attention = Attention(side, side, HEAD_DIM, 1.0, rotary=rotary, rotary_interleaved=interleaved)
    u = draw(2, HEADS, TOKENS, HEAD_DIM, seed=2).requires_grad_()
    placed = attention_module.place(attention, side, u)
    grad = draw(*placed.shape, seed=3)
    (expected,) = torch.autograd.grad(placed, u, grad)
    torch.testing.assert_close(
        attention_module.place_backward(attention, side, u, grad), expected, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(("centered", "whole"), list(itertools.product([False, True], repeat=2)))
def test_norms_are_those_of_torch(centered: bool, whole: bool):
    gain, shift = draw(HEADS * HEAD_DIM), draw(HEADS * HEAD_DIM, seed=1)
    u = draw(2, TOKENS, HEADS * HEAD_DIM, seed=2)
    across = (HEADS * HEAD_DIM,) if whole else (HEAD_DIM,)
    seen = u if whole else u.view(2, TOKENS, HEADS, HEAD_DIM)
    normed = (
        torch.nn.functional.layer_norm(seen, across, eps=0.1)
        if centered
        else torch.nn.functional.rms_norm(seen, across, eps=0.1)
    )
    expected = normed.reshape(u.shape) * gain + shift

    own = (HEADS, 1, HEAD_DIM)
    norm = Norm(gain.view(own), 0.1, shift.view(own), centered=centered, whole=whole)
    got = norm.forward(u.view(2, TOKENS, HEADS, HEAD_DIM).transpose(1, 2))
    torch.testing.assert_close(got.transpose(1, 2).flatten(2), expected)


def test_values_are_normed_as_torch_does_and_so_are_their_gradients():
    side = Projection(HEADS)
    attention = Attention(side, side, HEAD_DIM, 1.0, value_norm=Norm(torch.ones(6, dtype=torch.float64), 0.1))
    x, bias = draw(2, TOKENS, 7), draw(HEADS * 6, seed=2)
    weight = draw(HEADS * 6, 7, seed=1).requires_grad_()
    got = attention_module.values(attention, x, weight, bias)
    raw = torch.nn.functional.linear(x, weight, bias).view(2, TOKENS, HEADS, 6)
    torch.testing.assert_close(got.transpose(1, 2), torch.nn.functional.rms_norm(raw, (6,), eps=0.1))
    grad = draw(*got.shape, seed=3)
    (expected,) = torch.autograd.grad(got, weight, grad)
    before = attention_module.values_backward(attention, x, weight.detach(), bias, grad)
    torch.testing.assert_close(torch.einsum("bhtd,bti->hdi", before, x).flatten(0, 1), expected)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_rotary_pairs_turn_by_their_angle_and_the_rest_of_the_head_is_left_alone(interleaved: bool):
    """As complex numbers: a pair (a, b) is a + ib, multiplied by exp(i angle)."""
    cos, sin = tables(6, interleaved=interleaved)
    side = Projection(HEADS)
    attention = Attention(side, side, HEAD_DIM, 1.0, rotary=(cos, sin), rotary_interleaved=interleaved)
    u = draw(1, HEADS, TOKENS, HEAD_DIM)
    first, second = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))
    turned = torch.complex(u[..., first], u[..., second]) * torch.complex(cos[:, first], sin[:, first])
    placed = attention_module.place(attention, side, u)
    torch.testing.assert_close(placed[..., first], turned.real)
    torch.testing.assert_close(placed[..., second], turned.imag)
    assert torch.equal(placed[..., 6:], u[..., 6:])


def test_values_have_a_size_of_their_own_and_a_head_for_each_key_head():
    attention = Attention(Projection(4), Projection(2), head_dim=8, scaling=1.0)
    x, weight, bias = draw(3, TOKENS, 16), draw(2 * 5, 16, seed=1), draw(2 * 5, seed=2)
    got = attention_module.values(attention, x, weight, bias)
    assert got.shape == (3, 2, TOKENS, 5)
    for head in range(2):
        rows = slice(5 * head, 5 * head + 5)
        torch.testing.assert_close(got[:, head], x @ weight[rows].T + bias[rows])
    torch.testing.assert_close(attention_module.values(attention, x, weight, None)[:, 1], x @ weight[5:].T)
