"""What is read off a block: projections, norms, geometry; what is refused, before weights are loaded if possible."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.stablelm.modeling_stablelm import StableLmLayerNormPerHead

from compressx import NM, Block, Pattern, Unstructured, UnsupportedModelError, find_projections
from compressx.api.projections import parent
from compressx.api.pruner import BlockCall
from compressx.runtime.errors import RecipeError
from compressx_attnprune import layer
from compressx_attnprune.layer import KEY_NORMS, QUERY_NORMS, read_norm, unknown_norm

HALF = Unstructured(0.5, "joint")


def both(block: Block, pattern: Pattern = HALF) -> dict[str, Pattern]:
    return dict.fromkeys(blocks.targets(block), pattern)


def refused_as_computed(recorded: blocks.Recorded, told: str, **wrong: object) -> None:
    """Expect a refusal of a layer that is described otherwise than it computes."""
    with pytest.raises(UnsupportedModelError, match=told):
        layer.verify(recorded.block, replace(layer.describe(recorded.block), **wrong), recorded.x)


def test_a_fused_weight_with_another_layout_and_complex_rotary_tables_are_refused_by_what_the_module_computes():
    recorded = blocks.record("codegen")  # [4 parts, (query, value, key), ...]
    layer.check(recorded.block, both(recorded.block))
    refused_as_computed(recorded, r"CodeGenAttention.*qkv_proj has an unsupported row order")
    told = r"takes its rotary embedding as Tensor.*cosine and sine"
    refused_as_computed(blocks.record("llama4"), told)


@pytest.mark.parametrize(
    ("architecture", "wrong"),
    [("gpt-oss", {"sinks": None}),
     *(("llama", wrong) for wrong in ({"scaling": 0.3}, {"window": 4}, {"rotary": None}, {"softcap": 1.0}))],
    ids=str,
)  # fmt: skip
def test_attention_that_computes_something_else_is_refused(architecture: str, wrong: dict[str, object]):
    refused_as_computed(blocks.record(architecture), r"Attention\) is not softmax.*outputs differ by", **wrong)


def test_attention_that_needs_more_than_its_block_is_given_is_refused():
    recorded = blocks.record("llama")
    attention = layer.describe(recorded.block)
    recorded.block.module.self_attn.forward = lambda hidden_states, residual: hidden_states + residual
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention\) needs residual from within its block"):
        layer.verify(recorded.block, attention, recorded.x)


@pytest.mark.parametrize(
    ("architecture", "beyond", "line"),
    [("llama", "model.layers.1.self_attn.v_proj", 'write targets: ["*.q_proj", "*.k_proj"]'),
     ("gpt2", "transformer.h.1.mlp.c_fc", 'write targets: ["*.c_attn"] and')],
)  # fmt: skip
def test_targets_beyond_query_and_key_are_refused_with_the_line_to_write(architecture: str, beyond: str, line: str):
    block = blocks.skeleton(architecture)
    with pytest.raises(RecipeError) as error:
        layer.check(block, {**both(block), beyond: HALF})
    assert beyond in str(error.value)
    assert line in str(error.value)


def without(end: str) -> Callable[[Block], Block]:
    return lambda block: replace(block, linears={n: x for n, x in block.linears.items() if not n.endswith(end)})


def with_outputs(end: str, outputs: int) -> Callable[[Block], Block]:
    def change(block: Block) -> Block:
        (name,) = (n for n in block.linears if n.endswith(end))
        other = replace(block.linears[name], module=nn.Linear(64, outputs, device="meta"))
        return replace(block, linears={**block.linears, name: other})

    return change


def with_parameter(name: str, size: int) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        *above, last = name.split(".")
        setattr(block.module.get_submodule(".".join(above)), last, nn.Parameter(torch.empty(size, device="meta")))

    return change


def with_config(**values: Any) -> Callable[[Block], Block]:
    """Let a config say other numbers, where its attention says no size of a head."""

    def change(block: Block) -> Block:
        del block.submodule(parent(blocks.targets(block)[0])).head_dim
        return replace(block, config=SimpleNamespace(**{**block.config.to_dict(), **values}))

    return change


REFUSED: list[tuple[str, Callable[[Block], Block | None], str]] = [
    ("bloom", lambda _: None, r"Attention\) adds ALiBi to its scores.*sparsegpt or wanda"),
    ("falcon-alibi", lambda _: None, r"Attention\) adds ALiBi to its scores.*sparsegpt or wanda"),
    ("mpt", lambda _: None, r"Attention\) adds a position bias to its scores.*sparsegpt or wanda"),
    ("gpt-oss", with_parameter("self_attn.sinks", 2), r"sinks has shape \(2,\), not one for each of 4 heads"),
    ("qwen3", with_parameter("self_attn.k_norm.weight", 8),
     r"k_norm has weights of shape \(8,\); .* over one head, \(16,\)"),
    ("llama", lambda block: setattr(block.module.self_attn, "is_causal", False), "is not causal"),
    ("llama", without("v_proj"), r"self_attn has no value projection named .*v_proj.*sparsegpt"),
    ("llama", without("o_proj"), r"self_attn has no output projection named .*o_proj.*sparsegpt"),
    ("llama", with_outputs("v_proj", 40), r"40 value features in 2 heads.*do not match the 64 inputs of .*o_proj"),
    ("llama", with_outputs("q_proj", 192), "192 and 32 outputs, which is not 4 query heads of 16 features"),
    ("llama", with_outputs("k_proj", 48), "4 query heads cannot share 3 key heads"),
    *(("phi3", with_outputs("qkv_proj", size), rf"qkv_proj has {size} outputs, which is not 4 query heads")
      for size in (100, 64, 4 * 16 + 2 * 3 * 16)),
    *(("phi3", with_config(**{name: value}),
       rf"SimpleNamespace has no whole number {name}; .* write attribute_map = {{\"{name}\": .*sparsegpt")
      for name, value in (("hidden_size", None), ("num_attention_heads", None), ("num_attention_heads", [4, 4, 2]),
                          ("num_attention_heads", 0))),
    ("llama", lambda block: replace(block, linears={n: x for n, x in block.linears.items() if ".mlp." in n}),
     r"0 q_proj and 0 k_proj.*mlp\.gate_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "change", "told"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_attention_that_is_not_supported_is_refused_before_weights_are_loaded(architecture: str, change, told: str):
    block = blocks.skeleton(architecture)
    block = change(block) or block
    with pytest.raises(UnsupportedModelError, match=told):
        layer.check(block, both(block))


def test_a_rotary_embedding_that_turns_other_features_is_refused_before_weights_are_loaded(monkeypatch):
    block = blocks.skeleton("llama")
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x.flip(-1))
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention\) has a rotary embedding that rotates neither"):
        layer.check(block, both(block))


def test_a_norm_that_does_nothing_is_none():
    recorded = blocks.record("qwen3")
    recorded.block.module.self_attn.q_norm = torch.nn.Identity()
    attention = layer.describe(recorded.block)
    assert attention.query.norm is None
    assert attention.key.norm is not None
    layer.verify(recorded.block, attention, recorded.x)


def test_arguments_that_a_block_is_given_by_position_are_found():
    recorded = blocks.record("llama")
    kwargs = dict(recorded.block.calls[0].kwargs)
    order = list(inspect.signature(recorded.block.module.forward).parameters)[1:]
    args = tuple(kwargs.pop(n, None) for n in order[: order.index("position_embeddings") + 1])
    block = replace(recorded.block, calls=(BlockCall(args, kwargs),))
    attention = layer.describe(block)
    assert attention.rotary is not None
    layer.verify(block, attention, recorded.x)


def test_query_and_key_are_targeted_both_and_by_one_pattern():
    block = blocks.skeleton("llama")
    query, key = blocks.targets(block)
    for taken, missing in ((query, key), (key, query)):
        with pytest.raises(RecipeError, match=f"does not target {missing}"):
            layer.check(block, {taken: HALF})
    for other in (Unstructured(0.5000001, "joint"), Unstructured(0.5, "row"), NM(2, 4)):
        with pytest.raises(RecipeError, match="the same pattern"):
            layer.check(block, {query: HALF, key: other})


@pytest.mark.parametrize("architecture", [*blocks.EVERY, "mixtral"])
def test_every_architecture_passes_the_check_without_weights_and_the_verification_with_them(architecture: str):
    block = blocks.skeleton(architecture)
    assert next(block.module.parameters()).is_meta
    layer.check(block, both(block))
    for index in (1, 2):  # they differ where layers do: by their window, or by having no positions
        recorded = blocks.record(architecture, index=index)
        layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "phi3"])
def test_a_model_in_bfloat16_passes_the_verification_and_stays_as_it_was(architecture: str):
    recorded = blocks.record(architecture, dtype=torch.bfloat16)
    layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)
    assert {p.dtype for p in recorded.block.module.parameters()} == {torch.bfloat16}


def test_the_window_is_the_layers_own():
    for architecture in ("gemma2", "gemma3", "exaone4"):
        windows = [layer.describe(blocks.record(architecture, index=i).block).window for i in range(3)]
        assert windows == [8, None, 8]
    assert layer.describe(blocks.record("mistral").block).window == 8


def test_a_scaled_rotary_embedding_keeps_its_scale():
    """YaRN multiplies both tables by 0.1 ln(factor) + 1 (arXiv 2309.00071, section 3.4)."""
    attention = layer.describe(blocks.record("llama-yarn").block)
    assert attention.rotary is not None
    cos, sin = attention.rotary
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, (0.1 * math.log(64.0) + 1.0) ** 2))


def test_rotary_tables_with_one_entry_for_each_pair_turn_both_halves():
    recorded = blocks.record("gpt-oss")
    attention = layer.describe(recorded.block)
    cos, _ = recorded.block.calls[0].kwargs["position_embeddings"]
    assert attention.rotary is not None
    assert attention.rotary[0].shape == (cos.shape[-2], 2 * cos.shape[-1])
    layer.verify(recorded.block, attention, recorded.x)


def test_the_geometry_takes_the_tables_of_the_first_sequence_of_a_batch():
    recorded = blocks.record("llama")
    cos, sin = recorded.block.calls[0].kwargs["position_embeddings"]
    batched = BlockCall((), {"position_embeddings": (cos.expand(4, -1, -1), sin.expand(4, -1, -1))})
    attention = layer.describe(replace(recorded.block, calls=(batched,)))
    assert attention.rotary is not None
    assert attention.rotary[0].shape == (32, 16)


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


def split_by_hand(name: str, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split what a fused weight puts out [..., rows] the way its model does, with 4 query heads of 16 features."""
    kinds = {
        "thirds": lambda: outputs.split([64, 64, 64], dim=-1),
        "one key": lambda: outputs.split([64, 16, 16], dim=-1),
        "two keys": lambda: outputs.split([64, 32, 32], dim=-1),
        "by head": lambda: outputs.unflatten(-1, (4, 3, 16)).unbind(-2),
        "by pair": lambda: [t.flatten(-3, -2) for t in outputs.unflatten(-1, (2, 4, 16)).split([2, 1, 1], dim=-2)],
    }
    query, key, value = (t.reshape(*outputs.shape[:-1], -1) for t in kinds[name]())
    return query, key, value


