"""Models that take turns: what is timed, in which order, and what is shown of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.cli.commands import printed, refused
from tests.compressx.gguf_files import write_gguf
from tests.compressx.saved import save_tiny

from compressx import UnsupportedModelError
from compressx.evaluation import bench
from compressx.evaluation.bench import Speeds, time_in_turn, timed
from compressx.evaluation.saved import source_of
from compressx.report.section import Spread
from compressx.testing import tiny_model
from compressx.testing.models import TINY_CONFIGS


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_the_tokens_are_those_of_greedy_generate_which_never_stops(architecture: str) -> None:
    model = tiny_model(architecture)
    ids = torch.randint(3, 128, (2, 11))
    _, written = timed(model, ids, 7)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=7,
                              max_new_tokens=7, eos_token_id=None)  # fmt: skip
    assert torch.equal(written, expected[:, 11:])


def test_prefill_lasts_to_the_first_new_token_and_decode_from_there_on() -> None:
    """An end of text does not stop the writing, and the head sees the last token alone, as in `generate`."""
    model = tiny_model("llama")
    passes: list[tuple[int, ...]] = []
    model.lm_head.register_forward_pre_hook(lambda _m, args: passes.append(args[0].shape[:2]))
    model.lm_head.register_forward_hook(lambda _m, _x, out: out.index_fill(2, torch.tensor([2]), 1e4))
    seconds, written = timed(model, torch.ones(3, 9, dtype=torch.long), 4, iter((10.0, 12.0, 17.0)).__next__)
    assert seconds == {"prefill": 2.0, "decode": 5.0}
    assert passes == [(3, 1)] * 4
    assert written.tolist() == [[2] * 4] * 3
    assert model.config.eos_token_id == 2


def test_a_gpu_is_waited_for_before_each_reading_of_the_clock_and_not_between(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_accelerator() as record:
        model, ids = tiny_model("llama").to("cuda"), torch.ones(1, 5, dtype=torch.long).to("cuda")
        waits = []
        for new in (3, 9):
            with record.counted() as counts:
                timed(model, ids, new)
            waits.append(counts.waits)
        assert waits[0] == waits[1], "a wait for each token would be timed, too"
    events: list[str] = []
    monkeypatch.setattr(bench, "synchronize", lambda _: events.append("wait"))
    timed(tiny_model("llama"), torch.ones(1, 3, dtype=torch.long), 3, lambda: events.append("clock") or 0.0)
    assert events == ["wait", "clock"] * 3


def test_a_model_without_a_cache_is_refused() -> None:
    model = tiny_model("llama")
    model.register_forward_hook(lambda _m, _args, out: out.__setitem__("past_key_values", None))
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM gives no key/value cache.*; its forward has"):
        timed(model, torch.ones(1, 3, dtype=torch.long), 2)


@pytest.fixture
def work(project: Path) -> Path:
    save_tiny(project / "one", "llama")
    save_tiny(project / "two", "gpt2")
    return project


def test_models_take_turns_in_every_round_and_the_first_round_does_not_count(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []

    def told(model: Any, ids: torch.Tensor, new: int) -> Any:
        log.append((model.config.model_type, tuple(ids.shape), new))
        return {"prefill": float(len(log)), "decode": 10.0 * len(log)}, ids

    monkeypatch.setattr(bench, "timed", told)
    found = time_in_turn([source_of(name) for name in ("one", "two")], 8, 3, 2)
    assert log == [("llama", (1, 8), 3), ("gpt2", (1, 8), 3)] * 3
    assert found.names == ["one", "two"]
    assert found.seconds == [{"prefill": [3.0, 5.0], "decode": [30.0, 50.0]},
                             {"prefill": [4.0, 6.0], "decode": [40.0, 60.0]}]  # fmt: skip


FIRST = {"prefill": [1.0, 2.0, 9.0], "decode": [2.0, 2.0, 2.0]}


def speeds(prefill: list[float]) -> Speeds:
    tokens, second = {"prefill": 1000, "decode": 10}, {"prefill": prefill, "decode": [1.0, 4.0, 0.5]}
    return Speeds("a machine", tokens, ["dense", "pruned"], [FIRST, second])


def test_a_ratio_is_the_median_of_rounds_that_are_compared_with_their_own() -> None:
    found = speeds([4.0, 1.0, 3.0])
    assert found.rate(0, "prefill") == Spread(500.0, 1000 / 9, 1000.0)
    assert found.ratio(1, "prefill") == Spread(2.0, 0.25, 3.0), "that of the medians would be 2/3"
    (section,) = found.sections()
    assert section.table.names == ["model", "prefill, tokens/s", "x", "decode, tokens/s", "x"]
    assert section.table.texts == [
        ["dense", "500 (111 to 1,000)", "1.00 (1.00 to 1.00)", "5.0 (5.0 to 5.0)", "1.00 (1.00 to 1.00)"],
        ["pruned", "333 (250 to 1,000)", "2.00 (0.25 to 3.00)", "10.0 (2.5 to 20.0)", "2.00 (0.50 to 4.00)"],
    ]


@pytest.mark.parametrize(
    ("rounds", "sure"),
    [([4.0, 1.0, 3.0], False), ([2.0, 2.0, 3.0], False), ([1.0, 2.0, 9.0], True), ([1.1, 2.2, 9.9], True)],
)  # fmt: skip
def test_where_the_rounds_do_not_agree_a_ratio_is_said_to_say_nothing(rounds: list[float], sure: bool) -> None:
    (section,) = speeds(rounds).sections()
    assert ("pruned, prefill" in section.note) != sure
    assert "pruned, decode the rounds do not agree on which model is faster, so x says nothing" in section.note


def test_the_command_shows_models_side_by_side_or_prints_json(work: Path) -> None:
    few = ["--prompt-tokens", "4", "--new-tokens", "3", "--rounds", "2"]
    shown = printed("bench", "one", "two", *few)
    assert [line.split()[0] for line in shown.splitlines() if line.startswith((" one", " two"))] == ["one", "two"]
    plain = json.loads(printed("bench", "one", *few, "--json"))
    assert plain["tokens"] == {"prefill": 4, "decode": 2}
    assert [len(model[stage]) for model in plain["seconds"] for stage in plain["tokens"]] == [2, 2]


@pytest.mark.slow
def test_gguf_files_run_in_llama_cpp(work: Path) -> None:
    write_gguf(work / "tiny.gguf")
    plain = json.loads(printed("bench", "tiny.gguf", "one", "--rounds", "1", "--new-tokens", "3", "--prompt-tokens",
                               "8", "--threads", str(torch.get_num_threads()), "--json"))  # fmt: skip
    assert [model["decode"][0] > 0 for model in plain["seconds"]] == [True, True]


def test_what_cannot_be_timed_is_refused_with_the_option_or_the_file(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(work / "tiny.gguf")
    write_gguf(work / "odd.gguf", keys={"llama.attention.head_count": 5})
    few = ["--prompt-tokens", "100", "--new-tokens"]
    told = "one: --prompt-tokens 100, --new-tokens 29: a prompt of 100 tokens and 29 after it are more than the model's"
    assert told in refused("bench", "one", "two", *few, "29")
    assert "Invalid value for '--new-tokens': 1 is not in the range x>=2" in refused("bench", "one", *few, "1")
    assert "odd.gguf: " in refused("bench", "odd.gguf", *few, "2")
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    assert "pip install 'compressx[llama-cpp]'" in refused("bench", "tiny.gguf", *few, "2")
