"""What a run is done on, and by which command, in words; and the main memory that is free."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def machine(device: torch.device) -> str:
    """Describe the system, the processor, its cores, the threads in use, the memory and the device of a run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [
        f"{platform.system()} {platform.release().partition('-')[0]}",  # a build's own suffix says nothing
        _processor(),
        f"{cores} cores, {torch.get_num_threads()} threads",
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory",
        f"device {device}" + (f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""),
    ]
    return ", ".join(part for part in parts if part)


def command() -> str:
    """Return this process's command line, its program by name only."""
    program = Path(sys.argv[0])
    name = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    return shlex.join([*name, *sys.argv[1:]])


def free_main_memory() -> int:
    """Return the main memory in bytes that is free on this machine, and within its container."""
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no cgroup v2, or the limit is "max"
        limit, used = (int((_CGROUP / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text("ascii").splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))  # inactive file cache counts as free
    return free


def _processor() -> str:
    """Name the processor; Linux has no call for it."""
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
