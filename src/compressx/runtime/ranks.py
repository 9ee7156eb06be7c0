"""The processes of one run under `torchrun`: what they share out, add up and tell one another.

Every process handles the same blocks in the same order, each with its own share of the calibration text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from itertools import count
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from safetensors.torch import load, save
from torch import Tensor, distributed

from compressx.runtime.errors import ANOTHER_ENDED, CompressxError

_Task = TypeVar("_Task")
_Value = TypeVar("_Value")

_groups = count()
"""Numbers a process's runs, because the keys of earlier ones are still in `torchrun`'s store."""

_TIMEOUT = timedelta(days=1)
"""One process may evaluate or solve for hours while the others wait; `torchrun` ends all when one dies."""

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

    def share(self, sequences: Tensor) -> Tensor:
        """Return this process's contiguous share of the sequences [sequences, tokens]; sizes differ by 1 at most."""
        return torch.tensor_split(sequences, self.size)[self.rank]

    def divided(
        self, tasks: Sequence[_Task], sizes: Sequence[int], work: Callable[[_Task], _Value]
    ) -> Iterator[_Value]:
        """Yield what `work` makes of each task, which is done by one process. One alone does it when it is asked for.

        Args:
            tasks: the same in all processes.
            sizes: how much work each is.
            work: does a task. The other processes get what it returns as `broadcast` says.
        """
        if self.size == 1:
            yield from map(work, tasks)
            return
        owners = assign(sizes, self.size)
        mine = {i: work(task) for i, task in enumerate(tasks) if owners[i] == self.rank}
        for i, owner in enumerate(owners):
            yield cast("_Value", self.broadcast(mine.pop(i, None), owner))

    def broadcast(self, value: _Value, source: int = 0) -> _Value:
        """Return the value of process `source`; the other processes' argument is ignored.

        They get tensors on the CPU, and all else as JSON has it: lists for tuples, and dictionaries for dataclasses.
        Nothing is pickled, which would run code on arrival.
        """
        if self.size == 1:
            return value
        mine = self.rank == source
        sent = _encoded(value) if mine else torch.empty(0, dtype=torch.uint8)
        distributed.broadcast(length := _exchangeable(torch.tensor(len(sent))), source)
        sent = _exchangeable(sent if mine else torch.empty(int(length), dtype=torch.uint8))
        distributed.broadcast(sent, source)
        return value if mine else cast("_Value", _decoded(sent))

    def all_gather(self, value: _Value) -> list[_Value]:
        """Return every process's value by rank, those of others as `broadcast` says."""
        return [self.broadcast(value, source) for source in range(self.size)]

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


ALONE = Ranks()


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
    """Join the processes that `torchrun` started, for the duration of a `with`; without `torchrun` there is one."""
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
    """Write a value as JSON beside its tensors, in the format of safetensors: uint8 [bytes]."""
    tensors: dict[str, Tensor] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors[name := str(len(tensors))] = x.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {"tensor": name}
        if isinstance(x, Real):
            return float(x)
        return str(x) if isinstance(x, Path) else vars(x) if is_dataclass(x) else dict(x)

    text = json.dumps(value, default=plain).encode()
    tensors["json"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def _decoded(encoded: Tensor) -> object:
    tensors = load(encoded.cpu().numpy().tobytes())
    return json.loads(
        tensors["json"].numpy().tobytes(), object_hook=lambda x: tensors[x["tensor"]] if x.keys() == {"tensor"} else x
    )
