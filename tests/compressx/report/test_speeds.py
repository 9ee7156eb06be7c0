"""Rates and ratios from known seconds, and the files of a bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.report.test_plots import texts

from compressx.report.speeds import Bench, Length, ModelSpeed, Spread

LENGTH, OTHER = Length(100, 11), Length(10, 3)
FIRST = {"prefill": [1.0, 2.0, 9.0], "decode": [2.0, 2.0, 2.0]}
SECOND = {"prefill": [4.0, 1.0, 3.0], "decode": [1.0, 4.0, 0.5]}


def model(name: str, seconds: Any, **changes: Any) -> ModelSpeed:
    facts: dict[str, Any] = {
        "machine": "a machine", "dtype": "bfloat16", "parameters": 3_000_000, "file_bytes": 6_100_000,
        "weight_bytes": 6_000_000, "read_bytes": 5_000_000,
        "memory_bytes": {"before": 200_000_000, "load": 400_000_000, "run": 300_000_000},
    }  # fmt: skip
    return ModelSpeed(name=name, seconds={LENGTH: seconds, OTHER: seconds}, **{**facts, **changes})


@pytest.fixture
def found() -> Bench:
    return Bench((model("dense", FIRST), model("pruned", SECOND)), 2, 128, 8e9)


def test_a_spread_is_the_median_the_least_and_the_most() -> None:
    assert Spread.of([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)
    assert f"{Spread(2.0, 1.0, 5.0):.1f}" == "2.0 (1.0 to 5.0)"


def test_prefill_counts_the_prompts_tokens_and_decode_the_new_ones_but_the_first(found: Bench) -> None:
    dense, _ = found.models
    assert found.rate(dense, LENGTH, "prefill") == Spread(100.0, 200 / 9, 200.0)  # two prompts of 100 tokens
    assert found.rate(dense, LENGTH, "decode") == Spread(10.0, 10.0, 10.0)  # two texts, ten tokens after the first
    assert found.rate(dense, OTHER, "decode") == Spread(2.0, 2.0, 2.0)


def test_a_ratio_is_the_median_of_rounds_that_are_compared_with_their_own(found: Bench) -> None:
    dense, pruned = found.models
    assert found.ratio(pruned, LENGTH, "prefill") == Spread(2.0, 0.25, 3.0), "that of the medians would be 2/3"
    assert found.ratio(pruned, LENGTH, "decode") == Spread(2.0, 0.5, 4.0)
    assert found.ratio(dense, LENGTH, "prefill") == Spread(1.0, 1.0, 1.0)


def test_weights_are_read_once_for_all_sequences_of_a_batch(found: Bench) -> None:
    dense, pruned = found.models
    assert found.read_rate(dense, LENGTH) == 5_000_000 * 10 / 2.0  # ten passes in two seconds
    assert found.read_rate(model("experts", FIRST, read_bytes=None), LENGTH) is None
    assert found.read_rate(pruned, LENGTH) == 5_000_000 * 10


@pytest.mark.parametrize(
    ("rounds", "sure"),
    [([4.0, 1.0, 3.0], False), ([2.0, 2.0, 3.0], False), ([0.5, 1.5, 8.0], True), ([1.0, 2.0, 9.0], True),
     ([1.1, 2.2, 9.9], True), ([3.0, 4.0, 8.9], False)],
)  # fmt: skip
def test_a_bench_says_where_its_rounds_do_not_agree(rounds: list[float], sure: bool) -> None:
    seconds = {"prefill": rounds, "decode": FIRST["decode"]}
    (_, shown) = Bench((model("dense", FIRST), model("pruned", seconds)), 2, 128, 8e9).sections()
    told = (
        "Of pruned, prefill 100; pruned, prefill 10 the rounds do not agree on which model is faster, so x says nothing"
    )
    assert (told in shown.note) != sure
    assert ("do not agree" in shown.note) != sure


def test_the_tables_have_a_row_for_each_model_and_length_and_say_what_they_mean(found: Bench) -> None:
    sizes, speeds = found.sections()
    assert sizes.note == "a machine. Peaks of memory are the process's, which has 200 MB before it loads a model."
    assert sizes.table.names == [
        "model", "dtype", "parameters, M", "file, MB", "weights, MB", "peak of loading, MB", "peak, MB"
    ]  # fmt: skip
    assert sizes.table.texts == [
        ["dense", "bfloat16", "3.0", "6.1", "6", "400", "300"],
        ["pruned", "bfloat16", "3.0", "6.1", "6", "400", "300"],
    ]
    assert speeds.table.names == ["stage", "model", "tokens/s", "x", "weights, GB/s"]
    assert [row[:2] for row in speeds.table.texts] == [
        ["prefill 100", "dense"], ["prefill 100", "pruned"],
        ["decode 11 after 100", "dense"], ["decode 11 after 100", "pruned"],
        ["prefill 10", "dense"], ["prefill 10", "pruned"],
        ["decode 3 after 10", "dense"], ["decode 3 after 10", "pruned"],
    ]  # fmt: skip
    assert [row[2:] for row in speeds.table.texts][:4] == [
        ["100 (22 to 200)", "1.00 (1.00 to 1.00)", ""], ["66.7 (50.0 to 200.0)", "2.00 (0.25 to 3.00)", ""],
        ["10.0 (10.0 to 10.0)", "1.00 (1.00 to 1.00)", "0.0"], ["20.0 (5.0 to 40.0)", "2.00 (0.50 to 4.00)", "0.1"],
    ]  # fmt: skip
    fast = Bench((model("dense", {"prefill": [1e-3], "decode": [1.0]}),), 1, 9, 1e9)
    assert [*fast.sections()][1].table.texts[0][2] == "100,000 (100,000 to 100,000)"
    for said in (
        "Medians of 3 rounds",
        "x: times as fast as dense",
        "Batch 2",
        "ids below 128.",
        "moves 8.0 GB/s",
    ):
        assert said in speeds.note


def test_a_gpus_peaks_are_the_gpus() -> None:
    memory = {"before": 0, "load": 1, "run": 2}
    sizes, _ = Bench((model("dense", FIRST, memory_bytes=memory),), 1, 9, 1e9).sections()
    assert sizes.note == "a machine. Peaks of memory are the GPU's."


def test_a_report_is_written_with_a_plot_and_every_second(found: Bench, tmp_path: Path) -> None:
    written = found.write(tmp_path / "speed")
    assert [path.name for path in written] == ["bench.md", "bench.json", "bench.svg"]
    page = written[0].read_text()
    assert page.startswith("# Speed\n")
    assert "| prefill 100 | pruned | 66.7 (50.0 to 200.0) | 2.00 (0.25 to 3.00) |" in page
    assert "](bench.svg)" in page
    plain = json.loads(written[1].read_text())
    assert plain == found.to_dict()
    assert {k: v for k, v in plain.items() if k != "models"} == {
        "batch": 2, "rounds": 3, "ids_below": 128, "copy_rate": 8e9
    }  # fmt: skip
    pruned = plain["models"][1]
    assert pruned["memory_bytes"]["run"] == 300_000_000
    first = pruned["speeds"][0]
    assert (first["prompt"], first["new"], first["read_rate"]) == (100, 11, 5e7)
    assert first["prefill"] == {
        "seconds": [4.0, 1.0, 3.0], "tokens_per_second": {"median": 200 / 3, "least": 50.0, "most": 200.0},
        "ratio": {"median": 2.0, "least": 0.25, "most": 3.0},
    }  # fmt: skip
    shown = texts(written[2])
    assert {"dense", "pruned", "100 + 11", "10 + 3", "prefill, tokens/s", "decode, tokens/s"} <= set(shown)
