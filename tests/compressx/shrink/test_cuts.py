"""The smaller dense model: of every architecture what it computes, or why there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.mixtures import MIXTURES, mixture
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from compressx.api.patterns import UnitKind
from compressx.api.pruner import Block
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of, text_config
from compressx.models.units import find_units, leave_out
from compressx.runtime.errors import UnsupportedModelError
from compressx.shrink.cuts import RemainingUnits, renumber, smaller
from compressx.shrink.stage import TOLERANCE, largest_difference, save_shrunk
from compressx.testing.models import TINY_CONFIGS, save_tiny_model, tiny_model, tiny_tokens

FIXED = "has no number for its 256 neurons"
DIVIDED = "the config of .* cannot describe what is left: with num_attention_heads 2 instead of 4"
OVER_ALL = "is a norm over the 64 features of all heads together"

NO_NEURONS = {"bloom": FIXED}
NO_HEADS = {
    "gpt2": rf"{DIVIDED} it has transformer\.h\.0\.attn\.c_attn\.weight \[64, 192\], and \[64, 96\] is left",
    **dict.fromkeys(("opt", "gpt-neox", "gptj", "bloom", "stablelm"), DIVIDED),
    "phi": f"{DIVIDED}, .* it has model.layers.0.self_attn.q_layernorm.weight",
    "olmo2": OVER_ALL,
    "gemma4": rf"{DIVIDED}, .* it has model\.layers\.2\.self_attn\.q_proj\.weight \[64, 64\], and \[128, 64\] is left",
}
"""Architectures with heads (in Phi: norms) as large as their number says, and one whose heads share a norm."""
KEYS = ("k_proj", "c_attn", "qkv_proj", "query_key_value")
ONE_GROUP = ("llama-mqa", "gemma3", "falcon")


def made(name: str, **changed: Any) -> Any:
    """Make a tiny model with another config."""
    kind, values = TINY_CONFIGS[name]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values | changed)).eval()


def blocks_of(model: Any) -> list[Block]:
    found = architecture_of(model)
    return [
        Block(i, fqn, module, found.inside(fqn), (), text_config(model))
        for i, (fqn, module) in enumerate(found.blocks.items())
    ]


@torch.no_grad()
def dropped(model: Any, kind: UnitKind, share: float, *, only: tuple[int, ...] = (0, 1, 2)) -> list[RemainingUnits]:
    """Drop a share of the units of each block at random, in the model's weights; return what stays."""
    generator = torch.Generator().manual_seed(0)
    kept = []
    for block in blocks_of(model):
        if block.index not in only or (kind == "experts" and not any(".experts" in n for n in block.linears)):
            continue
        if kind == "kv-groups" and not any(n.endswith(KEYS) for n in block.linears):
            continue
        for units in find_units(kind, block):
            keep = torch.ones(units.count, dtype=torch.bool)
            keep[torch.randperm(units.count, generator=generator)[: round(share * units.count)]] = False
            masks = units.masks(keep, {n: tuple(block.linears[n].weight.shape) for n in units.owners})
            for name, mask in masks.items():
                weight = block.linears[name].weight
                weight.copy_(weight * mask)
            if kind == "experts":
                leave_out(block, units, keep)
            kept.append(RemainingUnits(units, keep))
    return kept


@torch.no_grad()
def without_output(model: Any, *gone: int) -> tuple[str, ...]:
    """Let blocks compute nothing; return their names."""
    blocks = [block for block in blocks_of(model) if block.index in gone]
    for block in blocks:
        for linear in block.linears.values():
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()
    return tuple(block.fqn for block in blocks)


def saved(model: Any, kept: list[RemainingUnits], folder: Path, gone: tuple[str, ...] = ()) -> Any:
    """Save the smaller model and load it again as anyone would."""
    save_shrunk(InMemory(model), smaller(model, kept, gone), None, folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def same(model: Any, small: Any) -> None:
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters())
    ids = tiny_tokens()
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(small(ids, use_cache=False).logits, expected, rtol=1e-4, atol=2e-5)


class OwnName(PretrainedConfig):
    """Counts its neurons under a name of its own."""

    def __init__(self, inner: int = 96, **values: Any) -> None:
        self.inner = inner
        super().__init__(**values)


