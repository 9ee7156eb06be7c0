"""Runs that are killed, and go on: the files are those of a run that nothing interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.depths import THIRD
from tests.compressx.pipeline.runs import (
    MAGNITUDE,
    MIXED,
    TASKS,
    artifacts,
    leftovers,
    recipe,
    same,
    stopped,
    stopped_at,
    weights,
)
from tests.compressx.saved import save_tiny

from compressx.api.record import RunReport
from compressx.pipeline.run import run
from compressx.plugins.manager import load_plugins
from compressx.report import figures
from compressx.runtime.errors import ArtifactError
from compressx.training import finetune

RULES: list[dict[str, Any]] = [
    {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.6},
    {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5},
]
SENSITIVE: dict[str, Any] = {"targets": ["*"], "pruner": "sensitivity", "sparsity": 0.5}
WANDA: dict[str, Any] = {"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}
OPEN: dict[str, Any] = {"targets": ["*"], "pruner": "wanda"}
QUICK: list[dict[str, Any]] = [WANDA | {"targets": [target]} for target in ("lm_head", "*")]


@pytest.fixture
def quick(model: Path) -> dict[str, Any]:
    return recipe(model, *QUICK)


UP = WANDA | {"targets": ["*.up_proj"]}
NEURONS, HEADS, EXPERTS = (WANDA | {"pattern": x} for x in ("neurons", "kv-groups", "experts"))
RUNS: dict[str, tuple[str, int, bool, tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "dense states and sensitivities": ("llama", 1, False, (SENSITIVE,), {"reconstruct_block": {"passes": 1}}),
    "the same, streamed": ("llama", 1, True, (SENSITIVE,), {"reconstruct_block": {"passes": 1}}),
    "several pruners": ("llama", 2, True, MIXED, {}),
    "one block": ("llama-tied", 1, True, (WANDA | {"targets": ["*.1.*"], "pruner": "sparsegpt"},), {}),
    "2:4": ("gpt2", 2, True, (OPEN | {"pattern": "2:4"},), {}),
    "head": ("mixtral", 1, True, (WANDA | {"targets": ["lm_head"], "pruner": "sparsegpt"},), {}),
    "attnprune": ("llama", 2, False, tuple({k: v for k, v in rule.items() if k != "sparsity"} for rule in RULES),
                  {"allocation": {"method": "attention-aware", "target": 0.5}}),
    "allocation": ("llama", 1, True, (OPEN | {"group": "layer"},),
                   {"allocation": {"method": "attention-aware", "target": 0.5}}),
    "N:M and other patterns": ("llama", 1, False, (OPEN | {"targets": ["*.mlp.*"], "pattern": "2:4"}, OPEN),
                               {"allocation": {"method": "owl", "target": 0.55}}),
    "harness": ("llama", 1, True, (WANDA,), {"evaluate": TASKS}),
    "dropped block": ("llama", 2, False, (THIRD, UP), {}),
    "shrunk": ("llama", 2, False, (NEURONS, HEADS), {"shrink": True}),
    "dropped block, shrunk": ("llama", 2, True, (THIRD, NEURONS), {"shrink": True}),
    "experts": ("mixtral", 2, False, (EXPERTS | {"pruner": "reap"},), {"shrink": True}),
    "experts, streamed": ("mixtral", 1, True, (EXPERTS | {"pruner": "reap"},), {"shrink": True}),
    "widths of their own": ("llama", 1, False, tuple(OPEN | {"pattern": x} for x in ("neurons", "kv-groups")),
                            {"allocation": {"method": "attention-aware", "target": 0.4}}),
}  # fmt: skip
"""By what is kept or streamed: the model, after how many blocks the run is stopped, whether it is streamed, its rules,
and further sections."""
SLOW = {"the same, streamed", "several pruners", "one block", "2:4", "head", "attnprune", "N:M and other patterns",
        "harness", "experts, streamed"}  # fmt: skip


@pytest.mark.parametrize("about", [pytest.param(x, marks=[pytest.mark.slow] * (x in SLOW)) for x in RUNS])
def test_an_interrupted_run_in_memory_or_streamed_ends_with_the_files_of_a_whole_one_in_memory(about, models):
    architecture, after, streaming, rules, sections = RUNS[about]
    asked = recipe(models(architecture), *rules, evaluated=True) | sections
    whole = run({**asked, "output": "whole"})
    asked["model"] |= {"streaming": True} if streaming else {}
    state = json.loads((stopped(asked, after) / "state.json").read_text())
    assert state["finished"] == [block.fqn for block in whole.blocks][:after]
    assert len(state["scores"]) == (3 if "dropped" in about else 0)
    assert not Path("out").exists()
    told: list[tuple[str, int, str]] = []
    report = run(asked, resume=True, progress=lambda stage, done, _, note: told.append((stage, done, note)))
    assert [done for stage, done, _ in told if stage == "prune"] == list(range(after, len(whole.blocks) + 1))
    assert all(stage != "allocate" and note != "blocks scored" for stage, _, note in told)
    assert about == "harness" or report.evaluation["pruned"] != report.evaluation["dense"]
    assert not leftovers()
    if streaming:
        same_but_for_shards(report, whole)
    else:
        assert artifacts("out") == artifacts("whole")


def same_but_for_shards(streamed: RunReport, whole: RunReport) -> None:
    """Check that a streamed run ended with the bits of one in memory, in a file of weights for each block."""
    for name in ("masks.safetensors", "plan.json", "units.json", "model/config.json", "model/generation_config.json"):
        mine, other = Path("out", name), Path("whole", name)
        assert mine.exists() == other.exists() == (name != "units.json" or bool(whole.shrink))
        assert not mine.exists() or mine.read_bytes() == other.read_bytes(), name
    assert same(weights("out/model"), weights("whole/model"))
    assert streamed.allocation == whole.allocation
    for stage, measured in whole.evaluation.items():
        one, other = (x["python_docs"]["acc"] if "python_docs" in x else x["token_perplexity"]
                      for x in (measured, streamed.evaluation[stage]))  # fmt: skip
        assert one == pytest.approx(other)
    assert all(Path("out/model", name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    assert not [*Path("out").glob("blocks*")]
    if not whole.shrink:
        shards = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
        assert sorted(p.name for p in Path("out/model").glob("*.safetensors")) == shards


@pytest.mark.parametrize(
    ("method", "streaming", "left"),
    [("divergence", False, 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in (
        ("attention-aware", True, 1), ("owl", False, 3)))],
)  # fmt: skip
def test_what_an_allocation_has_measured_is_not_measured_again(method, streaming, left, model, monkeypatch):
    asked = recipe(
        model, *(OPEN | {"pruner": p, "targets": [t]} for p, t in (("sparsegpt", "*.mlp.*"), ("wanda", "*")))
    )
    asked |= {"allocation": {"method": method, "target": 0.5}, "model": {**asked["model"], "streaming": streaming}}
    state = json.loads((stopped_at(asked, "allocate", left) / "state.json").read_text())
    assert {name.split(".")[2] for name in state["measured"]} == {str(i) for i in range(left)}
    told: list[int] = []
    run(asked, resume=True, progress=lambda stage, done, *_: told.append(done) if stage == "allocate" else None)
    assert min([done for done in told if done], default=left) >= left
    monkeypatch.setenv("COMPRESSX_CACHE", str(Path("another").absolute()))  # or what is remembered there were read
    run({**asked, "output": "whole"})
    assert artifacts("out") == artifacts("whole")


@pytest.mark.parametrize(
    ("stage", "step", "kept"),
    [("load", 0, ""), ("allocate", 1, "measurements of 1 unit for the allocation"),
     ("prune", 0, "the choice of blocks or sparsities"), ("save", 0, "3 finished blocks")],
)  # fmt: skip
def test_an_interruption_says_what_is_kept_and_no_more(stage, step, kept, model):
    asked = recipe(model, OPEN, allocation={"method": "divergence", "target": 0.5})

    def progress(name: str, done: int, *_: Any) -> None:
        if (name, done) == (stage, step):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped_here:
        run(asked, progress=progress)
    assert stopped_here.value.__notes__ == [kept]
    assert bool([p for p in leftovers() if (p / "state.json").exists()]) == bool(kept)


@pytest.mark.slow
def test_figures_of_a_resumed_run_are_those_of_one_that_was_not_interrupted(model, drawn):
    asked = recipe(model, *RULES)
    run({**asked, "output": "whole"})
    stopped(asked, 2)
    run(asked, resume=True)
    assert artifacts("out") == artifacts("whole")
    assert len([*Path("out/plots").iterdir()]) > 3


def test_a_run_can_be_interrupted_again_and_again_and_its_blocks_are_not_thrown_away_unasked(quick):
    """It keeps the states of its last block; what lies outside the blocks is not pruned again."""
    run({**quick, "output": "whole"}, resume=True)  # there is nothing to resume
    for block in (1, 2, 3):
        left = stopped(quick, 1, resume=True)
        assert [p.name for p in left.glob("blocks/states-*")] == [f"states-{block}.0.safetensors"]
        with pytest.raises(
            ArtifactError, match=r"was interrupted.*continue with --resume, or start over with --restart"
        ):
            run(quick)
    stopped(quick, 1, resume=True)
    told: list[int] = []
    run(quick, resume=True, progress=lambda stage, done, *_: stage == "prune" and told.append(done))
    assert told == [4]
    assert artifacts("out") == artifacts("whole")
    stopped(quick, 2, restart=True)
    run(quick, restart=True)
    assert not leftovers()


CHANGED: list[tuple[dict[str, Any], str]] = [
    ({"prune": [QUICK[0], {**QUICK[1], "sparsity": 0.6}]}, r"prune\[1\]\.sparsity: was 0\.5, is 0\.6"),
    ({"calibration": {"seed": 1}}, "calibration tokens: was"),
    ({"calibration": {"batch_size": 3}}, "calibration batch_size: was"),
    ({"model": {"dtype": "bfloat16"}}, "model: was"),
    ({"reconstruct_block": {"passes": 1}}, "reconstruct_block: was null"),
    ({"ignore": ["*.o_proj"]}, "ignore: was null"),
]
OTHERS = (("processes", 2), ("device", "tpu"), ("versions.compressx", "99"), ("plugins.wanda", "99"))


def test_another_run_is_not_resumed_and_what_differs_is_named(model, quick):
    """A refusal leaves the run, and what is evaluated decides nothing of it."""
    state = stopped(quick, 1) / "state.json"
    for changed, named in CHANGED:
        other = {k: {**quick.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changed.items()}
        with pytest.raises(ArtifactError, match=f"cannot be resumed.*{named}"):
            run({**quick, **other}, resume=True)
    whole = state.read_text()
    for name, was in OTHERS:
        told = json.loads(whole)
        *above, key = name.split(".")
        changed = told["fingerprint"][above[0]] if above else told["fingerprint"]
        change = f"{name}: was {json.dumps(was)}, is {json.dumps(changed[key])}"
        changed[key] = was
        state.write_text(json.dumps(told))
        with pytest.raises(ArtifactError, match=f"cannot be resumed.*{re.escape(change)}"):
            run(quick, resume=True)
    state.write_text(whole)
    run({**quick, "evaluate": recipe(model, evaluated=True)["evaluate"]}, resume=True)
    assert Path("out/report.json").is_file()


def test_fine_tuning_may_be_added_to_an_interrupted_run_and_taken_out(model):
    """Also where nothing else multiplies matrices, so that there is a compute_dtype only with it."""
    plain = recipe(model, MAGNITUDE)
    tuned = {**plain, "finetune": {"steps": 1, "batch_size": 2, "gradient_checkpointing": False}}
    for before, after in ((plain, tuned), (tuned, plain)):
        stopped(before, 2)
        assert (run(after, resume=True).finetune is None) == (after is plain)
        shutil.rmtree("out")


PLUGIN = """
from pydantic import BaseModel
from compressx import PruneResult, PrunerSpec, hookimpl, keep_masks

