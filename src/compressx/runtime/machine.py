"""What a run is done on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch


def machine(device: torch.device) -> str:
    """Describe the system, the processor, its cores, the threads in use, the memory and the device of a run."""
    parts = [
        platform.platform(terse=True),
        _processor(),
        f"{_cores()} cores, {torch.get_num_threads()} threads",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory",
        f"device {device}" + (f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""),
    ]
    return ", ".join(part for part in parts if part)


def _cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """Name the processor; Linux has no call for it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
