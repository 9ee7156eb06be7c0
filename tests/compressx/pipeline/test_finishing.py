"""Whole runs that fine-tune: what is measured, told and written, and how they go on when interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.pipeline import runs
from tests.compressx.pipeline.runs import artifacts, leftovers, stopped_at, weights
from tests.compressx.saved import rename_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from compressx.api.record import RunReport
from compressx.data.windows import read_calibration
from compressx.masks.maskset import MaskSet
from compressx.pipeline.run import plan, run
from compressx.recipe.sections import Calibration
from compressx.runtime.errors import ArtifactError, CalibrationError, RecipeError, UnsupportedModelError

TUNED = {"steps": 6, "learning_rate": 1e-3, "batch_size": 2}


@pytest.fixture(autouse=True)
def _many_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressx.training.finetune.CHECKPOINT_EVERY", 2)


def recipe(model: Path, *, pruner: str = "wanda", evaluated: bool = True, **tuning: Any) -> dict[str, Any]:
    rule = {"targets": ["*"], "pruner": pruner, "sparsity": 0.5}
    return runs.recipe(model, rule, evaluated=evaluated, finetune={**TUNED, **tuning})


def told_by(asked: dict[str, Any], **options: Any) -> tuple[RunReport, list[tuple[str, int, int, str]]]:
    """Run a recipe; returns the report and what it tells of its progress."""
    told: list[tuple[str, int, int, str]] = []
    return run(asked, progress=lambda *step: told.append(step), **options), told


def steps(told: list[tuple[str, int, int, str]], stage: str = "finetune") -> list[int]:
    return [done for name, done, *_ in told if name == stage]


def divergence(dense: Path, pruned: str, windows: torch.Tensor) -> float:
    """Return the mean divergence of a saved model's predictions from another's, in float64."""
    with torch.no_grad():
        p, q = (
            AutoModelForCausalLM.from_pretrained(folder)(windows).logits.double().log_softmax(-1)
            for folder in (dense, pruned)
        )
    found = float((p.exp() * (p - q)).sum(-1).mean())
    assert found > 0.01
    return found


# --- what a run does


def test_a_pruned_model_is_pruned_further_and_trained_towards_the_dense_one(model):
    """Its first loss is the divergence from the teacher, and the weights that were zero stay so."""
    run({**recipe(model, evaluated=False), "finetune": None, "output": "half"})
    rule = {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.7}
    further = {"model": {"path": "half/model"}, "prune": [rule]}
    asked = recipe(model, evaluated=False, batch_size=8, steps=1, held_out=0, teacher={"path": str(model)})
    run({**asked, **further, "finetune": None, "output": "pruned"})
    report = run({**asked, **further})
    windows = read_calibration(Calibration(**asked["calibration"]), AutoTokenizer.from_pretrained(model))
    assert report.sparsity == pytest.approx(0.7, abs=1e-3)
    assert report.finetune.losses[0] == pytest.approx(divergence(model, "pruned/model", windows), rel=1e-4)
    assert report.finetune.teacher == str(model)
    assert f"divergence from {model}" in Path("out/report.md").read_text()
    before, after = weights("half/model"), weights("out/model")
    assert all(not after[f"{x.name}.weight"][before[f"{x.name}.weight"] == 0].any() for x in report.layers)


def test_what_cannot_be_trained_or_taught_is_refused_by_a_plan(model, tmp_path, monkeypatch):
    smaller = AutoModelForCausalLM.from_pretrained(model)
    smaller.resize_token_embeddings(64)
    config = json.loads((model / "config.json").read_text())
    for name in ("smaller", "shorter", "renamed"):
        shutil.copytree(model, tmp_path / name)
    rename_tokens(tmp_path / "renamed")
    smaller.save_pretrained(tmp_path / "smaller")
    (tmp_path / "shorter/config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    monkeypatch.setattr("compressx.training.stage.find_spec", lambda name: None if name == "peft" else True)
    plain = {"gradient_checkpointing": False}
    for tuning, error, told in (
        (plain | {"teacher": {"path": str(tmp_path / "smaller")}}, UnsupportedModelError,
         r"the teacher has a vocabulary of 64 tokens and the model one of \d+"),
        (plain | {"teacher": {"path": str(tmp_path / "renamed")}}, UnsupportedModelError,
         r"the teacher has '.*' as token \d+ and the model '.*'; expected the same vocabulary"),
        (plain | {"teacher": {"path": str(tmp_path / "shorter")}}, UnsupportedModelError,
         "the teacher has 16 positions, and sequences have 32 tokens; lower"),
        (plain | {"teacher": {"path": "nowhere"}}, ArtifactError, "finetune.*nowhere"),
        (plain | {"lora": {"rank": 4}}, RecipeError, r"finetune\.lora: .*pip install peft"),
        ({}, UnsupportedModelError, r"finetune.*LlamaForCausalLM.*gradient_checkpointing: false"),
    ):  # fmt: skip
        with pytest.raises(error, match=told):
            plan(recipe(model, **tuning))
    assert plan(recipe(model, **plain)).linears


def test_the_log_says_when_training_goes_back_to_better_weights(model, monkeypatch):
    monkeypatch.setattr("compressx.training.finetune.WARMUP", 0.0)
    report = run(recipe(model, steps=8, learning_rate=1.0))
    before, after = (x.loss for x in report.finetune.held_out[:2])
    said = f"held-out loss {after:.4g}, not below {before:.4g}: back to those weights, at a lower rate"
    assert said in Path("out/run.log").read_text()


def test_checkpoints_of_other_settings_do_not_stay_beside_that_of_the_present_training(model):
    for rate in (1e-3, 2e-3, 3e-3):
        left = stopped_at(recipe(model, learning_rate=rate), "finetune", 2, resume=True)
    assert len(list(left.rglob("finetune-*.safetensors"))) == 1


@pytest.mark.parametrize("own_text", [False, True])
def test_text_of_its_own_is_trained_on_and_windows_begin_with_bos_wherever_the_model_sees_text(
    model, own_text, monkeypatch
):
    seen: list[torch.Tensor] = []
    embed = torch.nn.Embedding.forward

    def forward(self, ids):
        if ids.any():  # a plan sees how blocks are called by zeros
            seen.append(ids)
        return embed(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", forward)
    asked = recipe(model)
    for section in (asked["calibration"], asked["evaluate"]["token_perplexity"]):
        section["bos"] = True
    if own_text:
        Path("other.txt").write_text("w7 w8 w9 " * 100)
        asked["finetune"] |= {"dataset": {"text": "other.txt"}, "samples": 5, "sequence_length": 16, "bos": True}
    assert run(asked).finetune.windows == ((5, 16) if own_text else (7, 32))
    assert {ids.shape[1] for ids in seen} == ({16, 32} if own_text else {32})
    assert all((ids[:, 0] == 1).all() and (ids[:, 1:] != 1).all() for ids in seen)
    assert all(len(ids[:, 1:].unique()) == 3 for ids in seen if ids.shape[1] == 16)


def test_a_loss_that_is_not_finite_names_the_recipes_section(model):
    Path("r.yaml").write_text(json.dumps(recipe(model, learning_rate=1e30)))
    with pytest.raises(CalibrationError, match=r"^r\.yaml:1:\d+: step \d of fine-tuning: the loss is"):
        run(Path("r.yaml"))


# --- going on


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [{}, {"lora": {"rank": 4}}], ids=["weights", "adapters"])
def test_a_resumed_run_ends_with_the_files_of_one_that_was_not_interrupted(model, tuning):
    asked = recipe(model, **tuning)
    run({**asked, "output": "whole"})
    saved, masks = weights("whole/model"), MaskSet.load("whole/masks.safetensors")
    assert all(torch.equal(saved[f"{name}.weight"] != 0, masks[name].keep) for name in masks), "adapters are merged"
    for step in (0, 1, 3, 6):
        left = stopped_at(asked, "finetune", step, restart=step > 0)
        assert len([*left.glob("blocks/finetune-*.safetensors")]) == (step >= 2)
        _, told = told_by(asked, resume=True)
        assert steps(told, "prune") == [3]
        assert steps(told) == [0, *range(step // 2 * 2 + 1, 7)]
        assert artifacts("out") == artifacts("whole")
        assert not leftovers()


@pytest.mark.parametrize("changed", [pytest.param("steps", marks=pytest.mark.slow), "dataset"])
def test_another_fine_tuning_begins_anew_on_the_blocks_that_are_pruned(model, changed):
    Path("other.txt").write_text("w1 w2 w3 " * 200)
    other = {"dataset": {"text": str(Path("other.txt").resolve())}, "samples": 8, "sequence_length": 32}
    asked = recipe(model, **{"steps": {"steps": 7}, "dataset": other}[changed])
    run({**asked, "output": "whole"})
    stopped_at(recipe(model), "finetune", 4)
    _, told = told_by(asked, resume=True)
    assert steps(told, "prune") == [3]
    assert steps(told) == [*range(8 if changed == "steps" else 7)]
    assert artifacts("out") == artifacts("whole")


def test_fine_tuning_begins_anew_if_the_teacher_has_changed_where_it_is(model, tmp_path):
    teacher = shutil.copytree(model, tmp_path / "teacher")
    asked = recipe(model, teacher={"path": str(teacher)})
    stopped_at(asked, "finetune", 4)
    changed = AutoModelForCausalLM.from_pretrained(teacher)
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.5)
    changed.save_pretrained(teacher)
    _, told = told_by(asked, resume=True)
    assert steps(told) == [*range(7)]
