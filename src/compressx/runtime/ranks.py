"""The processes of one run, as `torchrun` starts them: collectives for tensors and for plain data.

Every process goes through the same blocks in the same order, each with its own share of the calibration text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed

from compressx.runtime.errors import CalibrationError, CompressxError

_Plain = TypeVar("_Plain", bound="str | int | float | list[Any] | dict[str, Any] | None")
"""Data that JSON knows, with infinity and NaN. A tuple would arrive as a list, and keys are strings."""

_groups = count()
"""Numbers for the groups of a process's runs, since the keys of earlier ones are still in the store of `torchrun`."""

_PATIENCE = timedelta(days=1)
"""How long a process waits for the others. One may evaluate or solve for hours; `torchrun` ends all when one dies."""


_LOST = re.compile("Connection (closed|reset) by peer|Broken pipe|remote process exited")
"""What the backends say when the process at the other end is gone."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        rank: of this one, from 0.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    def share(self, windows: Tensor) -> Tensor:
        """Return this process's part of the calibration windows [windows, tokens]: neighbours, sizes alike.

        Raises:
            CalibrationError: fewer windows than processes.
        """
        if len(windows) < self.size:
            raise CalibrationError(f"{len(windows)} calibration windows are fewer than the {self.size} processes")
        return torch.tensor_split(windows, self.size)[self.rank]

    def broadcast(self, value: _Plain, source: int = 0) -> _Plain:
        """Return the plain data of the process `source`; on the others the argument is ignored."""
        if self.size == 1:
            return value
        encoded = _encoded(value)
        length = torch.tensor(len(encoded))
        self.broadcast_(length, source)
        if source != self.rank:
            encoded = torch.empty(int(length), dtype=torch.uint8)
        self.broadcast_(encoded, source)
        return cast("_Plain", _decoded(encoded))

    def all_gather(self, value: _Plain) -> list[_Plain]:
        """Return every process's plain data, in their order."""
        if self.size == 1:
            return [value]
        return [cast("_Plain", _decoded(part)) for part in self.gathered(_encoded(value))]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            distributed.barrier()

    def all_reduce_(self, tensor: Tensor, operation: Literal["sum", "max"] = "sum") -> None:
        """Replace a tensor by the sum, or the highest values, of all processes'."""
        if self.size == 1:
            return
        ours = _exchangeable(tensor)
        distributed.all_reduce(ours, distributed.ReduceOp.SUM if operation == "sum" else distributed.ReduceOp.MAX)
        if ours is not tensor:
            tensor.copy_(ours)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Replace a tensor by that of the process `source`; all have one of its shape and dtype."""
        if self.size == 1:
            return
        ours = _exchangeable(tensor).contiguous()
        distributed.broadcast(ours.view(-1).view(torch.uint8), src=source)  # bytes: backends know few dtypes
        if ours is not tensor and source != self.rank:
            tensor.copy_(ours)

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """Return every process's tensor, on the device of this one's; they may differ in their first dimension."""
        if self.size == 1:
            return [tensor]
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(tensor)
        self.all_reduce_(lengths)
        parts = [tensor.new_empty(length, *tensor.shape[1:]) for length in lengths.tolist()]
        parts[self.rank] = tensor
        for rank, part in enumerate(parts):
            self.broadcast_(part, rank)
        return parts


ALONE = Ranks()


def assign(weights: Sequence[int], size: int) -> list[int]:
    """Spread tasks over processes so that the largest share is small: the heaviest first, each to the idlest.

    Args:
        weights: of each task.
        size: how many processes.

    Returns:
        A rank for each task.
    """
    loads, owners = [0] * size, [0] * len(weights)
    for task in sorted(range(len(weights)), key=lambda t: -weights[t]):
        owners[task] = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[owners[task]] += weights[task]
    return owners


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that `torchrun` started, for the length of a `with`; one process is alone.

    Raises:
        CompressxError: another process has ended, so that this one waits for it in vain.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    shared, rank, size = next(iter(distributed.rendezvous("env://", timeout=_PATIENCE)))  # type: ignore[attr-defined]
    store = distributed.PrefixStore(f"compressx-{next(_groups)}", shared)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise CompressxError("another process of this run has ended, and only its own message says why") from error
    finally:
        distributed.destroy_process_group()


def _exchangeable(tensor: Tensor) -> Tensor:
    """Put a tensor where processes can exchange it: NCCL knows GPUs only, and what saw no input is on the CPU still."""
    return tensor.cuda() if distributed.get_backend() == "nccl" else tensor


def _encoded(value: object) -> Tensor:
    """Write plain data as JSON in a tensor of bytes: nothing that arrives is unpickled."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(encoded: Tensor) -> object:
    return json.loads(encoded.numpy().tobytes())
