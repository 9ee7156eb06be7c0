"""What calls of torch from Python do while a pretended accelerator is on: they name devices, generators and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tests.accelerator.tensors import (
    INNER,
    SHOWN,
    DeviceGenerator,
    DeviceTensor,
    is_pinned,
    is_shown,
    pinned,
    replace,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnCall(TorchFunctionMode):
    """Sees every call of torch from Python before torch reads its arguments, which name devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the device's name in a call, and answer what torch's C++ code would answer for the host."""
        kwargs = kwargs or {}
        if (special := _SPECIAL.get(func)) is not None:
            return special(func, args, kwargs)
        device = kwargs.get("device")
        if "generator" in kwargs:
            _refuse_generator(args, kwargs)
        if device is not None and is_shown(device):
            kwargs["device"] = INNER
        if kwargs.get("pin_memory"):
            return pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)


def _to(func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    def inner(x: Any) -> Any:
        return INNER if isinstance(x, str | torch.device) and is_shown(x) else x

    return func(*map(inner, args), **{key: inner(x) if key == "device" else x for key, x in kwargs.items()})


def _cuda(_: Any, args: Any, kwargs: Any) -> Tensor:
    tensor, *device = args
    is_shown(*(device or [SHOWN]))
    return tensor.to(INNER, **{key: x for key, x in kwargs.items() if key != "device"})  # type: ignore[no-any-return]


def _from_data(func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Make a tensor from numbers: on the host, then copied."""
    own = args[0] if args and isinstance(args[0], DeviceTensor) else None
    device = kwargs.pop("device", None)
    there = own is not None if device is None else is_shown(device)
    if func in {torch.as_tensor, torch.asarray} and isinstance(args[0], Tensor):
        target = args[0].device if device is None else device
        return args[0].to(INNER if is_shown(target) else target, kwargs.get("dtype", args[0].dtype))
    if func is Tensor.new_tensor and own is not None:
        func, args, kwargs = torch.tensor, args[1:], {"dtype": own.dtype, **kwargs}
    elif device is not None and not there:
        kwargs["device"] = device
    learned = kwargs.pop("requires_grad", False)
    made = func(*args, **kwargs)
    return (made.to(INNER) if there else made).requires_grad_(learned)


def _set_item(func: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Write a number where a mask is true by one kernel, as CUDA does."""
    tensor, index, value = args
    if isinstance(tensor, DeviceTensor) and isinstance(index, Tensor) and isinstance(value, int | float):  # noqa: SIM102
        if index.dtype == torch.bool and index.shape == tensor.shape[: index.dim()]:
            tensor.masked_fill_(index.view(*index.shape, *[1] * (tensor.dim() - index.dim())), value)
            return
    func(*args, **kwargs)


def _set_data(func: Callable[..., None], args: Any, kwargs: Any) -> None:
    """Move a tensor to the device or back in place, as `module.to` does where torch does not swap tensors."""
    if any(isinstance(x, DeviceTensor) for x in args):
        replace(*args)
    else:
        func(*args, **kwargs)


_SPECIAL: Mapping[Any, Callable[..., Any]] = {
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.to: _to,
    Tensor.cuda: _cuda,
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor), _from_data),
    Tensor.__setitem__: _set_item,
    Tensor.pin_memory: lambda _, args, __: args[0] if is_pinned(args[0]) else pinned(args[0].clone()),
    Tensor.is_pinned: lambda _, args, __: is_pinned(args[0]),
}


def _refuse_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a generator of another device than the tensor that is drawn."""
    generator, device = kwargs.get("generator"), kwargs.get("device")
    there = isinstance(args[0] if args else None, DeviceTensor) if device is None else is_shown(device)
    if generator is not None and isinstance(generator, DeviceGenerator) != there:
        names = ("cpu", "cuda")
        raise RuntimeError(f"Expected a '{names[there]}' device type for generator but found '{names[not there]}'")
