"""The processes of one run under `torchrun`: collectives for tensors and for plain data.

Every process handles the same blocks in the same order, each with its own share of the calibration text.
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
"""JSON data, with infinity and NaN. Tuples would arrive as lists, and keys are strings."""

_groups = count()
"""Numbers a process's runs, because the keys of earlier ones are still in `torchrun`'s store."""

_TIMEOUT = timedelta(days=1)
"""One process may evaluate or solve for hours while the others wait; `torchrun` ends all when one dies."""

ANOTHER_ENDED = "another process of this run has ended; see its own message for the reason"
"""The message of a process whose part in the run is over by no fault of its own."""

_LOST = re.compile("Connection (closed|reset) by peer|Broken pipe|remote process exited")
"""The backends' messages when another process has ended."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run.

    Attributes:
        rank: this process's number, from 0.
        size: number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def share(self, windows: Tensor) -> Tensor:
        """Return this process's contiguous share of the windows [windows, tokens]; sizes differ by 1 at most.

        Raises:
            CalibrationError: fewer windows than processes.
        """
        refuse_few_windows(len(windows), self.size)
        return torch.tensor_split(windows, self.size)[self.rank]

    def broadcast(self, value: _Plain, source: int = 0) -> _Plain:
        """Return the plain data of process `source`; the other processes' argument is ignored."""
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
        """Return every process's plain data, by rank."""
        if self.size == 1:
            return [value]
        return [cast("_Plain", _decoded(part)) for part in self.gather_tensors(_encoded(value))]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            distributed.barrier()

    def all_reduce_(self, tensor: Tensor, operation: Literal["sum", "max"] = "sum") -> None:
        """Replace a tensor by its elementwise sum or maximum over all processes."""
        if self.size == 1:
            return
        local = _exchangeable(tensor).contiguous()  # gloo adds in the order of memory; NCCL refuses others
        distributed.all_reduce(local, distributed.ReduceOp.SUM if operation == "sum" else distributed.ReduceOp.MAX)
        if local is not tensor:
            tensor.copy_(local)

    def broadcast_(self, tensor: Tensor, source: int) -> None:
        """Replace a tensor by that of process `source`; shape and dtype must be the same in all processes."""
        if self.size == 1:
            return
        local = _exchangeable(tensor).contiguous()
        distributed.broadcast(local.view(-1).view(torch.uint8), src=source)  # as bytes: backends support few dtypes
        if local is not tensor and source != self.rank:
            tensor.copy_(local)

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return every process's tensor, on this one's device; first dimensions may differ."""
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


def refuse_few_windows(windows: int, processes: int) -> None:
    """Refuse to share windows among more processes.

    Raises:
        CalibrationError: fewer windows than processes.
    """
    if windows < processes:
        raise CalibrationError(f"{windows} calibration windows are fewer than the {processes} processes")


def assign(weights: Sequence[int], size: int) -> list[int]:
    """Assign tasks to processes greedily: the heaviest task first, each to the least loaded process.

    Returns:
        The rank of each task.
    """
    loads, owners = [0] * size, [0] * len(weights)
    for task in sorted(range(len(weights)), key=lambda t: -weights[t]):
        owners[task] = min(range(size), key=lambda rank: (loads[rank], rank))
        loads[owners[task]] += weights[task]
    return owners


@contextmanager
def joined_ranks(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that `torchrun` started, for the duration of a `with`; without `torchrun` there is one.

    Raises:
        CompressxError: another process has ended.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    shared, rank, size = next(iter(distributed.rendezvous("env://", timeout=_TIMEOUT)))  # type: ignore[attr-defined]
    store = distributed.PrefixStore(f"compressx-{next(_groups)}", shared)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise CompressxError(ANOTHER_ENDED) from error
    finally:
        distributed.destroy_process_group()


def _exchangeable(tensor: Tensor) -> Tensor:
    """Move a tensor to the GPU for NCCL; statistics that have seen no input are still on the CPU."""
    return tensor.cuda() if distributed.get_backend() == "nccl" else tensor


def _encoded(value: object) -> Tensor:
    """Encode plain data as JSON in a tensor of bytes; pickle would run code on arrival."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(encoded: Tensor) -> object:
    return json.loads(encoded.numpy().tobytes())
