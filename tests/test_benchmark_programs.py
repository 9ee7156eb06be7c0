"""Each benchmark runs to its end on a model of seconds: one that nobody has run for a month would be found broken."""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from tests.compressx.gguf_files import write_gguf
from tests.compressx.saved import save_tiny

pytestmark = pytest.mark.slow
Benchmark: TypeAlias = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama")


@pytest.fixture(scope="module")
def text(model: Path) -> Path:
    return model.with_name("text.txt")


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Benchmark:
    """Run one in this process; gives what it prints, and raises the exit of one that refuses."""
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))

    def run(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            with torch.enable_grad():  # which some turn off
                importlib.import_module(name).main()
        except SystemExit as ended:
            if ended.code:
                raise
        return capsys.readouterr().out

    return run


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells(printed: str) -> dict[str, list[str]]:
    """Return the cells of every line of a table by its first."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}


def test_attention_error_measures_every_layer_on_other_text_and_goes_on_where_it_stopped(
    model, text, tmp_path, benchmark
):
    more = tmp_path / "more.txt"  # enough for an order of methods that does not depend on which windows are drawn
    more.write_text(" ".join(reversed(text.read_text().split())) + " " + text.read_text())
    asked = (model, "--calibration", more, "--evaluation", more, "--output", tmp_path, "--samples", 16, "--windows", 8,
             "--length", 32, "--sparsities", 0.5, "--methods", "wanda", "sparsegpt", "gauss-newton")  # fmt: skip
    benchmark("attention_error", *asked, "--layers", 0)
    assert {row["layer"] for row in rows(tmp_path / "errors.csv")} == {"0"}
    first = (tmp_path / "errors.csv").read_text()
    with pytest.raises(SystemExit, match="measured with other settings: seed '0', now '7'; name another output"):
        benchmark("attention_error", *asked, "--seed", 7)
    benchmark("attention_error", *asked)
    measured = rows(tmp_path / "errors.csv")
    assert (tmp_path / "errors.csv").read_text().startswith(first)
    assert [row["layer"] for row in measured] == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
    by_method = {m: [float(r["attention"]) for r in measured if r["method"] == m] for m in ("wanda", "gauss-newton")}
    assert all(ours < theirs for ours, theirs in zip(by_method["gauss-newton"], by_method["wanda"], strict=True))
    assert "gauss-newton" in cells((tmp_path / "table.md").read_text())
    assert (tmp_path / "errors.svg").is_file()


def test_layer_error_measures_every_linear_to_every_pattern(model, text, tmp_path, benchmark):
    benchmark("layer_error", "--model", model, "--text", text, "--output", tmp_path, "--samples", 8,
              "--held-out", 4, "--sequence-length", 32, "--sparsities", 0.5)  # fmt: skip
    measured = rows(tmp_path / "layer-error.csv")
    assert len(measured) == 3 * 7 * 2 * 2
    assert "28 of" not in (tmp_path / "layer-error.md").read_text()
    assert "21 of 21" in (tmp_path / "layer-error.md").read_text()


def test_loss_study_correlates_every_error_with_perplexity(model, text, tmp_path, benchmark):
    asked = (model, "--text", text, "--output", tmp_path, "--samples", 8, "--held-out", 2, "--windows", 6,
             "--length", 32)  # fmt: skip
    benchmark("loss_study", *asked, "--blocks", 1, "--sparsities", 0.5)
    benchmark("loss_study", *asked, "--blocks", 0, 1, "--sparsities", 0.5, 0.7)
    measured = rows(tmp_path / "losses.csv")
    assert len(measured) == len({(r["index"], r["method"], r["sparsity"]) for r in measured}) == 2 * 5 * 2
    losses = [name for name in measured[0] if name not in ("index", "method", "sparsity", "growth")]
    for loss in losses:
        low, high = (
            [float(r[loss]) for r in sorted(measured, key=lambda r: (r["index"], r["method"])) if r["sparsity"] == s]
            for s in ("0.5", "0.7")
        )
        assert all(0 < few < many for few, many in zip(low, high, strict=True)), loss
    table = cells((tmp_path / "losses.md").read_text())
    assert all(-1 <= float(table[loss][0]) <= 1 for loss in losses)


def test_streaming_holds_the_peak_against_its_bound(tmp_path, benchmark):
    printed = cells(benchmark("streaming", tmp_path, "--gigabytes", 0.002, "--width", 64, "--inner", 128,
                              "--vocabulary", 100, "--samples", 2, "--length", 32,
                              "--methods", "wanda 2:4"))  # fmt: skip
    _, peak, bound, sparsity = printed["wanda 2:4"]
    assert 0 < float(peak) < float(bound)
    assert sparsity == "50.00%"


def test_batch_size_times_every_size_on_the_same_windows(model, text, benchmark, monkeypatch):
    module = importlib.import_module("batch_size")
    seen: list[tuple[str, torch.Size]] = []
    monkeypatch.setattr(module, "token_perplexity", lambda access, windows, batch_size: [
        seen.append((str(batch_size), logits.shape[:2])) for logits in access.logits(torch.split(windows, batch_size))
    ])  # fmt: skip
    printed = cells(benchmark("batch_size", model, "--text", text, "--length", 32, "--windows", 4, "--sizes", 1, 4,
                              "--rounds", 2))  # fmt: skip
    assert printed["32 tokens, float32, in a batch"] == ["passed on", "Wanda", "SparseGPT", "head"]
    assert [len(printed[size]) for size in ("1", "4")] == [4, 4]
    assert seen == 2 * [*4 * [("1", (1, 32))], ("4", (4, 32))]


def test_speed_measures_pruning_against_the_floor(model, text, benchmark, monkeypatch):
    speed = importlib.import_module("speed")
    monkeypatch.setattr(speed, "rate", partial(speed.rate, size=64))
    printed = benchmark("speed", model, "--text", text, "--dtype", "float32", "--samples", 4, "--length", 32,
                        "--rounds", 1, "--methods", "wanda")  # fmt: skip
    tools = [line.split("|")[2].strip() for line in printed.splitlines() if line.startswith("| wanda")]
    assert tools == ["compressx", "compressx, streamed", "floor"]
    assert printed.count("50.00%") == 2


def test_the_picture_of_a_summary_shows_what_the_report_of_a_run_has(tmp_path, benchmark):
    from tests.compressx.report.reports import report

    (tmp_path / "report.json").write_text(report(command="compressx run a.yaml").to_json())
    benchmark("summary", tmp_path, tmp_path / "summary.svg")
    drawn = (tmp_path / "summary.svg").read_text()
    for text in ("compressx&#160;run&#160;a.yaml", "Pruned&#160;org/model", "token_perplexity", "+25.0%"):
        assert text in drawn, text


def test_plan_time_holds_each_stage_and_the_peak_against_a_run(model, text, tmp_path, benchmark):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        f"model: {{path: {model}}}\ncalibration: {{dataset: {{text: {text}}}, samples: 8, sequence_length: 32}}\n"
        'prune: [{targets: ["*"], pruner: sparsegpt, sparsity: 0.5}]\noutput: out\n'
    )
    found = [line.strip("|").split("|") for line in benchmark("plan_time", recipe).splitlines()[2:]]
    stages = {name.strip(): float(ratio) for _, name, *_, ratio in found}
    assert {"load", "prune", "memory, GB"} <= set(stages)
    assert 0.5 < stages["memory, GB"] < 1.5


def test_smaller_files_weighs_bytes_speed_and_perplexity_of_every_file(tmp_path, text, benchmark):
    like = write_gguf(tmp_path / "like.gguf")
    letters = tmp_path / "letters.txt"
    letters.write_text("ab cd. " * 400)
    asked = ("--texts", f"letters={letters}", "--samples", 2, "--length", 32, "--rounds", 1, "--threads", 1)
    asked = (*asked, "--prompt-tokens", 8, "--new-tokens", 4, "--output", tmp_path / "out")
    files = ("--models", f"dense={like}", "--types", "F16", "Q8_0", "--files", f"like={like}")
    printed = cells(benchmark("smaller_files", *files, *asked))
    measured = {(r["model"], r["type"]): r for r in rows(tmp_path / "out" / "smaller.csv")}
    assert [*measured] == [("dense", "F16"), ("dense", "Q8_0"), ("like", "as it is")]
    for (name, kind), row in measured.items():
        file = like if name == "like" else tmp_path / "out" / f"{name}-{kind}.gguf"
        assert int(row["bytes"]) == file.stat().st_size
        assert float(row["times decode"]) > 0
        assert float(row["letters"]) > 1
    assert int(measured["dense", "Q8_0"]["bytes"]) < int(measured["dense", "F16"]["bytes"])
    assert measured["dense", "F16"]["times prefill"] == "1.0"
    assert any("like" in name for name in printed)
    assert "perplexity, letters" in (tmp_path / "out" / "smaller.svg").read_text()
