"""What an attention computes and its gradients, against the models themselves, whole matrices and autograd."""

from __future__ import annotations

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.drawn import normal, rotary
from tests.compressx_attnprune.signs import Signs
from tests.compressx_attnprune.test_losses import GEOMETRIES, HEAD_DIM, geometry
from tests.pairs import pairs
from torch import Tensor

from compressx.testing import TINY_CONFIGS
from compressx_attnprune import attention as attention_module
from compressx_attnprune.attention import Attention, Norm, Projection

HEADS, TOKENS = 3, 9


@pytest.fixture(autouse=True)
def _short_row_blocks(monkeypatch: pytest.MonkeyPatch):
    """Several blocks, the last of them shorter, even for the few tokens of a test."""
    monkeypatch.setattr(attention_module, "ROWS", 4)


def test_every_tiny_architecture_with_softmax_attention_is_checked():
    # The attention of llama and of mistral, one refused, and one that is here with keys in every block.
    others = {"llama-tied", "mixtral", "bloom", "gemma4"}
    assert set(TINY_CONFIGS) - others <= set(blocks.EVERY)


@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "centered", "whole", "own", "shifted", "last"),
    pairs([0, 4, 8], *[[False, True]] * 6),
)
def test_every_norm_under_every_rotary_embedding_has_the_gradient_of_autograd(
    rotary_dim: int, interleaved: bool, centered: bool, whole: bool, own: bool, shifted: bool, last: bool
):
    shape = (HEADS, 1, 8) if own else (8,)
    shift = normal(*shape, seed=1) if shifted else None
    side = Projection(HEADS, norm=Norm(normal(*shape), 1e-3, shift, centered=centered, whole=whole, last=last))
    turned = rotary(TOKENS, rotary_dim, interleaved=interleaved, scale=1.3) if rotary_dim else None
    attention = Attention(side, side, 8, 1.0, rotary=turned, rotary_interleaved=interleaved)
    projected = tuple(normal(2, HEADS, TOKENS, 8, seed=seed).requires_grad_() for seed in (2, 3))
    placed = attention_module.place(attention, projected)
    grads = (normal(*placed[0].shape, seed=4), normal(*placed[1].shape, seed=5))
    expected = torch.autograd.grad(placed, projected, grads)
    torch.testing.assert_close(
        attention_module.place_backward(attention, projected, grads), expected, rtol=1e-9, atol=1e-12
    )


def test_values_are_normed_as_torch_does():
    side = Projection(HEADS)
    attention = Attention(side, side, 8, 1.0, value_norm=Norm(torch.ones(6, dtype=torch.float64), 0.1))
    x, bias, weight = normal(2, TOKENS, 7), normal(HEADS * 6, seed=2), normal(HEADS * 6, 7, seed=1)
    got = attention_module.values(attention, x, weight, bias)
    raw = torch.nn.functional.linear(x, weight, bias).view(2, TOKENS, HEADS, 6)
    torch.testing.assert_close(got.transpose(1, 2), torch.nn.functional.rms_norm(raw, (6,), eps=0.1))


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


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_matrices_are_the_softmax_of_the_masked_scores_and_in_row_blocks_the_errors_are_theirs(name: str):
    attention = geometry(name)
    drawn = [[normal(2, side.heads, TOKENS, HEAD_DIM, seed=s) for side in attention.sides] for s in range(3)]
    dense, *others = (reference(attention, *pair) for pair in drawn)
    torch.testing.assert_close(attention_module.attention_matrices(attention, *drawn[0]), dense)
    for candidates in (others, []):
        errors, norms = attention_module.squared_errors(attention, drawn[0], drawn[1 : 1 + len(candidates)])
        assert errors.shape == (len(candidates), attention.query.heads)
        for error, other in zip(errors, candidates, strict=True):
            torch.testing.assert_close(error, (other - dense).square().sum(dim=(0, 2, 3)))
        torch.testing.assert_close(norms, dense.square().sum(dim=(0, 2, 3)))


def test_a_shift_common_to_all_keys_costs_no_precision():
    """Keys of real models share a mean far larger than their spread; float32 must not lose the spread in it."""
    attention = Attention(Projection(2), Projection(1), head_dim=8, scaling=0.3)
    q, k, v = (normal(1, h, 40, 8, seed=seed).float() for seed, h in enumerate((2, 1, 1)))
    q, k = q - q.mean(dim=-1, keepdim=True), k + 300.0  # the shift then leaves every score as it is
    signs = torch.randint(2, (2 * 40 * 40,), generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (torch.float64, torch.float32):
        with Signs(signs):
            probes = attention_module.matrix_probe(attention, q.to(dtype), k.to(dtype), torch.Generator())
        results.append((*probes, attention_module.mixed_by_rows(attention, q.to(dtype), k.to(dtype), v.to(dtype))))
    for exact, got in zip(*results, strict=True):
        assert (got - exact).norm() <= 1e-6 * exact.norm()
