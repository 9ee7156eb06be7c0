"""2:4 weights against dense ones: products of one linear, and tokens a second of a model. Parts of `accelerator.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressx.evaluation.bench import BenchSettings, bench
from compressx.evaluation.saved import source_of
from compressx.masks.tensor_cores import check_device
from compressx.models.architecture import survey
from compressx.report.speeds import STAGES, Length
from compressx.runtime.timing import synchronize


def products(
    device: torch.device, linears: Sequence[tuple[int, int]], tokens: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield for each linear and number of tokens the time of a dense and of a 2:4 product.

    Raises:
        UnsupportedModelError: the device has no such products.
    """
    from torch.sparse import to_sparse_semi_structured

    check_device(device)
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


def speeds(
    device: torch.device, model: Any, lengths: tuple[Length, ...], batches: Sequence[int], folder: Path
) -> Iterator[dict[str, Any]]:
    """Yield tokens a second of a model, dense and 2:4; a CPU multiplies its zeros like any number.

    Args:
        device: to measure on.
        model: on the CPU; its weights become 2:4.
        lengths: of prompts, and of what is written.
        batches: of these.
        folder: for both models.
    """
    for name in ("dense", "2of4"):
        if name != "dense":
            for linear in survey(model).linears.values():
                to_two_four(linear.weight)
        model.save_pretrained(folder / name)
    sources = [source_of(str(folder / name)) for name in ("dense", "2of4")]
    for batch in batches:
        asked = BenchSettings(lengths, batch, device=str(device), semi_structured=device.type == "cuda")
        found = bench(sources, asked)
        for length in lengths:
            for measured in found.models:
                yield {
                    "model": Path(measured.name).name, "converted": measured.two_four, "batch": batch,
                    "prompt + new": str(length), "bytes of weights": measured.weight_bytes,
                    **{f"{stage}, tokens/s": found.rate(measured, length, stage).median for stage in STAGES},
                    **{f"{stage}, x": found.ratio(measured, length, stage).median for stage in STAGES},
                }  # fmt: skip
