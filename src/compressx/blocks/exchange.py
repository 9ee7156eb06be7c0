"""What the processes of a run exchange about a block: statistics, which add up, and results of pruners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from compressx.api.pruner import PruneResult, Statistic
from compressx.runtime.ranks import Ranks


def combine(ranks: Ranks, statistic: Statistic, fresh: Callable[[], Statistic | None]) -> Statistic:
    """Return a statistic of what all processes gathered.

    What is summed is summed in float64, so that the number of processes matters as little as can be. What is joined
    (`cat`) is handed to a fresh statistic, in the order of the processes.

    Args:
        ranks: the processes.
        statistic: this process's; its tensors are overwritten with the sums.
        fresh: makes another like it.
    """
    tensors = statistic.tensors()
    if ranks.size == 1 or not tensors:
        return statistic
    for tensor, reduction in tensors.values():
        if reduction == "sum":
            total = tensor.double()
            ranks.all_reduce_(total)
            tensor.copy_(total)
        elif reduction == "max":
            ranks.all_reduce_(tensor, "max")
    joined = [tensor for tensor, reduction in tensors.values() if reduction == "cat"]
    if not joined:
        return statistic
    merged = fresh()
    assert merged is not None  # noqa: S101 - it was asked for once already
    for tensor in joined:
        for part in ranks.gathered(tensor):
            merged.update(part)
    return merged


def exchange(
    ranks: Ranks, owners: Sequence[int], decided: Mapping[int, Mapping[str, PruneResult]], device: torch.device
) -> Iterator[Mapping[str, PruneResult]]:
    """Yield the results of every task, each from the process that decided it.

    Args:
        ranks: the processes.
        owners: rank by task.
        decided: this process's results by task.
        device: where the results of the others go.
    """
    for task, owner in enumerate(owners):
        if ranks.size == 1:
            yield decided[task]
            continue
        described = ranks.broadcast(_described(decided[task]) if owner == ranks.rank else {}, owner)
        results = {}
        for name, (shape, dtype, rest) in described.items():
            mine = decided[task][name] if owner == ranks.rank else None
            keep = torch.empty(shape, dtype=torch.uint8, device=device)
            if mine is not None:
                keep.copy_(mine.keep)
            ranks.broadcast_(keep, owner)
            weight = None
            if dtype is not None:
                weight = torch.empty(shape, dtype=dtype, device=device)
                if mine is not None and mine.weight is not None:
                    weight.copy_(mine.weight)
                ranks.broadcast_(weight, owner)
            results[name] = PruneResult(keep.bool(), weight, *rest)
        yield results


def _described(results: Mapping[str, PruneResult]) -> dict[str, tuple[Any, ...]]:
    """Return all of some results but their large tensors; what they share they still share when it arrives."""
    on_cpu = {id(r.images): {name: image.cpu() for name, image in r.images.items()} for r in results.values()}
    return {
        name: (
            tuple(result.keep.shape),
            None if result.weight is None else result.weight.dtype,
            (result.info, on_cpu[id(result.images)], result.history),
        )
        for name, result in results.items()
    }
