"""What a run's report says of its time and memory."""

from __future__ import annotations

import os

import pytest
import torch
from tests.accelerator import pretended_accelerator

from compressx.runtime.timing import Timing, forget_peaks, peak_gpu_bytes, peak_resident_bytes


def test_a_stage_lasts_until_the_next_one_so_seconds_add_up_to_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    timing = Timing("load", now)
    timing.add({"load": 100.0, "prune": 50.0, "total": 150.0})  # of an interrupted run
    for stage, spent in (("load", 1), ("prune", 2), ("prune", 4), ("save", 8), ("load", 16)):
        timing.enter(stage)
        now += spent
    expected = {"load": 117.0, "prune": 56.0, "save": 8.0, "total": 181.0}
    assert timing.seconds() == expected == timing.seconds()


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks cannot be forgotten here")
def test_a_peak_is_forgotten_since_a_process_may_run_several_recipes() -> None:
    held = torch.ones(64 * 2**20)  # 256 MiB
    before = peak_resident_bytes()
    del held
    forget_peaks()
    assert peak_resident_bytes() < before - 128 * 2**20


def test_the_peak_of_a_gpu_is_that_of_its_tensors_since_the_last_one_was_forgotten() -> None:
    with pretended_accelerator():
        held = torch.ones(3000, device="cuda")
        assert peak_gpu_bytes() == 12_000
        del held
        forget_peaks()
        assert peak_gpu_bytes() == 0


def test_peaks_of_several_gpus_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda gpu: 10**gpu)
    assert peak_gpu_bytes() == 111
