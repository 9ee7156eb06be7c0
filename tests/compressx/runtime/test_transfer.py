"""Copies between the host and a GPU are pinned and do not wait, and nobody reads what has not arrived."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.accelerator import Record, pretended_accelerator

from compressx.runtime.transfer import to_device, to_host, written_behind

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def device() -> Iterator[Record]:
    with pretended_accelerator() as record:
        yield record


def test_on_the_cpu_nothing_is_copied():
    x = torch.rand(3, 4)
    assert to_device(x, CPU) is x
    assert to_host(x) is x


def test_a_tensor_goes_to_the_device_without_a_wait(device):
    x = torch.rand(3, 4)
    with device.counted() as counts:
        there = to_device(x, CUDA)
    assert (counts.synchronisations, counts.pageable.total(), counts.to_device_bytes) == (0, 0, 48)
    assert to_device(there, CUDA) is there
    assert torch.equal(there.cpu(), x)


def test_a_tensor_that_is_learned_goes_there_with_its_history(device):
    x = torch.rand(3, requires_grad=True)
    to_device(x, CUDA).square().sum().backward()
    assert torch.equal(x.grad, 2 * x)


def test_a_tensor_comes_to_the_host_after_one_wait(device):
    x = torch.rand(3, 4)
    there = x.to("cuda")
    with device.counted() as counts:
        here = to_host(there)
        assert torch.equal(here, x)
    assert (counts.synchronisations, counts.pageable.total(), counts.to_host_bytes) == (1, 0, 48)
    assert here.is_pinned()


def test_what_is_written_behind_is_there_when_the_next_but_one_is_computed_and_at_the_end(device):
    batches = [torch.rand(2, 3) for _ in range(3)]
    there = [x.to("cuda") for x in batches]
    rooms = [torch.zeros(2, 3) for _ in batches]
    with device.counted() as counts, written_behind() as put:
        for number, (room, x) in enumerate(zip(rooms, there, strict=True)):
            put(room, x)
            assert [torch.equal(r, b) for r, b in zip(rooms, batches, strict=True)] == [i < number for i in range(3)]
            x.zero_()  # the device goes on
    assert all(torch.equal(room, x) for room, x in zip(rooms, batches, strict=True))
    assert {what: n for (_, what), n in counts.waits.items()} == {"event": 3}
    assert counts.pageable.total() == 0


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("room", "given"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu")])
def test_what_does_not_come_from_the_device_is_written_at_once(room, given):
    x, into = torch.rand(3).to(given), torch.zeros(3).to(room)
    with written_behind() as put:
        put(into, x)
        assert torch.equal(into.cpu(), x.cpu())