class Options(BaseModel): pass

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


def test_a_run_is_not_resumed_with_a_plugin_that_was_edited(model, monkeypatch):
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("edited_later.py").write_text(PLUGIN)
    asked = recipe(model, WANDA | {"pruner": "largest"})
    stopped(asked, 1, modules=("edited_later",))
    plugins = load_plugins(modules=("edited_later",))
    Path("edited_later.py").write_text(PLUGIN.replace(".abs()", ".abs().sqrt()"))
    with pytest.raises(ArtifactError, match=r"cannot be resumed.*plugins\.edited_later: was \"no version, code"):
        run(asked, plugins=plugins, resume=True)
    Path("edited_later.py").write_text(PLUGIN)
    run(asked, plugins=plugins, resume=True)


def test_a_model_with_another_config_is_another_model(tmp_path):
    asked = recipe(save_tiny(tmp_path / "model", "llama"), *QUICK)
    stopped(asked, 1)
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ArtifactError, match=r"cannot be resumed.*model config: was"):
        run(asked, resume=True)


def test_seconds_are_those_of_the_interrupted_run_too_and_nothing_half_written_stays(quick):
    left = stopped(quick, 2)
    told = json.loads((left / "state.json").read_text())
    spent = dict(told["seconds"])
    told["seconds"]["prune"] += 1000
    (left / "state.json").write_text(json.dumps(told))
    (left / ".masks.safetensors.0123abcd.partial").write_text("half")
    seconds = run(quick, resume=True).seconds
    assert seconds["prune"] > 1000 + spent["prune"] > 1000
    assert seconds["total"] > 1000 + spent["total"]
    assert seconds["load"] > spent["load"]
    assert not [*Path("out").glob(".*")]


