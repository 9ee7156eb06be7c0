"""The pretended device: what CUDA refuses is refused, the rest is the CPU's, waits and bytes are counted."""

from __future__ import annotations

import gc
import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.accelerator import Record, pretended_accelerator
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import DefaultDeviceType

from compressx.runtime.machine import machine

CUDA = torch.device("cuda", 0)
MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def device() -> Iterator[Record]:
    with pretended_accelerator() as record:
        yield record


def there(*shape: int) -> torch.Tensor:
    return torch.rand(*shape).to("cuda")


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: there(3) + torch.ones(3),
        lambda: there(2, 3) @ torch.ones(3, 2),
        lambda: there(3).add_(torch.ones(3)),
        lambda: torch.ones(3).add_(there(3)),
        lambda: torch.where(torch.ones(3, dtype=torch.bool), there(3), 0.0),
        lambda: torch.cat([there(3), torch.ones(3)]),
        lambda: torch.mm(there(2, 2), there(2, 2), out=torch.empty(2, 2)),
        lambda: torch.ones(3)[torch.zeros(2, dtype=torch.int64, device="cuda")],
        lambda: functional.embedding(torch.zeros(2, dtype=torch.int64), there(4, 3)),
        lambda: nn.Linear(3, 3)(there(2, 3)),
        lambda: there(3) + torch.ones(3, device="meta"),
    ],
)
def test_tensors_of_different_devices_are_refused(device, mixed):
    with pytest.raises(RuntimeError, match=MIXED):
        mixed()


@pytest.mark.parametrize(
    "allowed",
    [
        lambda: there(3) + torch.tensor(2.0),
        lambda: torch.where(there(3) > 0.5, there(3), torch.tensor(0.0)),
        lambda: there(3)[torch.tensor([0, 2])],
        lambda: there(3).copy_(torch.ones(3)),
        lambda: there(3).masked_fill(there(3) > 0.5, torch.tensor(0.0)),
    ],
)
def test_numbers_and_indices_of_the_host_are_taken_as_cuda_takes_them(device, allowed):
    assert allowed().device == CUDA


def test_a_generator_of_another_device_is_refused(device):
    here, own = torch.Generator().manual_seed(0), torch.Generator("cuda").manual_seed(0)
    assert (here.device.type, own.device) == ("cpu", CUDA)
    for draw in (
        lambda: torch.rand(3, device="cuda", generator=here),
        lambda: torch.randperm(3, device="cuda", generator=here),
        lambda: there(3).normal_(generator=here),
        lambda: torch.rand(3, generator=own),
    ):
        with pytest.raises(RuntimeError, match="device type for generator but found"):
            draw()
    first = torch.rand(3, device="cuda", generator=own)
    again = torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    assert torch.equal(first, again)


WAITS = [
    (lambda x, y: x.sum().item(), {"item": 1}),
    (lambda x, y: float(x[0]) + int(x[1]), {"item": 2}),
    (lambda x, y: [float(v) for v in x], {"item": 4}),
    (lambda x, y: x.nonzero(), {"nonzero": 1}),
    (lambda x, y: x[x > 0.5], {"indexing by a mask": 1}),
    (lambda x, y: torch.equal(x, x + 1), {"equal": 1}),
    (lambda x, y: x.unique(), {"unique": 1}),
    (lambda x, y: torch.linalg.cholesky(torch.eye(3, device="cuda")), {"check of a factorisation": 1}),
    (lambda x, y: torch.cuda.synchronize(), {"synchronize": 1}),
    (lambda x, y: (x * 2 + 1).softmax(0).sum(), {}),
    (lambda x, y: torch.zeros(3, device="cuda").fill_(2.0), {}),
    (lambda x, y: x.__setitem__(x > 0.5, 0.0), {}),
    (lambda x, y: torch.where(x > 0.5, x, 0.0), {}),
    (lambda x, y: torch.linalg.cholesky_ex(torch.eye(3, device="cuda")), {}),
]
TO, FROM = {"copy to the device": 1}, {"copy to the host": 1}
COPIES = [  # waits, and whether memory of the host is not pinned
    (lambda x, y: x.tolist(), FROM, True),
    (lambda x, y: x.cpu(), FROM, True),
    (lambda x, y: y.copy_(x), FROM, True),
    (lambda x, y: y.copy_(x, non_blocking=True), FROM, True),
    (lambda x, y: y.pin_memory().copy_(x), FROM, False),
    (lambda x, y: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True), {}, False),
    (lambda x, y: x.to("cpu", non_blocking=True), {}, False),
    (lambda x, y: y.to("cuda"), TO, True),
    (lambda x, y: torch.tensor([1.0], device="cuda"), TO, True),
    (lambda x, y: x.copy_(y), TO, True),
    (lambda x, y: x.copy_(y.pin_memory()), TO, False),
    (lambda x, y: y.pin_memory().to("cuda", non_blocking=True), {}, False),
    (lambda x, y: x.clone().copy_(x), {}, False),
    (lambda x, y: x[0].fill_(torch.tensor(1.0)), {}, False),
]


