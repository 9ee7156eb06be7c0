"""Errors of memory that ran out, by the messages of those who raise them."""

from __future__ import annotations

import errno

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

from compressx.cli.common import Commands
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


def test_torch_and_numpy_that_are_asked_for_too_much_say_how_much_and_no_plugin_is_blamed_for_it():
    told = r"^out of memory: {}: {} did not fit in main memory"
    for what, named in (("a block", memory_named), ("pruner 'mine' failed on x", blamed_on)):
        with pytest.raises(OutOfMemoryError, match=told.format(what, f"{2**62} bytes")), named(what):
            torch.empty(2**60)
        with pytest.raises(OutOfMemoryError, match=told.format(what, r"4\.00 EiB")), named(what):
            np.empty(2**62, dtype=np.uint8)


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


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("shapes"), "RuntimeError: shapes"), (SystemExit(3), "SystemExit: 3")]
)
def test_a_plugin_is_blamed_for_what_it_raises_also_if_that_would_end_the_process(error, said):
    with (
        pytest.raises(PluginError, match=f"^pruner 'mine' failed on x: {said}"),
        blamed_on("pruner 'mine' failed on x"),
    ):
        raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"),
         "cannot write standard output: No space left on device; free some space there"),
        (MemoryError(), "out of memory: what the command computes: what is needed did not fit in main memory"),
    ],
)  # fmt: skip
def test_a_command_without_room_for_its_results_or_memory_ends_with_one_line_and_no_traceback(error, said):
    def fail() -> None:
        raise error

    done = CliRunner().invoke(Commands(commands=[click.Command("draw", callback=fail)]), ["draw"])
    assert (done.exit_code, done.output) == (2, f"error: {said}\n")
