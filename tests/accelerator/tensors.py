"""Tensors and generators that say they are on a CUDA device while their numbers are on the CPU.

A `DeviceTensor` wraps a tensor on the CPU. To torch's C++ code it is on `cpu:1`, a device of the CPU's kind that
nothing else is on: so autograd, autocast, attention and what C++ allocates inside an operator work as they do on the
CPU, and every operator can still be told apart from one on the host. To Python it is on `cuda:0`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

SHOWN = torch.device("cuda", 0)
"""What Python sees."""

INNER = torch.device("cpu", 1)
"""What torch's C++ code sees."""


class DeviceGenerator(torch.Generator):
    """A generator that says it is on the device."""

    device = SHOWN


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended device; `held` has its numbers, on the CPU."""

    held: Tensor
    operate: ClassVar[Callable[..., Any] | None] = None
    """Does an operator; set while a pretended accelerator is on."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor, requires_grad: bool = False) -> Self:
        """Wrap a tensor on the CPU, or make a parameter anew as `type(parameter)(data, requires_grad)` does."""
        held = held.held if isinstance(held, DeviceTensor) else held.detach()
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=INNER, requires_grad=requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Do an operator where the modes are not on, such as in a thread that was there before them."""
        if DeviceTensor.operate is None:
            raise RuntimeError(f"{func} of a tensor of a pretended accelerator that is off; use it within its `with`")
        return DeviceTensor.operate(func, args, kwargs or {})

    device = property(lambda _: SHOWN)
    is_cuda = property(lambda _: True)
    is_cpu = property(lambda _: False)

    @property
    def data(self) -> Tensor:
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        replace(self, new)

    def as_subclass(self, cls: type[Tensor]) -> Any:
        """Return an alias that is of another subclass of tensors, too."""
        alias: Any = self.view_as(self)
        alias.__class__ = _also(cls)
        return alias

    def data_ptr(self) -> int:
        """Return the address of the numbers."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the numbers."""
        return self.held.untyped_storage()

    def is_pinned(self, *_: Any) -> bool:
        """Say that memory of the device is not pinned."""
        return False

    def tolist(self) -> Any:
        """Copy the numbers to the host."""
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        """Refuse, as CUDA does."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.held!r:.200} on {SHOWN}"

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        memo[id(self)] = copied
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle what the host can read; it is read back on the host."""
        return self.cpu().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


@cache
def _also(cls: type[Tensor]) -> type[DeviceTensor]:
    return type(cls.__name__, (cls, DeviceTensor), {})


def replace(old: Tensor, new: Tensor) -> None:
    """Make a tensor another one, of another device too, and leave what holds it as it is: `old.data = new`."""
    new = new.detach().requires_grad_(old.requires_grad)
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(new, old.requires_grad)
    new.grad = old.grad
    torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    if old._backward_hooks is not None:  # `old` still has them, and what autograd sees of it does not
        old._backward_hooks = old._backward_hooks


def is_shown(device: Any) -> bool:
    """Say whether a device, as an argument gives it, is the pretended one.

    Raises:
        RuntimeError: an index that the machine has no device of.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index not in {None, 0}:
        raise RuntimeError(f"CUDA error: invalid device ordinal {device}")
    return bool(device.type == "cuda" or device == INNER)


def is_pinned(tensor: Tensor) -> bool:
    """Say whether a tensor of the host is in pinned memory."""
    return not isinstance(tensor, DeviceTensor) and getattr(tensor.untyped_storage(), "pretends_pinned", False)


def pinned(tensor: Tensor) -> Tensor:
    """Mark a tensor's memory as pinned."""
    tensor.untyped_storage().pretends_pinned = True  # type: ignore[attr-defined]
    return tensor
