"""`compressx plan`: memory and disk by arithmetic, and with `--time` seconds and memory by pruning one block."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.compressx.cli.commands import invoke, printed
from tests.compressx.saved import save_tiny

from compressx.pipeline import timed

PLAIN = """\
model: {path: model}
calibration: {dataset: {text: text.txt}, samples: 8, sequence_length: 32}
prune:
  - {targets: ["*"], pruner: wanda, sparsity: 0.5}
evaluate: {token_perplexity: {dataset: {text: text.txt}, sequence_length: 32}}
output: out
"""
MEASURED = """\
model: {path: model}
calibration: {dataset: {text: text.txt}, samples: 12, sequence_length: 32}
prune:
  - {targets: ["*.q_proj", "*.k_proj"], pruner: attnprune}
  - {targets: ["*"], pruner: sensitivity, group: joint}
allocation: {method: attention-aware, sparsities: [0.4, 0.6], target: 0.5, samples: 8}
reconstruct_block: {passes: 1}
finetune: {minutes: 1}
output: out
"""
UNCALIBRATED = """\
model: {path: model}
prune:
  - {targets: ["*"], pruner: mine, sparsity: 0.5}
output: out
"""
OTHERS = """
from compressx import score_pruner

@score_pruner("mine", "for a test")
def mine(weight):
    return weight.abs()
"""


@pytest.fixture(autouse=True)
def work(project: Path) -> Path:
    save_tiny(Path("model"), "llama")
    return project


def planned(recipe: str, *options: str) -> dict:
    Path("r.yaml").write_text(recipe)
    return json.loads(printed(*options, "plan", "r.yaml", "--time", "--json"))["time"]


def test_a_plan_ends_with_memory_and_disk_by_part():
    Path("r.yaml").write_text(PLAIN)
    *_, memory, disk, _ = printed("plan", "r.yaml").splitlines()
    assert memory.startswith("memory: at least ")
    assert "(weights " in memory
    assert "hidden states 0.0655 MB" in memory
    assert disk.startswith("disk: ")
    assert not Path("out").exists()


def test_time_says_the_seconds_of_each_stage_the_peak_and_what_it_leaves_out():
    Path("r.yaml").write_text(PLAIN)
    done = invoke("plan", "r.yaml", "--time")
    lines = [" ".join(x.split()) for x in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert {"load", "calibrate", "prune"} <= {line.split()[0] for line in lines if line}
    (total,) = (line for line in lines if line.startswith("about "))
    assert " on cpu, " in total
    assert " seconds a block to prune; peak of memory " in total
    assert "not measured: evaluation, writing files" in lines
    assert {p.name for p in Path().iterdir()} == {"model", "text.txt", "r.yaml"}


def test_gradients_an_allocation_and_the_training_of_blocks_are_timed():
    found = planned(MEASURED)
    assert all(found["seconds"][stage] > 0 for stage in ("load", "calibrate", "allocate", "prune"))
    assert found["total_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["blocks"] == 3
    assert found["peak_memory_bytes"] > 1e7
    assert found["left_out"] == ["fine-tuning (1 minutes)", "writing files"]


def test_a_third_partys_pruner_is_timed_by_the_same_code_without_calibration():
    Path("others.py").write_text(OTHERS)
    found = planned(UNCALIBRATED, "--plugin", "others")
    assert found["blocks"] == 3
    assert found["seconds"]["prune"] > 0


def test_one_early_block_of_each_kind_is_pruned_and_counts_as_often_as_there_are_alike(monkeypatch):
    """Dense blocks stand before it: nothing else is pruned."""
    dense, seen = load_file("model/model.safetensors"), []

    def prune_model(access, *given, **more):
        for pruned in timed_one(access, *given, **more):
            held, fqn = access.model.state_dict(), pruned.report.fqn
            seen.append(fqn)
            assert all(torch.equal(held[n], x) for n, x in dense.items() if not n.startswith((*seen,)))
            yield replace(pruned, report=replace(pruned.report, seconds=1.0))

    timed_one = timed.prune_model
    monkeypatch.setattr(timed, "prune_model", prune_model)
    assert planned(PLAIN)["seconds"]["prune"] == 3.0
    assert seen == ["model.layers.2"]
    seen.clear()
    rules = '  - {targets: ["*.layers.0.*"], pruner: magnitude, sparsity: 0.5}\n'
    assert planned(PLAIN.replace("prune:\n", f"prune:\n{rules}"))["seconds"]["prune"] == 3.0
    assert seen == ["model.layers.0", "model.layers.2"]


def test_an_allocation_takes_as_long_as_all_of_its_blocks(monkeypatch):
    tick = itertools.count()
    monkeypatch.setattr(timed, "time", SimpleNamespace(perf_counter=lambda: float(next(tick))))  # a second later
    assert planned(MEASURED)["seconds"]["allocate"] == 3.0


def test_linears_outside_the_blocks_are_pruned_too_and_dropped_blocks_are_not():
    outside = PLAIN.replace('["*"]', '["*", "lm_head"]')
    assert planned(outside)["blocks"] == 4
    depth = 'prune:\n  - {targets: ["*.layers.*"], pruner: depth, pattern: blocks, sparsity: 0.34}\n'
    dropped = planned(PLAIN.replace("prune:\n", depth))
    assert "the choice of whole blocks" in dropped["left_out"]