LAYOUTS = {
    "gpt2": "thirds",
    "gpt-neox": "by head",
    "phi3": "two keys",
    "falcon-grouped": "by pair",
    "falcon": "one key",
    "falcon-multi-head": "by head",
    "bigcode-multi-query": "one key",
    "bigcode-multi-head": "by head",
    "persimmon": "by head",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_of_a_fused_weight_are_told_apart_and_each_has_one_role(layout: str):
    recorded = blocks.record(layout)
    projections = find_projections(recorded.block)
    (name,) = blocks.targets(recorded.block)
    assert projections.fused
    expected = split_by_hand(LAYOUTS[layout], recorded.block.linears[name].module(recorded.x))
    for rows, outputs in zip((projections.query, projections.key, projections.value), expected, strict=True):
        assert rows.name == name
        got = torch.nn.functional.linear(recorded.x, rows.weight, rows.bias)
        torch.testing.assert_close(got, outputs)
    index = torch.cat([rows.index for rows in (projections.query, projections.key, projections.value)])
    assert index.dtype == torch.int64
    assert torch.equal(index.sort().values, torch.arange(projections.query.linear.out_features)), "one role for each"


def test_a_query_projection_of_twice_the_size_holds_queries_and_gates_head_by_head():
    """Gates may also have a projection of their own."""
    recorded = blocks.record("qwen3.5")
    found = find_projections(recorded.block)
    assert not found.fused
    assert found.gate is not None
    outputs = recorded.block.linears[found.query.name].module(recorded.x).unflatten(-1, (4, 2, 16))
    for rows, part in ((found.query, outputs[..., 0, :]), (found.gate, outputs[..., 1, :])):
        assert rows.name.endswith("q_proj")
        torch.testing.assert_close(torch.nn.functional.linear(recorded.x, rows.weight, rows.bias), part.flatten(-2))
    found = find_projections(blocks.skeleton("afmoe"))
    assert found.gate is not None
    assert found.gate.name == "model.layers.1.self_attn.gate_proj"
    assert (found.query.index, found.gate.index) == (None, None)
