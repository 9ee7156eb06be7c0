"""What `compressx plan` tells about costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.compressx.cli.commands import printed, refused
from tests.compressx.saved import save_tiny

RECIPE = """\
model: {path: model}
calibration: {dataset: {text: text.txt}, samples: 8, sequence_length: 32}
prune:
  - {targets: ["*.q_proj", "*.k_proj"], pruner: attnprune, sparsity: 0.5}
  - {targets: ["*"], pruner: wanda, reconstruct: sparsegpt, sparsity: 0.5}
evaluate: {token_perplexity: {dataset: {text: text.txt}, sequence_length: 32}}
output: out
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny(Path("model"), "llama")
    Path("r.yaml").write_text(RECIPE)


def test_a_plan_ends_with_seconds_memory_disk_and_what_is_left_out():
    shown = printed("plan", "r.yaml", "--assume", "cpu:250GF,20GB/s")
    *_, total, memory, disk, missing, _ = shown.strip().splitlines()
    assert total.startswith("about ")
    assert total.endswith(" on a processor with 250 GFLOP/s and 20 GB/s")
    assert memory.startswith("memory ")
    assert "(interpreter " in memory
    assert disk.startswith("disk ")
    assert missing.startswith("not estimated, and not in the sums: evaluate.token_perplexity without samples")
    stages = [line.split("  ")[0].strip() for line in shown.splitlines()]
    assert [s for s in stages if s.startswith("prune: ")] == [
        "prune: passes and statistics", "prune: attnprune", "prune: wanda", "prune: sparsegpt",
    ]  # fmt: skip


def test_a_gpu_has_memory_of_its_own_beside_the_hosts():
    shown = printed("plan", "r.yaml", "--assume", "h100")
    assert "on one H100 (SXM)" in shown
    assert "GPU's memory " in shown
    assert "host's memory " in shown


def test_as_json_the_plan_has_the_estimate_of_the_machine_that_is_assumed():
    found = json.loads(printed("plan", "r.yaml", "--json", "--assume", "cpu:1TF,1GB/s"))
    assert len(found["linears"]) == 21
    assert found["estimate"]["rates"]["float32"] == 1e12
    assert found["estimate"]["stages"][0]["name"] == "load"


@pytest.mark.slow
def test_without_a_machine_this_one_is_measured():
    found = json.loads(printed("plan", "r.yaml", "--json"))["estimate"]
    assert found["machine"].startswith("this machine")
    assert found["rates"]["float32"] > 1e8


def test_for_several_processes_a_plan_says_what_they_exchange():
    shown = printed("plan", "r.yaml", "--assume", "cpu:250GF,20GB/s", "--processes", "2").splitlines()
    (total,) = (line for line in shown if line.startswith("about "))
    assert total.endswith(" on a processor with 250 GFLOP/s and 20 GB/s, by 2 processes")
    assert any(line.startswith("memory of each process ") for line in shown)
    whole, block = (line for line in shown if line.startswith("exchanged"))
    assert whole.startswith("exchanged ")
    for what in ("statistics", "states", "masks", "weights"):
        assert what in whole
        assert what in block
    assert "the time that processes take to exchange" in shown[-2]
    alone = json.loads(printed("plan", "r.yaml", "--json", "--assume", "h100"))["estimate"]
    told = json.loads(printed("plan", "r.yaml", "--json", "--assume", "h100", "--processes", "2"))["estimate"]
    assert (alone["processes"], alone["exchanged_bytes"]) == (1, {})
    assert told["processes"] == 2
    assert told["exchanged_bytes"]["masks"] == 3 * told["exchanged_bytes_of_a_block"]["masks"] > 0


def test_processes_that_cannot_share_the_text_are_refused():
    told = refused("plan", "r.yaml", "--processes", "9")
    assert "8 calibration windows are fewer than the 9 processes" in told


def test_a_machine_that_nobody_knows_is_refused():
    told = refused("plan", "r.yaml", "--assume", "h200")
    assert "--assume h200: expected h100, a100, 4090, or a processor" in told
