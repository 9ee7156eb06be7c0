"""A block is written while the next one is worked on, and nobody reads it before it is on disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.accelerator import pretended_accelerator
from tests.compressx.models.test_streaming import saved
from torch import Tensor

from compressx.models import shards
from compressx.models.access import Access, InMemory, WriteBehind, block_file
from compressx.models.checkpoint import Checkpoint
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.runtime.errors import ArtifactError
from compressx.testing import tiny_model

FIRST, SECOND, THIRD = (f"model.layers.{i}" for i in range(3))


class Gate:
    """Holds back every writing of weights until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.reached, self.opened = Event(), Event()
        self.write = shards.write
        patch.setattr(shards, "write", self.wait)

    def wait(self, path: Path, tensors: Any) -> None:
        self.begun.append(path.name)
        self.reached.set()
        assert self.opened.wait(30), "nobody has opened the gate"
        self.write(path, tensors)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()
    for thread in writers():
        thread.join()


@pytest.fixture
def streamed(tmp_path: Path) -> StreamedModel:
    return open_streamed(Checkpoint(str(saved(tmp_path / "model", "llama"))))


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("write ")]


def doubled(access: Access, fqn: str, folder: Path) -> dict[str, Tensor]:
    """Double a block's weights and write them; return what was written."""
    with access.materialise(fqn) as block:
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.mul_(2)
        access.write(fqn, folder)
        return {name: tensor.clone() for name, tensor in block.state_dict(prefix=f"{fqn}.").items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("memory", [False, True], ids=["streamed", "in memory"])
def test_a_block_is_written_while_the_next_one_is_loaded(memory, streamed, gate, tmp_path):
    access: Access = InMemory(tiny_model("llama")) if memory else streamed
    wanted = doubled(access, FIRST, tmp_path)
    with access.materialise(SECOND) as block:
        assert not any(p.is_meta for p in block.parameters())
        assert not block_file(tmp_path, FIRST).exists()
    gate.opened.set()
    access.written()
    assert same(load_file(block_file(tmp_path, FIRST)), wanted)
    assert not writers()


@pytest.mark.parametrize("how", ["materialise", "read", "save"])
def test_whoever_needs_a_block_that_is_being_written_waits_for_it(how, streamed, gate, tmp_path):
    wanted = doubled(streamed, FIRST, tmp_path)
    Timer(0.2, gate.opened.set).start()
    if how == "read":
        streamed.read(FIRST, tmp_path)
    elif how == "save":
        streamed.save(None, tmp_path, tmp_path / "saved")
        file = next((tmp_path / "saved").glob("model-00001-*.safetensors"))
        assert same(load_file(file), wanted)
        return
    with streamed.materialise(FIRST) as block:
        assert same(block.state_dict(prefix=f"{FIRST}."), wanted)


def test_the_blocks_that_no_pruner_changed_are_saved_as_they_were(streamed, tmp_path):
    before = {}
    for fqn in (SECOND, THIRD):
        with streamed.materialise(fqn) as block:
            before |= {name: tensor.clone() for name, tensor in block.state_dict(prefix=f"{fqn}.").items()}
    before |= doubled(streamed, FIRST, tmp_path / "blocks")
    streamed.save(None, tmp_path / "blocks", tmp_path / "saved")
    found = open_streamed(Checkpoint(str(tmp_path / "saved")))
    for fqn in found.blocks:
        with found.materialise(fqn) as block:
            tensors = block.state_dict(prefix=f"{fqn}.")
            assert same(tensors, {name: before[name] for name in tensors})
    assert not writers()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full, but only when the file has been begun."""

    def failing(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", failing)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("how", ["next block", "written", "write", "read"])
def test_a_full_disk_is_told_with_the_blocks_name_when_the_next_one_is_begun(how, streamed, tmp_path):
    doubled(streamed, FIRST, tmp_path / "blocks")
    for thread in writers():
        thread.join()
    told = rf"cannot write .*{FIRST}\.safetensors: No space left on device"
    asking: dict[str, Callable[[], Any]] = {
        "next block": lambda: streamed.materialise(SECOND).__enter__(),
        "written": streamed.written,
        "write": lambda: streamed.write(SECOND, tmp_path / "blocks"),
        "read": lambda: streamed.read(THIRD, tmp_path / "blocks"),
    }
    for _ in range(2):  # the file is missing whenever it is asked for
        with pytest.raises(ArtifactError, match=told):
            asking[how]()
    assert not [*(tmp_path / "blocks").iterdir()]
    assert streamed.source[FIRST].folder == tmp_path / "model", "what could not be written is not read"


def test_an_error_elsewhere_waits_for_the_writing_and_is_the_one_that_is_told(gate, tmp_path):
    behind, path = WriteBehind(), tmp_path / "block.safetensors"

    def interrupted() -> None:
        with behind.ended():
            behind.begin("block", path, lambda: {"weight": torch.ones(3)})
            Timer(0.2, gate.opened.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not writers()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_weights_on_an_accelerator_are_copied_before_they_can_change(gate, tmp_path):
    with pretended_accelerator():
        access = InMemory(tiny_model("llama").to("cuda"))
        wanted = {name: tensor.cpu() for name, tensor in doubled(access, FIRST, tmp_path).items()}
        with torch.no_grad():
            for parameter in access.model.parameters():
                parameter.zero_()
        gate.opened.set()
        access.written()
    assert same(load_file(block_file(tmp_path, FIRST)), wanted)


def test_what_is_outside_the_blocks_is_written_behind_and_read_back(gate, tmp_path):
    access = InMemory(tiny_model("llama-tied"))
    before = access.model.lm_head.weight.clone()
    access.write(OUTSIDE, tmp_path)
    Timer(0.2, gate.opened.set).start()
    access.read(OUTSIDE, tmp_path)
    assert torch.equal(access.model.lm_head.weight, before)


def test_a_block_on_a_gpu_is_copied_without_waiting_for_each_of_its_tensors(tmp_path: Path) -> None:
    behind = WriteBehind()
    with pretended_accelerator() as device:
        tensors = {str(i): torch.full((3,), float(i), device="cuda") for i in range(4)}
        with device.counted() as counts:
            behind.begin("", tmp_path / "x.safetensors", lambda: tensors)
        assert not counts.pageable
    behind.end()
    assert {name: x.tolist() for name, x in load_file(tmp_path / "x.safetensors").items()} == {
        str(i): [float(i)] * 3 for i in range(4)
    }
