from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import pytest

from compressx import ArtifactError
from compressx.api.record import BlockReport, LayerReport, RunReport
from compressx.cli import terminal
from compressx.report.compare import side_by_side
from compressx.report.section import Best


def saved(folder: Path, sparsity: float, pruned: float, dense: float = 20.0, pruner: str = "wanda", **fields) -> Path:
    layer = LayerReport("model.layers.0.q", pruner, "50% row", (4, 4), sparsity, sparsity, 1.0, {"error": 0.1})
    report = RunReport(
        compressx="0.1.0", model={"id": "a/b"}, sparsity=sparsity, skipped=(),
        blocks=(BlockReport(0, "", (layer,), 1.0),),
        evaluation={"dense": {"token_perplexity": dense}, "pruned": {"token_perplexity": pruned}},
        seconds={"total": 12.3}, peak_memory_bytes=2**30,
    )  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(dataclasses.replace(report, **fields).to_json())
    return folder


def test_runs_stand_side_by_side_with_what_each_measured(tmp_path):
    tuned = {"dense": {"token_perplexity": 20.0}, "finetuned": {"token_perplexity": 22.5}}
    found = side_by_side(
        [saved(tmp_path / "a", 0.5, 30.0), saved(tmp_path / "b", 0.6, 0.0, pruner="alps", evaluation=tuned)]
    )
    shown = found.sections()[0].table
    assert shown.names == ["run", "pruners", "sparsity", "token perplexity, dense", "token perplexity, pruned",
                               "token perplexity, finetuned", "seconds", "GiB"]  # fmt: skip
    assert shown.texts == [  # the least perplexity of the last model first
        ["b", "alps", "60.00%", "20", "", "22.5", "12", "1.0"],
        ["a", "wanda", "50.00%", "20", "30", "", "12", "1.0"],
    ]
    on_gpu = side_by_side([tmp_path / "a", saved(tmp_path / "c", 0.5, 40.0, peak_gpu_memory_bytes=2**31)])
    assert on_gpu.table.names[-2:] == ["GiB", "GPU GiB"]
    assert [row[-2:] for row in on_gpu.table.texts] == [["1.0", "0.0"], ["1.0", "2.0"]]
    assert found.warnings == ()