def test_neurons_that_a_config_counts_under_its_own_name_are_found_by_attribute_map(monkeypatch):
    blocks = blocks_of(tiny_model("llama"))
    remaining = {"neurons": {units.fqn: 72 for block in blocks for units in find_units("neurons", block)}}
    told = "OwnName has no number for its 96 neurons, .*; leave out shrink, or .* in attribute_map"
    with pytest.raises(UnsupportedModelError, match=told):
        renumber(OwnName(), blocks, blocks, remaining)

    monkeypatch.setattr(OwnName, "attribute_map", {"intermediate_size": "inner"})
    config = OwnName()
    assert renumber(config, blocks, blocks, remaining) == {"inner": (96, 72)}
    assert config.to_dict()["inner"] == 72


def test_heads_that_a_config_counts_under_its_own_name_are_refused_in_a_line(monkeypatch):
    blocks = blocks_of(tiny_model("llama"))
    remaining = {"kv-groups": {units.fqn: 1 for block in blocks for units in find_units("kv-groups", block)}}
    with pytest.raises(UnsupportedModelError, match=r"^OwnName has no whole number num_attention_heads; .*attribute_m"):
        renumber(OwnName(num_key_value_heads=2), blocks, blocks, remaining)

    monkeypatch.setattr(OwnName, "attribute_map", {"num_attention_heads": "inner"})
    numbers = renumber(OwnName(4, num_key_value_heads=2), blocks, blocks, remaining)
    assert numbers == {"num_attention_heads": (4, 2), "num_key_value_heads": (2, 1)}


@pytest.mark.parametrize("architecture", [n for n in TINY_CONFIGS if n != "gpt-oss"])
def test_without_some_neurons_it_computes_what_the_pruned_model_does(architecture, tmp_path):
    model = tiny_model(architecture)
    kept = dropped(model, "neurons", 0.25)
    if architecture in NO_NEURONS:
        with pytest.raises(UnsupportedModelError, match=NO_NEURONS[architecture]):
            smaller(model, kept)
    else:
        same(model, saved(model, kept, tmp_path))


def test_heads_go_from_a_hybrid_whose_first_block_has_none():
    model = tiny_model("qwen3.5")
    made = smaller(model, dropped(model, "kv-groups", 0.5))
    assert made.numbers == {"num_attention_heads": (4, 2), "num_key_value_heads": (2, 1)}
    assert made.config.head_dim == 16


def test_sinks_go_with_their_heads():
    model = tiny_model("gpt-oss")
    kept = dropped(model, "kv-groups", 0.5)
    cuts = smaller(model, kept).cuts
    for one in kept:
        group = int(one.index)
        index = cuts.whole[f"{one.units.fqn}.sinks"][0]
        assert index.tolist() == [2 * group, 2 * group + 1]


@pytest.mark.parametrize("architecture", [n for n in TINY_CONFIGS if n not in ONE_GROUP])
def test_without_some_heads_it_computes_what_the_pruned_model_does(architecture, tmp_path):
    model = tiny_model(architecture)
    kept = dropped(model, "kv-groups", 0.5)
    if architecture in NO_HEADS:
        with pytest.raises(UnsupportedModelError, match=NO_HEADS[architecture]):
            smaller(model, kept)
    else:
        small = saved(model, kept, tmp_path)
        same(model, small)
        assert small.config.num_attention_heads == 2
        assert small.config.head_dim == 16


@pytest.mark.parametrize("name", MIXTURES)
def test_neurons_of_experts_go_from_each_of_them(name, tmp_path):
    model = mixture(name)
    same(model, saved(model, dropped(model, "neurons", 0.25), tmp_path))


def test_a_width_that_becomes_what_another_one_was_is_not_changed_twice(tmp_path):
    model = mixture("deepseek-v3")  # 96 to 48 in the first block, 48 to 24 in the experts
    small = saved(model, dropped(model, "neurons", 0.5), tmp_path)
    same(model, small)
    assert (small.config.intermediate_size, small.config.moe_intermediate_size) == (48, 24)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_without_its_first_block_keeps_what_its_other_blocks_are(name, tmp_path):
    model = mixture(name)
    same(model, saved(model, [], tmp_path, without_output(model, 0)))


def test_the_dense_blocks_that_a_mixture_begins_with_are_counted_again_by_any_name(tmp_path):
    sizes = {**MIXTURES["mixtral"][1], "num_experts": 4, "num_dense_layers": 2, "layer_types": ["full_attention"] * 3}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2_moe", **sizes)).eval()
    small = saved(model, [], tmp_path, without_output(model, 1))
    same(model, small)
    assert small.config.num_dense_layers == 1


def test_neurons_heads_and_a_block_go_together(tmp_path):
    model = tiny_model("qwen3")
    kept = [*dropped(model, "neurons", 0.25), *dropped(model, "kv-groups", 0.5)]
    same(model, saved(model, kept, tmp_path, without_output(model, 1)))


