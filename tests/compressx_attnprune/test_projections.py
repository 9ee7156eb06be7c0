"""Which rows of which linears are queries, keys and values, and what is refused without weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks
from torch import Tensor
from transformers import PretrainedConfig

from compressx import Block, Pattern, Unstructured, UnsupportedModelError
from compressx.api.projections import parent
from compressx_attnprune import layer

HALF = Unstructured(0.5, "joint")


def both(block: Block, pattern: Pattern = HALF) -> dict[str, Pattern]:
    return dict.fromkeys(blocks.targets(block), pattern)


def by_hand(name: str, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    projections = layer.find_projections(recorded.block)
    (name,) = blocks.targets(recorded.block)
    assert projections.fused
    expected = by_hand(LAYOUTS[layout], recorded.block.linears[name].module(recorded.x))
    for rows, outputs in zip((projections.query, projections.key, projections.value), expected, strict=True):
        assert rows.name == name
        got = torch.nn.functional.linear(recorded.x, rows.weight, rows.bias)
        torch.testing.assert_close(got, outputs)
    index = torch.cat([rows.index for rows in (projections.query, projections.key, projections.value)])
    assert index.dtype == torch.int64
    assert torch.equal(index.sort().values, torch.arange(projections.query.linear.out_features)), "one role for each"


def test_separate_projections_have_all_their_rows():
    block = blocks.skeleton("qwen2")
    found = layer.find_projections(block)
    assert not found.fused
    ends = [x.name.rpartition(".")[2] for x in (found.query, found.key, found.value, found.output)]
    assert ends == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert [r.index for r in (found.query, found.key, found.value)] == [None] * 3
    assert [r.count for r in (found.query, found.key, found.value)] == [64, 32, 32]


def test_a_query_projection_of_twice_the_size_holds_queries_and_gates_head_by_head():
    recorded = blocks.record("qwen3.5")
    found = layer.find_projections(recorded.block)
    assert not found.fused
    assert found.gate is not None
    outputs = recorded.block.linears[found.query.name].module(recorded.x).unflatten(-1, (4, 2, 16))
    for rows, part in ((found.query, outputs[..., 0, :]), (found.gate, outputs[..., 1, :])):
        assert rows.name.endswith("q_proj")
        torch.testing.assert_close(torch.nn.functional.linear(recorded.x, rows.weight, rows.bias), part.flatten(-2))


def test_gates_may_have_a_projection_of_their_own():
    found = layer.find_projections(blocks.skeleton("afmoe"))
    assert found.gate is not None
    assert found.gate.name == "model.layers.1.self_attn.gate_proj"
    assert (found.query.index, found.gate.index) == (None, None)


def test_a_fused_weight_of_another_size_is_refused():
    block = blocks.skeleton("phi3")
    (name,) = blocks.targets(block)
    for outputs in (100, 64, 4 * 16 + 2 * 3 * 16):
        other = torch.nn.Linear(64, outputs, device="meta")
        linears = {**block.linears, name: replace(block.linears[name], module=other)}
        with pytest.raises(UnsupportedModelError, match=rf"qkv_proj has {outputs} outputs, which is not 4 query heads"):
            layer.check(replace(block, linears=linears), both(block))


class OwnNames(PretrainedConfig):
    """Counts its heads and features under names of its own."""

    def __init__(self, heads: object = 4, width: int = 64, **values: Any) -> None:
        self.heads, self.width = heads, width
        super().__init__(**values)


@pytest.mark.parametrize(
    ("mapped", "heads", "missing"),
    [
        ({"hidden_size": "width"}, 4, "num_attention_heads"),
        ({"num_attention_heads": "heads"}, 4, "hidden_size"),
        ({"num_attention_heads": "heads", "hidden_size": "width"}, [4, 4, 2], "num_attention_heads"),
        ({"num_attention_heads": "heads", "hidden_size": "width"}, 0, "num_attention_heads"),
    ],
)
def test_a_config_that_counts_heads_under_its_own_name_is_told_of_attribute_map(mapped, heads, missing, monkeypatch):
    block = blocks.skeleton("phi3")
    del block.submodule(parent(blocks.targets(block)[0])).head_dim
    monkeypatch.setattr(OwnNames, "attribute_map", mapped)
    with pytest.raises(UnsupportedModelError) as refused:
        layer.check(replace(block, config=OwnNames(heads)), both(block))
    told = f"OwnNames has no whole number {missing}; if it has it under another name, write attribute_map = "
    written = f'{{"{missing}": "..."}} with that name in the class'
    assert str(refused.value).startswith(f"{told}{written}; leave it to a pruner of single linears")
    assert "\n" not in str(refused.value)

    monkeypatch.setattr(OwnNames, "attribute_map", {"num_attention_heads": "heads", "hidden_size": "width"})
    layer.check(replace(block, config=OwnNames()), both(block))


@pytest.mark.parametrize(("end", "role"), [("v_proj", "value"), ("o_proj", "output")])
def test_attention_without_a_value_or_output_projection_is_refused(end: str, role: str):
    block = blocks.skeleton("llama")
    block = replace(block, linears={n: x for n, x in block.linears.items() if not n.endswith(end)})
    with pytest.raises(UnsupportedModelError, match=rf"self_attn has no {role} projection named .*{end}.*sparsegpt"):
        layer.check(block, both(block))


def test_a_block_without_attention_projections_lists_its_linears():
    block = blocks.skeleton("llama")
    mlp = {n: x for n, x in block.linears.items() if ".mlp." in n}
    with pytest.raises(UnsupportedModelError, match=r"0 q_proj and 0 k_proj.*mlp\.gate_proj"):
        layer.check(replace(block, linears=mlp), dict.fromkeys(mlp, HALF))
