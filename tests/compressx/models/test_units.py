"""The units of every architecture: what a unit owns is all that it adds to the model, and nothing of another's."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from compressx import Block, UnsupportedModelError
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import each_block
from compressx.models.units import find_units
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

EXPERTS = {"mixtral"}
OF_ALL_HEADS = {"olmo2"}
"""Queries and keys are normalised over all heads together, so that zero rows change what the others become."""


def first_block(model: torch.nn.Module, number: int = 0) -> Block:
    found = architecture_of(model)
    block, _ = next(each_block(InMemory(model), found, dict.fromkeys(found.blocks, ()), [*found.blocks][number:]))
    return block


def expected(architecture: str, kind: str, model: torch.nn.Module) -> int:
    config = model.config
    if kind == "neurons":
        sizes = (getattr(config, n, None) for n in ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"))
        return next((n for n in sizes if n), 4 * config.hidden_size)
    if architecture == "falcon":
        return 1
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


@pytest.mark.parametrize("kind", ["neurons", "experts"])
def test_experts_with_biases_lose_neither_neurons_nor_experts(kind):
    told = (
        r"mlp\.experts\.\w+\.0: experts with biases, as in GPT-OSS, are pruned by weights, or 2:4, but not by neurons"
    )
    with pytest.raises(UnsupportedModelError, match=told):
        find_units(kind, first_block(tiny_model("gpt-oss")))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [(kind, n) for kind in ("neurons", "kv-groups") for n in TINY_CONFIGS if (kind, n) != ("neurons", "gpt-oss")],
)
@torch.no_grad()
def test_rows_of_a_unit_feed_its_columns_and_nothing_else(architecture, kind):
    model = tiny_model(architecture)
    block = first_block(model, number=architecture == "qwen3.5")  # its first block has no key/value groups
    tokens = tiny_tokens(sequences=2)
    dense = model(tokens).logits
    found = find_units(kind, block)
    assert len(found) == (4 if architecture in EXPERTS and kind == "neurons" else 1)
    for units in found:
        assert units.count == expected(architecture, kind, model)
        for name, own in units.owners.items():
            linear = block.linears[name]
            assert len(own.unit) == (linear.out_features, linear.in_features)[own.dim]
            each = torch.bincount(own.unit, minlength=units.count)
            assert (each == each[0]).all()
            assert int(each[0]) > 0
    units = found[0]
    keep = torch.ones(units.count, dtype=torch.bool)
    keep[units.count // 2] = False
    shapes = {n: (block.linears[n].out_features, block.linears[n].in_features) for n in units.owners}
    masks = units.masks(keep, shapes)
    for name, own in units.owners.items():
        if own.dim == 1:
            block.linears[name].weight.mul_(masks[name])
    without_columns = model(tokens).logits
    for name in units.owners:
        block.linears[name].weight.mul_(masks[name])
    without = model(tokens).logits
    assert float((without - dense).abs().max()) > 1e-4, "the unit adds something"
    same = bool(torch.allclose(without, without_columns, rtol=1e-4, atol=1e-5))
    assert same == (architecture not in OF_ALL_HEADS or kind == "neurons")


@torch.no_grad()
def test_a_group_has_its_queries_and_every_attention_head_belongs_to_one():
    block = first_block(tiny_model("llama"))  # four query heads of 16 features, two groups
    (units,) = find_units("kv-groups", block)
    by = {name.rsplit(".", 1)[1]: own for name, own in units.owners.items()}
    assert {name: own.dim for name, own in by.items()} == {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
    for name, each in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)):
        assert by[name].unit.tolist() == [0] * each + [1] * each, name


@torch.no_grad()
def test_an_expert_owns_all_its_linears_and_shares_no_neuron_with_another():
    block = first_block(tiny_model("mixtral"))
    (units,) = find_units("experts", block)
    assert units.count == 4
    for name, own in units.owners.items():
        assert own.dim == 0
        assert set(own.unit.tolist()) == {int(re.findall(r"\d+", name)[-1])}
    neurons = find_units("neurons", block)
    names = [name for one in neurons for name in one.owners]
    assert len(names) == len(set(names))
    assert set(names) == {*units.owners}
    assert len({one.fqn for one in neurons}) == 4


def test_what_has_no_units_says_what_it_has_instead():
    block = first_block(tiny_model("llama"))
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0 has no experts; its linears: model\.layers"):
        find_units("experts", block)
    attention = replace(block, linears={n: x for n, x in block.linears.items() if "self_attn" in n})
    with pytest.raises(UnsupportedModelError, match=r"layers\.0 has no feed-forward neurons .*none of down_proj"):
        find_units("neurons", attention)
    down = block.linears["model.layers.0.mlp.down_proj"]
    shorter = torch.nn.Linear(90, 64, bias=False)
    odd = replace(block, linears={**block.linears, down.name: replace(down, module=shorter)})
    with pytest.raises(UnsupportedModelError, match=r"gate_proj has 96 outputs and .*down_proj 90 inputs"):
        find_units("neurons", odd)
