"""Runs with `shrink: true`: what they write, what they refuse, and that nothing else needs compressx afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tests.compressx.depths import THIRD
from tests.compressx.pipeline.runs import artifacts, recipe, stopped, weights
from tests.compressx.saved import save_tiny
from transformers import AutoModelForCausalLM, LlamaConfig

from compressx import prune
from compressx.evaluation.saved import apply_masks, evaluate_saved, measures, source_of
from compressx.masks.inspect import inspect
from compressx.masks.maskset import MaskSet
from compressx.pipeline.run import run
from compressx.plugins.manager import load_plugins
from compressx.runtime.errors import ArtifactError, CompressxError, RecipeError, UnsupportedModelError
from compressx.shrink import stage as shrinking
from compressx.testing import tiny_model, tiny_tokens
from compressx.testing.models import TINY_CONFIGS

NEURONS = {"targets": ["*"], "pruner": "wanda", "pattern": "neurons", "sparsity": 0.25}
HEADS = {"targets": ["*"], "pruner": "wanda", "pattern": "kv-groups", "sparsity": 0.5}
EXPERTS = {"targets": ["*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}
SHRINK: dict[str, Any] = {"shrink": True}


def logits(folder: str | Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(tiny_tokens(), use_cache=False).logits
    return found


def close(folder: str, other: str) -> None:
    torch.testing.assert_close(logits(folder), logits(other), rtol=1e-4, atol=2e-5)


def test_the_smaller_model_computes_what_the_one_with_zeros_does_and_its_files_say_what_is_left(model):
    run(recipe(model, NEURONS, HEADS, output="masked"))
    report = run(recipe(model, NEURONS, HEADS, **SHRINK))
    close("out/model", "masked/model")
    small = weights("out/model")
    assert small["model.layers.0.mlp.down_proj.weight"].shape == (64, 72)
    assert small["model.layers.0.self_attn.k_proj.weight"].shape == (16, 64)
    assert Path("out/masks.safetensors").read_bytes() == Path("masked/masks.safetensors").read_bytes()

    units = json.loads(Path("out/units.json").read_text())
    assert units["blocks"] == {"count": 3, "dropped": []}
    down = MaskSet.load("out/masks.safetensors")["model.layers.1.mlp.down_proj"].keep
    left = down[0].nonzero().flatten().tolist()
    assert units["units"]["model.layers.1.mlp"] == {"kind": "neurons", "count": 96, "kept": left}
    dense, cut = weights(model), "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(small[cut], dense[cut][:, left])

    counts = [sum(x.numel() for x in weights(folder).values()) for folder in (str(model), "out/model")]
    assert report.shrink["parameters"] == counts
    heads = {"num_attention_heads": [4, 2], "num_key_value_heads": [2, 1]}
    assert report.shrink["config"] == {"intermediate_size": [96, 72], **heads}
    assert report.shrink["difference"] < 1e-5
    assert json.loads(Path("out/report.json").read_text())["shrink"] == report.shrink
    assert f"dense {counts[0] / 1e6:.4g} M, num_attention_heads 4 -> 2" in Path("out/report.md").read_text()
    card = ModelCard.load("out/model/README.md")
    assert f"{counts[1]:,} parameters instead of {counts[0]:,} (num_attention_heads 2 instead of 4" in card.text
    assert card.data.tags == ["compressx", "pruned", "smaller"]
    assert "masks.safetensors" not in card.text


@pytest.mark.slow
def test_a_process_without_compressx_generates_what_the_masked_model_does(model):
    run(recipe(model, NEURONS, HEADS, output="masked"))
    run(recipe(model, NEURONS, HEADS, **SHRINK))
    script = """
