"""The dtype of matmuls while blocks are run or trained, whatever the dtype of the weights.

Narrower matmuls are torch's autocast. 16-bit models may multiply in float32, on processors that have no 16-bit
matmuls and emulate them at a fraction of float32's speed, or in the other dtype of 16 bits. Each matmul's factors are
converted for the length of the matmul, and its result back. In float32 that is what a processor with 16-bit matmuls
computes, up to the order of the sums. Autocast is not for them: its results meet tensors of the model's dtype, torch
makes float32 of the two, and norms refuse it. A block's weights are never held twice: one conversion costs a percent of
a matmul with a thousand tokens.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.benchmark import Timer

from compressx.api.record import Arithmetic
from compressx.recipe.sources import ComputeDtype

WORTHWHILE = 1.5
"""How many times as fast as the weights' own dtype another one has to be: blocks do more than matmuls."""

_ROUNDS = 5
"""Of the measured matmuls, which take milliseconds."""

_NARROW = (torch.bfloat16, torch.float16)
_MATMULS = {
    getattr(owner, name)
    for owner, names in {
        functional: ("linear", "scaled_dot_product_attention", "grouped_mm"),
        torch: ("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "_grouped_mm"),
        Tensor: ("matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__", "__rmatmul__"),
    }.items()
    for name in names
    if hasattr(owner, name)  # the grouped ones are new
}


def run_arithmetic(wanted: ComputeDtype, weights: torch.dtype, device: torch.device, *, training: bool) -> Arithmetic:
    """Return the arithmetic of a run with a recipe's `compute_dtype`.

    `auto` keeps the weights' dtype unless the device multiplies another one `WORTHWHILE` times as fast. For weights of
    16 bits that may be float32. bfloat16 in place of float32 is for runs that train, where matmuls take most of the
    time, and training makes up for it; float16 is too narrow for it: small gradients vanish. Without training the same
    masks are found on every machine.
    """
    if wanted != "auto":
        return Arithmetic(wanted, "as the recipe says")
    own = torch.float32 if training and weights == torch.float16 else weights
    others = [x for x in (torch.float32, *([torch.bfloat16] if training else [])) if x != own]
    if weights == torch.float64 or not others:
        return Arithmetic(name_of(own), "as the weights")
    measured = rates(device)
    fastest = max(map(name_of, others), key=measured.__getitem__)
    if measured[fastest] < WORTHWHILE * measured[name_of(own)] or not measured[fastest]:
        return Arithmetic(name_of(own), f"because no other is {WORTHWHILE} times as fast here", measured)
    return Arithmetic(fastest, "the fastest here", measured)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name in recipes and reports, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def rates(device: torch.device) -> Mapping[str, float]:
    """Measure the FLOP/s of matmuls by the name of their factors' dtype, in a fraction of a second; once a process.

    The matmuls take turns and the shortest time of each counts, because other processes only make them slower. A CPU
    is measured with one thread, by the time that it runs: on a busy machine most of a second is other processes'. 0
    stands for a dtype that the device cannot multiply.
    """
    rows = 64 if device.type == "cpu" else 2**14
    clock: dict[str, Any] = {"timer": time.thread_time} if device.type == "cpu" else {}
    timers: dict[str, Timer] = {}
    seconds: dict[str, float] = {}
    for dtype in (torch.float32, *_NARROW):
        x, weight = (torch.ones(n, 1024, dtype=dtype, device=device) for n in (rows, 1024))
        factors = {"linear": functional.linear, "x": x, "weight": weight}
        timers[name_of(dtype)] = Timer("linear(x, weight)", globals=factors, num_threads=1, **clock)
    for _ in range(_ROUNDS):
        for name, timer in timers.items():
            try:
                taken = timer.timeit(1).median  # after a run that loads kernels and fills caches
            except RuntimeError:  # this backend has no matmuls of this dtype
                taken = math.inf
            seconds[name] = min(seconds.get(name, math.inf), taken)
    return {name: 2 * rows * 1024**2 / taken for name, taken in seconds.items()}


def matmuls_in(
    dtype: torch.dtype | None, part: nn.Module, device: torch.device, *, cache: bool = False
) -> AbstractContextManager[Any]:
    """Return a context in which a model, or a part of one, multiplies in a dtype; None for that of the weights.

    Nothing changes where the part's matrices have the dtype already. `cache` keeps narrow copies of the weights within
    the context: only where no weight changes in it.
    """
    matrices = {p.dtype for p in part.parameters() if p.dim() >= 2 and p.dtype.is_floating_point}
    narrow = matrices & {*_NARROW}
    if dtype is not None and narrow and dtype not in narrow:
        return _ConvertedMatmuls(dtype)
    if dtype is None or dtype == torch.float32 or dtype in matrices:
        return nullcontext()  # not a disabled autocast, which would end the caller's
    return _caching(device.type, dtype) if cache else torch.autocast(device.type, dtype, cache_enabled=False)


@contextmanager
def _caching(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Open autocast with narrow copies of its own alone.

    torch drops copies where the outermost autocast ends. Within one of the caller's, those of one training step would
    be taken for the weights of the next, and those of a check, which have no gradient, for those of a step.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device_type, dtype):
            yield
    finally:
        torch.clear_autocast_cache()


class _ConvertedMatmuls(TorchFunctionMode):
    """Computes matmuls of 16-bit factors in another dtype, and returns them in the factors'.

    A matmul whose result is to be wider is left alone: a Hessian's is float32, and would come back in 16 bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _MATMULS or kwargs.get("out_dtype") not in {None, *_NARROW}:
            return function(*args, **kwargs)
        narrow = next((x.dtype for x in _tensors((args, *kwargs.values())) if x.dtype in _NARROW), None)
        if narrow is None:
            return function(*args, **kwargs)
        wanted = self.dtype
        result = function(
            *_converted(args, wanted), **{key: _converted(value, wanted) for key, value in kwargs.items()}
        )
        return result.to(narrow)


def original(factor: Tensor) -> Tensor:
    """Return the tensor that a factor of a matmul was converted from, or the factor itself."""
    narrow: Tensor = getattr(factor, "_narrow", factor)
    return narrow


def _converted(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.dtype in _NARROW and value.dtype != dtype:
        converted = value.to(dtype)
        converted._narrow = value  # type: ignore[attr-defined]
        return converted
    return tuple(_converted(x, dtype) for x in value) if isinstance(value, tuple | list) else value


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)
