"""What a run sets in its process, and restores: torch's modes, deterministic algorithms, and memory that is freed.

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
from collections.abc import Iterator

import torch

from compressx.runtime.errors import CompressxError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = (":4096:8", ":16:8")
"""Values with which cuBLAS gives the same sums each time (NVIDIA's cuBLAS documentation, Results Reproducibility)."""


@contextlib.contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """Make torch take deterministic algorithms within a `with`, and restore its settings afterwards.

    An operation without one runs all the same, with torch's warning that names it.
    """
    if not wanted:
        yield
        return
    if device.type == "cuda" and os.environ.get(_WORKSPACE) not in _FIXED:
        if _WORKSPACE in os.environ or torch.cuda.max_memory_allocated(device) > 0:  # matmuls may have run
            raise CompressxError(
                f"deterministic: true needs {_WORKSPACE} to be {' or '.join(_FIXED)} before a process uses the GPU, "
                f"and it is {os.environ.get(_WORKSPACE, 'not set')}; export {_WORKSPACE}={_FIXED[0]} and start again"
            )
        os.environ[_WORKSPACE] = _FIXED[0]
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tuned = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = tuned


@contextlib.contextmanager
def torchs_own_modes() -> Iterator[None]:
    """Compute as torch does by default within a `with`, or a function: restores what the caller has set.

    Autocast would narrow the sums of statistics without a word, training needs gradients, and numbers that are made on
    the way are float32 and on the CPU unless they say otherwise.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as modes:
        modes.callback(torch.clear_autocast_cache)  # it may have copies of weights that have changed since
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        modes.enter_context(torch.inference_mode(mode=False))
        modes.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":  # every call of torch takes longer in this one
            modes.enter_context(torch.device("cpu"))
        modes.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from glibc's malloc.h."""

_LARGE = 2**25
"""Bytes from which the heap does not grow for an array: the most that glibc accepts, and what it adapts itself to."""

_OWN_SETTINGS = re.compile(
    r"MALLOC_(TRIM_THRESHOLD|MMAP_THRESHOLD|MMAP_MAX)_=|GLIBC_TUNABLES=.*malloc\.(trim_threshold|mmap_threshold|mmap_max)="
)
"""Variables of the environment by which a user sets the same."""


@contextlib.contextmanager
def reuse_freed_memory() -> Iterator[None]:
    """Keep freed memory for the next arrays within a `with`, or a function, and return it to the system at the end.

    Whoever sets glibc's allocator by the environment keeps these settings. Settings that a process has made itself are
    lost, because they cannot be read. Of several at a time the first to end ends it for all, which costs time alone.
    """
    mallopt = _glibc("mallopt")
    if mallopt is None or any(_OWN_SETTINGS.match(f"{name}={value}") for name, value in os.environ.items()):
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    mallopt(_TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        # What glibc adapts itself to in a process that has freed large arrays (mallopt(3)).
        mallopt(_TRIM_THRESHOLD, 2 * _LARGE)
        return_freed_memory()


def return_freed_memory() -> None:
    """Return freed memory that the C library retains to the system."""
    if (trim := _glibc("malloc_trim")) is not None:
        trim(0)


def _glibc(name: str) -> ctypes._NamedFuncPointer | None:
    """Return a function of glibc, or None in a process that has another C library."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
