"""`--processes`: one command, several processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.compressx.cli.commands import invoke, refused

from compressx.masks.maskset import MaskSet

# Batches of 2, so that one process and four of them make the same ones: larger products are summed in other orders.
RECIPE = """\
model: {path: model}
calibration: {dataset: {text: text.txt}, samples: 8, sequence_length: 32, batch_size: 2}
prune:
  - {targets: ["*"], pruner: PRUNER, sparsity: 0.5}
output: out
"""
WAITING = '''
import os, signal, time
from pathlib import Path
from pydantic import BaseModel
from compressx import FeatureNorms, PruneResult, PrunerSpec, hookimpl, keep_masks

class Options(BaseModel):
    pass

class Waiting:
    """Wanda whose last process ends itself in the second block, or waits there."""

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def prune(self, block, patterns, stats):
        if block.index == 1 and os.environ["RANK"] == "1" and os.environ["ENDS"] == "itself":
            for _ in range(1200):  # the first process writes it in the background
                if list(Path().glob(".out.partial-*/state.json")):
                    break
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if block.index == 1 and os.environ["ENDS"] == "never":
            Path("waiting").touch()
            time.sleep(100)
        scores = {n: block.linears[n].weight.abs() * stats[n].norms for n in patterns}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}

@hookimpl
def compressx_pruners():
    return [PrunerSpec("waiting", "for a test", Options, lambda _: Waiting(), separable=True)]
'''


@pytest.fixture
def work(saved: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for source in saved.iterdir():
        (project / source.name).symlink_to(source)
    (project / "r.yaml").write_text(RECIPE.replace("PRUNER", "sparsegpt"))
    (project / "waiting.py").write_text(WAITING)
    for name in ("OMP_NUM_THREADS", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return project


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "compressx", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=os.environ | environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.slow
def test_four_processes_write_the_masks_of_one_and_print_once(work: Path) -> None:
    assert invoke("run", "r.yaml", "--set", "output=one", "-q").exit_code == 0
    process = start("run", "r.yaml", "--processes", "4")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert out.count("written to out") == 1
    one, four = MaskSet.load("one/masks.safetensors"), MaskSet.load("out/masks.safetensors")
    assert set(one) == set(four)
    assert all(torch.equal(one[name].keep, four[name].keep) for name in one)


@pytest.mark.slow
def test_a_mistake_is_told_once_and_its_status_returned(work: Path) -> None:
    process = start("run", "r.yaml", "--processes", "2", "--set", "prune.0.pruner=sparsegtp")
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert errors.count("did you mean 'sparsegpt'?") == 1
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_process_that_is_killed_ends_all_within_seconds_and_the_run_can_be_resumed(work: Path) -> None:
    (work / "r.yaml").write_text(RECIPE.replace("PRUNER", "waiting"))
    process = start("--plugin", "waiting", "run", "r.yaml", "--processes", "2", ENDS="itself")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert "error: process 1 was ended by SIGKILL, so all ended" in errors
    assert "Traceback" not in errors
    assert "written to" not in out
    assert len(list(work.glob(".out.partial-*/state.json"))) == 1
    process = start("--plugin", "waiting", "run", "r.yaml", "--processes", "2", "--resume", ENDS="by itself")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "resumed after model.layers.0" in errors
    assert "written to out" in out


@pytest.mark.slow
def test_ctrl_c_ends_all_processes(work: Path) -> None:
    (work / "r.yaml").write_text(RECIPE.replace("PRUNER", "waiting"))
    process = start("--plugin", "waiting", "run", "r.yaml", "--processes", "2", ENDS="never")
    deadline = time.monotonic() + 200
    while not (work / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    asked = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - asked < 40
    assert process.returncode == 130, errors
    assert "interrupted; what was finished is kept, and --resume continues" in errors


@pytest.mark.parametrize(
    ("processes", "device", "gpus", "told"),
    [
        ("0", "cpu", 0, "'0' is no number of processes; expected 1, 2, ... or all, one for each GPU"),
        ("many", "cpu", 0, "'many' is no number of processes"),
        ("all", "cuda", 0, "all starts one for each GPU, and there is none"),
        ("all", "cpu", 2, "all starts one for each GPU, and there is none"),
        ("2", "cuda:1", 2, "--device cuda:1 is one GPU, and every process needs its own"),
        ("3", "cuda", 2, "3: every process needs its own GPU, and there are 2"),
        ("2", "under torchrun", 0, "torchrun excludes it"),
    ],
)
def test_a_number_that_cannot_be_is_refused(
    processes: str, device: str, gpus: int, told: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr("compressx.models.access.device_for", torch.device)
    if device == "under torchrun":
        monkeypatch.setenv("RANK", "0")
        device = "cpu"
    assert f"--processes: {told}" in refused("run", "r.yaml", "--device", device, "--processes", processes)


def test_all_starts_one_process_for_each_gpu(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("compressx.models.access.device_for", torch.device)
    monkeypatch.setattr("compressx.cli.launch.launch", lambda *given: started.append(given) or 0)
    assert invoke("run", "r.yaml", "--device", "cuda", "--processes", "all").exit_code == 0
    assert invoke("sweep", "r.yaml", "--grid", "a=1", "--device", "cuda", "--processes", "2").exit_code == 0
    assert started == [
        (8, "what was finished is kept, and --resume continues"),
        (2, "what was finished is kept, and the same command continues"),  # it has no --resume
    ]


def test_one_process_is_not_started_anew(work: Path) -> None:
    assert invoke("run", "r.yaml", "--processes", "1", "-q").exit_code == 0
    assert (work / "out/report.json").is_file()
