"""A pretended accelerator: code that asks for `cuda` runs on the CPU, and what would cost time on a GPU is counted.

For tests on machines without a GPU: a tensor that was left on the host, a generator of the wrong device and a loop
that waits for the device show here as they do on CUDA. It says nothing of speed, and numbers are the CPU's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from tests.accelerator.calls import OnCall
from tests.accelerator.counts import Record
from tests.accelerator.device import Accelerator, OnDispatch
from tests.accelerator.tensors import SHOWN, DeviceGenerator, DeviceTensor, is_shown
from torch._utils import _dummy_type
from torch.utils.checkpoint import DefaultDeviceType

from compressx.models import architecture

MEMORY_BYTES = 16 * 2**30
"""What `torch.cuda.mem_get_info` says the device has; nothing is refused for want of it."""


@contextmanager
def pretended_accelerator() -> Iterator[Record]:
    """Let torch find one CUDA device, whose tensors compute on the CPU, and yield what is counted.

    Operations across devices are refused as CUDA refuses them. Waits of the host, kernels, copied bytes and bytes alive
    are counted. Everything is as before when the `with` is left; tensors of the device cannot be used any more then. A
    GPU that the machine has is out of reach within it.
    """
    if DeviceTensor.operate is not None:
        raise RuntimeError("a pretended accelerator is on already; leave it first")
    accelerator = Accelerator()
    with ExitStack() as stack:
        for target, name, new in _replaced(accelerator):
            stack.enter_context(mock.patch.object(target, name, new, create=True))
        plain = architecture._PLAIN_CLASSES | {"DeviceTensor"}
        stack.enter_context(mock.patch.object(architecture, "_PLAIN_CLASSES", plain))
        stack.enter_context(_modes(accelerator))
        yield accelerator.record


@contextmanager
def _modes(accelerator: Accelerator) -> Iterator[None]:
    """Switch the modes on in this thread."""
    with OnDispatch(accelerator), OnCall():
        yield


def _replaced(accelerator: Accelerator) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced in torch, and in threads that are started, by (where, name, new)."""
    record = accelerator.record

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def said(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def seed(number: int, *_: Any) -> None:
        accelerator.generator.manual_seed(number)

    def synchronize(*_: Any, **__: Any) -> None:
        record.wait("synchronize")

    def set_device(device: Any) -> None:
        is_shown(f"cuda:{device}" if isinstance(device, int) else device)

    for name, new in {
        "is_available": said(True), "device_count": said(1), "current_device": said(0), "set_device": set_device,
        "is_initialized": said(True), "_initialized": True, "init": nothing, "_lazy_init": nothing,
        "synchronize": synchronize, "current_stream": lambda *_: _Stream(record),
        "get_device_name": said("pretended accelerator"), "get_device_capability": said((9, 0)),
        "mem_get_info": lambda *_: (max(0, MEMORY_BYTES - record.alive_bytes), MEMORY_BYTES),
        "memory_allocated": lambda *_: record.alive_bytes, "memory_reserved": lambda *_: record.alive_bytes,
        "max_memory_allocated": lambda *_: record.peak_bytes, "max_memory_reserved": lambda *_: record.peak_bytes,
        "reset_peak_memory_stats": lambda *_: record.forget_peak(), "empty_cache": nothing,
        "is_bf16_supported": said(True), "manual_seed": seed, "manual_seed_all": seed,
        "get_rng_state": lambda *_: accelerator.generator.get_state(),
        "set_rng_state": lambda state, *_: accelerator.generator.set_state(state),
        "get_rng_state_all": lambda: [accelerator.generator.get_state()],
        "set_rng_state_all": lambda states: accelerator.generator.set_state(states[0]),
        "_exchange_device": said(0), "_maybe_exchange_device": said(0), "is_current_stream_capturing": said(False),
    }.items():  # fmt: skip
        yield torch.cuda, name, new
    yield from _out_of_reach(record, set_device)
    yield DeviceTensor, "operate", accelerator.run
    yield torch, "Generator", _Generator
    yield torch, "autocast", _autocast(torch.autocast)
    yield torch.amp, "autocast", torch.autocast
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        yield torch, name, _of_the_host(getattr(torch, name))
    yield torch.autograd, "_engine_run_backward", _with_mode(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    swapped = "get_swap_module_params_on_conversion"  # so that `module.to` keeps its parameters what they are
    yield torch.__future__, swapped, said(True)
    yield threading.Thread, "run", _in_thread(threading.Thread.run, accelerator)


def _out_of_reach(record: Record, set_device: Callable[[Any], None]) -> Iterator[tuple[Any, str, Any]]:
    """Yield what is replaced where a build of torch for CUDA would start the driver, or reach the machine's own GPU."""
    known: dict[str, Callable[..., Any]] = {
        "getAccelerator": lambda: torch.device("cuda"), "getDeviceIndex": lambda: 0, "setDeviceIndex": set_device,
        "exchangeDevice": lambda _: 0, "maybeExchangeDevice": lambda _: 0, "getStream": lambda *_: _Stream(record),
        "synchronizeDevice": lambda *_: record.wait("synchronize"), "isAllocatorInitialized": lambda: False,
    }  # fmt: skip
    for name in dir(torch._C):
        if name.startswith(("_accelerator_", "_cuda_")) and not isinstance(getattr(torch._C, name), type):
            yield torch._C, name, known.get(name.removeprefix("_accelerator_"), _dummy_type(name))
    yield from ((where, name, _dummy_type(name)) for where in (torch, torch.cuda) for name in ("Stream", "Event"))
    yield DefaultDeviceType, "_default_device_type", DefaultDeviceType._default_device_type  # it keeps what it is told


class _Stream:
    """The device's only stream, which does everything in order."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def synchronize(self) -> None:
        """Wait for the device."""
        self._record.wait("synchronize")

    is_capturing = staticmethod(lambda: False)  # of a graph: an optimizer asks before each step

    def record_event(self) -> _Event:
        """Return an event after what was begun."""
        return _Event(self._record, self._record.copies_begun)


class _Event:
    """A moment in the work of the device."""

    def __init__(self, record: Record, begun: int) -> None:
        self._record, self._begun = record, begun

    def synchronize(self) -> None:
        """Wait until the device gets there."""
        self._record.wait("event", self._begun)


class _Generator(torch.Generator):
    """What `torch.Generator` is while the device is on."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        """Make a generator that says it is on the device, or a plain one."""
        return DeviceGenerator() if is_shown(device) else _PLAIN(device)


_PLAIN = torch.Generator


def _autocast(plain: type) -> type:
    """Make the class of contexts in which products are narrow on the CPU if they are asked to be on the device."""

    class Autocast(plain):  # type: ignore[misc]
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__("cpu" if is_shown(device_type) else device_type, *args, **kwargs)

    return Autocast


def _of_the_host(func: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for the host's setting where the device's is asked for: one stands for the other."""

    def asked(*args: Any) -> Any:
        return func(*("cpu" if isinstance(x, str) and x == SHOWN.type else x for x in args))

    return asked


def _with_mode(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let hooks and recomputed forward passes name the device, too: `Tensor.backward` leaves the mode."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with OnCall():
            return backward(*args, **kwargs)

    return run


def _in_thread(run: Callable[..., None], accelerator: Accelerator) -> Callable[..., None]:
    """Switch the modes on in a thread that is started, since modes are of one thread."""

    def with_modes(self: threading.Thread) -> None:
        with _modes(accelerator):
            run(self)

    return with_modes
