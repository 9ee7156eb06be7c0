"""What a run takes: seconds by stage, and memory."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Timing:
    """Adds up the seconds of each stage, and of all."""

    started: float = field(default_factory=time.perf_counter)
    spent: dict[str, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)  # when each stage began that has not ended
    before: float = 0.0  # what interrupted runs took that this one goes on from

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the length of a `with` to a stage."""
        self.running[name] = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - self.running.pop(name)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add what `seconds` of an interrupted run had returned."""
        for name, spent in seconds.items():
            if name == "total":
                self.before += spent
            else:
                self.spent[name] = self.spent.get(name, 0.0) + spent

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage that a report shows, and of all until now."""
        now = time.perf_counter()
        stages = {
            name: self.spent.get(name, 0.0) + now - self.running.get(name, now)
            for name in ("load", "calibrate", "allocate", "prune", "finetune", "evaluate")
        }
        return stages | {"total": self.before + now - self.started}


def forget_peaks() -> None:
    """Begin to measure the highest memory anew, where the system can: a process may run several recipes."""
    with contextlib.suppress(OSError):  # Linux alone, and not in every container
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if _on_cuda():  # else a run on the CPU would take memory of a GPU
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """Return the process's highest resident memory since `forget_peaks`, plus that of the accelerator."""
    accelerator = torch.cuda.max_memory_allocated() if _on_cuda() else 0
    return peak_resident_bytes() + accelerator


def peak_resident_bytes() -> int:
    """Return the process's highest resident memory since `forget_peaks`."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    if sys.platform == "linux":  # getrusage would begin with what the parent process had
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _on_cuda() -> bool:
    """Whether this process has used CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