IN_BLOCKS = ("0.json", "0.safetensors", "0.masks.safetensors")
DAMAGED = ["state.json", "blocks/states-1.0.safetensors", *(f"blocks/model.layers.{name}" for name in IN_BLOCKS)]


def test_a_damaged_record_is_named_and_not_gone_on_with(quick):
    left = stopped(quick, 1)
    told: list[str] = []
    for damaged in DAMAGED:
        whole = (left / damaged).read_bytes()
        (left / damaged).write_bytes(whole[:-20])
        with pytest.raises(ArtifactError, match=re.escape(Path(damaged).name)):
            run(quick, resume=True, progress=lambda stage, *_: told.append(stage))
        assert "prune" not in told, "masks that are damaged would otherwise be noticed when all blocks are done"
        (left / damaged).write_bytes(whole)


# --- killed


def _run(asked: dict[str, Any], resume: bool, limit: int | None) -> None:
    torch.set_num_threads(1)
    figures.draw = lambda *_: ()
    finetune.CHECKPOINT_EVERY = 2
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
    context.set_forkserver_preload(["compressx.pipeline.run", "transformers.models.llama.modeling_llama"])
    process = context.Process(target=_run, args=(asked, resume, limit))
    process.start()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True], ids=["fine-tuned", "streamed"])
