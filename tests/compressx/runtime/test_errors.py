"""Errors of memory that ran out, by the messages of those who raise them."""

from __future__ import annotations

import errno
import sys

import numpy as np
import pytest
import torch

from compressx.cli.common import errors_for_users
from compressx.runtime.errors import OutOfMemoryError, PluginError, blamed_on, memory_named

MESSAGES = {
    "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "what is needed did not fit in the GPU",
    "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`": "what is needed did not fit in the GPU",
    "unable to mmap 4096 bytes from file <x>: Cannot allocate memory (12)": "4096 bytes did not fit in main memory",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 96 bytes.": "96 bytes did not fit in main memory",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_what_did_not_fit_is_read_from_the_message(message):
    with (
        pytest.raises(OutOfMemoryError, match=f"^out of memory: a block: {MESSAGES[message]}$"),
        memory_named("a block"),
    ):
        raise RuntimeError(message)


def test_torch_and_numpy_that_are_asked_for_too_much_say_how_much():
    with (
        pytest.raises(OutOfMemoryError, match=rf"a block: {2**62} bytes did not fit in main memory"),
        memory_named("a block"),
    ):
        torch.empty(2**60)
    with (
        pytest.raises(OutOfMemoryError, match=r"an array: 4\.00 EiB did not fit in main memory"),
        memory_named("an array"),
    ):
        np.empty(2**62, dtype=np.uint8)


def test_a_plugin_is_blamed_for_its_faults_and_not_for_memory_that_is_not_there():
    with (
        pytest.raises(OutOfMemoryError, match=r"^out of memory: pruner 'mine' failed on x: .* bytes did not fit"),
        blamed_on("pruner 'mine' failed on x"),
    ):
        torch.empty(2**60)
    with (
        pytest.raises(PluginError, match=r"^pruner 'mine' failed on x: RuntimeError: shapes"),
        blamed_on("pruner 'mine' failed on x"),
    ):
        raise RuntimeError("shapes")


class Scores:
    def __init__(self, power: float = 1.0) -> None:
        self.power = power


@pytest.mark.parametrize(
    ("mistake", "meant"),
    [(lambda: Scores().powr, "power"), (lambda: torch.absolut(torch.ones(1)), "absolute"),
     (lambda: Scores(powr=1), "power"), (lambda: torch.nn.functional.one_hut, "one_hot"),
     (lambda: Scoers, "Scores"), (lambda: Scores().zzz, None), (lambda: {}["power"], None)],  # noqa: F821
)  # fmt: skip
def test_the_name_that_was_probably_meant_is_said(mistake, meant):
    with pytest.raises(PluginError) as raised, blamed_on("pruner 'mine' failed on model.layers.0"):
        mistake()
    assert (f"; did you mean {meant!r}? (" if meant else "") in str(raised.value)
    assert ("did you mean" in str(raised.value)) == (meant is not None)
    assert [frame.name for frame in raised.value.frames] == ["<lambda>"]


def test_a_plugin_that_ends_the_process_is_blamed_for_it():
    with (
        pytest.raises(PluginError, match=r"^pruner 'mine' failed on x: SystemExit: 3"),
        blamed_on("pruner 'mine' failed on x"),
    ):
        sys.exit(3)


def test_results_that_a_full_disk_does_not_take_end_with_one_line_and_no_traceback(capsys):
    @errors_for_users
    def show() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit) as ended:
        show()
    assert ended.value.code == 2
    said = "error: cannot write standard output: No space left on device; free some space there\n"
    assert capsys.readouterr().err == said


def test_a_command_without_memory_ends_with_one_line_and_no_traceback(capsys):
    @errors_for_users
    def draw() -> None:
        raise MemoryError

    with pytest.raises(SystemExit) as ended:
        draw()
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err
        == "error: out of memory: what draw computes: what is needed did not fit in main memory\n"
    )
