"""Runs of several processes end as one process's run, or all of them end early."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.pipeline.runs import MAGNITUDE, recipe
from tests.compressx.processes import in_two, torchrun

from compressx.masks.maskset import MaskSet
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import load_plugins
from compressx.runtime.errors import CalibrationError, RecipeError
from compressx.runtime.ranks import Ranks

OPEN = {"targets": ["*"], "pruner": "wanda"}
RULES = {
    "mixed": [
        {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.6, "options": {"sequences": 6}},
        {"targets": ["*.v_proj"], "pruner": "wanda", "sparsity": 0.5, "reconstruct": "sparsegpt"},
        {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5},
    ],
    "wanda": [OPEN | {"pattern": "2:4"}],
}


def write_recipe(saved: Path, rules: list[dict[str, Any]], folder: Path, **more: Any) -> Path:
    asked = recipe(saved, *rules, evaluated=True, output=str(folder / "out"), compute_dtype="float32")
    asked["calibration"]["batch_size"] = 2
    asked["evaluate"]["token_perplexity"]["samples"] = 8
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(asked | more))
    return path


def _run(path: Path) -> str:
    return run(path).to_json()


def report_of(path: Path, processes: int) -> dict[str, Any]:
    """Run a recipe on so many processes; returns its report."""
    returned = in_two(partial(_run, path), path.parent) if processes == 2 else [_run(path)]
    written = (path.parent / "out/report.json").read_text()
    assert returned == [written] * processes
    told: dict[str, Any] = json.loads(written)
    return told


def alone_and_together(
    saved: Path, tmp_path: Path, rules: list[dict[str, Any]], **more: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the reports of a run on one process and on two, in folders of these names."""
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
    one, two = (report_of(write_recipe(saved, rules, tmp_path / str(n), **more), n) for n in (1, 2))
    return one, two


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "streaming"), [("mixed", True), ("wanda", False)])
def test_two_processes_end_as_one_does(model, rules, streaming, tmp_path):
    source = {"path": str(model), "streaming": streaming}
    reports = alone_and_together(model, tmp_path, RULES[rules], model=source)
    one, two = (MaskSet.load(tmp_path / folder / "out/masks.safetensors") for folder in "12")
    assert one.keys() == two.keys()
    differing = sum(int((one[n].keep != two[n].keep).sum()) for n in one) / sum(one[n].keep.numel() for n in one)
    assert differing < 1e-4
    figures = [r["evaluation"]["pruned"]["token_perplexity"] for r in reports]
    assert figures[1] == pytest.approx(figures[0], rel=1e-3)
    linears = [[x["name"] for block in r["blocks"] for x in block["layers"]] for r in reports]
    assert linears[0] == linears[1]


@pytest.mark.slow
def test_an_allocation_and_fine_tuning_are_those_of_one_process_which_reads_the_text_of_all(model, tmp_path):
    allocation = {"target": 0.5, "method": "divergence", "sparsities": [0.3, 0.7]}
    tuned = {"steps": 3, "learning_rate": 1e-3}
    rule = {"targets": ["*"], "pruner": "magnitude"}
    found = alone_and_together(model, tmp_path, [rule], evaluate=None, allocation=allocation, finetune=tuned)
    alone, together = ((x["allocation"]["units"], x["finetune"]["losses"]) for x in found)
    assert alone == together


@pytest.mark.slow
def test_two_processes_train_blocks_on_both_their_texts_and_end_with_one_model(model, tmp_path):
    joint = {"sparsity": 0.5, "group": "joint"}
    rules = [{"targets": ["*.down_proj"], "pruner": "sensitivity", **joint}, OPEN | joint]
    trained = {"passes": 3, "learning_rate": 0.03, "batch_size": 4}
    reports = alone_and_together(model, tmp_path, rules, evaluate=None, reconstruct_block=trained)
    alone, together = ([x["reconstruction"] for x in r["blocks"]] for r in reports)
    for one, two in zip(alone, together, strict=True):
        assert two["after"] < two["before"]
        assert two["before"] == pytest.approx(one["before"], rel=0.2)  # other windows are held out


UNEVEN = r"a step of 6 sequences is no whole number of calibration batches of 2 for each"
NONE_LEFT = (
    r"no batch is left to hold out: {} calibration sequences are one batch of 2{}; expected calibration\.samples of {}"
)


