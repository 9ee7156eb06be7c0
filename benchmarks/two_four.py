"""2:4 weights against dense ones: products of one linear, and tokens a second of a model. Parts of `accelerator.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from compressx.evaluation.bench import timed
from compressx.models.architecture import architecture_of
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.timing import synchronize

ROUNDS = 5


def products(
    device: torch.device, linears: Sequence[tuple[int, int]], tokens: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield for each linear and number of tokens the time of a dense and of a 2:4 product.

    Raises:
        UnsupportedModelError: the device has no such products.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        raise UnsupportedModelError(f"2:4 products need an NVIDIA GPU of compute capability 8.0, and this is {device}")
    for rows, columns in linears:
        linear = nn.Linear(columns, rows, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
        to_two_four(linear.weight)
        sparse = to_sparse_semi_structured(linear.weight)
        for count in tokens:
            x = torch.randn(max(count, 16), columns, device=device, dtype=torch.bfloat16)  # fewer rows are padded
            dense, fast = linear(x), nn.functional.linear(x, sparse)
            error = float((fast - dense).float().norm() / dense.float().norm())
            times = {
                kind: median_time(device, partial(nn.functional.linear, x, weight))
                for kind, weight in (("dense", linear.weight), ("2:4", sparse))
            }
            yield {"linear": f"{rows} x {columns}", "tokens": count, **times, "error": error}


def median_time(device: torch.device, call: Callable[[], Any], times: int = 30) -> float:
    """Return the median of seconds of a call, warmed up."""
    seconds = []
    for attempt in range(times + 5):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        if attempt >= 5:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def to_two_four(weight: Tensor) -> None:
    """Set the two smallest of every four weights in a row to zero."""
    groups = weight.detach().view(len(weight), -1, 4)
    groups.scatter_(-1, groups.abs().topk(2, largest=False).indices, 0.0)


def convert(model: Any) -> int:
    """Let a GPU multiply the 2:4 linears in the blocks of a model as such, and return their number."""
    linears: list[Any] = [x.module for x in architecture_of(model).linears.values()]
    for linear in linears:
        linear.weight = nn.Parameter(to_sparse_semi_structured(linear.weight.detach()), requires_grad=False)
        linear.forward = partial(_by_rows, linear.forward)
    return len(linears)


def _by_rows(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Multiply [rows, in]: of hidden states with other strides torch makes a product for each sequence, without 2:4."""
    return forward(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)


def speeds(
    device: torch.device, model: Any, lengths: Sequence[tuple[int, int]], batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield tokens a second of a model, dense and 2:4, medians of rounds with both in turn.

    Each of `lengths` has the tokens of the prompt and those written after it.

    A CPU multiplies the zeros of the 2:4 one like any number.
    """
    sparse = deepcopy(model)
    for linear in architecture_of(sparse).linears.values():
        to_two_four(linear.weight)
    converted = {"dense": 0, "2of4": convert(sparse) if device.type == "cuda" else 0}
    models = {"dense": model, "2of4": sparse}
    for batch in batches:
        for prompt, new in lengths:
            ids = torch.randint(model.config.vocab_size, (batch, prompt), device=device)
            tokens = {"prefill": prompt, "decode": new - 1}  # of one sequence
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in models}
            for _ in range(1 + ROUNDS):
                for name, each in models.items():
                    rounds[name].append(timed(each, ids, new)[0])
            seconds = {  # the first round loads kernels
                name: {stage: [x[stage] for x in found[1:]] for stage in tokens} for name, found in rounds.items()
            }
            for name, took in seconds.items():
                yield {
                    "model": name, "converted": converted[name], "batch": batch, "prompt + new": f"{prompt} + {new}",
                    "bytes of weights": sum(map(_bytes, models[name].parameters())),
                    **{f"{stage}, tokens/s": batch * tokens[stage] / statistics.median(took[stage])
                       for stage in tokens},
                    **{f"{stage}, x": statistics.median(a / b for a, b in zip(seconds["dense"][stage], took[stage],
                                                                            strict=True))
                       for stage in tokens},
                }  # fmt: skip


def _bytes(parameter: Tensor) -> int:
    """Return the size of a parameter as it is stored: a 2:4 one is values and places."""
    if isinstance(parameter, SparseSemiStructuredTensor):
        return sum(getattr(parameter, name).nbytes for name in parameter.__tensor_flatten__()[0])
    return parameter.nbytes
