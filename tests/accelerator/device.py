"""The pretended device: does every operator on the CPU, refuses what CUDA refuses, and counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.accelerator.counts import Record
from tests.accelerator.operators import CUDA_ONLY, is_drawing, is_kernel, may_mix, wait_of, writes
from tests.accelerator.tensors import DeviceGenerator, DeviceTensor, is_pinned, is_shown, pinned
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_HOST = torch.device("cpu")

_aten = torch.ops.aten


class Accelerator:
    """The device: what it counted, and its generator."""

    def __init__(self) -> None:
        self.record = Record()
        self.generator = DeviceGenerator()  # draws where a call names none
        self.generator.manual_seed(torch.initial_seed())

    def put(self, held: Tensor) -> DeviceTensor:
        """Make a tensor of the device from the tensor on the CPU that holds its numbers."""
        self.record.allocated(held.untyped_storage())
        return DeviceTensor(held)

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Do one operator of aten, on the device if it says so or if one of its tensors is there.

        Raises:
            RuntimeError: tensors of different devices, as CUDA raises it.
        """
        mine: dict[int, DeviceTensor] = {}
        host: list[Tensor] = []
        held = [_held(x, mine, host) for x in args]
        named = {key: _held(x, mine, host) for key, x in kwargs.items()}
        wanted = kwargs.get("device")
        there = bool(mine) if wanted is None else is_shown(wanted)
        if not (mine or there):
            return func(*args, **kwargs)
        if wanted is not None:
            named["device"] = _HOST if there else wanted
        if func is _aten._to_copy.default or func is _aten.copy_.default:
            return self._copied(func, args, func(*held, **named), there, _non_blocking(args, kwargs))
        if not there:  # such as zeros_like(x, device="cpu")
            return func(*held, **named)
        if host:
            _refuse_mix(func, args, kwargs, host)
        if (what := wait_of(func, args, kwargs)) is not None:
            self.record.wait(what)
        if is_kernel(func):
            self.record.launch()
        return self._wrapped(func, mine, self._computed(func, held, named))

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        func = CUDA_ONLY.get(func, func)
        if not is_drawing(func) or any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            self.generator.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)

    def _wrapped(self, func: Any, known: Mapping[int, DeviceTensor], out: Any) -> Any:
        """Return what the caller gave where an operator wrote into it, and tensors of the device for the rest."""
        if isinstance(out, tuple | list):
            return type(out)(self._wrapped(func, known, x) for x in out)
        if not isinstance(out, Tensor):
            return out
        same = known.get(id(out))
        if same is None:
            return self.put(out)
        if same.shape != out.shape or same.stride() != out.stride():
            raise NotImplementedError(f"{func}: the pretended device cannot give a tensor another shape in place")
        return same

    def _copied(self, func: Any, args: Sequence[Any], out: Tensor, there: bool, non_blocking: bool) -> Tensor:
        """Count a copy within the device, or between it and the host; that waits unless memory is pinned.

        `out` is what `_to_copy` or `copy_` returned on the CPU, `there` whether a new tensor is the device's.
        """
        to_copy = func is _aten._to_copy.default
        source = args[0] if to_copy else args[1]
        target = there if to_copy else isinstance(args[0], DeviceTensor)
        size = source.numel() * source.element_size()
        if target == isinstance(source, DeviceTensor):
            self.record.launch()
        elif target:
            self.record.copied(to_device=size, pageable=source.dim() > 0 and not is_pinned(source))
            # A number that is written into a tensor of the device is an argument of a kernel.
            if not non_blocking and (to_copy or source.dim()):
                self.record.wait("copy to the device")
        else:
            # What `to` makes on the host for a copy that does not block is pinned by torch.
            if to_copy and non_blocking:
                pinned(out)
            into = out if to_copy else args[0]
            self.record.copied(to_host=size, pageable=source.dim() > 0 and not is_pinned(into))
            if non_blocking and is_pinned(into):
                self._delay(into)
            else:
                self.record.wait("copy to the host")
        if not to_copy:
            return args[0]  # type: ignore[no-any-return]
        return self.put(out) if target else out

    def _delay(self, into: Tensor) -> None:
        """Show other numbers than those that were copied to the host until the host waits for the device."""
        values = into.detach().clone()
        into.detach().fill_(math.nan if into.is_floating_point() else 1)
        self.record.arrives_late(lambda: into.detach().copy_(values))


def _held(value: Any, mine: dict[int, DeviceTensor], host: list[Tensor]) -> Any:
    """Return an argument as the CPU computes with it; tensors are added to those of the device or of the host."""
    if isinstance(value, DeviceTensor):
        mine[id(value.held)] = value
        return value.held
    if isinstance(value, Tensor):
        host.append(value)
    elif isinstance(value, list | tuple):
        return [_held(x, mine, host) for x in value]
    return value


def _non_blocking(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))


def _refuse_mix(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], host: Sequence[Tensor]) -> None:
    written = writes(func, args, kwargs)
    for x in host:
        if any(x is w for w in written) or not may_mix(func, args, x):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"{x.device}! ({func}, a tensor {list(x.shape)} on {x.device})"
            )


class OnDispatch(TorchDispatchMode):
    """Sees every operator of aten, those on the host too."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._accelerator = accelerator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nothing here is compiled: torch would import its compiler to step around this mode."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operator."""
        return self._accelerator.run(func, args, kwargs or {})