import sys
sys.modules["compressx"] = None  # importing it fails
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = AutoTokenizer.from_pretrained(sys.argv[1])("w1 w2 w3 w4 w5", return_tensors="pt").input_ids
print(model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0].tolist())
"""
    told = [
        subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True).stdout
        for folder in ("masked/model", "out/model")
    ]
    assert told[0] == told[1]
    assert len(json.loads(told[0])) == 17


def test_a_saved_smaller_model_measures_what_the_run_did(model):
    report = run(recipe(model, NEURONS, HEADS, evaluated=True, **SHRINK))
    settings, _ = measures(Path("out/recipe.yaml"), [], load_plugins())
    found = evaluate_saved(source_of("out"), settings, load_plugins())
    pruned = report.evaluation["pruned"]["token_perplexity"]
    assert found["token_perplexity"] == pytest.approx(pruned, rel=1e-6)
    assert pruned != report.evaluation["dense"]["token_perplexity"]


@pytest.mark.slow
def test_fine_tuned_survivors_are_what_is_left(model):
    tuning = {"finetune": {"steps": 3}}
    run(recipe(model, NEURONS, HEADS, output="masked", **tuning))
    run(recipe(model, NEURONS, HEADS, output="pruned", **SHRINK))
    run(recipe(model, NEURONS, HEADS, **tuning, **SHRINK))
    close("out/model", "masked/model")
    assert not torch.allclose(logits("out/model"), logits("pruned/model"), atol=1e-3)


@pytest.mark.parametrize("rules", [(NEURONS, HEADS), (THIRD, NEURONS)], ids=["units", "blocks"])
def test_a_streamed_run_writes_the_same_model(model, rules):
    run(recipe(model, *rules, evaluated=True, **SHRINK))
    streamed = {**recipe(model, *rules, evaluated=True, output="streamed", **SHRINK)}
    run(streamed | {"model": {"path": str(model), "streaming": True}})
    expected, found = weights("out/model"), weights("streamed/model")
    assert expected.keys() == found.keys()
    assert all(torch.equal(x, found[n]) for n, x in expected.items())
    assert Path("streamed/units.json").read_bytes() == Path("out/units.json").read_bytes()
    of = [json.loads(Path(f, "report.json").read_text())["evaluation"]["pruned"] for f in ("out", "streamed")]
    assert of[0] == pytest.approx(of[1])
    assert not [*Path("streamed").glob("blocks*")]


def test_what_a_killed_process_left_of_a_streamed_smaller_models_blocks_is_not_in_the_output(model, monkeypatch):
    @contextmanager
    def kept(prefix: str, dir: Path | None = None) -> Iterator[str]:  # noqa: A002 - as tempfile's
        yield mkdtemp(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", kept)
    run(recipe(model, NEURONS, **SHRINK) | {"model": {"path": str(model), "streaming": True}})
    assert not [path for path in Path("out").rglob("*layers.0*") if "model" not in path.parts]


def test_a_run_that_goes_on_without_shrink_has_no_description_of_a_smaller_model(model):
    class Stop(Exception):  # noqa: N818 - a test's own
        pass

    def stop(stage: str, *_: Any) -> None:
        if stage == "evaluate pruned":
            raise Stop

    with pytest.raises(Stop):
        run(recipe(model, NEURONS, evaluated=True, **SHRINK), progress=stop)
    run(recipe(model, NEURONS, evaluated=True), resume=True)
    assert not Path("out/units.json").exists()
    assert json.loads(Path("out/model/config.json").read_text())["intermediate_size"] == 96


@pytest.mark.slow
def test_a_streamed_mixture_loses_experts_and_their_neurons(models):
    mixtral = models("mixtral")
    run(recipe(mixtral, EXPERTS, **SHRINK))
    streamed = recipe(mixtral, EXPERTS, output="streamed", **SHRINK)
    run(streamed | {"model": {"path": str(mixtral), "streaming": True}})
    expected, found = weights("out/model"), weights("streamed/model")
    assert expected["model.layers.0.mlp.gate.weight"].shape == (2, 64)
    assert all(torch.equal(x, found[n]) for n, x in expected.items())


def test_a_tied_model_in_bfloat16_stays_both(tmp_path):
    saved = save_tiny(tmp_path / "tied" / "model", "llama-tied", torch.bfloat16)
    report = run(recipe(saved, NEURONS, **SHRINK))
    run(recipe(saved, NEURONS, output="masked"))
    small = AutoModelForCausalLM.from_pretrained("out/model")
    assert small.dtype == torch.bfloat16
    assert small.lm_head.weight is small.model.embed_tokens.weight
    expected = logits("masked/model").float()
    assert float((logits("out/model").float() - expected).norm() / expected.norm()) < 0.02
    streamed = run(
        recipe(saved, NEURONS, output="streamed", **SHRINK) | {"model": {"path": str(saved), "streaming": True}}
    )
    assert streamed.shrink["parameters"] == report.shrink["parameters"]
    assert report.shrink["parameters"][1] == sum(p.numel() for p in small.parameters())


def test_a_dropped_block_and_what_else_goes(model):
    run(recipe(model, THIRD, NEURONS, HEADS, output="masked"))
    report = run(recipe(model, THIRD, NEURONS, HEADS, **SHRINK))
    close("out/model", "masked/model")
    units = json.loads(Path("out/units.json").read_text())
    (gone,) = units["blocks"]["dropped"]
    assert units["blocks"]["count"] == 3
    assert report.shrink["config"]["num_hidden_layers"] == [3, 2]
    assert len(units["units"]) == 4
    assert not any(name.startswith(f"{gone}.") for name in units["units"])


def test_a_resumed_run_ends_with_the_same_files(model):
    asked = recipe(model, NEURONS, HEADS, **SHRINK)
    run({**asked, "output": "whole"})
    stopped(asked, 2)
    run(asked, resume=True)
    assert artifacts("out") == artifacts("whole")


def test_a_shrunk_model_can_be_pruned_and_shrunk_again(model):
    run(recipe(model, NEURONS, **SHRINK, output="first"))
    text = {"text": str(model.with_name("text.txt"))}
    again = recipe(model, NEURONS, **SHRINK) | {"model": {"path": "first/model"}}
    again["calibration"]["dataset"] = text
    report = run(again)
    assert report.shrink["config"] == {"intermediate_size": [72, 54]}


def test_masks_of_the_original_are_refused_with_what_became_of_it(model):
    run(recipe(model, NEURONS, HEADS, **SHRINK))
    told = r"what shrink has left \(intermediate_size 72 of 96, .*\), and masks of the original do not fit it"
    with pytest.raises(ArtifactError, match=told):
        apply_masks(Path("out/masks.safetensors"), source_of("out"), Path("applied"))
    with pytest.raises(ArtifactError, match=told):
        inspect(source_of("out"), Path("out/masks.safetensors"))
    found = inspect(source_of("out"))
    assert found.masks is None
    assert found.sparsity == 0


def test_masks_for_blocks_that_are_gone_are_refused_likewise(model):
    run(recipe(model, THIRD, **SHRINK))
    with pytest.raises(ArtifactError, match=r"there is a mask for 'model\.layers\.2\..*num_hidden_layers 2 of 3"):
        apply_masks(Path("out/masks.safetensors"), source_of("out"), Path("applied"))


def test_a_smaller_model_that_computes_something_else_is_not_written(model, monkeypatch):
    real = shrinking.smaller

    def wrong(*args: Any) -> Any:
        made = real(*args)
        for cuts in made.cuts.whole.values():  # other rows than those that are left
            cuts.update({dim: torch.arange(len(index)) for dim, index in cuts.items()})
        return made

    monkeypatch.setattr(shrinking, "smaller", wrong)
    with pytest.raises(UnsupportedModelError, match=r"shrink: the smaller LlamaForCausalLM does not compute what"):
        run(recipe(model, NEURONS, **SHRINK))
    assert not Path("out").exists()
    assert not [*Path().glob(".out.partial-*/model")]


def refused(asked: dict[str, Any], error: type[CompressxError], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect a refusal before weights are read."""

    def read(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("compressx.pipeline.inputs.open_model", read)
    with pytest.raises(error, match=match):
        run(asked)


@pytest.mark.parametrize(
    ("name", "rules", "match"),
    [
        ("gpt2", [HEADS], "shrink: the config of GPT2LMHeadModel cannot describe what is left: with num_attention"),
        ("olmo2", [HEADS], r"shrink: model\.layers\.0\.self_attn\.q_norm is a norm over the 64 features of"),
        ("bloom", [NEURONS], "shrink: BloomConfig has no number for its 256 neurons, so it cannot describe a"),
        ("llama", [{**NEURONS, "targets": ["model.layers.0.*"]}], r"shrink: .*layers\.0\.mlp would have 72 of 96 and"),
        ("llama", [{**NEURONS, "targets": ["model.layers.0.*"]}, {**NEURONS, "sparsity": 0.5}], r"72 of 96 .* 48;"),
    ],
    ids=["no head_dim", "norm over heads", "no number", "some blocks", "two sparsities"],
)  # fmt: skip
def test_what_a_config_cannot_describe_is_refused_before_weights_are_read(models, name, rules, match, monkeypatch):
    refused(recipe(models(name), *rules, **SHRINK), UnsupportedModelError, match, monkeypatch)


def test_shrink_without_units_is_refused_with_its_line(model, monkeypatch):
    match = "shrink: no rule drops anything whole, .* pattern: neurons, kv-groups, experts or blocks, or remove"
    refused(recipe(model, **SHRINK), RecipeError, match, monkeypatch)


def test_a_number_of_heads_that_the_width_is_no_multiple_of_is_refused_with_those_that_fit(tmp_path, monkeypatch):
    saved = save_tiny(tmp_path / "eight" / "model", "llama")
    values = TINY_CONFIGS["llama"][1] | {"num_attention_heads": 8, "num_key_value_heads": 4}
    AutoModelForCausalLM.from_config(LlamaConfig(**values)).save_pretrained(saved)
    match = r"with num_attention_heads 6 .*; sparsities of kv-groups that fit: 0\.75 \(1 left\), 0\.5 \(2 left\)$"
    refused(recipe(saved, {**HEADS, "sparsity": 0.25}, **SHRINK), UnsupportedModelError, match, monkeypatch)


def test_a_model_in_memory_is_not_shrunk():
    asked = {"calibration": {}, "prune": [NEURONS], **SHRINK}
    with pytest.raises(RecipeError, match="shrink: the smaller model is written to an output folder; leave it out"):
        prune(tiny_model("llama"), None, asked, calibration=tiny_tokens())


def test_heads_that_fit_are_not_named_when_it_is_the_neurons_that_do_not(models, monkeypatch):
    rules = [{**NEURONS, "targets": ["model.layers.0.*"]}, HEADS]
    refused(
        recipe(models("llama"), *rules, **SHRINK), UnsupportedModelError, r"mlp 96; prune all .* shrink$", monkeypatch
    )
