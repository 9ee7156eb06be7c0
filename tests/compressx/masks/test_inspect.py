from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.compressx.architectures import KINDS
from tests.compressx.gguf_files import write_gguf
from tests.compressx.saved import save_tiny

from compressx import NM, ArtifactError, Unstructured, keep_mask, load_plugins, run
from compressx.evaluation.saved import source_of
from compressx.masks import MaskSet
from compressx.masks import inspect as inspect_module
from compressx.masks.file import MaskEntry
from compressx.masks.inspect import inspect_model, pattern_of
from compressx.models import streaming
from compressx.models.streaming import open_model
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
    found = inspect_model(source)
    assert found.masks == str(folder / "masks.safetensors")
    by_name = {x.name: x for x in found.linears}
    assert len(by_name) == 21
    q = by_name["model.layers.1.self_attn.q_proj"]
    assert (q.pattern, q.sparsity, q.mask, q.off_mask) == ("2:4", 0.5, "magnitude 2:4", 0)
    down = by_name["model.layers.2.mlp.down_proj"]
    assert (down.pattern, down.mask) == ("50%", "magnitude 50% layer")
    assert by_name["model.layers.0.self_attn.v_proj"].pattern == "dense"
    weights = sum(x.shape[0] * x.shape[1] for x in found.linears)
    assert found.sparsity == sum(x.zeros for x in found.linears) / weights


def test_the_masks_beside_a_model_are_found_from_within_it_and_from_the_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.chdir(folder / "model")
    for path, masks in (
        (f"~/{folder.name}", folder), (f"~/{folder.name}/model", folder), (".", folder), ("../model", Path("..")),
    ):  # fmt: skip
        found = inspect_model(ModelSource(path=Path(path)))
        assert found.masks == str(masks / "masks.safetensors")
        assert found.linears[0].off_mask == 0


def test_weights_that_grew_back_are_counted(folder):
    model = tiny_model("llama")
    model.save_pretrained(folder / "model")  # dense again
    found = inspect_model(source_of(str(folder)))
    q = next(x for x in found.linears if x.name.endswith("0.self_attn.q_proj"))
    assert q.off_mask == 64 * 64 / 2
    assert q.pattern == "dense"


def test_masks_of_another_model_are_refused(folder):
    entry = MaskEntry(torch.ones(2, 2, dtype=torch.bool), "2:4", "magnitude", "0" * 64)
    MaskSet({"model.layers.0.self_attn.q_proj": entry}).save(folder / "other.safetensors")
    with pytest.raises(
        ArtifactError,
        match=r"other.safetensors: .*its mask is \[2, 2\] \[out.*, the weight \[64, 64\]; give this model's masks",
    ):
        inspect_model(source_of(str(folder)), folder / "other.safetensors")
    MaskSet({"model.layers.9.q_proj": entry}).save(folder / "other.safetensors")
    with pytest.raises(ArtifactError, match=r"it has a mask for model.layers.9.q_proj, which .* does not have"):
        inspect_model(source_of(str(folder)), folder / "other.safetensors")


TUNED = "model.layers.1.self_attn.q_proj"


