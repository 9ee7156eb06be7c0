from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compressx.saved import save_tiny

from compressx import NM, ArtifactError, Unstructured, keep_mask
from compressx.evaluation.saved import source_of
from compressx.masks import MaskSet
from compressx.masks.file import MaskEntry
from compressx.masks.inspect import fits_two_four, inspect, pattern_of
from compressx.recipe.sources import ModelSource
from compressx.testing import tiny_model


def scores(rows: int = 16, columns: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pattern", [NM(2, 4), NM(1, 4), NM(3, 4), NM(4, 8), NM(1, 8), NM(5, 16)], ids=str)
def test_an_nm_pattern_is_named_by_what_it_keeps(pattern):
    assert pattern_of(~keep_mask(scores(), pattern)) == str(pattern)


@settings(max_examples=20)
@given(st.integers(0, 2**31), st.sampled_from([0.25, 0.5, 0.75, 0.9]), st.sampled_from(["row", "layer"]))
def test_unstructured_zeros_are_named_by_their_share_and_by_rows_that_are_alike(seed, sparsity, group):
    zero = ~keep_mask(scores(24, 64, seed), Unstructured(sparsity, group))
    share = f"{100 * float(zero.float().mean()):.4g}%"
    alike = len(zero.sum(dim=1).unique()) == 1
    assert pattern_of(zero) == (f"{share} row" if alike else share)


def test_weights_without_zeros_are_dense_and_a_few_natural_zeros_are_no_pattern():
    assert pattern_of(torch.zeros(8, 8, dtype=torch.bool)) == "dense"
    zero = torch.zeros(8, 8, dtype=torch.bool)
    zero[0, 0] = True
    assert pattern_of(zero) == "1.562%"


def test_one_group_with_three_kept_weights_breaks_two_four():
    zero = ~keep_mask(scores(), NM(2, 4))
    assert fits_two_four(zero)
    assert fits_two_four(~keep_mask(scores(), NM(1, 4))), "sparser fits, too"
    assert not fits_two_four(torch.ones(4, 6, dtype=torch.bool))
    zero[3, torch.nonzero(zero[3])[0]] = False
    assert not fits_two_four(zero)
    assert pattern_of(zero) != "2:4"


@pytest.fixture
def folder(tmp_path):
    save_tiny(tmp_path / "model", "llama")
    model = tiny_model("llama")
    entries = {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "down_proj")):
            pattern = NM(2, 4) if name.endswith("q_proj") else Unstructured(0.5, "layer")
            keep = keep_mask(module.weight.detach().abs(), pattern)
            entries[name] = MaskEntry(keep, str(pattern), "magnitude", "0" * 64)
    masks = MaskSet(entries)
    masks.apply(model)
    model.save_pretrained(tmp_path / "model")
    masks.save(tmp_path / "masks.safetensors")
    return tmp_path


@pytest.mark.parametrize("streaming", [True, False])
def test_a_folder_is_counted_layer_by_layer_and_compared_with_the_masks_beside_it(folder, streaming):
    source = source_of(str(folder)).model_copy(update={"streaming": streaming})
    found = inspect(source)
    assert found.masks == str(folder / "masks.safetensors")
    by_name = {x.name: x for x in found.linears}
    assert len(by_name) == 21
    q = by_name["model.layers.1.self_attn.q_proj"]
    assert (q.pattern, q.two_four, q.sparsity, q.mask, q.off_mask) == ("2:4", True, 0.5, "magnitude 2:4", 0)
    down = by_name["model.layers.2.mlp.down_proj"]
    assert (down.pattern, down.two_four, down.mask) == ("50%", False, "magnitude 50% layer")
    assert by_name["model.layers.0.self_attn.v_proj"].pattern == "dense"
    weights = sum(x.shape[0] * x.shape[1] for x in found.linears)
    assert found.sparsity == sum(x.zeros for x in found.linears) / weights


def test_the_masks_beside_a_model_are_found_from_within_it_and_from_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder / "model")
    for path, masks in (
        (f"~/{folder.name}", folder), (f"~/{folder.name}/model", folder), (".", folder), ("../model", Path("..")),
    ):  # fmt: skip
        found = inspect(ModelSource(path=Path(path)))
        assert found.masks == str(masks / "masks.safetensors")
        assert found.linears[0].off_mask == 0


def test_weights_that_grew_back_are_counted(folder):
    model = tiny_model("llama")
    model.save_pretrained(folder / "model")  # dense again
    found = inspect(source_of(str(folder)))
    q = next(x for x in found.linears if x.name.endswith("0.self_attn.q_proj"))
    assert q.off_mask == 64 * 64 / 2
    assert q.pattern == "dense"


def test_masks_of_another_model_are_refused(folder):
    entry = MaskEntry(torch.ones(2, 2, dtype=torch.bool), "2:4", "magnitude", "0" * 64)
    MaskSet({"model.layers.0.self_attn.q_proj": entry}).save(folder / "other.safetensors")
    with pytest.raises(
        ArtifactError,
        match=r"other.safetensors: .*q_proj: its mask is \[2, 2\], the weight \[64, 64\]; give this model's masks",
    ):
        inspect(source_of(str(folder)), folder / "other.safetensors")
    MaskSet({"model.layers.9.q_proj": entry}).save(folder / "other.safetensors")
    with pytest.raises(ArtifactError, match=r"it has a mask for model.layers.9.q_proj, which .* does not have"):
        inspect(source_of(str(folder)), folder / "other.safetensors")


def test_masks_that_say_two_of_four_and_were_transposed_are_refused(folder):
    name = "model.layers.0.self_attn.q_proj"
    entry = MaskSet.load(folder / "masks.safetensors")[name]
    MaskSet({name: dataclasses.replace(entry, keep=entry.keep.T)}).save(folder / "masks.safetensors")
    says = rf"masks.safetensors: {name}: its mask is called 2:4, but is none: 2 of 4 input features are kept, but"
    with pytest.raises(ArtifactError, match=says):
        inspect(source_of(str(folder)))