@pytest.mark.parametrize(("work", "waits", "pageable"), [*((*of, False) for of in WAITS), *COPIES])
def test_the_host_waits_where_it_asks_the_device_or_copies_memory_that_is_not_pinned(device, work, waits, pageable):
    x, y = there(4), torch.rand(4)
    with device.counted() as counts:
        work(x, y)
    assert {asked: count for (_, asked), count in counts.waits.items()} == waits
    assert counts.synchronisations == sum(waits.values())
    assert counts.pageable.total() == pageable
    assert not pageable or next(iter(counts.pageable)).startswith("tests/test_accelerator/test_accelerator.py:")


def test_a_copy_to_the_host_that_does_not_block_arrives_when_the_host_has_waited(device):
    first, second = torch.ones(2, device="cuda"), torch.full((2,), 2.0, device="cuda")
    one = first.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    two = torch.empty(2, pin_memory=True).copy_(second, non_blocking=True)
    second.zero_()
    assert one.isnan().all()
    event.synchronize()
    assert one.tolist() == [1.0, 1.0]
    assert two.isnan().all(), "it was begun after the event"
    event.synchronize()
    assert two.isnan().all()
    first.sum().item()
    assert two.tolist() == [2.0, 2.0]


def test_a_wait_has_the_line_that_asked(device):
    x = torch.rand(4).to("cuda")
    with device.counted() as counts:
        for _ in range(3):
            x.sum().item()
        line = inspect.currentframe().f_lineno - 1
    assert counts.waits == {(f"tests/test_accelerator/test_accelerator.py:{line}", "item"): 3}
    assert counts.places() == f"3 x item at tests/test_accelerator/test_accelerator.py:{line}"


def test_kernels_are_what_computes(device):
    x = torch.rand(4, 4).to("cuda")
    with device.counted() as counts:
        y = torch.empty(16, device="cuda")
        y.copy_(x.T.reshape(16))  # a clone, and a copy
        y.view(4, 4)[1:].t().unsqueeze(0).detach()
        torch.mul(x, 2, out=x)
        x @ x
        torch.rand(2).square()  # the host's
        x.sum().item()
    assert counts.launches == 5


def test_bytes_are_counted_both_ways_and_in_open_sections_only(device):
    with device.counted() as outer:
        x = torch.zeros(10, dtype=torch.float64).to("cuda")
        with device.counted() as inner:
            x.float().cpu()
            x[:2].tolist()
        x.copy_(torch.ones(10))
    x.cpu()
    assert (inner.to_device_bytes, inner.to_host_bytes) == (0, 40 + 16)
    assert (outer.to_device_bytes, outer.to_host_bytes) == (80 + 40, 56)
    assert (device.to_device_bytes, device.to_host_bytes) == (120, 136)


def test_the_peak_is_of_storages_that_are_alive_at_once(device):
    x = torch.zeros(1000, device="cuda")
    view = x.view(10, 100)[2:]
    assert device.alive_bytes == 4000
    with device.counted() as counts:
        y = view + 1  # 3200
        del y
        y = x.double()  # 8000
        del y
    assert (counts.peak_bytes, device.peak_bytes, device.alive_bytes) == (12_000, 12_000, 4000)
    del x
    assert device.alive_bytes == 4000, "the view still holds it"
    del view
    gc.collect()
    assert (device.alive_bytes, torch.cuda.max_memory_allocated()) == (0, 12_000)
    torch.cuda.reset_peak_memory_stats()
    assert device.peak_bytes == 0


SHARED = (
    torch, torch._C, DefaultDeviceType, torch.cuda, torch.amp, torch.autograd, torch.__future__, threading.Thread,
    torch.Tensor,
)  # fmt: skip


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


def test_torch_finds_one_device_and_its_memory(device):
    assert (torch.cuda.device_count(), torch.cuda.current_device(), torch.cuda.is_initialized()) == (1, 0, True)
    assert torch.cuda.get_device_name(0) in machine(torch.device("cuda"))
    x, (_, whole) = torch.zeros(1000, device="cuda"), torch.cuda.mem_get_info()
    assert torch.cuda.mem_get_info()[0] == whole - x.numel() * 4
    assert torch.cuda.memory_allocated() == device.alive_bytes == x.numel() * 4
    torch.cuda.set_device("cuda:0")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.cuda.set_device(1)


def test_threads_use_the_device_too(device):
    with ThreadPoolExecutor(1) as pool:
        x = pool.submit(lambda: torch.ones(3).to("cuda") + torch.zeros(3, device="cuda")).result()
        with pytest.raises(RuntimeError, match=MIXED):
            pool.submit(lambda: x + torch.ones(3)).result()
    assert (x.device.type, device.to_device_bytes) == ("cuda", 12)
