"""What a run is done on, and by which command, in words; and how fast it multiplies matrices and copies memory."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch.nn import functional

from compressx.runtime.timing import synchronize

_CGROUP = Path("/sys/fs/cgroup")


def machine(device: torch.device) -> str:
    """Describe the system, the processor, its cores, the threads in use, the memory and the device of a run."""
    parts = [
        f"{platform.system()} {platform.release().partition('-')[0]}",  # a build's own suffix says nothing
        _processor(),
        f"{_cores()} cores, {torch.get_num_threads()} threads",
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
    return int(min([psutil.virtual_memory().available, *_left_by_cgroup()]))


def _left_by_cgroup() -> list[int]:
    """Return the memory left under a container's limit, if there is one; inactive file cache counts as free."""
    with suppress(OSError, ValueError):  # no cgroup v2, or the limit is "max"
        limit, used = (int((_CGROUP / f"memory.{name}").read_text("ascii")) for name in ("max", "current"))
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text("ascii").splitlines())
        return [limit - used + int(stat["inactive_file"])]
    return []


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


_NAMES = ("float32", "bfloat16", "float16")

_WIDTH = 1024
"""Input and output features of the measured product: those of a small model's linear."""

_ROWS = (64, 2**14)
"""Least and most rows of the measured product."""

_LONG_ENOUGH = 2e-3
"""Seconds of one measured product: a thousand readings of the clock."""

_ROUNDS = 20
_BUDGET = 0.5
"""Rounds of all operations, and the seconds after which no further round begins."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second at its best.

    Attributes:
        products: FLOP/s of a matrix product by the name of its factors' dtype, `float32`, `bfloat16` and `float16`.
            A multiplication and an addition are two operations. On the CPU, the rate of one thread times the number of
            torch's threads.
    """

    products: Mapping[str, float]

    def of(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of products of a dtype; 0 if the device cannot multiply it."""
        return self.products.get(name_of(dtype), 0.0)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in recipes and reports, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def rates(device: torch.device) -> Rates:
    """Measure a device's rates, in about a second; once a process.

    All operations are repeated in turn and the best time of each counts, because other processes only make them slower.
    A CPU is measured with one thread, by the time that it runs: on a busy machine most of a second is other processes'.
    """
    one = _measured(device)
    threads = 1 if device.type == "cuda" else torch.get_num_threads()
    return Rates({name: rate * threads for name, rate in one.products.items()})


@functools.cache
def _measured(device: torch.device) -> Rates:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(device)
    finally:
        torch.set_num_threads(threads)


def _measure(device: torch.device) -> Rates:
    operations = {name: timed for name in _NAMES if (timed := _product(device, name)) is not None}
    clock = _clock(device)
    started = clock()
    for _ in range(_ROUNDS):
        for operation in operations.values():
            operation.run()
        if clock() - started > _BUDGET:
            break
    return Rates({name: operation.rate for name, operation in operations.items()})


def _clock(device: torch.device) -> Callable[[], float]:
    """Return what tells the seconds of a device, or those that this thread has run on the CPU."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


class _Timed:
    """An operation and its shortest time.

    Attributes:
        rate: what it does, in units of `work`, in a second of its fastest run.
    """

    def __init__(self, operation: Callable[[], object], work: float, device: torch.device) -> None:
        self.operation, self.work, self.device, self.clock = operation, work, device, _clock(device)
        self.rate = 0.0

    def run(self) -> float:
        """Run the operation once; return the shortest time so far in seconds."""
        synchronize(self.device)
        started = self.clock()
        self.operation()
        synchronize(self.device)
        self.rate = max(self.rate, self.work / (self.clock() - started))
        return self.work / self.rate


def _product(device: torch.device, name: str) -> _Timed | None:
    """Return `x @ weight.T` with x [rows, 1024] and enough rows to be timed; None if it fails."""
    dtype = getattr(torch, name)
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(_WIDTH, _WIDTH, generator=generator, device=device).to(dtype)
    rows, most = _ROWS
    while True:
        x = torch.randn(rows, _WIDTH, generator=generator, device=device).to(dtype)
        timed = _Timed(functools.partial(functional.linear, x, weight), 2 * rows * _WIDTH**2, device)
        try:
            timed.operation()  # loads kernels and fills caches
        except RuntimeError:  # this backend has no products of this dtype
            return None
        if rows >= most or min(timed.run() for _ in range(2)) >= _LONG_ENOUGH:
            return timed
        rows *= 2
