"""Exchange of a block's statistics and pruning results between the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import PruneResult, Statistic
from compressx.runtime.ranks import Ranks


def combine(ranks: Ranks, statistic: Statistic, fresh: Callable[[], Statistic | None]) -> Statistic:
    """Combine a statistic over all processes.

    Sums are computed in float64, so that the number of processes hardly affects them. Tensors to concatenate (`cat`)
    update a fresh statistic in the order of the processes.

    Args:
        ranks: the processes.
        statistic: this process's; its tensors are overwritten with the sums.
        fresh: creates an empty statistic of the same kind.
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
    assert merged is not None  # noqa: S101 - `statistic` was created the same way
    for tensor in joined:
        for part in ranks.gather_tensors(tensor):
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
        device: for received masks and weights; received images go to the CPU.
    """
    for task, owner in enumerate(owners):
        if owner == ranks.rank:
            results = decided[task]
            ranks.broadcast(_described(results), owner)
        else:
            results = _allocated(ranks.broadcast({}, owner), device)
        for tensor in _tensors(results):
            ranks.broadcast_(tensor, owner)
        yield results


def _described(results: Mapping[str, PruneResult]) -> dict[str, Any]:
    """Describe results as plain data: of each tensor shape and dtype."""
    return {
        name: [
            *map(_plain, (r.keep, r.weight, r.bias)),
            *({key: _plain(value) for key, value in values.items()} for values in (r.info, r.images, r.history)),
            r.group,
        ]
        for name, r in results.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if value is None or isinstance(value, Real):
        return value if value is None else float(value)
    return [float(x) for x in value]


def _allocated(described: Mapping[str, Any], device: torch.device) -> dict[str, PruneResult]:
    """Return the results that `_described` describes, with uninitialised tensors."""

    def made(value: Any, device: torch.device) -> Any:
        if not isinstance(value, dict):
            return value
        return torch.empty(value["shape"], dtype=getattr(torch, value["dtype"]), device=device)

    cpu = torch.device("cpu")
    results = {}
    for name, (keep, weight, bias, info, images, history, group) in described.items():
        mask, new, shift = (made(x, device) for x in (keep, weight, bias))
        drawn = {key: made(value, cpu) for key, value in images.items()}
        results[name] = PruneResult(mask, new, info, drawn, history, shift, group)
    return results


def _tensors(results: Mapping[str, PruneResult]) -> Iterator[Tensor]:
    """Yield every tensor of the results, in the same order on all processes."""
    for r in results.values():
        yield from (x for x in (r.keep, r.weight, r.bias, *r.images.values()) if x is not None)