def test_table_numbers_and_plot_are_written(tmp_path):
    found = side_by_side([saved(tmp_path / "a", 0.5, 30.0), saved(tmp_path / "b", 0.6, 40.123456)])
    assert [p.name for p in found.write(tmp_path / "out")] == ["compare.md", "compare.csv", "compare.svg"]
    assert "| a | wanda | 50.00% | 20 | **30** | 12 | 1.0 |" in (tmp_path / "out" / "compare.md").read_text()
    with (tmp_path / "out" / "compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(r["token perplexity, pruned"]) for r in rows] == [30.0, 40.123456]
    drawn = (tmp_path / "out" / "compare.svg").read_text()
    assert "token perplexity" in drawn
    assert "wanda" in drawn


def test_what_no_run_as_sparse_or_sparser_beats_is_marked_unless_the_runs_cannot_be_compared(tmp_path, capsys):
    def task(acc: float) -> dict[str, float]:
        return {"arc": {"acc": acc, "acc_stderr": 0.01}, "mine": {"odd": acc}}

    given = {"a": (0.5, 31.0, 0.4), "b": (0.5, 30.0, 0.3), "c": (0.6, 40.0, 0.5), "d": (0.6, 41.0, 0.2)}
    folders = [
        saved(tmp_path / name, sparsity, 0.0, evaluation={"pruned": {"token_perplexity": ppl, **task(acc)}})
        for name, (sparsity, ppl, acc) in given.items()
    ]
    table = (found := side_by_side(folders)).sections()[0].table
    assert [row[0] for row in table.rows] == ["b", "a", "c", "d"], "the least perplexity first"
    marked = {(row[0], column) for row in table.rows for column, x in zip(table.names, row, strict=True)
              if isinstance(x, Best)}  # fmt: skip
    perplexity, accuracy = "token perplexity, pruned", "arc acc, pruned"
    assert marked == {("b", perplexity), ("c", perplexity), ("c", accuracy)}
    terminal.show(*found.sections())
    assert "30*" in capsys.readouterr().out
    other = side_by_side([*folders, saved(tmp_path / "e", 0.5, 29.0, model={"id": "c/d"})])
    assert not any(isinstance(x, Best) for row in other.sections()[0].table.rows for x in row)


def test_a_comparison_says_how_many_answers_each_run_changed(tmp_path):
    def task(right: str) -> dict[str, object]:
        return {"arc": {"acc": 0.5, "acc_documents": right}}

    given = {"a": task("1c"), "b": task("1a")}
    folders = [
        saved(tmp_path / name, 0.5, 0.0, evaluation={"dense": task("1c"), "pruned": x}) for name, x in given.items()
    ]
    shown = side_by_side(folders).table
    assert shown.names[3:6] == ["arc acc, dense", "arc acc, pruned", "arc acc, pruned: flips"]
    assert [row[5] for row in shown.texts] == ["0 right to wrong, 0 wrong to right, p = 1",
                                               "1 right to wrong, 1 wrong to right, p = 1"]  # fmt: skip


def test_dense_figures_that_differ_are_said_to_make_the_others_incomparable(tmp_path):
    found = side_by_side([saved(tmp_path / "a", 0.5, 30.0), saved(tmp_path / "b", 0.5, 31.0, dense=21.0)])
    (warning,) = found.warnings
    assert "token perplexity differs (20, 21)" in warning
    other = side_by_side(
        [saved(tmp_path / "c", 0.5, 30.0), saved(tmp_path / "d", 0.5, 31.0, 21.0, model={"id": "c/d"})]
    )
    assert other.warnings == ("Different models: a/b, c/d.",)


def test_runs_that_differ_in_something_else_than_sparsity_are_not_joined_by_a_line(tmp_path):
    found = side_by_side([saved(tmp_path / "a", 0.5, 30.0), saved(tmp_path / "b", 0.5, 31.0)])
    drawn = {"dense": ([0.0], [20.0]), "a: wanda": ([50.0], [30.0]), "b: wanda": ([50.0], [31.0])}
    assert found._panels()["token perplexity"] == drawn


def test_a_run_is_named_by_its_folder_or_its_report_and_by_the_folders_above_where_names_are_alike(tmp_path):
    alike = [saved(tmp_path / above / "run", 0.5, 30.0, evaluation={}) for above in "xy"]
    assert [run.name for run in side_by_side(alike).runs] == ["x/run", "y/run"]
    alone = side_by_side([alike[0] / "report.json"])
    assert [run.name for run in alone.runs] == ["run"]
    assert [p.name for p in alone.write(tmp_path / "out")] == ["compare.md", "compare.csv"], "nothing to draw"


def test_standard_errors_are_in_the_table_and_not_in_the_plot(tmp_path):
    task = {"arc": {"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1}}
    found = side_by_side([saved(tmp_path / "a", 0.5, 30.0, evaluation={"dense": task, "pruned": task})])
    assert "arc exact match stderr,strict, pruned" in found.sections()[0].table.names
    assert list(found._panels()) == ["arc exact match,strict"]


def test_a_folder_without_a_report_and_a_report_of_another_version_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"holds no report.json; expected the output folder of a finished run"):
        side_by_side([tmp_path])
    folder = saved(tmp_path / "a", 0.5, 30.0)
    text = (folder / "report.json").read_text()
    (folder / "report.json").write_text(text.replace('"sparsity": 0.5', '"sparsity": "half"', 1))
    with pytest.raises(ArtifactError, match=r"report.json: sparsity: .*; was it written by this version"):
        side_by_side([folder])
    (folder / "report.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"the file: Invalid JSON"):
        side_by_side([folder])
