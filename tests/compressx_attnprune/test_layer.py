"""What attention pruning refuses, before weights are loaded where that can be known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.compressx_attnprune import blocks

from compressx import NM, Block, Pattern, Unstructured, UnsupportedModelError
from compressx.errors import RecipeError
from compressx.pruner import BlockCall
from compressx_attnprune import layer

HALF = Unstructured(0.5, "joint")


def both(block: Block, pattern: Pattern = HALF) -> dict[str, Pattern]:
    return dict.fromkeys(blocks.targets(block), pattern)


@pytest.mark.parametrize("architecture", [*blocks.CHECKED, "mixtral"])
def test_a_skeleton_without_weights_passes_the_check(architecture: str):
    block = blocks.skeleton(architecture)
    assert next(block.module.parameters()).is_meta
    layer.check(block, both(block))


@pytest.mark.parametrize("architecture", blocks.FUSED)
def test_a_fused_projection_is_refused_with_its_name_and_an_alternative(architecture: str):
    block = blocks.skeleton(architecture)
    with pytest.raises(UnsupportedModelError, match=r"holds query, key and value in one weight.*sparsegpt or wanda"):
        layer.check(block, dict.fromkeys(block.linears, HALF))


def test_interleaved_rotary_embeddings_are_refused_before_weights_are_loaded():
    block = blocks.skeleton("cohere")
    with pytest.raises(UnsupportedModelError, match=r"CohereAttention.*turns neighbouring features"):
        layer.check(block, both(block))


def test_a_norm_over_all_heads_at_once_is_refused():
    block = blocks.skeleton("olmo2")
    with pytest.raises(UnsupportedModelError, match=r"self_attn\.q_norm has a weight of shape \(64,\)"):
        layer.check(block, both(block))


def test_heads_that_do_not_fill_the_projection_are_refused():
    block = blocks.skeleton("llama")
    gated = torch.nn.Linear(64, 128, device="meta")
    query = blocks.targets(block)[0]
    linears = {**block.linears, query: replace(block.linears[query], module=gated)}
    with pytest.raises(UnsupportedModelError, match="128 and 32 outputs, which is not 4 query heads of 16 features"):
        layer.check(replace(block, linears=linears), both(block))


def test_attention_that_is_not_causal_is_refused():
    block = blocks.skeleton("llama")
    block.module.self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="is not causal"):
        layer.check(block, both(block))


def test_a_block_without_attention_projections_lists_its_linears():
    block = blocks.skeleton("llama")
    mlp = {n: x for n, x in block.linears.items() if ".mlp." in n}
    with pytest.raises(UnsupportedModelError, match=r"0 q_proj and 0 k_proj.*mlp\.gate_proj"):
        layer.check(replace(block, linears=mlp), dict.fromkeys(mlp, HALF))


def test_targets_beyond_query_and_key_are_refused_with_the_line_to_write():
    block = blocks.skeleton("llama")
    value = "model.layers.1.self_attn.v_proj"
    with pytest.raises(RecipeError) as error:
        layer.check(block, {**both(block), value: HALF})
    assert value in str(error.value)
    assert 'write targets: ["*.q_proj", "*.k_proj"]' in str(error.value)


@pytest.mark.parametrize(("taken", "missing"), [(0, 1), (1, 0)])
def test_targets_with_only_one_of_the_two_name_the_other(taken: int, missing: int):
    block = blocks.skeleton("llama")
    names = blocks.targets(block)
    with pytest.raises(RecipeError, match=f"does not take {names[missing]}"):
        layer.check(block, {names[taken]: HALF})


def test_a_target_outside_the_blocks_is_refused():
    block = blocks.skeleton("llama")
    with pytest.raises(RecipeError, match="takes lm_head outside the decoder blocks"):
        layer.check(replace(block, fqn="", linears={}), {"lm_head": HALF})


@pytest.mark.parametrize("other", [Unstructured(0.6, "joint"), Unstructured(0.5, "row"), NM(2, 4)])
def test_query_and_key_need_one_pattern(other: Pattern):
    block = blocks.skeleton("llama")
    query, key = blocks.targets(block)
    with pytest.raises(RecipeError, match="one pattern"):
        layer.check(block, {query: HALF, key: other})


def test_sparsities_that_differ_by_a_hair_are_still_different():
    block = blocks.skeleton("llama")
    query, key = blocks.targets(block)
    with pytest.raises(RecipeError, match="one pattern"):
        layer.check(block, {query: HALF, key: Unstructured(0.5000001, "joint")})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", blocks.CHECKED)
def test_the_models_own_attention_passes_the_verification(architecture: str, dtype: torch.dtype):
    recorded = blocks.record(architecture, dtype=dtype)
    layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)


@pytest.mark.parametrize(
    "wrong", [{"scaling": 0.3}, {"window": 4}, {"rotary": None}, {"softcap": 1.0}], ids=lambda w: next(iter(w))
)
def test_attention_that_computes_something_else_is_refused(wrong: dict[str, object]):
    recorded = blocks.record("llama")
    attention = replace(layer.describe(recorded.block), **wrong)
    with pytest.raises(UnsupportedModelError, match=r"self_attn \(LlamaAttention\) is not softmax.*outputs differ by"):
        layer.verify(recorded.block, attention, recorded.x)


def test_verification_leaves_the_model_as_it_was():
    recorded = blocks.record("llama", dtype=torch.bfloat16)
    layer.verify(recorded.block, layer.describe(recorded.block), recorded.x)
    assert {p.dtype for p in recorded.block.module.parameters()} == {torch.bfloat16}


def test_the_geometry_takes_the_tables_of_the_first_sequence_of_a_batch():
    recorded = blocks.record("llama")
    cos, sin = recorded.block.calls[0].kwargs["position_embeddings"]
    batched = BlockCall((), {"position_embeddings": (cos.expand(4, -1, -1), sin.expand(4, -1, -1))})
    attention = layer.describe(replace(recorded.block, calls=(batched,)))
    assert attention.rotary is not None
    assert attention.rotary[0].shape == (32, 16)
