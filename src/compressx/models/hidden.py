"""Where hidden states of the calibration text, and gradients with respect to them, are kept: in memory, or in files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from compressx.runtime.files import os_errors_named

Keep: TypeAlias = Callable[[Tensor], Tensor]
"""From hidden states of one batch to a tensor of the same values that lasts, and may be overwritten."""


@dataclass(frozen=True, eq=False)
class Streams:
    """The hidden states between two blocks, one [batch, tokens, width] for each calibration batch.

    Attributes:
        pruned: what the pruned blocks give.
        dense: what the dense blocks gave, where blocks are reconstructed; else empty.
    """

    pruned: Sequence[Tensor]
    dense: Sequence[Tensor] = ()


def in_memory(states: Tensor) -> Tensor:
    """Keep the tensor itself."""
    return states


@dataclass
class InFiles:
    """Keeps each batch in a file, whose pages the kernel drops from memory and reads again as it sees fit.

    Attributes:
        folder: for the files; made when missing.
    """

    folder: Path
    _count: int = field(default=0, init=False)

    def __call__(self, states: Tensor) -> Tensor:
        """Keep a copy, on the CPU whatever the tensor's device.

        Raises:
            ArtifactError: no room for it. It is taken up beforehand: a full disk under a mapped file kills the process.
        """
        path = self.folder / f"{self._count}.states"
        self._count += 1
        with os_errors_named("write", path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("w+b") as file:
                _take_up(file.fileno(), max(1, states.numel() * states.element_size()))
        mapped = torch.from_file(str(path), shared=True, size=states.numel(), dtype=states.dtype)
        return mapped.view(states.shape).copy_(states)


def _take_up(file: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:  # macOS
        os.truncate(file, size)
