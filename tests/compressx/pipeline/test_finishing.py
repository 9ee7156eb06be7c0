"""Whole runs that fine-tune: what is measured, told and written, and how they go on when interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.pipeline import runs
from tests.compressx.pipeline.runs import artifacts, leftovers, weights

from compressx.masks.maskset import MaskSet
from compressx.models import streaming
from compressx.pipeline.run import run
from compressx.runtime.errors import ArtifactError, CalibrationError, RecipeError, UnsupportedModelError

TUNED = {"steps": 6, "learning_rate": 1e-3, "batch_size": 2, "checkpoint_every": 2}


def recipe(
    model: Path, *, pruner: str = "wanda", evaluated: bool = True, output: str = "out", **tuning: Any
) -> dict[str, Any]:
    rule = {"targets": ["*"], "pruner": pruner, "sparsity": 0.5}
    return runs.recipe(model, rule, evaluated=evaluated, output=output, finetune={**TUNED, **tuning})


# --- what a run does


@pytest.mark.parametrize("pruner", ["wanda", "magnitude"])
def test_survivors_are_trained_and_the_zeros_stay(model: Path, pruner: str) -> None:
    """Magnitude pruning reads no calibration text, fine-tuning does."""
    run({**recipe(model, pruner=pruner, evaluated=False, output="pruned"), "finetune": None})
    report = run(recipe(model, pruner=pruner, evaluated=False))
    before, after, masks = weights("pruned/model"), weights("out/model"), MaskSet.load("out/masks.safetensors")
    assert Path("out/masks.safetensors").read_bytes() == Path("pruned/masks.safetensors").read_bytes()
    for layer in report.layers:
        weight = after[f"{layer.name}.weight"]
        assert torch.equal(weight != 0, masks[layer.name].keep)
        assert layer.sparsity == pytest.approx(float((weight == 0).float().mean()))
        assert not torch.equal(weight, before[f"{layer.name}.weight"])
    untouched = set(before) - {f"{name}.weight" for name in masks}
    assert all(torch.equal(before[name], after[name]) for name in untouched)


@pytest.mark.slow
def test_what_is_measured_before_and_after_stands_side_by_side(model: Path) -> None:
    alone = run({**recipe(model, output="pruned"), "finetune": None})
    report = run(recipe(model, teacher="none", steps=60, learning_rate=3e-3))
    assert set(alone.evaluation) == {"dense", "pruned"}
    assert set(report.evaluation) == {"dense", "pruned", "finetuned"}
    assert report.evaluation["pruned"] == alone.evaluation["pruned"]
    assert report.evaluation["dense"] == alone.evaluation["dense"]
    pruned, finetuned = (report.evaluation[k]["token_perplexity"] for k in ("pruned", "finetuned"))
    assert finetuned < 0.9 * pruned
    lines = Path("out/report.md").read_text().splitlines()
    header = lines.index("| measure | dense | pruned | change | finetuned | change |")
    cells = [cell.strip() for cell in lines[header + 2].split("|")[1:-1]]
    assert (cells[0], cells[2], cells[4]) == ("token_perplexity", f"{pruned:.4g}", f"{finetuned:.4g}")


def test_the_saved_model_is_the_one_that_was_measured(model: Path) -> None:
    report = run(recipe(model))
    again = run({**recipe(Path("out/model").resolve(), output="again"), "finetune": None,
                 "calibration": None, "prune": [{"targets": ["*.q_proj"], "pruner": "magnitude", "sparsity": 0.0}],
                 "evaluate": recipe(model)["evaluate"]})  # fmt: skip
    assert again.evaluation["dense"] == report.evaluation["finetuned"]


@pytest.mark.slow
def test_reports_hold_the_losses_and_a_figure_shows_them(model: Path, drawn: None) -> None:
    report = run(recipe(model))
    read = json.loads(Path("out/report.json").read_text())
    assert report.finetune is not None
    assert read["finetune"]["losses"] == list(report.finetune.losses)
    assert (read["finetune"]["steps"], read["finetune"]["windows"]) == (6, [8, 32])
    assert read["seconds"]["finetune"] > 0
    assert report.figures[0]["file"] == "plots/finetune.svg"
    assert ">fine-tuning<" in Path("out/plots/finetune.svg").read_text()
    assert "## Fine-tuning\n\n6 steps on 8 windows of 32 tokens, " in Path("out/report.md").read_text()


def test_progress_tells_of_every_step_with_its_loss(model: Path) -> None:
    told: list[tuple[str, int, int, str]] = []
    report = run(recipe(model), progress=lambda *step: told.append(step))
    stages = list(dict.fromkeys(stage for stage, *_ in told))
    assert stages == ["load", "calibrate", "evaluate dense", "prune", "evaluate pruned", "finetune", "save",
                      "evaluate finetuned"]  # fmt: skip
    assert report.finetune is not None
    expected = [(0, 6, ""), *((i + 1, 6, f"loss {x:.4g}") for i, x in enumerate(report.finetune.losses))]
    assert [tuple(rest) for stage, *rest in told if stage == "finetune"] == expected
    assert report.finetune.losses[0] > 0.01, "the teacher is the dense model, not the pruned one"


def test_text_of_its_own_is_trained_on(model: Path) -> None:
    other = Path("other.txt")
    other.write_text(" ".join(model.with_name("text.txt").read_text().split()[::-1]))
    asked = recipe(model, dataset={"text": str(other)}, samples=5, sequence_length=16)
    report = run(asked)
    assert report.finetune is not None
    assert report.finetune.windows == (5, 16)
    run(recipe(model, output="default"))
    mine, default = weights("out/model"), weights("default/model")
    assert any(not torch.equal(mine[n], default[n]) for n in mine)


@pytest.mark.parametrize("own_text", [False, True])
def test_windows_that_are_to_begin_with_bos_do_wherever_the_model_sees_text(
    model: Path, own_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []
    embed = torch.nn.Embedding.forward
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda self, ids: seen.append(ids) or embed(self, ids))  # type: ignore[func-returns-value]
    asked = recipe(model)
    text = asked["calibration"]["dataset"]
    for section in (asked["calibration"], asked["evaluate"]["token_perplexity"]):
        section["bos"] = True
    if own_text:
        asked["finetune"] |= {"dataset": text, "samples": 5, "sequence_length": 16, "bos": True}
    run(asked)
    assert {ids.shape[1] for ids in seen} == ({16, 32} if own_text else {32})
    assert all((ids[:, 0] == 1).all() and (ids[:, 1:] != 1).all() for ids in seen)


def test_a_model_that_is_found_too_large_for_memory_is_refused_before_it_is_pruned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_free_memory", lambda _device: 1000)
    told: list[str] = []
    with pytest.raises(RecipeError, match=r"model\.streaming is auto at .*too large for the free memory; set it to"):
        run(recipe(model), progress=lambda stage, *_: told.append(stage))
    assert set(told) == {"load", "calibrate"}


def test_a_loss_that_is_not_finite_names_the_recipes_section(model: Path) -> None:
    Path("r.yaml").write_text(json.dumps(recipe(model, learning_rate=1e30, warmup=0.0)))
    with pytest.raises(CalibrationError, match=r"^r\.yaml:1:\d+: step \d of 6: the loss is"):
        run(Path("r.yaml"))


# --- going on


def stopped(asked: dict[str, Any], step: int, **options: Any) -> None:
    def progress(stage: str, done: int, *_: Any) -> None:
        if stage == "finetune" and done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, progress=progress, **options)


def test_a_resumed_run_ends_with_the_files_of_one_that_was_not_interrupted(model: Path) -> None:
    asked = recipe(model)
    run({**asked, "output": "whole"})
    for step in (0, 1, 3, 6):
        stopped(asked, step, restart=step > 0)
        [left] = leftovers()
        assert len([*left.glob("blocks/finetune-*.safetensors")]) == (step >= 2)
        told: list[tuple[str, int]] = []
        run(asked, resume=True, progress=lambda stage, done, *_, told=told: told.append((stage, done)))
        assert [done for stage, done in told if stage == "prune"] == [3]
        assert [done for stage, done in told if stage == "finetune"] == [0, *range(step // 2 * 2 + 1, 7)]
        assert artifacts("out") == artifacts("whole")
        assert not leftovers()


@pytest.mark.parametrize("changed", ["steps", "learning_rate", "dataset"])
def test_another_fine_tuning_begins_anew_on_the_blocks_that_are_pruned(model: Path, changed: str) -> None:
    Path("other.txt").write_text("w1 w2 w3 " * 200)
    other = {"dataset": {"text": str(Path("other.txt").resolve())}, "samples": 8, "sequence_length": 32}
    tuning = {"steps": {"steps": 7}, "learning_rate": {"learning_rate": 1e-4}, "dataset": other}[changed]
    run({**recipe(model, **tuning), "output": "whole"})
    stopped(recipe(model), 4)
    told: list[tuple[str, int]] = []
    run(recipe(model, **tuning), resume=True, progress=lambda stage, done, *_: told.append((stage, done)))
    assert [done for stage, done in told if stage == "prune"] == [3]
    assert [done for stage, done in told if stage == "finetune"] == [*range(8 if changed == "steps" else 7)]
    assert artifacts("out") == artifacts("whole")


def test_how_often_fine_tuning_is_kept_decides_nothing(model: Path) -> None:
    stopped(recipe(model), 4)
    told: list[tuple[str, int]] = []
    run(recipe(model, checkpoint_every=3), resume=True, progress=lambda stage, done, *_: told.append((stage, done)))
    assert [done for stage, done in told if stage == "finetune"] == [0, 5, 6]


def test_a_model_that_cannot_checkpoint_gradients_is_refused_before_anything_is_pruned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    from compressx.pipeline.run import plan

    monkeypatch.setattr(LlamaForCausalLM, "supports_gradient_checkpointing", False)
    with pytest.raises(UnsupportedModelError, match=r"finetune.*LlamaForCausalLM.*gradient_checkpointing: false"):
        plan(recipe(model))
    assert plan(recipe(model, gradient_checkpointing=False)).linears


def test_a_damaged_checkpoint_is_named_and_not_gone_on_with(model: Path) -> None:
    asked = recipe(model)
    stopped(asked, 4)
    (file,) = leftovers()[0].glob("blocks/finetune-*.safetensors")
    whole = file.read_bytes()
    for cut in (1, 1000):
        file.write_bytes(whole[:-cut])
        with pytest.raises(ArtifactError, match=r"finetune-\w+\.safetensors"):
            run(asked, resume=True)