def test_killed_at_random_moments_a_run_still_ends_with_the_same_files(model, streaming):
    asked = recipe(model, *RULES)
    asked["model"]["streaming"] = streaming
    if not streaming:
        asked["finetune"] = {"steps": 8, "batch_size": 2}
        asked["compute_dtype"] = "float32"  # each process measures the machine for itself
    start({**asked, "output": "warm"}).join()  # the server imports what it needs
    started = time.perf_counter()
    whole = start({**asked, "output": "whole"})
    whole.join()
    assert whole.exitcode == 0
    length = time.perf_counter() - started
    choice = random.Random(0)  # noqa: S311 - moments, no secret
    kills = 0
    left: list[list[str]] = []  # the blocks that a killed run had finished
    while kills < 4 or not any(left):  # some between the first block and the end
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
            shutil.rmtree("out")  # there would be nothing to resume
    last = start(asked, resume=True)
    last.join()
    assert last.exitcode == 0
    assert artifacts("out") == artifacts("whole")


def test_a_run_that_was_killed_when_its_output_was_there_leaves_nothing_once_it_is_resumed(quick) -> None:
    run(quick)
    before = artifacts("out")
    Path("out/blocks").mkdir()
    Path("out/blocks/model.layers.0.json").write_text("{}")
    Path("out/state.json").write_text("{}")
    run(quick, resume=True)
    assert artifacts("out") == before


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2_000, 60_000])
def test_a_full_disk_is_an_error_with_the_file_and_after_it_a_run_goes_on(quick, limit):
    """A limit on the size of files stands in: the larger it is, the later the write that fails."""
    process = start(quick, limit=limit)
    process.join()
    assert process.exitcode == 2
    assert Path("error.txt").read_text().removeprefix("<dict>:model: ").startswith("cannot ")  # which is tried first
    assert not Path("out").exists()
    run(quick, resume=True)
    run({**quick, "output": "whole"})
    assert artifacts("out") == artifacts("whole")
