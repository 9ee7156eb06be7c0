"""What a run takes: seconds by stage, and memory."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Clock:
    """Adds up the seconds of each stage."""

    started: float = field(default_factory=time.perf_counter)
    spent: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the length of a `with` to a stage."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begun

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage that a report shows, and of all until now."""
        stages = {
            name: self.spent.get(name, 0.0)
            for name in ("load", "calibrate", "allocate", "prune", "finetune", "evaluate")
        }
        return stages | {"total": time.perf_counter() - self.started}


def forget_peaks() -> None:
    """Begin to measure the highest memory anew, where the system can: a process may run several recipes."""
    with contextlib.suppress(OSError):  # Linux alone, and not in every container
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """Return the process's highest resident memory since `forget_peaks`, plus that of the accelerator."""
    accelerator = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return peak_resident_bytes() + accelerator


def peak_resident_bytes() -> int:
    """Return the process's highest resident memory since `forget_peaks`."""
    import resource

    if sys.platform == "linux":  # getrusage would begin with what the parent process had
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
