"""2:4 weights in the layout that NVIDIA's sparse tensor cores multiply, by `torch.sparse`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.sparse import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)

from compressx.api.names import folded
from compressx.api.pruner import Linear
from compressx.masks.adapters import refuse_adapted
from compressx.masks.inspect import fits_two_four
from compressx.models.architecture import Architecture, refuse_prepared, survey
from compressx.runtime.errors import ArtifactError, UnsupportedModelError, did_you_mean
from compressx.runtime.machine import name_of
from compressx.runtime.quiet import quiet_libraries

_OLDEST = (8, 0)
"""Compute capability of Ampere, the first GPUs with sparse tensor cores."""

_DTYPES = (torch.float16, torch.bfloat16)
"""Of 2:4 weights. In float32 the hardware keeps one of every two, so that torch would lose weights without a word."""

_MOST_REASONS = 8
"""Reasons that a message lists; the others are counted."""


@dataclass(frozen=True)
class Converted:
    """What `semi_structured` did.

    Attributes:
        names: fully qualified names of the linears that were converted, in the model's order.
        reasons: why the others were not, by name.
    """

    names: tuple[str, ...]
    reasons: Mapping[str, str]


def semi_structured(model: nn.Module, linears: Iterable[str] | None = None) -> Converted:
    """Let a GPU multiply the 2:4 weights of a model as such, in place: for inference, not for saving or training.

    The weights are replaced by `torch.sparse` tensors of 9/16 of their size; biases stay.
    Outputs are equal up to rounding. cuSPARSELt multiplies if it can, else CUTLASS: each is tried with a small product
    first. Save the model before, or load it again: its state dict is refused afterwards.

    Args:
        model: a transformers causal language model on an NVIDIA GPU of compute capability 8.0 or later.
        linears: fully qualified names of those to convert; by default all whose weights are 2:4 and fit.

    Returns:
        The names of those that were converted, and why the others were not.

    Raises:
        UnsupportedModelError: the device has no such products; one of `linears` cannot be converted, or none can where
            no names are given. The message has the reasons, and the model is left unchanged.
        ArtifactError: a name that the model does not have, masks that are held, or adapters.
    """
    refuse_prepared(model, "converted to 2:4", allowed="SparseSemiStructuredTensor")
    refuse_adapted(model)
    surveyed = survey(model)
    check_device(next(model.parameters()).device)
    known = {**surveyed.linears, **surveyed.outside}
    chosen = [*known] if linears is None else list(dict.fromkeys(linears))
    layout_of = cache(_first_that_works)  # each dtype is tried once
    reasons = {name: reason for name in chosen if (reason := _reason(surveyed, name, layout_of))}
    names = tuple(name for name in chosen if name not in reasons)
    if reasons and (linears is not None or not names):
        raise UnsupportedModelError(_refusal(type(model).__name__, reasons, names))
    for name in names:
        module = known[name].module
        weight = module.get_parameter("weight").detach()
        layout = layout_of(weight.dtype, weight.device)
        module.weight = nn.Parameter(layout.from_dense(weight.contiguous()), requires_grad=False)
        module.forward = partial(_multiplied_by_rows, module.forward)
        module.register_state_dict_pre_hook(_refuse_saving)  # type: ignore[no-untyped-call]
    return Converted(names, reasons)


def check_device(device: torch.device) -> None:
    """Refuse a device without sparse tensor cores.

    Raises:
        UnsupportedModelError: anything but an NVIDIA GPU of compute capability 8.0 or later.
    """
    if device.type != "cuda":
        raise UnsupportedModelError(
            f"2:4 products need an NVIDIA GPU, and the model is on {device}; move it to one (device cuda) first. Other "
            "devices multiply its zeros like any number"
        )
    found = torch.cuda.get_device_capability(device)
    if found < _OLDEST:
        raise UnsupportedModelError(
            f"2:4 products need compute capability {_OLDEST[0]}.{_OLDEST[1]} (Ampere) or later, and "
            f"{torch.cuda.get_device_name(device)} has {found[0]}.{found[1]}; use the model as it is, or another GPU"
        )


def is_two_four(model: nn.Module) -> bool:
    """Return whether any linear in the decoder blocks of a model has 2:4 weights."""
    return any(fits_two_four(linear.weight == 0) for linear in survey(model).linears.values())


def _classes() -> list[Any]:
    """Return the classes of torch for 2:4 weights, the usually faster one first."""
    forced = SparseSemiStructuredTensor._FORCE_CUTLASS  # torch's own switch, which its users know
    first = [SparseSemiStructuredTensorCUSPARSELT] if torch.backends.cusparselt.is_available() and not forced else []
    return [*first, SparseSemiStructuredTensorCUTLASS]


def _first_that_works(dtype: torch.dtype, device: torch.device) -> Any:
    """Return the first class whose products of a dtype are right on a device; if there is none, why, as a text."""
    failed = []
    for layout in _classes():
        if not (error := _trial(layout, dtype, device)):
            return layout
        failed.append(f"{layout.BACKEND}: {error}")
    return f"torch {torch.__version__} multiplies no 2:4 weights of {name_of(dtype)} on {device} ({'; '.join(failed)})"


def _trial(layout: Any, dtype: torch.dtype, device: torch.device) -> str:
    """Multiply a small weight that keeps every pair of positions somewhere; return what went wrong, if anything did.

    A GPU that a class was not built for is found by this alone.
    """
    rows, columns, tokens = 128, 256, 16
    pairs = torch.tensor(list(combinations(range(4), 2)), device=device)  # [6, 2]
    place = torch.arange(rows, device=device)[:, None] + torch.arange(columns // 4, device=device)  # [rows, groups]
    keep = torch.zeros(rows, columns // 4, 4, device=device).scatter_(2, pairs[place.remainder(len(pairs))], 1.0)
    # small whole numbers, so that products and sums are exact in both dtypes but for the rounding of the result
    weight = _counted(rows, columns, 7, device) * keep.view(rows, columns)
    x = _counted(tokens, columns, 5, device)
    try:
        with quiet_libraries(), torch.no_grad():  # torch warns that its classes are a prototype
            product = nn.functional.linear(x.to(dtype), layout.from_dense(weight.to(dtype)))
        wrong = not torch.allclose(product.float(), nn.functional.linear(x, weight), rtol=1e-2, atol=0.5)
    except (RuntimeError, AttributeError) as error:
        return " ".join(str(error).split())[:200]
    return "a small trial gave a wrong product" if wrong else ""


def _counted(rows: int, columns: int, period: int, device: torch.device) -> Tensor:
    """Return the numbers 1, 2, ... period, 1, 2, ..., float32 [rows, columns]."""
    return torch.arange(rows * columns, dtype=torch.float32, device=device).remainder_(period).add_(1).view(rows, -1)


def _reason(surveyed: Architecture, name: str, layout_of: Callable[[torch.dtype, torch.device], Any]) -> str:
    """Return why a linear cannot be converted; empty if it can.

    Raises:
        ArtifactError: the model has no linear of this name.
    """
    known = {**surveyed.linears, **surveyed.outside}
    if name in surveyed.unprunable:
        return surveyed.unprunable[name]
    if name not in known:
        raise ArtifactError(f"linears: the model has no linear {name!r}; {did_you_mean(name, known)}")
    linear = known[name]
    weight = getattr(linear.module, linear.parameter)
    if isinstance(weight, SparseSemiStructuredTensor):
        return "converted already"
    if linear.expert is not None or linear.transposed:
        kind = "one of several experts in one tensor" if linear.expert is not None else "stored as [in, out]"
        return f"{kind}; only an nn.Linear can be converted"
    if weight.device.type != "cuda":
        return f"on {weight.device}; move the whole model to the GPU"
    if weight.dtype not in _DTYPES:
        return f"{name_of(weight.dtype)}; 2:4 products are of float16 and bfloat16, so load the model in one of these"
    return _unlike_two_four(linear) or _unfit(weight, layout_of(weight.dtype, weight.device))


def _unlike_two_four(linear: Linear) -> str:
    """Return how far a weight is from 2:4; empty if it is."""
    zero = linear.weight == 0
    if fits_two_four(zero):
        return ""
    if zero.shape[1] % 4:
        return f"{zero.shape[1]} input features are no multiple of 4"
    over = ((~zero).view(len(zero), -1, 4).sum(dim=2) > 2).float().mean()
    return f'not 2:4: {float(over):.2%} of its groups of 4 keep more than 2; prune it with pattern: "2:4"'


def _unfit(weight: Tensor, layout: Any) -> str:
    """Return why a class of torch does not take a 2:4 weight; empty if it does."""
    if isinstance(layout, str):
        return layout
    least = layout._DTYPE_SHAPE_CONSTRAINTS[weight.dtype]
    rows, columns = weight.shape
    if rows % least.sparse_min_rows or columns % least.sparse_min_cols:
        return (
            f"[{rows}, {columns}] are no multiples of [{least.sparse_min_rows}, {least.sparse_min_cols}] "
            f"[out_features, in_features], which {layout.BACKEND} asks for in {name_of(weight.dtype)}"
        )
    return ""


def _refusal(model: str, reasons: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Say why linears cannot be converted, with one line for those that are alike."""
    lines = [f"{name}: {reason}" for name, _, (reason,) in folded(reasons.items())]
    if len(lines) > _MOST_REASONS:
        lines = [*lines[:_MOST_REASONS], f"and {len(lines) - _MOST_REASONS} more"]
    of = len(reasons) + len(names)
    return "\n  ".join([f"{model}: {len(reasons)} of {of} linears cannot be converted to 2:4:", *lines])


def _multiplied_by_rows(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute a linear of x [..., in_features] as a product of two matrices, which is all that torch does with 2:4.

    Of other strides it would multiply a copy of the weight for each sequence, which no 2:4 weight has. What a 2:4
    product leaves for one token of several sequences has such strides.
    """
    rows = forward(x.reshape(-1, x.shape[-1]))
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def _refuse_saving(_module: nn.Module, prefix: str, _keep_vars: bool) -> None:
    """Refuse the state dict of a converted linear, which `from_pretrained` could not read."""
    raise ArtifactError(
        f"{prefix.rstrip('.')}: its weight is in a GPU's 2:4 layout and cannot be saved; save the model before "
        "compressx.masks.semi_structured, or load it again"
    )
