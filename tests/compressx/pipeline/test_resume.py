"""Runs that are killed, and go on: the files are those of a run that nothing interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.saved import save_tiny

from compressx.pipeline.run import run
from compressx.plugins.manager import load_plugins
from compressx.runtime.errors import ArtifactError

RULES: list[dict[str, Any]] = [
    {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.6},
    {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5},
]
QUICK: list[dict[str, Any]] = [{"targets": [t], "pruner": "wanda", "sparsity": 0.5} for t in ("lm_head", "*")]
ALLOCATED = [{k: v for k, v in rule.items() if k != "sparsity"} for rule in RULES]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama")


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))


def recipe(model: Path, *, streaming: bool = False, allocated: bool = False, output: str = "out") -> dict[str, Any]:
    text = {"text": str(model.with_name("text.txt"))}
    whole: dict[str, Any] = {
        "model": {"path": str(model), "streaming": streaming},
        "calibration": {"dataset": text, "samples": 8, "sequence_length": 32},
        "prune": ALLOCATED if allocated else RULES,
        "evaluate": {"token_perplexity": {"dataset": text, "sequence_length": 32, "samples": 4}},
        "output": output,
    }
    if allocated:
        whole["allocation"] = {"method": "attention-aware", "target": 0.5}
    return whole


def quick(model: Path) -> dict[str, Any]:
    return {**recipe(model), "prune": QUICK, "evaluate": None}


class Stopping:
    """A plugin that stops a run after so many blocks."""

    def __init__(self, after: int) -> None:
        self.left = after

    def compressx_block_pruned(self, report: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def stopped(asked: dict[str, Any], after: int, modules: tuple[str, ...] = (), **options: Any) -> None:
    from compressx import hookimpl

    plugins = load_plugins(modules=modules)
    Stopping.compressx_block_pruned = hookimpl(Stopping.compressx_block_pruned)  # type: ignore[method-assign]
    plugins.manager.register(Stopping(after), name="stopping")
    with pytest.raises(KeyboardInterrupt):
        run(asked, plugins=plugins, **options)


def artifacts(folder: str) -> dict[str, bytes]:
    """Return every file of an output; of its reports all but what is measured by the timing."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}
    report = json.loads(found.pop("report.json"))
    del found["report.md"], found["report.html"]  # the same content for people
    for name in ("seconds", "peak_memory_bytes"):
        del report[name]
    for block in report["blocks"]:
        for timed in (block, *block["layers"]):
            del timed["seconds"]
        if block["reconstruction"] is not None:
            del block["reconstruction"]["seconds"]
    found["recipe.yaml"] = found["recipe.yaml"].replace(folder.encode(), b"out")
    return {**found, "report": json.dumps(report).encode()}


def leftovers() -> list[Path]:
    return sorted(Path().glob(".out.partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streaming", "allocated", "trained", "after"),
    [
        (False, False, False, 1),
        (False, True, True, 2),
        (False, False, False, 3),
        (True, True, False, 1),
        (True, False, True, 2),
        (True, False, False, 3),
    ],
)
def test_a_resumed_run_ends_with_the_files_of_one_that_was_not_interrupted(
    model: Path, streaming: bool, allocated: bool, trained: bool, after: int
):
    asked = recipe(model, streaming=streaming, allocated=allocated)
    if trained:
        asked |= {"reconstruct_block": {"passes": 2}}
    run({**asked, "output": "whole"})
    stopped(asked, after)
    (left,) = leftovers()
    assert json.loads((left / "state.json").read_text())["finished"] == [f"model.layers.{i}" for i in range(after)]
    assert not Path("out").exists()
    told: list[tuple[str, int, int]] = []
    run(asked, resume=True, progress=lambda *x: told.append(x[:3]))
    assert [done for stage, done, _ in told if stage == "prune"] == list(range(after, 4))
    assert all(stage != "allocate" for stage, _, _ in told)
    assert artifacts("out") == artifacts("whole")
    assert not leftovers()


@pytest.mark.slow
@pytest.mark.parametrize(
    "allocation",
    [{"method": "owl", "target": 0.55}, {"method": "uniform", "target": 0.55},
     {"method": "error", "target": 0.55, "sparsities": [0.3, 0.7]},
     {"method": "explicit", "sparsities": {"*.layers.1.*": 0.25, "*": 0.5}}],
    ids=lambda x: x["method"],
)  # fmt: skip
def test_what_an_allocation_chose_for_n_m_and_other_patterns_is_kept(model: Path, allocation: dict[str, Any]):
    patterned = [{"targets": ["*.mlp.*"], "pruner": "wanda", "pattern": "2:4"}, {"targets": ["*"], "pruner": "wanda"}]
    asked = {**recipe(model), "prune": patterned, "allocation": allocation}
    run({**asked, "output": "whole"})
    stopped(asked, 1)
    told: list[str] = []
    run(asked, resume=True, progress=lambda stage, *_: told.append(stage))
    assert "allocate" not in told
    assert artifacts("out") == artifacts("whole")
    asked["allocation"] = {"method": "uniform", "target": 0.6}
    stopped(asked, 1, restart=True)
    with pytest.raises(ArtifactError, match=r"the result differs: allocation\.target: was 0\.6, is 0\.61"):
        run({**asked, "allocation": {"method": "uniform", "target": 0.61}}, resume=True)


