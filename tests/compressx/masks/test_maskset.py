from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.compressx.two_of_four import out_in, two_of_four
from torch import nn

from compressx.masks.maskset import MaskEntry, MaskSet, weight_sha256
from compressx.masks.maskset import squash as squash_held
from compressx.models.architecture import architecture_of
from compressx.runtime.errors import ArtifactError
from compressx.testing import tiny_model, tiny_tokens

everywhere = pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", torch.bfloat16), ("llama-tied", torch.float32), ("gpt2", torch.bfloat16), ("opt", torch.float32)],
    ids=str,
)


def random_entry(rows: int, columns: int, seed: int = 0) -> MaskEntry:
    keep = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.5
    return MaskEntry(keep, "50% layer", "magnitude", "0" * 64)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[n], before[n]) for n in before)


def test_masks_say_how_many_linears_they_have_how_sparse_they_are_and_in_which_pattern() -> None:
    keep = torch.tensor([[True, False, True, False]])
    rows = MaskEntry(keep | torch.tensor([[False, True, False, False]]), "25% row", "wanda", "0" * 64)
    two = MaskEntry(keep, "2:4", "magnitude", "0" * 64)
    assert repr(MaskSet({"a": two, "b": rows, "c": two})) == "MaskSet(3 linears, 41.67% sparse: 2 x 2:4, 1 x 25% row)"
    assert repr(MaskSet({"a": two})) == "MaskSet(1 linear, 50.00% sparse: 1 x 2:4)"
    assert repr(MaskSet({})) == "MaskSet(0 linears)"


@everywhere
def test_applied_masks_make_exact_zeros_where_they_drop_and_touch_nothing_else(architecture, dtype, tmp_path):
    model, dense = tiny_model(architecture, dtype=dtype), tiny_model(architecture, dtype=dtype)
    found = two_of_four(model)
    found.apply(model)
    for name, module in dense.named_modules():
        if name in found:
            now = out_in(model.get_submodule(name))
            assert torch.equal(now, torch.where(found[name].keep, out_in(module), 0.0))
            assert not torch.signbit(now[~found[name].keep]).any()
            assert now.dtype == dtype
    for name, parameter in dense.named_parameters():
        if name.removesuffix(".weight") not in found:
            assert torch.equal(model.get_parameter(name), parameter)
    assert found.sparsity() == 0.5
    assert found.deviations(model) == {}
    assert found.verify(model)
    assert not found.verify(dense)
    found.save(tmp_path / "masks.safetensors")
    MaskSet.load(tmp_path / "masks.safetensors").apply(dense, original=True)
    assert unchanged(dense, state_of(model)), "a file does the same to a model built anew"


def test_conv1d_weights_are_masked_along_their_inputs_even_when_square() -> None:
    model = tiny_model("gpt2")
    name = "transformer.h.0.attn.c_proj"  # [64, 64] either way, so no shape check could notice
    found = MaskSet({name: two_of_four(model)[name]})
    found.apply(model)
    stored = model.get_submodule(name).weight  # [in_features, out_features]
    assert ((stored == 0).view(16, 4, 64).sum(dim=1) == 2).all()


def test_a_mask_of_another_shape_names_the_layer_and_both_shapes_and_nothing_is_changed() -> None:
    model = tiny_model("gpt2")
    before = state_of(model)
    stored_shape = random_entry(64, 192)  # the module's own [in, out], which is not what a mask is
    bad = MaskSet({**two_of_four(model), "transformer.h.2.attn.c_attn": stored_shape})
    for use in (bad.apply, bad.to_torch_ao, bad.verify):
        with pytest.raises(ArtifactError, match=r"h\.2\.attn\.c_attn: its mask is \[64, 192\].*weight \[192, 64\]"):
            use(model)
    assert unchanged(model, before)


def test_another_models_weights_are_refused_when_the_original_is_asked_for_and_nothing_is_changed() -> None:
    model = tiny_model("llama")
    found = two_of_four(model)
    other = tiny_model("llama")
    with torch.no_grad():
        other.get_submodule([*found][-1]).weight[0, 0] += 1
    before = state_of(other)
    with pytest.raises(ArtifactError, match=rf"{[*found][-1]}: its weight has sha256 .* but its mask was made with"):
        found.apply(other, original=True)
    assert unchanged(other, before)
    found.apply(other)
    assert found.verify(other)