@pytest.mark.parametrize(
    ("processes", "settings", "told"),
    [(2, ["reconstruct_block.batch_size=6"], rf"{UNEVEN} of 2 processes; expected a multiple of 4,"),
     (4, ["reconstruct_block.batch_size=6"], NONE_LEFT.format(8, " for each of 4 processes", "12 or more")),
     (4, ["reconstruct_block.batch_size=6"], rf"{UNEVEN} of 4 processes; expected a multiple of 8,"),
     (1, ["reconstruct_block.batch_size=6", "calibration.samples=2"], NONE_LEFT.format(2, "", "3 or more")),
     (2, ["calibration.samples=1"], "samples=1: 1 sequences are fewer than the 2 processes")],
)  # fmt: skip
def test_what_processes_cannot_share_or_hold_out_is_refused_before_anything_is_written(
    model, processes, settings, told, tmp_path, monkeypatch
):
    ranks = Ranks(0, processes)
    monkeypatch.setattr("compressx.pipeline.run.joined_ranks", lambda _: nullcontext(ranks))
    monkeypatch.setattr(Ranks, "broadcast", lambda _, value: value)
    path = write_recipe(model, RULES["wanda"], tmp_path)
    with pytest.raises((RecipeError, CalibrationError), match=told):
        run(path, overrides=settings)
    assert not (tmp_path / "out").exists()
    if processes == 1:  # a step is a whole number of batches of its own
        plan(path, overrides=settings[:1])


# --- processes that torchrun starts, and that end early


@pytest.mark.slow
def test_the_runs_of_a_sweep_find_one_another_each_time_and_the_first_process_tells(model, tmp_path):
    path = write_recipe(model, [MAGNITUDE], tmp_path, evaluate=None, calibration=None)
    sparsities = [0.2, 0.4]
    done = torchrun(path, f"--grid=prune.0.sparsity={','.join(map(str, sparsities))}", command="sweep")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(f"[{i}/2]") for i in (1, 2)] == [1, 1]
    reports = [json.loads((tmp_path / f"out-sweep/sparsity={s}/report.json").read_text()) for s in sparsities]
    assert [r["sparsity"] for r in reports] == pytest.approx(sparsities, abs=0.01)
    assert (tmp_path / "out-sweep/compare.csv").is_file()


STOPPING = '''
import json, os, signal, time
from pathlib import Path
from pydantic import BaseModel
from compressx import FeatureNorms, PruneResult, PrunerSpec, hookimpl, keep_masks

class Options(BaseModel):
    pass

def wait_until_listed(blocks):
    """The first process lists a block in the background, while all work on the next."""
    for _ in range(1200):
        for state in Path(os.environ["FOLDER"]).glob(".out.partial-*/state.json"):
            if len(json.loads(state.read_text())["finished"]) == blocks:
                return
        time.sleep(0.05)
    raise TimeoutError(f"{blocks} blocks were not listed within a minute")

class Stopping:
    """Wanda whose second process ends itself, or torchrun, in a block when those before it are listed."""

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def prune(self, block, patterns, stats):
        if os.environ.get("RANK") == "1" and os.environ.get("STOP") == f"itself in {block.index}":
            wait_until_listed(block.index)
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("RANK") == "1" and os.environ.get("STOP") == f"all in {block.index}":
            wait_until_listed(block.index)
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()
        scores = {n: block.linears[n].weight.abs() * stats[n].norms for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}

@hookimpl
def compressx_pruners():
    return [PrunerSpec("stopping", "for a test", Options, lambda _: Stopping(), separable=True)]
'''


def _go_on(path: Path, folder: Path) -> None:
    sys.path.insert(0, str(folder))
    run(path, plugins=load_plugins(modules=("stopping",)), resume=True)


def finished(folder: Path) -> list[str]:
    (left,) = folder.glob(".out.partial-*/state.json")
    names: list[str] = json.loads(left.read_text())["finished"]
    return names


@pytest.mark.slow
def test_a_process_that_is_killed_or_sigterm_to_torchrun_ends_all_and_they_go_on_from_the_last_finished_block(
    model, tmp_path, monkeypatch
):
    (tmp_path / "stopping.py").write_text(STOPPING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FOLDER", str(tmp_path))
    rules = [{"targets": ["*"], "pruner": "stopping", "sparsity": 0.5}]
    path = write_recipe(model, rules, tmp_path, evaluate=None)
    for block, (stop, ending) in enumerate([("itself", "SIGKILL"), ("all", "SIGTERM")], start=1):
        monkeypatch.setenv("STOP", f"{stop} in {block}")
        died = torchrun(path, "--resume", plugins=("stopping",))
        assert died.returncode != 0
        assert ending in died.stderr, died.stderr
        assert "[rank" not in died.stderr  # a traceback of another process
        assert "closed by peer" not in died.stderr
        assert "written to" not in died.stdout
        assert finished(tmp_path) == [f"model.layers.{i}" for i in range(block)]
        assert not (tmp_path / "out").exists()
    monkeypatch.delenv("STOP")
    in_two(partial(_go_on, path, tmp_path), tmp_path)
    (tmp_path / "out").rename(tmp_path / "resumed")
    in_two(partial(_go_on, path, tmp_path), tmp_path)
    for file in ("masks.safetensors", "model/model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "resumed" / file).read_bytes()
