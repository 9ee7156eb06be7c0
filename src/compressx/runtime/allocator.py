"""Memory that the C library has freed: kept for the next array, or returned to the system.

When the end of its heap is free, glibc returns it to the system, and the next array gets fresh pages, which the system
clears one by one. What a batch or a training step frees is asked for again by the next one, so this took a fifth of a
training step. Arrays of more than 32 MiB still get pages of their own where no gap is large enough: in a heap that
grows for each of them, gaps add up. Other C libraries are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from collections.abc import Iterator

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from glibc's malloc.h."""

_LARGE = 2**25
"""Bytes from which the heap does not grow for an array: the most that glibc accepts, and what it adapts itself to."""

_KEEPING = {_MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: -1}
_RETURNING = {_MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: 2 * _LARGE}
"""What glibc adapts itself to in a process that has freed large arrays (mallopt(3)); its start cannot be set again."""

_OWN_SETTINGS = re.compile(
    r"MALLOC_(TRIM_THRESHOLD|MMAP_THRESHOLD|MMAP_MAX)_=|GLIBC_TUNABLES=.*malloc\.(trim_threshold|mmap_threshold|mmap_max)="
)
"""Variables of the environment by which a user sets the same."""

_inside = 0
"""Runs that go on: the first one in sets the allocator, and the last one out restores it."""

_entering = threading.Lock()


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep freed memory for the next arrays within a `with`, or a function, and return it to the system at the end.

    Whoever sets glibc's allocator by the environment keeps these settings. Settings that a process has made itself are
    lost, because they cannot be read.
    """
    mallopt = _glibc("mallopt")
    if mallopt is None or any(_OWN_SETTINGS.match(f"{name}={value}") for name, value in os.environ.items()):
        yield
        return
    _count(1, mallopt, _KEEPING)
    try:
        yield
    finally:
        _count(-1, mallopt, _RETURNING)
        return_freed_memory()


def return_freed_memory() -> None:
    """Return freed memory that the C library retains to the system."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _count(change: int, mallopt: ctypes._NamedFuncPointer, values: dict[int, int]) -> None:
    """Count a run that begins or ends, and set the allocator where no other goes on."""
    global _inside  # noqa: PLW0603 - the allocator is the process's, too
    with _entering:
        others = _inside - (change < 0)
        _inside += change
        if others == 0:
            for parameter, value in values.items():
                mallopt(parameter, value)


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    """Return a function of glibc, or None in a process that has another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
