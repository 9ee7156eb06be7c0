"""Storage of hidden states of the calibration text, and of gradients: in memory or in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from compressx.runtime.files import os_errors_named
from compressx.runtime.transfer import to_host

Keep: TypeAlias = Callable[[Tensor], Tensor]
"""Stores the hidden states of one batch; returns a persistent, writable tensor of the same values."""


@dataclass(frozen=True, eq=False)
class Streams:
    """The hidden states between two blocks, one [batch, tokens, width] for each calibration batch.

    Attributes:
        pruned: output of the pruned blocks.
        dense: output of the dense blocks if blocks are reconstructed, else empty.
    """

    pruned: Sequence[Tensor]
    dense: Sequence[Tensor] = ()


def in_memory(states: Tensor) -> Tensor:
    """Keep the tensor itself."""
    return states


@dataclass
class InFiles:
    """Keeps each batch in a memory-mapped file, so that the kernel can evict its pages.

    Attributes:
        folder: for the files; created if missing.
    """

    folder: Path
    _count: int = field(default=0, init=False)

    def __call__(self, states: Tensor) -> Tensor:
        """Return a copy in a file, on the CPU.

        Raises:
            ArtifactError: not enough disk space. It is reserved first, because writing to a mapped file on a full disk
                kills the process.
        """
        path = self.folder / f"{self._count}.states"
        self._count += 1
        with os_errors_named("write", path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                _reserve(file.fileno(), max(1, states.numel() * states.element_size()))
        mapped = torch.from_file(str(path), shared=True, size=states.numel(), dtype=states.dtype)
        return mapped.view(states.shape).copy_(to_host(states))


def _reserve(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:  # macOS
        os.truncate(file, size)
