"""The same results on the same GPU each time, at the cost of some speed, and whatever modes the caller has set."""

from __future__ import annotations

import contextlib
import os
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

    Raises:
        CompressxError: cuBLAS may have been started with another workspace in this process.
    """
    if not wanted:
        yield
        return
    if device.type == "cuda" and os.environ.get(_WORKSPACE) not in _FIXED:
        if _WORKSPACE in os.environ or torch.cuda.max_memory_allocated(device) > 0:  # products may have run
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