def test_phi_without_norms_of_queries_and_keys_can_have_fewer_heads(tmp_path):
    model = made("phi", qk_layernorm=False)
    same(model, saved(model, dropped(model, "kv-groups", 0.5), tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_keep_their_dtype_and_rounding_is_tolerated(dtype, tmp_path):
    save_tiny_model(tmp_path / "whole", "llama", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    kept = [*dropped(model, "neurons", 0.25), *dropped(model, "kv-groups", 0.5)]
    small = saved(model, kept, tmp_path / "small")
    assert small.dtype == dtype
    assert largest_difference(InMemory(model), InMemory(small), smaller(model, kept), tiny_tokens()) < TOLERANCE / 100


@pytest.mark.parametrize("part", ["model.embed_tokens", "model.layers.1.mlp.up_proj", "model.norm"])
def test_the_difference_is_the_largest_of_all_parts_relative_to_what_each_computes(part, tmp_path):
    model = tiny_model("llama")
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()  # so that the block adds what the up projection scales
    kept = dropped(model, "kv-groups", 0.5)
    small = saved(model, kept, tmp_path)
    small.get_submodule(part).weight.data *= 1.5
    assert largest_difference(InMemory(model), InMemory(small), smaller(model, kept), tiny_tokens()) == pytest.approx(
        0.5
    )


@pytest.mark.parametrize("part", ["model.layers.1.mlp.up_proj", "lm_head"])
def test_a_part_that_computes_no_number_is_a_difference(part, tmp_path):
    model = tiny_model("llama")
    kept = dropped(model, "neurons", 0.25)
    small = saved(model, kept, tmp_path)
    small.get_submodule(part).weight.data[0, 0] = torch.nan
    assert math.isnan(largest_difference(InMemory(model), InMemory(small), smaller(model, kept), tiny_tokens()))


def test_a_dropped_block_that_still_adds_something_is_a_difference(tmp_path):
    model = tiny_model("llama")
    gone = without_output(model, 1)
    small = saved(model, [], tmp_path, gone)
    assert largest_difference(InMemory(model), InMemory(small), smaller(model, [], gone), tiny_tokens()) < 1e-6
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.normal_(std=1e9)
        for linear in (model.model.layers[1].mlp.gate_proj, model.model.layers[1].mlp.up_proj):
            linear.weight.normal_()
    assert largest_difference(InMemory(model), InMemory(small), smaller(model, [], gone), tiny_tokens()) > 1


def test_a_width_that_does_not_divide_into_the_heads_is_refused_with_transformers_reason():
    model = made("llama", num_attention_heads=8, num_key_value_heads=4)
    with pytest.raises(UnsupportedModelError, match=r"heads 6 instead of 8, num_key_value_heads 3 .*: .*\(64\)"):
        smaller(model, dropped(model, "kv-groups", 0.25))


def test_a_config_that_divides_the_size_of_a_head_out_of_the_width_cannot_have_fewer_heads():
    model = made("falcon", new_decoder_architecture=True, num_kv_heads=2)
    with pytest.raises(UnsupportedModelError, match=r"FalconConfig divides .* with 2 heads of 16 features; leave out"):
        smaller(model, dropped(model, "kv-groups", 0.5))


def test_a_block_that_computes_by_its_place_may_not_move():
    model = made("gpt2", scale_attn_by_inverse_layer_idx=True)
    smaller(model, [], ("transformer.h.2",))
    with pytest.raises(UnsupportedModelError, match=r"attn has scaling 0\.125, .* transformer\.h\.2\.attn has 0\.083"):
        smaller(model, [], ("transformer.h.1",))


def test_a_rotary_table_that_would_change_is_refused():
    model = tiny_model("llama")
    model.model.rotary_emb.inv_freq *= 2
    with pytest.raises(UnsupportedModelError, match=r"its buffer model\.rotary_emb\.inv_freq has other values"):
        smaller(model, dropped(model, "neurons", 0.25))


def test_nothing_of_the_larger_model_or_its_config_changes(tmp_path):
    model = tiny_model("llama")
    kept = dropped(model, "kv-groups", 0.5)
    config, weights = model.config.to_dict(), {n: x.clone() for n, x in model.state_dict().items()}
    small = saved(model, kept, tmp_path)
    small.get_parameter("lm_head.weight").data.zero_()
    assert model.config.to_dict() == config
    assert all(torch.equal(x, weights[n]) for n, x in model.state_dict().items())
