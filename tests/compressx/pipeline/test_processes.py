"""Runs of several processes end as one process's run, or all of them end early."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.processes import in_two, torchrun
from tests.compressx.saved import save_tiny

from compressx.masks.maskset import MaskSet
from compressx.pipeline.preparation import refuse_nothing_held_out, refuse_uneven_steps
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import load_plugins
from compressx.recipe.schema import load_recipe
from compressx.runtime.errors import CalibrationError, RecipeError
from compressx.runtime.ranks import Ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama")


RULES = {
    "mixed": [
        {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.6},
        {"targets": ["*.v_proj"], "pruner": "wanda", "sparsity": 0.5, "reconstruct": "sparsegpt"},
        {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5},
    ],
    "wanda": [{"targets": ["*"], "pruner": "wanda", "pattern": "2:4"}],
}


def write_recipe(saved: Path, rules: list[dict[str, Any]], folder: Path, **more: Any) -> Path:
    text = {"text": str(saved.with_name("text.txt"))}
    asked = {
        "model": {"path": str(saved)},
        "calibration": {"dataset": text, "samples": 8, "sequence_length": 32, "batch_size": 2},
        "prune": rules,
        "evaluate": {"token_perplexity": {"dataset": text, "sequence_length": 32, "samples": 8}},
        "output": str(folder / "out"),
        **more,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(asked))
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))


def _run(recipe: Path) -> str:
    return run(recipe).to_json()


def report_of(recipe: Path, processes: int) -> dict[str, Any]:
    """Run a recipe on so many processes; returns its report."""
    returned = in_two(partial(_run, recipe), recipe.parent) if processes == 2 else [_run(recipe)]
    written = (recipe.parent / "out/report.json").read_text()
    assert returned == [written] * processes
    told: dict[str, Any] = json.loads(written)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "streaming"), [("mixed", True), ("wanda", False)])
def test_two_processes_end_as_one_does(model: Path, rules: str, streaming: bool, tmp_path: Path):
    outputs = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        source = {"path": str(model), "streaming": streaming}
        report = report_of(write_recipe(model, RULES[rules], folder, model=source), processes)
        outputs.append((MaskSet.load(folder / "out/masks.safetensors"), report))
    (one, alone), (two, together) = outputs
    assert one.keys() == two.keys()
    differing = sum(int((one[n].keep != two[n].keep).sum()) for n in one) / sum(one[n].keep.numel() for n in one)
    assert differing < 1e-4
    figures = [r["evaluation"]["pruned"]["token_perplexity"] for r in (alone, together)]
    assert figures[1] == pytest.approx(figures[0], rel=1e-3)
    linears = [[x["name"] for block in r["blocks"] for x in block["layers"]] for r in (alone, together)]
    assert linears[0] == linears[1]


def allocations(model: Path, tmp_path: Path, method: str = "divergence", **rule: Any) -> list[dict[str, Any]]:
    """Return what one process and two report of an allocation that they measured."""
    told = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        allocation = {"method": method, "target": 0.5, **({"sparsities": [0.3, 0.7]} if method == "divergence" else {})}
        asked = write_recipe(model, [{"targets": ["*"], **rule}], folder, allocation=allocation, evaluate=None)
        told.append(report_of(asked, processes)["allocation"])
    return told


@pytest.mark.slow
def test_an_allocation_is_measured_on_the_text_of_all_processes(model: Path, tmp_path: Path):
    alone, together = allocations(model, tmp_path, "owl", pruner="wanda")
    assert alone["units"] == together["units"]


@pytest.mark.slow
def test_what_sparsity_costs_is_measured_by_the_first_of_several_processes_as_by_one(model: Path, tmp_path: Path):
    alone, together = allocations(model, tmp_path, pruner="wanda")
    assert alone["units"] == together["units"]


@pytest.mark.slow
def test_the_first_of_two_processes_fine_tunes_as_one_does(model: Path, tmp_path: Path):
    losses = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        rules = [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}]
        asked = write_recipe(model, rules, folder, finetune={"steps": 3, "learning_rate": 1e-3})
        losses.append(report_of(asked, processes)["finetune"]["losses"])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_two_processes_train_blocks_on_both_their_texts_and_end_with_one_model(model: Path, tmp_path: Path):
    rules = [{"targets": ["*"], "pruner": "sensitivity", "sparsity": 0.5, "group": "joint"}]
    reports = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        trained = {"reconstruct_block": {"passes": 3, "learning_rate": 0.03, "held_out": 0.25, "batch_size": 4}}
        reports.append(report_of(write_recipe(model, rules, folder, evaluate=None, **trained), processes))
    alone, together = ([x["reconstruction"] for x in r["blocks"]] for r in reports)
    for one, two in zip(alone, together, strict=True):
        assert two["after"] < two["before"]
        assert two["before"] == pytest.approx(one["before"], rel=0.2)  # other windows are held out


def test_a_training_step_that_processes_cannot_share_is_refused(model: Path, tmp_path: Path):
    """Each would take a batch, and blocks be trained in larger and fewer steps than the recipe says."""
    rules = [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]
    loaded = load_recipe(write_recipe(model, rules, tmp_path, reconstruct_block={"batch_size": 6}))
    for processes in (1, 3):
        refuse_uneven_steps(loaded, processes)
    with pytest.raises(RecipeError) as refused:
        refuse_uneven_steps(loaded, 2)
    assert "a step of 6 windows cannot be shared by 2 processes in calibration batches of 2" in str(refused.value)
    assert str(refused.value).endswith("expected a multiple of 4, or calibration.batch_size: 3")
    with pytest.raises(RecipeError, match=r"in calibration batches of 2; expected a multiple of 8$"):
        refuse_uneven_steps(loaded, 4)


def test_training_of_which_nothing_could_be_held_out_is_refused(model: Path, tmp_path: Path):
    """Its error would be that of the text that it learns from, and go down whatever is learnt."""
    rules = [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]
    loaded = load_recipe(write_recipe(model, rules, tmp_path, reconstruct_block={}))
    samples, batch = loaded.recipe.calibration.samples, loaded.recipe.calibration.batch_size
    refuse_nothing_held_out(loaded, (samples - 1) // (batch + 1))
    processes = samples // batch
    with pytest.raises(RecipeError) as refused:
        refuse_nothing_held_out(loaded, processes)
    assert f"are one batch of {batch} for each of {processes} processes; expected" in str(refused.value)
    assert f"calibration.samples of {(batch + 1) * processes} or more, or a smaller" in str(refused.value)
    few = load_recipe(tmp_path / "recipe.yaml", [f"calibration.samples={batch}"])
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml:\d+:\d+: no batch is left to hold out: 2 calibration windows are"
    ):
        plan(few)


@pytest.mark.parametrize(
    ("setting", "error", "told"),
    [
        ("reconstruct_block.batch_size=6", RecipeError, "a step of 6 windows cannot be shared by 2 processes"),
        ("calibration.samples=1", CalibrationError, "1 calibration windows are fewer than the 2 processes"),
    ],
)
def test_what_processes_cannot_share_is_refused_before_anything_is_written(
    model: Path, setting: str, error: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("compressx.pipeline.run.joined_ranks", lambda _: nullcontext(Ranks(0, 2)))
    with pytest.raises(error, match=told):
        run(write_recipe(model, RULES["wanda"], tmp_path), overrides=[setting])
    assert not (tmp_path / "out").exists()


# --- processes that torchrun starts, and that end early


@pytest.mark.slow
def test_the_runs_of_a_sweep_find_one_another_each_time_and_the_first_process_tells(model: Path, tmp_path: Path):
    rules = [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}]
    recipe = write_recipe(model, rules, tmp_path, evaluate=None, calibration=None)
    sparsities = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    done = torchrun(recipe, f"--grid=prune.0.sparsity={','.join(map(str, sparsities))}", command="sweep")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"[{i}/6]") for i in range(1, 7)] == [1] * 6
    reports = [json.loads((tmp_path / f"out-sweep/sparsity={s}/report.json").read_text()) for s in sparsities]
    assert [r["sparsity"] for r in reports] == pytest.approx(sparsities, abs=0.01)
    assert (tmp_path / "out-sweep/compare.csv").is_file()


STOPPING = '''
import os, signal
from pydantic import BaseModel
from compressx import FeatureNorms, PruneResult, PrunerSpec, hookimpl, keep_masks

class Options(BaseModel):
    pass

class Stopping:
    """Magnitude pruning whose second process ends itself, or torchrun, in a block."""

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def prune(self, block, patterns, stats):
        if os.environ.get("RANK") == "1" and os.environ.get("STOP") == f"itself in {block.index}":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("RANK") == "1" and os.environ.get("STOP") == f"all in {block.index}":
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()
        scores = {n: block.linears[n].weight.abs() * stats[n].norms for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}

@hookimpl
def compressx_pruners():
    return [PrunerSpec("stopping", "for a test", Options, lambda _: Stopping(), separable=True)]
'''


def _go_on(recipe: Path, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    run(recipe, plugins=load_plugins(modules=("stopping",)), resume=True)


def finished(folder: Path) -> list[str]:
    (left,) = folder.glob(".out.partial-*/state.json")
    names: list[str] = json.loads(left.read_text())["finished"]
    return names


@pytest.mark.slow
def test_a_process_that_is_killed_or_sigterm_to_torchrun_ends_all_and_they_go_on_from_the_last_finished_block(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "stopping.py").write_text(STOPPING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rules = [{"targets": ["*"], "pruner": "stopping", "sparsity": 0.5}]
    recipe = write_recipe(model, rules, tmp_path, evaluate=None)
    for block, (stop, ending) in enumerate([("itself", "SIGKILL"), ("all", "SIGTERM")], start=1):
        monkeypatch.setenv("STOP", f"{stop} in {block}")
        died = torchrun(recipe, "--resume", plugins=("stopping",))
        assert died.returncode != 0
        assert ending in died.stderr, died.stderr
        assert "[rank" not in died.stderr  # a traceback of another process
        assert "closed by peer" not in died.stderr
        assert "written to" not in died.stdout
        assert finished(tmp_path) == [f"model.layers.{i}" for i in range(block)]
        assert not (tmp_path / "out").exists()
    monkeypatch.delenv("STOP")
    in_two(partial(_go_on, recipe, tmp_path), tmp_path)
    (tmp_path / "out").rename(tmp_path / "resumed")
    in_two(partial(_go_on, recipe, tmp_path), tmp_path)
    for file in ("masks.safetensors", "model/model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes()
