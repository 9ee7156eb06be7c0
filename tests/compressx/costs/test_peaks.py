"""The memory of an estimate's stages is what they hold on a pretended accelerator, neither less nor more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.costs.peaks import PASSES, peaks
from tests.compressx.pipeline.runs import recipe
from tests.compressx.saved import save_wide

from compressx.costs.machine import assumed
from compressx.costs.recipe import estimate
from compressx.pipeline.preparation import loaded_recipe, prepare
from compressx.plugins.manager import load_plugins

ATTENTION = ["*.q_proj", "*.k_proj"]
GROUPS: dict[str, Any] = {
    "targets": [f"*.{name}_proj" for name in "qkvo"], "pattern": "kv-groups", "sparsity": 0.5,
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "magnitude": {"pruner": "magnitude", "sparsity": 0.5},
    "magnitude 2:4": {"pruner": "magnitude", "pattern": "2:4"},
    "wanda": {"pruner": "wanda", "sparsity": 0.5},
    "wanda 2:4": {"pruner": "wanda", "pattern": "2:4"},
    "sparsegpt": {"pruner": "sparsegpt", "sparsity": 0.5},
    "sparsegpt 2:4": {"pruner": "sparsegpt", "pattern": "2:4"},
    "alps": {"pruner": "alps", "sparsity": 0.5},
    "alps 2:4": {"pruner": "alps", "pattern": "2:4"},
    "ziplm": {"pruner": "ziplm", "pattern": "neurons", "sparsity": 0.5},
    "attnprune": {"targets": ATTENTION, "pruner": "attnprune", "sparsity": 0.5},
    "attnprune 2:4": {"targets": ATTENTION, "pruner": "attnprune", "pattern": "2:4"},
    "attnprune refit": {"targets": ATTENTION, "pruner": "attnprune", "sparsity": 0.5, "options": {"refit": 2}},
    "attnprune of a given mask": {
        "targets": ATTENTION, "pruner": "wanda", "reconstruct": "attnprune", "sparsity": 0.5,
    },
    "attnprune matrix": {
        "targets": ATTENTION, "pruner": "attnprune", "sparsity": 0.5, "options": {"objective": "attention-matrix"},
    },
    "sensitivity": {"pruner": "sensitivity", "sparsity": 0.5},
    "attnprune groups": {**GROUPS, "pruner": "attnprune"},
    "attnprune groups refit": {**GROUPS, "pruner": "attnprune", "options": {"refit": 2}},
    "attnprune of given groups": {**GROUPS, "pruner": "wanda", "reconstruct": "attnprune"},
}  # fmt: skip
FEW, MANY = (4, 64, 2), (16, 256, 4)
"""Windows, tokens in each, and windows in a batch: weights and Hessians take the most, or activations do."""


def expected_and_held(written: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes of each stage of pruning by an estimate, and by a run."""
    known = load_plugins()
    loaded = loaded_recipe(written, (), known)
    made = prepare(loaded, known)
    planned = estimate(loaded.recipe, made.plan, made.checkpoint, lambda: assumed("h100"))
    stages = (stage for stage in planned.stages if stage.name.startswith(("prune: ", "calibrate")))
    expected = {stage.name: sum(stage.memory.values()) for stage in stages}
    return expected, peaks(written)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a recipe for a Llama of width 256 in bfloat16 or float32, with so much text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("compressx.report.figures.draw", lambda *_: ())

    def make(
        rule: dict[str, Any], text: tuple[int, int, int], streaming: bool, dtype: torch.dtype,
        architecture: str = "llama", **changes: Any,
    ) -> dict[str, Any]:  # fmt: skip
        changes |= {"num_key_value_heads": 2}
        model = save_wide(tmp_path / "model", 256, dtype=dtype, architecture=architecture, **changes)
        document = model.with_name("text.txt")
        document.write_text(document.read_text() * 30)
        made = recipe(model, {"targets": ["*"], **rule}, compute_dtype=str(dtype).removeprefix("torch."))
        made["model"] |= {"streaming": streaming}
        samples, length, at_once = text
        made["calibration"] |= {"samples": samples, "sequence_length": length, "batch_size": at_once}
        return made

    return make


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True], ids=["in memory", "streamed"])
@pytest.mark.parametrize("text", [FEW, MANY], ids=["few tokens", "many tokens"])
@pytest.mark.parametrize("name", RULES)
def test_the_peak_of_each_stage_is_within_a_tenth_of_the_plan(name, text, streaming, written):
    expected, held = expected_and_held(written(RULES[name], text, streaming, torch.float32))
    assert expected.keys() == held.keys()
    assert held == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("name", "targets", "text"),
    [
        pytest.param("wanda", "*", FEW, id="wanda, few tokens"),
        pytest.param("magnitude", "*", FEW, id="magnitude, few tokens", marks=pytest.mark.slow),
        pytest.param("sensitivity", "*", FEW, id="sensitivity, few tokens", marks=pytest.mark.slow),
        pytest.param("sensitivity", "*", MANY, id="sensitivity, many tokens", marks=pytest.mark.slow),
        pytest.param("sensitivity", "*.up_proj", FEW, id="sensitivity, one linear", marks=pytest.mark.slow),
    ],
)
def test_the_peak_of_a_pruner_whose_linears_compete_is_within_a_tenth_of_the_plan(name, targets, text, written):
    rule = {"targets": [targets], "pruner": name, "sparsity": 0.5, "group": "joint"}
    expected, held = expected_and_held(written(rule, text, False, torch.float32))
    assert held[f"prune: {name}"] == pytest.approx(expected[f"prune: {name}"], rel=0.1)


@pytest.mark.parametrize(
    "name", ["wanda", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sparsegpt", "attnprune"))]
)
def test_the_peak_of_few_tokens_is_within_a_twentieth_of_the_plan(name, written):
    expected, held = expected_and_held(written(RULES[name], FEW, False, torch.float32))
    assert held == pytest.approx(expected, rel=0.05)
    assert held[PASSES] != held[f"prune: {name}"]


@pytest.mark.slow
def test_the_peak_of_training_groups_of_a_gated_layer_is_within_a_tenth_of_the_plan(written):
    rule, kinds = RULES["attnprune groups refit"], ["full_attention"] * 2
    expected, held = expected_and_held(written(rule, MANY, False, torch.float32, "qwen3.5", layer_types=kinds))
    assert held == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("text", [FEW, MANY], ids=["few tokens", "many tokens"])
def test_the_peak_of_dropping_experts_is_within_a_tenth_of_the_plan(text, written):
    rule = {"targets": ["*.experts.*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}
    made = written(rule, text, False, torch.float32, "mixtral") | {"shrink": True}
    expected, held = expected_and_held(made)
    assert held == pytest.approx(expected, rel=0.1)
