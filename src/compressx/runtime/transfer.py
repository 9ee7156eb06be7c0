"""Copies of hidden states, masks and weights between the host and a GPU, through pinned memory.

States that are kept in files cannot be pinned, so each batch is copied once more on the host. torch gives pinned memory
to nobody else before the copies from and to it are done, and copies of one stream are in order with its kernels.
Everywhere but between the host and a GPU these are plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; from the host to a GPU without waiting for what the GPU is doing."""
    if device.type != "cuda" or x.is_cuda or x.requires_grad:  # gradients do not pass `pin_memory`
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """Return a tensor on the host, after waiting for a GPU once; its memory there is pinned."""
    copied, arrived = begin_to_host(x)
    arrived()
    return copied


def begin_to_host(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Begin to copy a tensor to the host; return the copy, and a function that waits until its values are there."""
    if not x.is_cuda:
        return x.cpu(), lambda: None
    copied = x.to("cpu", non_blocking=True)  # into memory that torch pins
    return copied, torch.cuda.current_stream(x.device).record_event().synchronize


@contextmanager
def written_behind() -> Iterator[Callable[[Tensor, Tensor], None]]:
    """Yield a function that copies the second tensor into the first, which may be on another device.

    From a GPU to the host, the first one gets its values when the function is called again or the `with` ends, so that
    the GPU has the next batch to work on meanwhile. After an error it may keep those that it had.
    """
    waiting: list[Callable[[], None]] = []

    def finish() -> None:
        while waiting:
            waiting.pop()()

    def put(room: Tensor, x: Tensor) -> None:
        if room.is_cuda or not x.is_cuda:
            room.copy_(x)
            return
        copied, arrived = begin_to_host(x)

        def store() -> None:
            arrived()
            room.copy_(copied)

        finish()
        waiting.append(store)

    yield put
    finish()
