"""What torch says while a pretended accelerator is on, and that everything is as before when it is off."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import pytest
import torch
from tests.accelerator import pretended_accelerator
from torch.utils.checkpoint import DefaultDeviceType, checkpoint

from compressx.runtime.machine import machine

SHARED = (
    torch,
    torch._C,
    DefaultDeviceType,
    torch.cuda,
    torch.amp,
    torch.autograd,
    torch.__future__,
    threading.Thread,
    torch.Tensor,
)


def state() -> list[dict[str, object]]:
    return [dict(vars(each)) for each in SHARED]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_everything_is_as_before_when_it_is_left(error):
    before, generator, gpu = state(), torch.get_rng_state(), torch.cuda.is_available()
    try:
        with pretended_accelerator():
            assert torch.cuda.is_available()
            torch.rand(3, device="cuda").sum().item()
            if error:
                raise error
    except ZeroDivisionError:
        pass
    assert state() == before
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.cuda.is_available() == gpu
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    if not gpu:
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(3, device="cuda")


def test_torch_finds_one_device_with_the_memory_that_was_said():
    with pretended_accelerator(memory_bytes=10_000) as device:
        assert (torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.is_initialized()) == (1, 0, True)
        assert torch.cuda.get_device_name(0) in machine(torch.device("cuda"))
        x = torch.zeros(1000, device="cuda")
        assert torch.cuda.mem_get_info() == (6000, 10_000)
        assert torch.cuda.memory_allocated() == device.alive_bytes == x.numel() * 4
        torch.cuda.set_device("cuda:0")
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.cuda.set_device(1)


def test_there_is_one_at_a_time():
    with (
        pretended_accelerator(),
        pytest.raises(RuntimeError, match="is on already; leave it first"),
        pretended_accelerator(),
    ):
        pass


def test_threads_use_the_device_too():
    with pretended_accelerator() as device:
        with ThreadPoolExecutor(1) as pool:
            x = pool.submit(lambda: torch.ones(3).to("cuda") + torch.zeros(3, device="cuda")).result()
            with pytest.raises(RuntimeError, match="same device"):
                pool.submit(lambda: x + torch.ones(3)).result()
        assert (x.device.type, device.to_device_bytes) == ("cuda", 12)


def test_a_thread_that_was_there_before_can_still_read_a_tensor_of_the_device():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with pretended_accelerator():
            x = torch.ones(3, device="cuda")
            assert pool.submit(x.cpu).result().tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_steps_on_the_device_and_asks_no_driver(foreach):
    with pretended_accelerator() as device:
        weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
        weight.grad = torch.ones(3, device="cuda")
        asked = torch.accelerator.current_accelerator(check_available=True)
        torch.optim.AdamW([weight], lr=0.5, weight_decay=0, foreach=foreach).step()
        assert (asked, torch.accelerator.current_stream().is_capturing()) == (torch.device("cuda"), False)
        assert weight.tolist() == pytest.approx([0.5] * 3)
        before = device.synchronisations
        torch.accelerator.synchronize()
        assert device.synchronisations == before + 1
    assert torch.accelerator.current_accelerator(check_available=True) is None


def test_recomputing_on_the_device_leaves_no_name_of_it_behind(monkeypatch):
    monkeypatch.setattr(DefaultDeviceType, "_default_device_type", None)
    with pretended_accelerator():
        checkpoint(torch.sin, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert DefaultDeviceType._default_device_type is None


@pytest.mark.parametrize(
    "reach", ["cuda.memory_stats", "accelerator.get_memory_info", "cuda.Stream", "cuda.Event", "Stream", "Event"]
)
def test_a_gpu_of_the_machine_is_out_of_reach(reach):
    with pretended_accelerator(), pytest.raises((NotImplementedError, RuntimeError, AttributeError)):
        attrgetter(reach)(torch)()