def test_a_prepared_model_is_refused_and_keeps_its_weights() -> None:
    model = tiny_model("llama")
    found = two_of_four(model)
    MaskSet({"lm_head": random_entry(128, 64)}).to_torch_ao(model)
    before = state_of(model)
    with pytest.raises(
        ArtifactError, match=r"cannot be masked while its weights are parametrized by MaskedWeight \(lm_head\)"
    ):
        found.apply(model)
    assert unchanged(model, before)


@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2"])
def test_a_tied_weight_is_refused_until_all_its_owners_are_named_with_one_mask(architecture: str) -> None:
    model = tiny_model(architecture)
    embedding = next(n for n, m in model.named_modules() if m is model.get_input_embeddings())
    before = state_of(model)
    one, other = random_entry(128, 64), random_entry(128, 64, seed=1)
    for bad in ({"lm_head": one}, {embedding: one}, {"lm_head": one, embedding: other}):
        for use in (MaskSet(bad).apply, MaskSet(bad).to_torch_ao):
            with pytest.raises(ArtifactError, match=r"weight is tied to that of .*; give both the same mask"):
                use(model)
    assert unchanged(model, before)
    MaskSet({"lm_head": one, embedding: one}).apply(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight == 0, ~one.keep)


def test_two_names_of_one_module_are_refused() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, shared)
    entry = random_entry(4, 4)
    with pytest.raises(ArtifactError, match="0 and 1 are the same module"):
        MaskSet({"0": entry, "1": entry}).to_torch_ao(model)
    MaskSet({"1": entry}).apply(model)
    assert torch.equal(model[0].weight == 0, ~entry.keep)


def test_deviations_count_dropped_weights_that_live_and_kept_ones_may_be_zero() -> None:
    model = tiny_model("llama")
    found = two_of_four(model)
    found.apply(model)
    first, second, *_ = found
    with torch.no_grad():
        weight = model.get_submodule(first).weight
        weight[0, torch.nonzero(~found[first].keep[0])[:3, 0]] = torch.tensor([1.0, -1.0, torch.nan])
        kept = torch.nonzero(found[second].keep[0])[:2, 0]
        model.get_submodule(second).weight[0, kept] = torch.tensor([0.0, -0.0])
    assert found.deviations(model) == {first: 3}
    assert not found.verify(model)
    found.apply(model)
    assert found.verify(model), "kept weights may be zero by nature"


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
def test_masks_of_fused_experts_are_applied_verified_and_held_like_any_other(kind, tmp_path):
    model = tiny_model(kind)
    names = [
        f"model.layers.1.mlp.experts.{p}.{e}" for p, e in (("gate_up_proj", 0), ("gate_up_proj", 2), ("down_proj", 3))
    ]
    experts = model.model.layers[1].mlp.experts
    linears = architecture_of(model).linears
    weights = {n: linears[n].weight for n in names}
    generator = torch.Generator().manual_seed(0)
    keeps = {n: torch.rand(w.shape, generator=generator) > 0.5 for n, w in weights.items()}
    masks = MaskSet({n: MaskEntry(k, "50% row", "wanda", weight_sha256(weights[n])) for n, k in keeps.items()})
    masks.save(tmp_path / "masks.safetensors")
    held = tiny_model(kind)
    sparsifier = MaskSet.load(tmp_path / "masks.safetensors").to_torch_ao(held)
    masks.apply(model, original=True)
    assert masks.verify(model)
    assert not masks.deviations(model)
    untouched = tiny_model(kind).model.layers[1].mlp.experts
    assert torch.equal(experts.gate_up_proj[1], untouched.gate_up_proj[1])
    with torch.no_grad():
        assert torch.equal(held(tiny_tokens()).logits, model(tiny_tokens()).logits)
    squash_held(sparsifier)
    assert torch.equal(held.model.layers[1].mlp.experts.gate_up_proj, experts.gate_up_proj)


def test_masks_that_say_two_of_four_and_were_transposed_are_refused_by_all_that_uses_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before, found = state_of(model), two_of_four(model)
    name = "model.layers.1.self_attn.o_proj"
    turned = replace(found[name], keep=found[name].keep.T.contiguous())
    MaskSet({**found, name: turned}).save(tmp_path / "masks.safetensors")
    loaded = MaskSet.load(tmp_path / "masks.safetensors")
    says = rf"^{name}: its mask is called 2:4, but is none: 2 of 4 input features are kept, but \d+ of 1024 groups keep"
    for use in (loaded.apply, loaded.verify, loaded.deviations, loaded.to_torch_ao, loaded.by_parameter):
        with pytest.raises(ArtifactError, match=says):
            use(model)
    assert unchanged(model, before)
    MaskSet({name: replace(turned, pattern="50% layer")}).apply(model)
