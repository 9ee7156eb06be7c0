"""What heads mix, and its gradients, against the model's own modules and autograd."""

from __future__ import annotations

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.test_objective import GEOMETRIES, reference
from torch import Tensor

from compressx import Block
from compressx_attnprune import attention as attention_module
from compressx_attnprune import layer
from compressx_attnprune.attention import Attention, place, project, values
from compressx_attnprune.groups import Mixing, Triple


def weights_of(block: Block) -> Triple:
    found = layer.find_projections(block)
    return found.query.weight, found.key.weight, found.value.weight


@pytest.mark.parametrize("architecture", [*blocks.EVERY, "mixtral"])
def test_what_is_mixed_is_what_the_output_projection_is_given(architecture: str):
    recorded = blocks.record(architecture)
    found = layer.find_projections(recorded.block)
    mixing = Mixing(layer.describe(recorded.block), found.value.bias)
    seen: list[Tensor] = []
    with found.output.module.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        layer.attend(recorded.block, found, layer.arguments(recorded.block), recorded.x)
    torch.testing.assert_close(mixing.mixed(recorded.x, weights_of(recorded.block)), seen[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_gradients_of_the_values_are_those_of_whole_matrices(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_module, "ROWS", 4)
    attention = GEOMETRIES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 6, generator=generator, dtype=torch.float64)
    rows = [side.heads * attention.head_dim for side in (attention.query, attention.key)] + [attention.key.heads * 5]
    weights = [torch.randn(n, 6, generator=generator, dtype=torch.float64).requires_grad_() for n in rows]
    bias = torch.randn(rows[2], generator=generator, dtype=torch.float64)
    mixing = Mixing(attention, bias)
    expected = by_hand(attention, x, weights, bias)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, weights, grad)
    query, key, value = (w.detach() for w in weights)
    torch.testing.assert_close(mixing.mixed(x, (query, key, value)), expected.detach())
    for got, want in zip(mixing.gradients(x, (query, key, value), grad), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def by_hand(attention: Attention, x: Tensor, weights: list[Tensor], bias: Tensor) -> Tensor:
    """Mix the plain way, [batch, tokens, h * value_dim]."""
    q, k = (
        place(attention, side, project(attention, side, x, w))
        for side, w in zip((attention.query, attention.key), weights[:2], strict=True)
    )
    v = values(attention, x, weights[2], bias).repeat_interleave(attention.groups, dim=1)
    return (reference(attention, q, k) @ v).transpose(1, 2).flatten(2)


def test_only_a_norm_over_all_heads_ties_them_together():
    apart = {
        name: Mixing(layer.describe(blocks.record(name).block), None).apart for name in ("llama", "qwen3", "olmo2")
    }
    assert apart == {"llama": True, "qwen3": True, "olmo2": False}


@pytest.mark.parametrize("architecture", ["olmo2", "cohere", "gemma2", "stablelm"])
def test_gradients_go_through_norms_and_rotary_embeddings(architecture: str):
    recorded = blocks.record(architecture)
    found = layer.find_projections(recorded.block)
    attention = layer.describe(recorded.block, torch.float64)
    bias = None if found.value.bias is None else found.value.bias.double()
    weights = [w.double().requires_grad_() for w in weights_of(recorded.block)]
    x = recorded.x[:2].double()
    expected = by_hand(attention, x, weights, torch.zeros(len(weights[2])).double() if bias is None else bias)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, weights, grad)
    query, key, value = (w.detach() for w in weights)
    with torch.no_grad():
        got = Mixing(attention, bias).gradients(x, (query, key, value), grad)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
