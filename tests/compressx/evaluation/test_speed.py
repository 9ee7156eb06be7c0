"""Timing one model: what is written, what is counted, and how the process answers."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.evaluation.benched import Inside
from tests.compressx.saved import save_tiny

from compressx import UnsupportedModelError
from compressx.evaluation import speed
from compressx.evaluation.speed import Task, prompts, serve, sizes, task_of, timed
from compressx.models.checkpoint import Checkpoint
from compressx.testing import tiny_model
from compressx.testing.models import TINY_CONFIGS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("speed") / "model", "llama")


def task(folder: Path, **changes: Any) -> Task:
    return dataclasses.replace(Task("mine", Checkpoint(str(folder)), "cpu", None, 2, 100), **changes)


def clock(*readings: float) -> Any:
    return iter(readings).__next__


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_the_tokens_are_those_of_greedy_generate_which_never_stops(architecture: str) -> None:
    model = tiny_model(architecture)
    ids = torch.randint(3, 128, (2, 11))
    _, written = timed(model, ids, 7)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=7,
                              max_new_tokens=7, eos_token_id=None)  # fmt: skip
    assert torch.equal(written, expected[:, 11:])


def test_prefill_lasts_to_the_first_new_token_and_decode_from_there_on() -> None:
    model = tiny_model("llama")
    passes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _m, args: passes.append(args[0].shape))
    seconds, written = timed(model, torch.ones(3, 9, dtype=torch.long), 4, clock(10.0, 12.0, 17.0))
    assert seconds == {"prefill": 2.0, "decode": 5.0}
    assert passes == [(3, 9), (3, 1), (3, 1), (3, 1)]
    assert written.shape == (3, 4)


def test_an_end_of_text_token_does_not_stop_the_writing() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[model.config.eos_token_id] = 0
        model.lm_head.register_forward_hook(lambda _m, _x, out: out.index_fill(2, torch.tensor([2]), 1e4))
    _, written = timed(model, torch.ones(1, 5, dtype=torch.long), 6)
    assert written.tolist() == [[2] * 6]


def test_prefill_computes_only_the_last_tokens_logits_as_generate_does() -> None:
    model = tiny_model("llama")
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, inputs, _out: seen.append(inputs[0].shape[1]))
    timed(model, torch.ones(1, 9, dtype=torch.long), 2)
    assert seen == [1, 1]


def test_a_device_is_waited_for_before_each_reading_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(speed, "synchronize", lambda _: events.append("wait"))
    timed(tiny_model("llama"), torch.ones(1, 3, dtype=torch.long), 3, lambda: events.append("clock") or 0.0)
    assert events == ["wait", "clock"] * 3


def test_decoding_waits_for_a_gpu_only_at_its_ends() -> None:
    with pretended_accelerator() as record:
        model, ids = tiny_model("llama").to("cuda"), torch.ones(1, 5, dtype=torch.long).to("cuda")
        waits = []
        for new in (3, 9):
            with record.counted() as counts:
                timed(model, ids, new)
            waits.append(counts.waits)
        assert waits[0] == waits[1], "a wait for each token would be timed, too"


def test_a_model_without_a_cache_is_refused() -> None:
    model = tiny_model("llama")
    model.register_forward_hook(lambda _m, _args, out: out.__setitem__("past_key_values", None))
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM gives no key/value cache.*; its forward has"):
        timed(model, torch.ones(1, 3, dtype=torch.long), 2)


def test_prompts_are_the_same_for_every_model_and_below_the_smallest_vocabulary(folder: Path) -> None:
    ids = prompts(task(folder, below=7), 64)
    assert ids.shape == (2, 64)
    assert set(ids.flatten().tolist()) == set(range(7))
    assert torch.equal(ids, prompts(task(folder, below=7, name="other"), 64))


# --- sizes


@pytest.mark.parametrize("architecture", ["llama", "llama-tied", "gpt2", "mixtral"])
def test_decoding_reads_all_weights_but_embeddings_that_are_not_the_head_and_of_experts_it_is_not_known(
    architecture: str,
) -> None:
    model = tiny_model(architecture, dtype=torch.bfloat16)
    found = sizes(model)
    each = {id(p): p for p in model.parameters()}.values()
    assert found["parameters"] == sum(p.numel() for p in each)
    assert found["weight_bytes"] == 2 * found["parameters"]
    assert found["dtype"] == "bfloat16"
    rows = {
        "llama": 128 * 64,
        "llama-tied": 0,
        "gpt2": 128 * 64,
    }  # embedding; of GPT-2 the positions
    if architecture == "mixtral":
        assert found["read_bytes"] is None
    else:
        assert found["read_bytes"] == found["weight_bytes"] - 2 * rows[architecture]


# --- the process


def test_the_first_answer_says_what_was_loaded_and_the_others_time_it(folder: Path) -> None:
    worker = Inside(task(folder))
    loaded = worker.answer()
    assert loaded["parameters"] == sum(p.numel() for p in tiny_model("llama").parameters())
    assert "device cpu" in loaded["machine"]
    assert 0 < loaded["memory_bytes"]["before"] <= loaded["memory_bytes"]["load"]
    worker.ask({"prompt": 8, "new": 3})
    timing = worker.answer()
    assert set(timing["seconds"]) == {"prefill", "decode"}
    assert min(timing["seconds"].values()) > 0
    assert timing["peak_bytes"] > 1e7


def test_memory_of_a_gpu_is_what_is_allocated_there(folder: Path) -> None:
    with pretended_accelerator():
        worker = Inside(task(folder, device="cuda:0"))
        loaded = worker.answer()
        assert loaded["memory_bytes"] == {"before": 0, "load": pytest.approx(loaded["weight_bytes"], rel=0.2)}
        worker.ask({"prompt": 64, "new": 2})
        assert loaded["weight_bytes"] < worker.answer()["peak_bytes"] < 10 * loaded["weight_bytes"]


def test_threads_are_set_as_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    Inside(task(folder)).answer()
    Inside(task(folder, threads=3)).answer()
    assert asked == [3]


def test_lines_of_json_go_in_and_out_and_an_error_is_the_last(folder: Path) -> None:
    mine = task(folder)
    assert task_of(json.dumps(dataclasses.asdict(mine))) == mine
    told = io.StringIO()
    requests = [dataclasses.asdict(mine), {"prompt": 4, "new": 2}, {"prompt": 5, "new": 2}]
    serve(io.StringIO("".join(json.dumps(x) + "\n" for x in requests)), told)
    loaded, first, second = map(json.loads, told.getvalue().splitlines())
    assert loaded["parameters"]
    assert first["seconds"]
    assert second["seconds"]
    gone = dataclasses.replace(mine, checkpoint=Checkpoint(str(folder / "gone")))
    told = io.StringIO()
    serve(io.StringIO(json.dumps(dataclasses.asdict(gone)) + "\n"), told)
    said = json.loads(told.getvalue())
    assert said["error"] == "ArtifactError"
    assert "gone" in said["message"]


def test_memory_that_runs_out_names_the_model_and_what_was_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")

    monkeypatch.setattr(speed, "timed", full)
    told = io.StringIO()
    requests = [dataclasses.asdict(task(folder)), {"prompt": 4, "new": 2}]
    serve(io.StringIO("".join(json.dumps(x) + "\n" for x in requests)), told)
    said = json.loads(told.getvalue().splitlines()[-1])
    assert said == {
        "error": "OutOfMemoryError",
        "message": "out of memory: mine: 4 + 2 tokens, batch 2: 2.00 GiB did not fit in cuda:0",
    }
