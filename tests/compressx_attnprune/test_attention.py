"""What an attention computes and its gradients, against the models themselves, whole matrices and autograd."""

from __future__ import annotations

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.signs import Signs
from tests.pairs import pairs
from torch import Tensor

from compressx.testing import TINY_CONFIGS
from compressx_attnprune import attention as attention_module
from compressx_attnprune.attention import Attention, Norm, Projection

HEADS, HEAD_DIM, TOKENS = 3, 8, 5


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tables(rotary_dim: int, *, interleaved: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of random angles, both partners of a pair having the same."""
    angles = normal(TOKENS, rotary_dim // 2, seed=7)
    both = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angles, angles], dim=-1)
    return scale * both.cos(), scale * both.sin()


def test_every_tiny_architecture_with_softmax_attention_is_checked():
    # The attention of llama and of mistral, one refused, and one that is here with keys in every block.
    others = {"llama-tied", "mixtral", "bloom", "gemma4"}
    assert set(TINY_CONFIGS) - others <= set(blocks.EVERY)


@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "centered", "whole", "own", "shifted", "last"),
    pairs([0, 4, HEAD_DIM], *[[False, True]] * 6),
)
def test_every_norm_under_every_rotary_embedding_has_the_gradient_of_autograd(
    rotary_dim: int, interleaved: bool, centered: bool, whole: bool, own: bool, shifted: bool, last: bool
):
    shape = (HEADS, 1, HEAD_DIM) if own else (HEAD_DIM,)
    shift = normal(*shape, seed=1) if shifted else None
    norm = Norm(normal(*shape), 1e-3, shift, centered=centered, whole=whole, last=last)
    side = Projection(HEADS, norm=norm)
    rotary = tables(rotary_dim, interleaved=interleaved, scale=1.3) if rotary_dim else None
    attention = Attention(side, side, HEAD_DIM, 1.0, rotary=rotary, rotary_interleaved=interleaved)
    u = normal(2, HEADS, TOKENS, HEAD_DIM, seed=2).requires_grad_()
    placed = attention_module.place(attention, side, u)
    grad = normal(*placed.shape, seed=3)
    (expected,) = torch.autograd.grad(placed, u, grad)
    torch.testing.assert_close(
        attention_module.place_backward(attention, side, u, grad), expected, rtol=1e-9, atol=1e-12
    )


def test_values_are_normed_as_torch_does():
    side = Projection(HEADS)
    attention = Attention(side, side, HEAD_DIM, 1.0, value_norm=Norm(torch.ones(6, dtype=torch.float64), 0.1))
    x, bias = normal(2, TOKENS, 7), normal(HEADS * 6, seed=2)
    weight = normal(HEADS * 6, 7, seed=1)
    got = attention_module.values(attention, x, weight, bias)
    raw = torch.nn.functional.linear(x, weight, bias).view(2, TOKENS, HEADS, 6)
    torch.testing.assert_close(got.transpose(1, 2), torch.nn.functional.rms_norm(raw, (6,), eps=0.1))


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
LENGTH = 9


@pytest.fixture(autouse=True)
def _short_row_blocks(monkeypatch: pytest.MonkeyPatch):
    """Several blocks, the last of them shorter, even for the few tokens of a test."""
    monkeypatch.setattr(attention_module, "ROWS", 4)


def draw(attention: Attention, *, sequences: int = 2, tokens: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor]:
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
