"""What attention pruning refuses, before weights are loaded where that can be known."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch
from tests.compressx_attnprune import blocks
from transformers.models.llama import modeling_llama

from compressx import NM, Block, Pattern, Unstructured, UnsupportedModelError
from compressx.api.pruner import BlockCall
from compressx.runtime.errors import RecipeError
from compressx_attnprune import layer

HALF = Unstructured(0.5, "joint")


def both(block: Block, pattern: Pattern = HALF) -> dict[str, Pattern]:
    return dict.fromkeys(blocks.targets(block), pattern)


def test_a_fused_weight_with_another_layout_is_refused_by_what_the_module_computes():
    recorded = blocks.record("codegen")  # [4 parts, (query, value, key), ...]
    layer.check(recorded.block, both(recorded.block))
    with pytest.raises(UnsupportedModelError, match=r"CodeGenAttention.*qkv_proj has an unsupported row order"):
        layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)


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


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("bloom", "adds ALiBi"), ("falcon-alibi", "adds ALiBi"), ("mpt", "adds a position bias")],
)
def test_positions_added_to_the_scores_are_refused_before_weights_are_loaded(architecture: str, reason: str):
    block = blocks.skeleton(architecture)
    with pytest.raises(UnsupportedModelError, match=rf"Attention\) {reason} to its scores.*sparsegpt or wanda"):
        layer.check(block, both(block))


def test_sinks_and_rotary_tables_of_one_entry_per_pair_are_the_models_own():
    recorded = blocks.record("gpt-oss")
    layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)


def test_attention_whose_sinks_go_elsewhere_is_refused_by_what_it_computes():
    recorded = blocks.record("gpt-oss")
    attention = replace(layer.describe(recorded.block), sinks=None)
    with pytest.raises(UnsupportedModelError, match=r"GptOssAttention\) is not softmax.*outputs differ by"):
        layer.verify(recorded.block, attention, recorded.x)


def test_sinks_that_are_not_one_for_each_head_are_refused_before_weights_are_loaded():
    block = blocks.skeleton("gpt-oss")
    block.module.self_attn.sinks = torch.nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"sinks has shape \(2,\), not one for each of 4 heads"):
        layer.check(block, both(block))


def test_complex_rotary_tables_are_refused():
    recorded = blocks.record("llama4")
    with pytest.raises(UnsupportedModelError, match=r"takes its rotary embedding as Tensor.*cosine and sine"):
        layer.describe(recorded.block)


def test_a_rotary_embedding_that_turns_other_features_is_refused_before_weights_are_loaded(monkeypatch):
    block = blocks.skeleton("llama")
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x.flip(-1))
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention\) has a rotary embedding that rotates neither"):
        layer.check(block, both(block))


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


def test_a_norm_over_something_else_is_refused_before_weights_are_loaded():
    block = blocks.skeleton("qwen3")
    block.module.self_attn.k_norm.weight = torch.nn.Parameter(torch.empty(8, device="meta"))
    with pytest.raises(UnsupportedModelError, match=r"k_norm has weights of shape \(8,\); .* over one head, \(16,\)"):
        layer.check(block, both(block))


def test_a_norm_that_does_nothing_is_none():
    recorded = blocks.record("qwen3")
    recorded.block.module.self_attn.q_norm = torch.nn.Identity()
    attention = layer.describe(recorded.block)
    assert attention.query.norm is None
    assert attention.key.norm is not None
    layer.verify(recorded.block, attention, recorded.x)


def test_attention_that_needs_more_than_its_block_is_given_is_refused():
    recorded = blocks.record("llama")
    attention = layer.describe(recorded.block)
    recorded.block.module.self_attn.forward = lambda hidden_states, residual: hidden_states + residual
    with pytest.raises(UnsupportedModelError, match=r"LlamaAttention\) needs residual from within its block"):
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


def test_attention_that_is_not_causal_is_refused():
    block = blocks.skeleton("llama")
    block.module.self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is not causal"):
        layer.check(block, both(block))


def test_targets_with_only_one_of_the_two_name_the_other():
    block = blocks.skeleton("llama")
    query, key = blocks.targets(block)
    for taken, missing in ((query, key), (key, query)):
        with pytest.raises(RecipeError, match=f"does not target {missing}"):
            layer.check(block, {taken: HALF})


def test_query_and_key_need_one_pattern():
    block = blocks.skeleton("llama")
    query, key = blocks.targets(block)
    for other in (Unstructured(0.5000001, "joint"), Unstructured(0.5, "row"), NM(2, 4)):
        with pytest.raises(RecipeError, match="the same pattern"):
            layer.check(block, {query: HALF, key: other})


@pytest.mark.parametrize("architecture", [*blocks.EVERY, "mixtral"])
def test_every_architecture_passes_the_check_without_weights_and_the_verification_with_them(architecture: str):
    block = blocks.skeleton(architecture)
    assert next(block.module.parameters()).is_meta
    layer.check(block, both(block))
    recorded = blocks.record(architecture)
    layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "phi3"])
def test_a_model_in_bfloat16_passes_the_verification_and_stays_as_it_was(architecture: str):
    recorded = blocks.record(architecture, dtype=torch.bfloat16)
    layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)
    assert {p.dtype for p in recorded.block.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("end", "outputs", "reason"),
    [("v_proj", 40, r"40 value features in 2 heads.*do not match the 64 inputs of .*o_proj"),
     ("q_proj", 192, "192 and 32 outputs, which is not 4 query heads of 16 features"),
     ("k_proj", 48, "4 query heads cannot share 3 key heads")],
)  # fmt: skip
def test_heads_that_do_not_fill_their_projections_are_refused(end: str, outputs: int, reason: str):
    block = blocks.skeleton("llama")
    name = f"model.layers.1.self_attn.{end}"
    other = replace(block.linears[name], module=torch.nn.Linear(64, outputs, device="meta"))
    with pytest.raises(UnsupportedModelError, match=reason):
        layer.check(replace(block, linears={**block.linears, name: other}), both(block))


@pytest.mark.parametrize(
    "wrong", [{"scaling": 0.3}, {"window": 4}, {"rotary": None}, {"softcap": 1.0}], ids=lambda w: next(iter(w))
)
def test_attention_that_computes_something_else_is_refused(wrong: dict[str, object]):
    recorded = blocks.record("llama")
    attention = replace(layer.describe(recorded.block), **wrong)
    with pytest.raises(UnsupportedModelError, match=r"self_attn \(LlamaAttention\) is not softmax.*outputs differ by"):
        layer.verify(recorded.block, attention, recorded.x)


def test_the_geometry_takes_the_tables_of_the_first_sequence_of_a_batch():
    recorded = blocks.record("llama")
    cos, sin = recorded.block.calls[0].kwargs["position_embeddings"]
    batched = BlockCall((), {"position_embeddings": (cos.expand(4, -1, -1), sin.expand(4, -1, -1))})
    attention = layer.describe(replace(recorded.block, calls=(batched,)))
    assert attention.rotary is not None
    assert attention.rotary[0].shape == (32, 16)