@pytest.mark.slow
def test_a_run_can_be_interrupted_again_and_again(model: Path):
    asked = recipe(model)
    run({**asked, "output": "whole"})
    stopped(asked, 1)
    stopped(asked, 1, resume=True)
    stopped(asked, 1, resume=True)
    run(asked, resume=True)
    assert artifacts("out") == artifacts("whole")


@pytest.mark.slow
def test_what_lies_outside_the_blocks_is_not_pruned_again(model: Path):
    asked = quick(model)
    run({**asked, "output": "whole"})
    stopped(asked, 4)
    told: list[tuple[int, int]] = []
    run(asked, resume=True, progress=lambda stage, *x: told.append(x[:2]) if stage == "prune" else None)
    assert told == [(4, 4)]
    assert artifacts("out") == artifacts("whole")


def test_hidden_states_of_the_last_finished_block_alone_are_kept(model: Path):
    stopped(quick(model), 2)
    (left,) = leftovers()
    assert [p.name for p in left.glob("blocks/states-*")] == ["states-2.0.safetensors"]


@pytest.mark.slow
def test_with_nothing_to_resume_a_run_begins(model: Path):
    run(recipe(model), resume=True)
    assert Path("out/report.json").is_file()


@pytest.mark.slow
def test_finished_blocks_are_not_thrown_away_unasked(model: Path):
    asked = recipe(model)
    stopped(asked, 2)
    with pytest.raises(ArtifactError, match=r"was interrupted.*go on with --resume, or begin anew with --restart"):
        run(asked)
    assert len(leftovers()) == 1
    run(asked, restart=True)
    assert not leftovers()
    assert Path("out/report.json").is_file()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"prune": [QUICK[0], {**QUICK[1], "sparsity": 0.6}]}, r"prune\[1\]\.sparsity: was 0\.5, is 0\.6"),
        ({"calibration": {"samples": 7}}, "calibration tokens: was"),
        ({"calibration": {"batch_size": 3}}, "calibration batch_size: was"),
        ({"model": {"dtype": "bfloat16"}}, "model: was"),
        ({"reconstruct_block": {"passes": 1}}, "reconstruct_block: was null"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_another_run_is_not_resumed_and_what_differs_is_named(model: Path, changed: dict[str, Any], named: str):
    asked = quick(model)
    stopped(asked, 1)
    other = {k: {**asked.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changed.items()}
    with pytest.raises(ArtifactError, match=f"cannot be resumed.*{named}"):
        run({**asked, **other}, resume=True)


def test_a_run_of_another_version_is_not_resumed(model: Path, monkeypatch: pytest.MonkeyPatch):
    asked = quick(model)
    stopped(asked, 1)
    plugins = load_plugins()
    records = tuple(replace(r, version="99") if "wanda" in r.offers["pruners"] else r for r in plugins.records)
    with pytest.raises(ArtifactError, match=r"cannot be resumed.*plugins\.\S+: was"):
        run(asked, plugins=replace(plugins, records=records), resume=True)
    monkeypatch.setattr("compressx.pipeline.run.__version__", "99")
    with pytest.raises(ArtifactError, match=r"cannot be resumed.*versions\.compressx: was"):
        run(asked, resume=True)


PLUGIN = """
from pydantic import BaseModel
from compressx import PruneResult, PrunerSpec, hookimpl, keep_masks

class Options(BaseModel):
    pass

class Largest:
    def observe(self, block, name):
        return None

    def prune(self, block, patterns, stats):
        scores = {n: block.linears[n].weight.abs() for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}

@hookimpl
def compressx_pruners():
    return [PrunerSpec("largest", "for a test", Options, lambda _: Largest())]
"""


def test_a_run_is_not_resumed_with_a_plugin_that_was_edited(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("edited_later.py").write_text(PLUGIN)
    asked = {**quick(model), "prune": [{"targets": ["*"], "pruner": "largest", "sparsity": 0.5}]}
    stopped(asked, 1, modules=("edited_later",))
    plugins = load_plugins(modules=("edited_later",))
    Path("edited_later.py").write_text(PLUGIN.replace(".abs()", ".abs().sqrt()"))
    with pytest.raises(ArtifactError, match=r"cannot be resumed.*plugins\.edited_later: was \"no version, code"):
        run(asked, plugins=plugins, resume=True)
    Path("edited_later.py").write_text(PLUGIN)
    run(asked, plugins=plugins, resume=True)


@pytest.mark.parametrize(("name", "was"), [("processes", 2), ("device", "tpu")])
def test_a_run_of_other_processes_or_on_another_device_is_not_resumed(model: Path, name: str, was: Any):
    asked = quick(model)
    stopped(asked, 1)
    state = leftovers()[0] / "state.json"
    told = json.loads(state.read_text())
    now = told["fingerprint"][name]
    state.write_text(json.dumps({**told, "fingerprint": {**told["fingerprint"], name: was}}))
    with pytest.raises(ArtifactError, match=rf"cannot be resumed.*{name}: was {json.dumps(was)}, is {json.dumps(now)}"):
        run(asked, resume=True)


@pytest.mark.slow
def test_a_refusal_leaves_the_run_to_be_resumed_and_what_is_evaluated_decides_nothing_of_its_result(model: Path):
    asked = {**recipe(model), "prune": QUICK}
    stopped(asked, 1)
    with pytest.raises(ArtifactError, match="cannot be resumed"):
        run({**asked, "reconstruct_block": {"passes": 1}}, resume=True)
    run({**asked, "evaluate": None}, resume=True)
    assert Path("out/report.json").is_file()


@pytest.mark.slow
def test_a_model_with_another_config_is_another_model(tmp_path: Path):
    model = save_tiny(tmp_path / "model", "llama")
    asked = recipe(model)
    stopped(asked, 1)
    config = json.loads((model / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"cannot be resumed.*model config: was"):
        run(asked, resume=True)


@pytest.mark.slow
def test_seconds_are_those_of_the_interrupted_run_too_and_nothing_half_written_stays(model: Path):
    asked = recipe(model)
    stopped(asked, 2)
    (left,) = leftovers()
    spent = json.loads((left / "state.json").read_text())["seconds"]
    (left / ".masks.safetensors.0123abcd.partial").write_text("half")
    told = json.loads((left / "state.json").read_text())
    told["seconds"] = {**spent, "prune": spent["prune"] + 1000, "total": spent["total"] + 2000}
    (left / "state.json").write_text(json.dumps(told))
    seconds = run(asked, resume=True).seconds
    assert spent["prune"] > 0
    assert seconds["prune"] > 1000 + spent["prune"]
    assert seconds["total"] > 2000 + spent["total"]
    assert seconds["load"] > spent["load"]
    assert not [*Path("out").glob(".*")]


IN_BLOCKS = ("0.json", "0.safetensors", "0.masks.safetensors")
DAMAGED = ["state.json", "blocks/states-1.0.safetensors", *(f"blocks/model.layers.{name}" for name in IN_BLOCKS)]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_record_is_named_and_not_gone_on_with(model: Path, damaged: str):
    asked = recipe(model)
    stopped(asked, 1)
    file = leftovers()[0] / damaged
    file.write_bytes(file.read_bytes()[:-20])
    told: list[str] = []
    with pytest.raises(ArtifactError, match=file.name.replace(".", r"\.")):
        run(asked, resume=True, progress=lambda stage, *_: told.append(stage))
    assert "prune" not in told, "masks that are damaged would otherwise be noticed when all blocks are done"


# --- killed


def _run(asked: dict[str, Any], resume: bool, limit: int | None) -> None:
    torch.set_num_threads(1)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        run(asked, resume=resume)
    except ArtifactError as error:
        Path("error.txt").write_text(str(error))
        os._exit(2)
    os._exit(0)


def start(asked: dict[str, Any], *, resume: bool = False, limit: int | None = None) -> Any:
    """Start a run in a process of its own, forked from one that has imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.compressx.preloaded"])
    process = context.Process(target=_run, args=(asked, resume, limit))
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_killed_at_random_moments_a_run_still_ends_with_the_same_files(model: Path, streaming: bool):
    asked = recipe(model, streaming=streaming)
    start({**asked, "output": "warm"}).join()  # the server imports what it needs
    started = time.perf_counter()
    whole = start({**asked, "output": "whole"})
    whole.join()
    assert whole.exitcode == 0
    length = time.perf_counter() - started
    choice = random.Random(0)  # noqa: S311 - moments, no secret
    kills = finished = 0
    left: list[list[str]] = []  # the blocks that a killed run had finished
    while kills < 5:
        process = start(asked, resume=True)
        process.join(choice.uniform(0.2, 1.1) * length)
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            left += [json.loads(path.read_text())["finished"] for path in Path().glob(".out.partial-*/state.json")]
        else:
            assert process.exitcode == 0
            assert artifacts("out") == artifacts("whole")
            finished += 1
    last = start(asked, resume=True)
    last.join()
    assert last.exitcode == 0
    assert artifacts("out") == artifacts("whole")
    assert any(left), "some run was killed between its first block and its end"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2_000, 40_000, 60_000, 120_000])
def test_a_full_disk_is_an_error_with_the_file_and_after_it_a_run_goes_on(model: Path, limit: int):
    """A limit on the size of files stands in: the larger it is, the later the write that fails."""
    asked = recipe(model)
    process = start(asked, limit=limit)
    process.join()
    assert process.exitcode == 2
    message = Path("error.txt").read_text()
    assert message.startswith("cannot ")
    assert not Path("out").exists()
    run({**asked, "output": "whole"})
    run(asked, resume=True)
    assert artifacts("out") == artifacts("whole")
