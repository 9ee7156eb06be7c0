"""Several processes of one run, as `torchrun` starts them: who each is, and what they tell one another.

Every process goes through the same blocks in the same order. Each runs its own share of the calibration text; what they
gathered is combined, each decides for its share of the linears, and all get to know every decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from compressx.errors import CalibrationError
from compressx.pruner import PruneResult, Statistic

_Value = TypeVar("_Value")

_groups = count()
"""Numbers for the groups of a process's runs, since the keys of earlier ones are still in the store of `torchrun`."""

_PATIENCE = timedelta(days=1)
"""How long a process waits for the others. One may evaluate or solve for hours; `torchrun` ends all when one dies."""


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

    def told(self, value: _Value) -> _Value:
        """Return what the first process says; on the others the argument is ignored."""
        if self.size == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]

    def everyones(self, value: _Value) -> list[_Value]:
        """Return what each process says, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            distributed.barrier()

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of all processes'."""
        if self.size > 1:
            distributed.all_reduce(tensor)

    def combine(self, statistic: Statistic, fresh: Callable[[], Statistic | None]) -> Statistic:
        """Return a statistic of what all processes gathered.

        What is summed is summed in float64, so that the number of processes matters as little as can be. What is joined
        (`cat`) is handed to a fresh statistic, in the order of the processes.

        Args:
            statistic: this process's; its tensors are overwritten with the sums.
            fresh: makes another like it.
        """
        tensors = statistic.tensors()
        if self.size == 1 or not tensors:
            return statistic
        for tensor, reduction in tensors.values():
            if reduction == "sum":
                total = _exchangeable(tensor.double())
                distributed.all_reduce(total)
                tensor.copy_(total)
            elif reduction == "max":
                highest = _exchangeable(tensor)
                distributed.all_reduce(highest, distributed.ReduceOp.MAX)
                tensor.copy_(highest)
        joined = [tensor for tensor, reduction in tensors.values() if reduction == "cat"]
        if not joined:
            return statistic
        merged = fresh()
        assert merged is not None  # noqa: S101 - it was asked for once already
        for tensor in joined:
            for part in self._all(tensor):
                merged.update(part)
        return merged

    def exchange(
        self, owners: Sequence[int], decided: Mapping[int, Mapping[str, PruneResult]], device: torch.device
    ) -> Iterator[Mapping[str, PruneResult]]:
        """Yield the results of every task, each from the process that decided it.

        Args:
            owners: rank by task.
            decided: this process's results by task.
            device: where the results of the others go.
        """
        for task, owner in enumerate(owners):
            if self.size == 1:
                yield decided[task]
                continue
            told: list[Any] = [_described(decided[task]) if owner == self.rank else None]
            distributed.broadcast_object_list(told, src=owner)
            results = {}
            for name, (shape, dtype, rest) in told[0].items():
                mine = decided[task][name] if owner == self.rank else None
                keep = torch.empty(shape, dtype=torch.uint8, device=device)
                if mine is not None:
                    keep.copy_(mine.keep)
                distributed.broadcast(keep, src=owner)
                weight = None
                if dtype is not None:
                    weight = torch.empty(shape, dtype=dtype, device=device)
                    if mine is not None and mine.weight is not None:
                        weight.copy_(mine.weight)
                    distributed.broadcast(weight, src=owner)
                results[name] = PruneResult(keep.bool(), weight, *rest)
            yield results

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """Return every process's tensor, which may differ in their first dimension."""
        tensor, parts = _exchangeable(tensor), []
        for rank, shape in enumerate(self.everyones(tuple(tensor.shape))):
            part = tensor.contiguous() if rank == self.rank else tensor.new_empty(shape)
            distributed.broadcast(part, src=rank)
            parts.append(part)
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
    """Join the processes that `torchrun` started, for the length of a `with`; one process is alone."""
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
    finally:
        distributed.destroy_process_group()


def _exchangeable(tensor: Tensor) -> Tensor:
    """Put a tensor where processes can exchange it: NCCL knows GPUs only, and what saw no input is on the CPU still."""
    return tensor.cuda() if distributed.get_backend() == "nccl" else tensor


def _described(results: Mapping[str, PruneResult]) -> dict[str, tuple[Any, ...]]:
    """Say all of some results but their large tensors; what they share they still share when it arrives."""
    on_cpu = {id(r.images): {name: image.cpu() for name, image in r.images.items()} for r in results.values()}
    return {
        name: (
            tuple(result.keep.shape),
            None if result.weight is None else result.weight.dtype,
            (result.info, on_cpu[id(result.images)], result.history),
        )
        for name, result in results.items()
    }
