"""Time by stage and peak memory of a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Timing:
    """Seconds of each stage. A stage lasts until the next one begins, so they add up to the total.

    Attributes:
        stage: the current one.
        since: when it began, or when its seconds were last counted; of `time.perf_counter`.
        spent: seconds by stage, in the order in which they first began.
    """

    stage: str
    since: float = field(default_factory=time.perf_counter)
    spent: dict[str, float] = field(default_factory=dict)

    def enter(self, stage: str) -> None:
        """Begin a stage, which ends the one before; the current one goes on."""
        now = time.perf_counter()
        self.add({self.stage: now - self.since})
        self.stage, self.since = stage, now

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds by stage, such as the `seconds()` of an interrupted run."""
        for name, spent in seconds.items():
            if name != "total":
                self.spent[name] = self.spent.get(name, 0.0) + spent

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage up to now, and their sum as `total`."""
        self.enter(self.stage)
        return {**self.spent, "total": sum(self.spent.values())}


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU was asked to do, so that the clock can be read; a CPU has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peaks() -> None:
    """Reset the peak memory counters where the system can, because one process may run several recipes."""
    with contextlib.suppress(OSError):  # Linux only, and not in every container
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    if _on_cuda():  # otherwise this would initialize CUDA, which takes GPU memory
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(gpu)


def peak_gpu_bytes() -> int:
    """Return the peak of the memory of tensors on GPUs since `forget_peaks`, in bytes; 0 without one."""
    return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) if _on_cuda() else 0


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
