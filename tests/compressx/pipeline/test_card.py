"""What the hub shows of a pruned model: its card, and the sparsity in its config."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from tests.compressx.pipeline.runs import recipe
from tests.compressx.saved import save_tiny
from transformers import AutoModelForCausalLM

from compressx.models.checkpoint import Checkpoint, find_checkpoint, license_of
from compressx.pipeline.card import card
from compressx.pipeline.run import loaded_recipe, run
from compressx.planning.plan import Plan
from compressx.plugins.manager import load_plugins
from compressx.recipe.schema import load_recipe

_RULES = ({"targets": ["*.q_proj"], "pruner": "wanda", "pattern": "2:4"},
          {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5})  # fmt: skip


def test_the_card_says_what_was_done_and_measured_and_its_recipe_runs_again(project: Path) -> None:
    model = save_tiny(project / "tiny", "llama")
    (model / "README.md").write_text("---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE\n---\n# Tiny\n")
    asked = recipe(model, *_RULES, evaluated=True, finetune={"steps": 2})
    report = run(asked)
    shown = ModelCard.load("out/model/README.md")
    data = {"license": "other", "license_name": "tiny", "license_link": "LICENSE", "library_name": "transformers",
            "pipeline_tag": "text-generation", "tags": ["compressx", "pruned", "sparse"]}  # fmt: skip
    assert shown.data.to_dict() == data
    assert "# tiny, 50% sparse" in shown.text
    assert "| q_proj | wanda | 2:4 | 3 | 50.00% |" in shown.text
    assert "8 sequences of 32 tokens, drawn with seed 0" in shown.text
    dense, pruned, tuned = (report.evaluation[of]["token_perplexity"] for of in ("dense", "pruned", "finetuned"))
    assert f"| token_perplexity | {dense:.4g} | {tuned:.4g} | {tuned / dense - 1:+.1%} | {pruned:.4g} |" in shown.text
    Path("again.yaml").write_text(shown.text.partition("```yaml\n")[2].partition("```")[0])
    plugins = load_plugins()
    taken = loaded_recipe({**asked, "compute_dtype": "float32"}, (), plugins).recipe
    assert loaded_recipe("again.yaml", ["output=out"], plugins).recipe == taken


def test_a_model_of_the_hub_is_named_as_the_base_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(recipe(model, *_RULES))
    asked = recipe(model, *_RULES) | {"model": {"id": "someone/some-model", "revision": "main"}}
    Path("README.md").write_text("---\nlicense: apache-2.0\n---\n")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo, name, revision: name)
    planned = Plan((), {}, (), needs_calibration=False)
    shown = ModelCard(card(load_recipe(asked), planned, report, Checkpoint("someone/some-model")))
    assert (shown.data.base_model, shown.data.license) == ("someone/some-model", "apache-2.0")
    assert "[someone/some-model](https://huggingface.co/someone/some-model), pruned by" in shown.text
    assert "## Calibration" not in shown.text


@pytest.mark.parametrize("damage", [None, "no front matter", "---\nlicense: [\n---\n"], ids=["none", "plain", "broken"])
def test_a_license_that_is_not_known_is_left_out(damage: str | None, tmp_path: Path) -> None:
    if damage is not None:
        (tmp_path / "README.md").write_text(damage)
    assert license_of(Checkpoint(str(tmp_path))) == {}


@pytest.mark.slow
def test_the_license_of_a_gguf_file_is_in_its_metadata() -> None:
    from tests.conftest import SMOLLM2

    from compressx.recipe.sources import ModelSource

    assert license_of(find_checkpoint(ModelSource(**SMOLLM2))) == {"license": "apache-2.0"}


@pytest.mark.parametrize("architecture", ["gpt2", "mixtral"])
def test_transformers_keeps_the_sparsity_in_the_config(architecture: str, models: Any, tmp_path: Path) -> None:
    rules = [{"targets": ["*"], "pruner": "magnitude"}]
    run(recipe(models(architecture), *rules, allocation={"method": "owl", "target": 0.5}))
    first = AutoModelForCausalLM.from_pretrained("out/model")
    sparsity = first.config.compressx["sparsity"]
    assert sparsity == pytest.approx(0.5, abs=0.01)
    assert first.config.compressx["patterns"] == ["allocated layer"]
    assert first.config.compressx["pruners"] == ["magnitude"]
    first.save_pretrained(tmp_path / "again")
    shutil.rmtree("out")
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert second.config.compressx == first.config.compressx


@pytest.mark.slow
def test_names_of_strangers_are_no_markup_of_the_card(project: Path) -> None:
    model = save_tiny(project / "<img src=x onerror=alert(1)>`[x](javascript:alert(1))", "llama")
    text = project / "```\n<b>.txt"
    text.write_text("w1 w2 w3 " * 500)
    asked = recipe(model, *_RULES)
    asked["calibration"]["dataset"] = {"text": str(text)}
    run(asked)
    for page in ("out/model/README.md", "out/report.md"):
        shown = MarkdownIt("commonmark").enable("table").render(Path(page).read_text())
        assert "javascript" not in "".join(re.findall('(?:href|src)="([^"]*)"', shown))
        assert "<b>" not in shown
        assert "<img src=x" not in shown
