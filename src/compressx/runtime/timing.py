"""Time by stage and peak memory of a run."""

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
    """Seconds of each stage, and in total."""

    started: float = field(default_factory=time.perf_counter)
    spent: dict[str, float] = field(default_factory=dict)
    running: dict[str, float] = field(default_factory=dict)  # start times of the stages in progress
    before: float = 0.0  # total of the interrupted runs that this one resumes

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the duration of a `with` to a stage."""
        self.running[name] = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - self.running.pop(name)

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the `seconds()` of an interrupted run."""
        for name, spent in seconds.items():
            if name == "total":
                self.before += spent
            else:
                self.spent[name] = self.spent.get(name, 0.0) + spent

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each reported stage, and `total`, up to now."""
        now = time.perf_counter()
        stages = {
            name: self.spent.get(name, 0.0) + now - self.running.get(name, now)
            for name in ("load", "calibrate", "allocate", "prune", "finetune", "evaluate")
        }
        return stages | {"total": self.before + now - self.started}


def forget_peaks() -> None:
    """Reset the peak memory counters where the system can, because one process may run several recipes."""
    with contextlib.suppress(OSError):  # Linux only, and not in every container
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if _on_cuda():  # otherwise this would initialize CUDA, which takes GPU memory
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """Return the peak resident memory since `forget_peaks`, plus the accelerator's, in bytes."""
    accelerator = torch.cuda.max_memory_allocated() if _on_cuda() else 0
    return peak_resident_bytes() + accelerator


def peak_resident_bytes() -> int:
    """Return the peak resident memory since `forget_peaks`, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    if sys.platform == "linux":  # getrusage would include the peak of the parent process
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _on_cuda() -> bool:
    """Return whether this process has initialized CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
