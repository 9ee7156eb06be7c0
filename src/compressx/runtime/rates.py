"""How fast a device multiplies matrices and copies memory, measured once a process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from compressx.runtime.timing import synchronize

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

_COPIED = 2**26
"""Bytes of the measured copy's source: 64 MiB, more than the last cache of most processors."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second at its best.

    Attributes:
        products: FLOP/s of a matrix product by the name of its factors' dtype, `float32`, `bfloat16` and `float16`.
            A multiplication and an addition are two operations. On the CPU, the rate of one thread times the number of
            torch's threads.
        copy: bytes/s of a copy within the device's memory, bytes read plus bytes written; on the CPU by one thread.
    """

    products: Mapping[str, float]
    copy: float

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
    return Rates({name: rate * threads for name, rate in one.products.items()}, one.copy)


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
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    into = torch.zeros_like(source)  # its pages exist before the clock runs
    operations["copy"] = _Timed(lambda: into.copy_(source), 2 * _COPIED, device)
    clock = _clock(device)
    started = clock()
    for _ in range(_ROUNDS):
        for operation in operations.values():
            operation.run()
        if clock() - started > _BUDGET:
            break
    copy = operations.pop("copy").rate
    return Rates({name: operation.rate for name, operation in operations.items()}, copy)


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
