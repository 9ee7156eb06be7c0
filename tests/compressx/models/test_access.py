"""The two ways to reach a model's weights give the same."""

from __future__ import annotations

import os
import tempfile
import types
from pathlib import Path

import psutil
import pytest
import torch

from compressx.models.access import InMemory, device_for, weights_fingerprint
from compressx.models.blockwise import InFiles
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_model
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import open_streamed
from compressx.runtime.errors import ArtifactError, CompressxError
from compressx.testing import tiny_model, tiny_tokens


def test_the_fingerprint_changes_with_any_weight_and_with_the_dtype():
    model = tiny_model("llama")
    prints = {
        weights_fingerprint(InMemory(model)),
        weights_fingerprint(InMemory(tiny_model("llama", dtype=torch.bfloat16))),
    }
    assert weights_fingerprint(InMemory(tiny_model("llama"))) in prints
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[5, 7] += 1e-3
    prints.add(weights_fingerprint(InMemory(model)))
    assert len(prints) == 3


@pytest.mark.parametrize("architecture", ["llama-tied", "gemma3", "gpt2"])
def test_a_streamed_model_gives_the_fingerprint_and_the_logits_of_the_loaded_one(architecture: str, tmp_path: Path):
    tiny_model(architecture).save_pretrained(tmp_path)
    checkpoint = Checkpoint(str(tmp_path))
    streamed, loaded = open_streamed(checkpoint), InMemory(load_model(checkpoint))
    assert weights_fingerprint(streamed) == weights_fingerprint(loaded)
    batches = tiny_tokens(sequences=5).split(2)
    with torch.no_grad():
        expected = list(loaded.logits(batches))
        for got, want in zip(streamed.logits(batches), expected, strict=True):
            assert torch.equal(got, want)
        with streamed.whole() as model:
            assert torch.equal(model(batches[0], use_cache=False).logits, expected[0])


def test_an_embedding_that_is_read_back_is_still_the_heads(tmp_path: Path):
    model = tiny_model("llama-tied")
    access = InMemory(model)
    access.write(OUTSIDE, tmp_path)
    access.read(OUTSIDE, tmp_path)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_hidden_states_of_an_evaluation_that_memory_cannot_hold_lie_in_files_until_it_is_over(tmp_path, monkeypatch):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    streamed = open_streamed(Checkpoint(str(tmp_path / "model")))
    batches = tiny_tokens(sequences=5).split(2)
    expected = list(streamed.logits(batches))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1000))
    found = streamed.logits(batches)
    first = next(found)
    assert len(list((tmp_path / "scratch").rglob("*.states"))) == 3
    for got, want in zip([first, *found], expected, strict=True):
        assert torch.equal(got, want)
    assert not list((tmp_path / "scratch").iterdir())


def test_room_for_hidden_states_is_taken_up_before_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArtifactError, match=r"0\.states: No space left"):
        InFiles(tmp_path)(torch.ones(3))


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


def test_cuda_where_there_is_none_is_refused_and_auto_takes_the_cpu(monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, 0)
    assert device_for("auto") == torch.device("cpu")
    with pytest.raises(CompressxError, match=r"^device cuda: torch \S+ finds no CUDA GPU; use --device cpu"):
        device_for("cuda")


def test_every_process_has_a_gpu_of_its_own_or_is_refused(monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device_for("auto") == device_for("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(CompressxError, match="process 2 of this machine needs its own GPU, but torch finds 2; "):
        device_for("auto")
    assert device_for("cpu") == torch.device("cpu")


def test_one_gpu_can_be_chosen_by_a_single_process_if_it_is_there(monkeypatch: pytest.MonkeyPatch):
    gpus(monkeypatch, 2)
    assert device_for("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(CompressxError, match="device cuda:2: torch finds 2, cuda:0 to cuda:1; choose one of them"):
        device_for("cuda:2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(CompressxError, match="device cuda:1: every process needs its own GPU; use --device cuda"):
        device_for("cuda:1")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("mps", "sums in float64, which Apple GPUs do not have; use --device cpu"),
        ("gpu", "unknown; expected auto, cpu, cuda or cuda:N"),
        ("meta", "compressx runs on cpu and cuda only"),
    ],
)
def test_a_device_that_cannot_work_is_refused_with_what_can(wanted: str, told: str):
    with pytest.raises(CompressxError, match=f"^device {wanted}: .*{told}"):
        device_for(wanted)
