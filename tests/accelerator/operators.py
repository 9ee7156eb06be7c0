"""What operators of aten do on CUDA: which make the host wait, which start no kernel, which may mix devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten

_WAITS = {
    "_local_scalar_dense": "item",
    "equal": "equal",
    "allclose": "allclose",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "masked_select_backward": "masked_select",
    "_unique": "unique",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "unique_dim_consecutive": "unique",
    "bincount": "bincount",
    "_linalg_check_errors": "check of a factorisation",
    "_linalg_eigh": "eigh",
    "_linalg_svd": "svd",
    "linalg_lstsq": "lstsq",
    "repeat_interleave": "repeat_interleave",
}
"""By name in aten, what the host waits for. `bool`, `int`, `float`, `tolist` of one number are `item`."""

_INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}

_NO_KERNEL = {
    "_local_scalar_dense", "_linalg_check_errors", "detach", "detach_", "alias", "lift_fresh", "empty", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "_reshape_alias", "_unsafe_view", "set_", "resize_", "is_pinned",
}  # fmt: skip
"""Copies of one number, metadata, and allocations."""

_NO_HOST_NUMBER = {
    "index_select", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_",
    "index_copy", "index_copy_", "embedding", "take", "cat", "stack", "mm", "addmm", "bmm", "mv", "dot", "linear",
}  # fmt: skip
"""Where CUDA takes not even a tensor of no dimension from the host."""


@cache
def _name(func: Any) -> str:
    return str(func._schema.name.removeprefix("aten::"))


@cache
def is_kernel(func: Any) -> bool:
    """Say whether an operator computes something on the device."""
    return not (func.is_view or _name(func) in _NO_KERNEL)


@cache
def is_drawing(func: Any) -> bool:
    """Say whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def wait_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return what the host waits for in an operator, or None."""
    name = _name(func)
    if name in _INDEXING:
        masks = [x for x in args[1] if x is not None and x.dtype in {torch.bool, torch.uint8}]
        return "indexing by a mask" if masks else None
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    return _WAITS.get(name)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write)


def writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _written(func)]


def may_mix(func: Any, args: Sequence[Any], host: Tensor) -> bool:
    """Say whether CUDA takes a tensor of the host among tensors of the device: as an index, or as a number."""
    name = _name(func)
    if name in _INDEXING and any(host is x for x in args[1]):
        return True
    return host.dim() == 0 and name not in _NO_HOST_NUMBER and host.device.type == "cpu"


def _mm_to(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply halves with sums in float32, which only CUDA has a kernel for."""
    return a.to(out_dtype) @ b.to(out_dtype)


def _histogram(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Count whole numbers, too."""
    return torch.histc(x.double(), bins, low, high).to(x.dtype)


CUDA_ONLY: Mapping[Any, Callable[..., Any]] = {_aten.mm.dtype: _mm_to, _aten.histc.default: _histogram}
"""Operators that the CPU has no kernel for, and what computes the same."""
