"""What a run's report says of its time and memory."""

from __future__ import annotations

import os

import pytest
import torch

from compressx.runtime.timing import forget_peaks, peak_memory_bytes


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="peaks cannot be forgotten here")
def test_a_peak_is_forgotten_since_a_process_may_run_several_recipes() -> None:
    held = torch.ones(64 * 2**20)  # 256 MiB
    before = peak_memory_bytes()
    del held
    forget_peaks()
    assert peak_memory_bytes() < before - 128 * 2**20
