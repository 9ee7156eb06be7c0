"""What a run sets in its process, and restores."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from tests.compressx.pipeline.runs import recipe
from tests.compressx.saved import save_tiny

from compressx.pipeline.memory import prune
from compressx.pipeline.run import run
from compressx.runtime import modes
from compressx.runtime.errors import CompressxError
from compressx.runtime.modes import deterministic, return_freed_memory, reuse_freed_memory
from compressx.testing import tiny_model, tiny_tokens

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


def settings() -> tuple[bool, bool, bool]:
    deterministic, warning = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    return deterministic, torch.is_deterministic_algorithms_warn_only_enabled(), warning


@pytest.mark.parametrize("before", [(False, False, True), (True, False, False), (True, True, True)])
def test_settings_are_as_they_were_after_an_error_too(before, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before[2])
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with deterministic(False, CPU):
            assert settings() == before
        with contextlib.suppress(KeyError), deterministic(True, CPU):
            assert settings() == (True, True, False)
            raise KeyError
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_is_deterministic_if_its_recipe_says_so(wanted, project, monkeypatch):
    model = save_tiny(project / "model", "llama")
    asked = recipe(model, deterministic=wanted)
    seen: list[bool] = []

    def progress(stage: str, *_: object) -> None:
        if stage == "prune":
            seen.append(torch.are_deterministic_algorithms_enabled())

    run(asked, progress=progress)
    rules = {"prune": asked["prune"], "deterministic": wanted}
    prune(tiny_model("llama"), None, rules, calibration=tiny_tokens(), progress=progress)
    assert {*seen} == {wanted}
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("given", "used", "told"),
    [
        (None, 0, None),
        (":4096:8", 9, None),
        (":16:8", 9, None),
        (None, 9, "it is not set"),
        (":64:1", 0, "it is :64:1"),
    ],
)
def test_the_workspace_of_cublas_is_fixed_before_it_starts_or_the_run_is_refused(given, used, told, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: used if device == GPU else 0)
    if told is not None:
        with (
            pytest.raises(CompressxError, match=f"{told}; export CUBLAS_WORKSPACE_CONFIG=:4096:8"),
            deterministic(True, GPU),
        ):
            pass
        return
    with deterministic(True, GPU):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (given or ":4096:8")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def torch_modes() -> tuple[Any, ...]:
    device = torch.get_default_device()
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), device, *grad


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "device": lambda: torch.device("meta"),
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "dtype": lambda: default_dtype(torch.bfloat16),
}  # fmt: skip
QUICK = ("autocast", "device")


@pytest.mark.parametrize("mode", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in MODES])
@pytest.mark.parametrize("held_out", [0, 2])
def test_the_modes_of_the_caller_change_no_result_and_are_left_as_they_are(mode, held_out):
    expected, found = pruned_within(contextlib.nullcontext, held_out), pruned_within(MODES[mode], held_out)
    assert all(torch.equal(x, found[name]) for name, x in expected.items())


@cache
def pruned_within(entered: Callable[[], Any], held_out: int) -> dict[str, torch.Tensor]:
    """Prune and fine-tune a model within a mode of torch; return its parameters."""
    rules = [{"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.5},
             {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5}]  # fmt: skip
    asked = {"prune": rules, "calibration": {"batch_size": 4}, "compute_dtype": "bfloat16",
             "finetune": {"steps": 4, "batch_size": 2, "held_out": held_out, "learning_rate": 1e-2}}  # fmt: skip
    tokens, model = tiny_tokens(), tiny_model("llama")
    with entered():
        before = torch_modes()
        prune(model, None, asked, calibration=tokens)
        assert torch_modes() == before
    return {name: p.clone() for name, p in model.named_parameters()}


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str | int, ...]]:
    """What glibc is asked for."""
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    made: list[tuple[str | int, ...]] = []
    monkeypatch.setattr(modes, "_glibc", lambda name: lambda *values: made.append((name, *values)))
    return made


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("MALLOC_MMAP_MAX_", "65536"), ("MALLOC_MMAP_THRESHOLD_", "131072"),
     ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=131072")],
)  # fmt: skip
def test_settings_of_the_environment_are_left_alone(name, value, calls, monkeypatch):
    monkeypatch.setenv(name, value)
    with reuse_freed_memory():
        pass
    assert calls == []


def test_what_is_freed_is_kept_within_and_returned_at_the_end(calls):
    with reuse_freed_memory():
        assert calls == [("mallopt", -3, 2**25), ("mallopt", -1, -1)]
        calls.clear()
    assert calls == [("mallopt", -1, 2**26), ("malloc_trim", 0)]


@pytest.mark.parametrize(("system", "library"), [("darwin", None), ("win32", None), ("linux", lambda _: object())])
def test_other_systems_and_other_c_libraries_are_left_alone(system, library, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(modes.ctypes, "CDLL", library)
    with reuse_freed_memory():
        return_freed_memory()
