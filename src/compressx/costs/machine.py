"""The machine of an estimate: how fast it does each kind of work, measured here or assumed."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from compressx.api.patterns import Unstructured, keep_mask
from compressx.api.work import KINDS, Work
from compressx.runtime.errors import RecipeError
from compressx.runtime.rates import fastest, rates

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NUMBER = r"(\d+(?:\.\d+)?)"
_GIVEN = re.compile(rf"{_NUMBER}([KMGT])F,{_NUMBER}([KMGT])B/s")

_LAUNCH_OF_GPU = 12e-6
"""Seconds from one small kernel of a Python program to the next: of SparseGPT's sweep, beside an H200.
A loop of products alone, as `_launches` times it, takes less than any program.
"""


@dataclass(frozen=True)
class Machine:
    """How fast a machine is.

    Attributes:
        name: for people.
        rates: what it does in a second, by the names in `KINDS`.
        gpu: whether the model has a device of its own.
    """

    name: str
    rates: Mapping[str, float]
    gpu: bool = False

    def seconds(self, work: Work) -> float:
        """Return how long some work takes: kinds take place one after the other."""
        return sum(count / self.rates[kind] for kind, count in work.counts.items())


# Products: dense figures of the makers' data sheets, of which large products reach the share below. float32 products
# are not TF32, which compressx leaves off.
_SHARE = 0.7
_ON_HOST = {"hashed": 1e9, "dequantized": 2e8, "read": 1e9, "written": 1e9}
"""Of a server: checksums and numbers made floats by one core, and one disk."""


def _gpu(name: str, *, single: float, half: float, bandwidth: float) -> Machine:
    return Machine(
        name,
        {
            "float32": _SHARE * single, "bfloat16": _SHARE * half, "float16": _SHARE * half,
            # Kernels of attention reach about half of what products do; Cholesky a third, eigenvectors a fiftieth.
            "attention": 0.5 * _SHARE * single, "attention16": 0.5 * _SHARE * half,
            "factor": _SHARE * single / 3, "eigen": _SHARE * single / 50,
            # A selection reads its numbers five times, and what it returns in between is written.
            "moved": 0.8 * bandwidth, "selected": 0.8 * bandwidth / 32, "launches": 1 / _LAUNCH_OF_GPU, **_ON_HOST,
        },
        gpu=True,
    )  # fmt: skip


ASSUMED = {
    "h100": _gpu("one H100 (SXM)", single=67e12, half=989e12, bandwidth=3.35e12),
    "a100": _gpu("one A100 (80 GB, SXM)", single=19.5e12, half=312e12, bandwidth=2.04e12),
    "4090": _gpu("one RTX 4090", single=82.6e12, half=165e12, bandwidth=1.01e12),
}
"""Machines by the name that `--assume` takes; only the seconds of a launch were measured, beside an H200."""


def assumed(text: str, processes: int = 1) -> Machine:
    """Read the machine that `--assume` names.

    Args:
        text: `h100`, `a100`, `4090`, or `cpu:250GF,20GB/s`: FLOP/s of float32 products, and bytes/s of memory.
        processes: that part the processor among them; each has a GPU of its own.

    Raises:
        RecipeError: anything else.
    """
    if text in ASSUMED:
        return ASSUMED[text]
    name, colon, rest = text.partition(":")
    found = _GIVEN.fullmatch(rest) if colon and name == "cpu" else None
    flops, bandwidth = (float(found[i]) * _UNITS[found[i + 1]] for i in (1, 3)) if found else (0.0, 0.0)
    if not (flops and bandwidth):
        raise RecipeError(
            f"--assume {text}: expected {', '.join(ASSUMED)}, or a processor with its rates of float32 products and of "
            "memory, both above zero, such as cpu:250GF,20GB/s"
        )
    name = f"a processor with {found[1]} {found[2]}FLOP/s and {found[3]} {found[4]}B/s"  # type: ignore[index]
    return Machine(name, _cpu(flops / processes, bandwidth / processes))


def _cpu(flops: float, bandwidth: float) -> dict[str, float]:
    """Return the rates of a processor of which two are known: the others by assumed shares of them."""
    return {
        "float32": flops, "bfloat16": flops, "float16": flops, "attention": flops / 3, "attention16": flops / 3,
        "factor": flops / 2, "eigen": flops / 4, "moved": bandwidth / 2,
        "selected": bandwidth / 100, "launches": 3e5, **_ON_HOST,
    }  # fmt: skip


def measured(device: torch.device, processes: int = 1) -> Machine:
    """Measure this machine, in a few seconds; once a process.

    Args:
        device: where the model runs.
        processes: that part the processor's cores among them, as `compressx run --processes` does; each has a GPU of
            its own.
    """
    found, gpu = dict(_of_a_thread(device)), device.type == "cuda"
    threads = 1 if gpu else _threads(processes)
    cores = os.cpu_count() or 1
    for kind in found:
        used = threads if kind in _THREADED else 1
        crowded = 1.0 if gpu or processes == 1 else max(1.0, used * processes / cores)
        found[kind] *= used / crowded
    name = f"this machine's {device}" if gpu else "this machine"
    return Machine(name, {kind: found[kind] for kind in KINDS}, gpu)


_THREADED = ("float32", "bfloat16", "float16", "attention", "attention16", "factor")
"""The kinds of work that several threads of a processor do about as many times as fast as one."""


def _threads(processes: int) -> int:
    """Return the threads of each of some processes, as `--processes` starts them."""
    own = processes == 1 or "OMP_NUM_THREADS" in os.environ
    return torch.get_num_threads() if own else max(1, (os.cpu_count() or 1) // processes)


@functools.cache
def _of_a_thread(device: torch.device) -> Mapping[str, float]:
    """Measure the rates of one thread, or of a GPU."""
    known = rates(device)
    threads = 1 if device.type == "cuda" else torch.get_num_threads()  # by which products are multiplied
    products = {
        name: known.products.get(name, known.products["float32"]) / threads
        for name in ("float32", "bfloat16", "float16")
    }
    found = {kind: _rate(kind, device) for kind in _SAMPLES}
    if device.type == "cuda":
        found["launches"] = min(found["launches"], 1 / _LAUNCH_OF_GPU)
    return {**products, **found, "read": known.copy / 2, "written": found["hashed"] / 2}


def _rate(kind: str, device: torch.device) -> float:
    operation, work = _SAMPLES[kind](device)
    return fastest(operation, work, device)


Sample = tuple[Callable[[], object], float]


def _attention(device: torch.device, dtype: torch.dtype = torch.float32) -> Sample:
    heads = 2 if device.type == "cpu" else 512  # a few milliseconds, which other processes seldom interrupt
    q = torch.randn(1, heads, 512, 64, device=device).to(dtype)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return lambda: sdpa(q, q, q, is_causal=True), heads * 512 * 512 * 64 * 4


# A GPU needs large matrices to be busy, as those of a large model are. By the rates of 512 columns ALPS was estimated
# at 300 s for two blocks of Llama 3 8B, which an H100 prunes in 18.


def _factor(device: torch.device) -> Sample:
    n = 512 if device.type == "cpu" else 8192
    matrix = torch.eye(n, device=device) + 0.1 / (2 * n)
    return lambda: torch.cholesky_inverse(torch.linalg.cholesky(matrix)), float(n) ** 3


def _eigen(device: torch.device) -> Sample:
    n = 256 if device.type == "cpu" else 2048
    x = torch.randn(n, n, device=device)
    return lambda: torch.linalg.eigh(x @ x.T), 9 * float(n) ** 3


def _moved(device: torch.device) -> Sample:
    # 16 or 256 MiB each, as weights and activations are: beyond the caches. The result is new memory, as in a model.
    numbers = 2**22 if device.type == "cpu" else 2**26
    x, y = torch.randn(2, numbers, device=device)
    return lambda: torch.mul(x, y), 3 * 4 * numbers


def _selected(device: torch.device) -> Sample:
    rows = 512 if device.type == "cpu" else 2**15
    x = torch.randn(rows, 1024, device=device)
    return lambda: keep_mask(x, Unstructured(0.5, "layer")), 1024.0 * rows


def _launches(device: torch.device) -> Sample:
    x, out = torch.ones(64, device=device), torch.empty(64, device=device)

    def several() -> None:
        for _ in range(100):
            torch.mul(x, x, out=out)

    return several, 100


def _hashed(_: torch.device) -> Sample:
    data = bytes(2**22)
    return lambda: hashlib.sha256(data).digest(), 2**22


def _dequantized(_: torch.device) -> Sample:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType.Q4_K
    numbers, size = GGML_QUANT_SIZES[kind]  # of a block of numbers
    stored = np.zeros((1536, 4 * size), np.uint8)
    return lambda: quants.dequantize(stored, kind), stored.shape[0] * 4.0 * numbers


_SAMPLES: dict[str, Callable[[torch.device], Sample]] = {
    "attention": _attention, "attention16": partial(_attention, dtype=torch.bfloat16), "factor": _factor,
    "eigen": _eigen, "moved": _moved, "selected": _selected, "launches": _launches, "hashed": _hashed,
    "dequantized": _dequantized,
}  # fmt: skip
"""What is timed for each kind of work: an operation, and how much it does."""
