"""Norms of queries and keys, read off modules by what these compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from compressx_attnprune.layer import KEY_NORMS, QUERY_NORMS, read_norm, unknown_norm

HEADS, HEAD_DIM = 3, 8
EPS = 0.3  # large, so that one that is forgotten shows


def by_head(norm: nn.Module, u: Tensor) -> Tensor:
    return norm(u)  # [batch, heads, tokens, head_dim], as it comes


def by_token(norm: nn.Module, u: Tensor) -> Tensor:
    return norm(u.transpose(1, 2)).transpose(1, 2)


def all_heads(norm: nn.Module, u: Tensor) -> Tensor:
    return norm(u.transpose(1, 2).flatten(2)).view(*u.transpose(1, 2).shape).transpose(1, 2)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "root mean square": (lambda: LlamaRMSNorm(HEAD_DIM, EPS), by_head),
    "one plus the weight": (lambda: Gemma3RMSNorm(HEAD_DIM, EPS), by_head),
    "torch's": (lambda: nn.RMSNorm(HEAD_DIM, EPS), by_head),
    "layer norm": (lambda: nn.LayerNorm(HEAD_DIM, EPS), by_head),
    "layer norm without bias": (lambda: nn.LayerNorm(HEAD_DIM, EPS, bias=False), by_head),
    "a gain for each head": (lambda: CohereLayerNorm((HEADS, HEAD_DIM), EPS), by_token),
    "a module for each head": (lambda: StableLmLayerNormPerHead(HEAD_DIM, HEADS, EPS), by_head),
    "all heads at once": (lambda: LlamaRMSNorm(HEADS * HEAD_DIM, EPS), all_heads),
    "layer norm of all heads": (lambda: nn.LayerNorm(HEADS * HEAD_DIM, EPS), all_heads),
}


def attention_with(name: str, norm: nn.Module) -> nn.Module:
    module = nn.Module()
    module.add_module(name, norm)
    return module


@pytest.mark.parametrize(("kind", "name"), list(zip(KINDS, itertools.cycle([*QUERY_NORMS, *KEY_NORMS]), strict=False)))
@torch.no_grad()
def test_a_norm_is_read_as_what_its_module_computes(kind: str, name: str):
    make, apply = KINDS[kind]
    norm = make()
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator))
    names = QUERY_NORMS if name in QUERY_NORMS else KEY_NORMS
    module = attention_with(name, norm)
    assert unknown_norm(module, names, HEADS, HEAD_DIM) is None
    read = read_norm(module, names, HEADS, HEAD_DIM)
    assert read is not None
    u = torch.randn(2, HEADS, 5, HEAD_DIM, generator=generator) + 0.5
    torch.testing.assert_close(read.forward(u), apply(norm, u))


@torch.no_grad()
def test_a_norm_of_a_bfloat16_model_is_read_without_rounding_its_gain():
    norm = Gemma3RMSNorm(HEAD_DIM, EPS).bfloat16()
    norm.weight.fill_(2.0**-9)  # one plus it is no bfloat16
    read = read_norm(attention_with("q_norm", norm), QUERY_NORMS, HEADS, HEAD_DIM)
    assert read is not None
    torch.testing.assert_close(read.gain, torch.full((HEAD_DIM,), 1.0 + 2.0**-9), rtol=1e-6, atol=0)
    assert norm.weight.dtype == torch.bfloat16