@pytest.fixture
def tuned(tmp_path):
    """A folder with `base`, and `model` of which one linear differs, by a matrix of rank one in its first rows."""
    base = save_tiny(tmp_path / "base", "llama")
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_submodule(TUNED).weight[:32] += torch.outer(scores(1, 32)[0], 1 + scores(1, 64)[0])
    shutil.copytree(base, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("streaming", [True, False])
def test_what_differs_from_a_base_is_measured_linear_by_linear(tuned, streaming):
    source = source_of(str(tuned / "model")).model_copy(update={"streaming": streaming})
    found = inspect_model(source, base=source_of(str(tuned / "base")))
    assert found.base == str(tuned / "base")
    changes = {x.name: (x.change, x.unchanged) for x in found.linears}
    before = tiny_model("llama").get_submodule(TUNED).weight.detach().double()
    after = load_file(tuned / "model" / "model.safetensors")[f"{TUNED}.weight"].double()
    assert changes.pop(TUNED) == (pytest.approx(float((after - before).norm() / before.norm())), 0.5)
    assert set(changes.values()) == {(0.0, 1.0)}
    assert {(x.change, x.unchanged) for x in inspect_model(source).linears} == {(None, None)}


def test_the_base_is_streamed_beside_the_model_and_a_gguf_file_is_loaded_whole(tuned, monkeypatch):
    opened = []
    for module in (inspect_module, streaming):
        monkeypatch.setattr(module, "open_model", lambda *given: opened.append(given[1]) or open_model(*given))
    inspect_model(source_of(str(tuned / "model")), base=source_of(str(tuned / "base")))
    file = source_of(str(write_gguf(tuned / "tiny.gguf")))
    found = inspect_model(file, base=file)
    assert opened == ["auto", True, "auto", False]
    assert {x.unchanged for x in found.linears} == {1.0}


def test_a_vocabulary_of_another_size_is_no_other_model(tuned):
    model = tiny_model("llama")
    model.resize_token_embeddings(160)
    model.save_pretrained(tuned / "model")
    found = inspect_model(source_of(str(tuned / "model")), base=source_of(str(tuned / "base")))
    assert {x.unchanged for x in found.linears} == {1.0}


@pytest.mark.parametrize(("other", "complaint"), [
    ("llama-mqa", r"layers.0.self_attn.k_proj is \[16, 64\], and \[32, 64\] in .*model; expected the model that"),
    ("gpt2", r"model.layers.0.self_attn.q_proj is missing, and \[64, 64\] in"),
])  # fmt: skip
def test_a_base_with_other_linears_is_refused_by_name_and_both_shapes(tuned, other, complaint):
    save_tiny(tuned / "other", other)
    with pytest.raises(ArtifactError, match=f"^{tuned}/other: .*{complaint}"):
        inspect_model(source_of(str(tuned / "model")), base=source_of(str(tuned / "other")))


@pytest.mark.parametrize("damaged", ["model", "base"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_model(tuned, damaged, value):
    model = tiny_model("llama")
    model.model.layers[2].mlp.up_proj.weight.data[3, 4] = value
    model.save_pretrained(tuned / damaged)
    inspected, base = (source_of(str(tuned / name)) for name in ("model", "base"))
    told = rf"^{tuned}/{damaged}: model.layers.2.mlp.up_proj.weight has NaN or infinite values"
    with pytest.raises(ArtifactError, match=told):
        inspect_model(inspected, base=base)
    assert len(inspect_model(inspected).linears) == 21, "zeros are counted whatever the others are"


@pytest.mark.parametrize("architecture", [*KINDS, "gpt-oss", "gemma4"])
def test_every_architecture_has_numbers_that_are_json(tmp_path, architecture):
    source = source_of(str(save_tiny(tmp_path / "model", architecture)))
    found = inspect_model(source, base=source)
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert {(x["change"], x["unchanged"]) for x in plain["linears"]} == {(0.0, 1.0)}


# --- a real model, pruned to 2:4, in the hands of those who get it


@pytest.fixture(scope="module")
def pruned_smollm2(smollm2_short_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "out"
    recipe = {
        "model": {"path": str(smollm2_short_folder), "dtype": "bfloat16"},
        "calibration": {"dataset": "python-docs", "samples": 4, "sequence_length": 128},
        "prune": [{"targets": ["*"], "pruner": "wanda", "pattern": "2:4"}],
        "output": str(folder),
    }
    run(recipe, plugins=load_plugins())
    return folder


@pytest.mark.slow
def test_the_folder_answers_a_prompt_through_transformers_pipeline(pruned_smollm2):
    from transformers import pipeline

    ask = pipeline("text-generation", model=str(pruned_smollm2 / "model"), device="cpu")
    told = ask("The capital of France is", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert told.startswith("The capital of France is")
    assert len(told) > len("The capital of France is") + 4


@pytest.mark.slow
def test_adapters_of_a_recipe_lower_its_perplexity_and_keep_the_zeros(smollm2_short_folder, tmp_path):
    pytest.importorskip("peft")
    text = {"dataset": "python-docs", "sequence_length": 64}
    report = run(
        {
            "model": {"path": str(smollm2_short_folder)},
            "calibration": {**text, "samples": 8},
            "prune": [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.6}],
            "finetune": {
                **text,
                "samples": 32,
                "steps": 16,
                "batch_size": 2,
                "learning_rate": 2e-3,
                "lora": {"rank": 16},
            },
            "evaluate": {"token_perplexity": {**text, "samples": 8}},
            "output": str(tmp_path / "out"),
        },
        plugins=load_plugins(),
    )
    pruned, finetuned = (report.evaluation[name]["token_perplexity"] for name in ("pruned", "finetuned"))
    assert finetuned < 0.8 * pruned
    found = inspect_model(source_of(str(tmp_path / "out")))
    assert sum(x.off_mask or 0 for x in found.linears) == 0
    assert report.sparsity == pytest.approx(0.6, abs=1e-3)
