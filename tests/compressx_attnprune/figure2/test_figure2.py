"""The paper's experiment: its claims on means over seeds, its files, and its command."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from compressx import ArtifactError
from compressx_attnprune import cli
from compressx_attnprune.figure2 import experiment as figure2
from compressx_attnprune.figure2 import output as figure2_output
from compressx_attnprune.figure2 import synthetic
from compressx_attnprune.figure2.experiment import OURS, Figure, Point
from compressx_attnprune.figure2.settings import QUICK, Settings

FACTORS = ["Wanda on factors", "SparseGPT on factors"]
TINY = Settings(
    seeds=2,
    tuning_seeds=1,
    width=6,
    tokens=12,
    scale=0.4,
    regularizations=(1e-3, 1e-1),
    token_counts=(8, 12),
    sparsities=(0.5, 0.75),
    steps=30,
)
TINY_OPTIONS = [
    *("--seeds", "2", "--tuning-seeds", "1", "--width", "6", "--tokens", "12", "--scale", "0.4", "--steps", "30"),
    *("--regularizations", "1e-3,1e-1", "--token-counts", "8,12", "--sparsities", "0.5,0.75"),
]


@pytest.fixture(scope="module")
def quick() -> Figure:
    """The experiment with the constants of --quick, five seeds."""
    return figure2.measure(QUICK)


@pytest.fixture(scope="module")
def tiny() -> Figure:
    return figure2.measure(TINY)


def of(figure: Figure, panel: str, method: str) -> list[Point]:
    return [p for p in figure.points if p.panel == panel and p.method == method]


@pytest.mark.slow
def test_the_error_against_lambda_is_u_shaped_with_its_minimum_inside_the_grid(quick: Figure):
    points = of(quick, "lambda", OURS)
    assert [p.regularization for p in points] == list(QUICK.regularizations)
    means = [p.mean for p in points]
    least = means.index(min(means))
    assert 0 < least < len(means) - 1
    assert all(a > b for a, b in pairwise(means[: least + 1])), "falls up to the minimum"
    assert all(a < b for a, b in pairwise(means[least:])), "rises after it"
    assert min(means[0], means[-1]) > 1.3 * means[least]
    assert all(len(p.errors) == 5 and p.unconverged == 0 for p in points)


@pytest.mark.slow
def test_pruning_for_the_attention_matrix_has_the_lowest_error_which_grows_with_n_and_with_the_ratio(quick: Figure):
    for panel, axis, values in (("n", "tokens", QUICK.token_counts), ("rho", "sparsity", QUICK.sparsities)):
        ours = of(quick, panel, OURS)
        assert [getattr(p, axis) for p in ours] == list(values)
        assert [p.mean for p in ours] == sorted(p.mean for p in ours)
        for method in FACTORS:
            for a, b in zip(ours, of(quick, panel, method), strict=True):
                assert (a.tokens, a.sparsity) == (b.tokens, b.sparsity)
                assert a.mean < 0.7 * b.mean, f"{method} at n = {a.tokens} and rho = {a.sparsity}"


@pytest.mark.slow
def test_lambda_is_chosen_on_seeds_that_are_not_reported(quick: Figure, monkeypatch: pytest.MonkeyPatch):
    assert not set(QUICK.reported) & set(QUICK.tuning)
    drawn: list[tuple[int, range]] = []
    sample = synthetic.sample
    monkeypatch.setattr(
        synthetic, "sample", lambda seeds, **kw: drawn.append((kw["tokens"], seeds)) or sample(seeds, **kw)
    )
    figure = figure2.measure(TINY)
    assert sorted(drawn, key=str) == sorted([(n, s) for n in (8, 12) for s in (TINY.tuning, TINY.reported)], key=str)

    chosen = {(c.tokens, c.sparsity): c for c in figure.choices}
    assert set(chosen) == {(8, 0.7), (12, 0.7), (12, 0.5), (12, 0.75)}
    for panel in ("n", "rho"):
        for p in of(figure, panel, OURS):
            choice = chosen[p.tokens, p.sparsity]
            assert p.regularization == choice.regularization
            assert choice.tuning_errors[choice.regularization] == min(choice.tuning_errors.values())
            assert set(choice.tuning_errors) == set(TINY.regularizations)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062047364), (2, 4.3026527297), (4, 2.7764451052), (9, 2.2621571628), (999, 1.9623414611)],
)
def test_confidence_intervals_use_students_t(freedom: int, quantile: float):
    assert figure2.student_t(freedom) == pytest.approx(quantile, rel=1e-9)
    if freedom == 4:
        point = Point("n", OURS, 0.1, 8, 0.5, (1.0, 2.0, 3.0, 4.0, 5.0))
        assert point.mean == 3.0
        assert point.half_width == pytest.approx(quantile * math.sqrt(2.5 / 5), rel=1e-9)


def test_a_failure_while_writing_and_an_interrupt_leave_nothing_behind(tiny, tmp_path, monkeypatch):
    def raising(error: BaseException) -> Any:
        def fail(*args: object) -> None:
            raise error

        return fail

    monkeypatch.setattr(figure2_output, "plot", raising(OSError(28, "No space left on device")))
    with (
        pytest.raises(ArtifactError, match=r"cannot write .*No space left"),
        figure2_output.output_folder(tmp_path / "out") as folder,
    ):
        figure2_output.write(tiny, folder)
    monkeypatch.setattr(figure2, "measure", raising(KeyboardInterrupt()))
    result = CliRunner().invoke(cli.cli, ["figure2", "--output", str(tmp_path / "out")])
    assert result.exit_code == 130
    assert "nothing was written" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_something_put_into_the_output_during_the_run_is_not_replaced(tmp_path: Path):
    def run() -> None:
        with figure2_output.output_folder(tmp_path / "out") as folder:
            (folder / "figure2.csv").touch()
            (tmp_path / "out").mkdir()
            (tmp_path / "out/theirs").touch()

    with pytest.raises(ArtifactError, match="is not empty"):
        run()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "theirs"]


@pytest.mark.slow
def test_the_command_writes_table_data_and_plots(tmp_path: Path, tiny: Figure):
    from matplotlib import image

    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    out = tmp_path / "out"
    done = CliRunner().invoke(cli.cli, ["figure2", "--output", str(out), *TINY_OPTIONS])
    assert done.exit_code == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert sorted(p.name for p in out.iterdir()) == ["figure2.csv", "figure2.json", "figure2.png", "figure2.svg"]
    assert "choosing lambda on 1 tuning seeds, n = 8" in done.stderr
    assert f"wrote {out}" in done.stderr
    assert "| method | rho = 0.5 | rho = 0.75 |" in done.stdout

    rows = list(csv.DictReader((out / "figure2.csv").read_text().splitlines()))
    columns = ["panel", "method", "lambda", "n", "rho", "seeds", "mean", "ci95_low", "ci95_high", "unconverged"]
    assert list(rows[0]) == columns
    assert len(rows) == (2 + 3) + 2 * 4 + 2 * 4
    for row, point in zip(rows, tiny.points, strict=True):
        assert (row["panel"], row["method"], int(row["n"])) == (point.panel, point.method, point.tokens)
        assert float(row["mean"]) == pytest.approx(point.mean, rel=1e-6)
        assert (row["lambda"] == "") is (row["method"] != OURS)
        assert float(row["ci95_low"]) <= float(row["mean"]) <= float(row["ci95_high"])

    data = json.loads((out / "figure2.json").read_text())
    assert data["settings"] == json.loads(json.dumps(vars(TINY)))
    assert data["reported_seeds"] == [0, 1]
    assert data["tuning_seeds"] == [1_000_000]
    assert {"compressx", "torch", "matplotlib", "python"} <= set(data["versions"])
    assert {(c["n"], c["rho"]) for c in data["chosen_lambda"]} == {(8, 0.7), (12, 0.7), (12, 0.5), (12, 0.75)}
    assert len(data["points"]) == len(rows)
    assert all(len(p["errors"]) == 2 for p in data["points"])

    pixels = image.imread(out / "figure2.png")
    assert (pixels[..., :3].std(axis=-1) > 0.05).sum() > 1000, "colored lines and bands"
    groups = {g.get("id") for g in ET.parse(out / "figure2.svg").iter("{http://www.w3.org/2000/svg}g")}  # noqa: S314 - our own file
    assert {"axes_1", "axes_2", "axes_3"} <= groups
    with figure2_output.output_folder(tmp_path / "again") as folder:
        figure2_output.write(tiny, folder)
    for name in ("figure2.csv", "figure2.json", "figure2.svg", "figure2.png"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), "the same figure, the same files"


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--seeds", "1"], "'1' is not a whole number from 2 to 1000"),
     (["--scale", "nan"], "'nan' is not a number above 0, below 100"),
     (["--sparsity", "1"], "'1' is not a number above 0, below 1"),
     (["--sparsities", "0.5,1.5"], "'1.5' is not a number above 0, below 1"),
     (["--sparsities", "0.5,"], "'' is not a number above 0, below 1"),
     (["--regularizations", "0.1,0.01"], "'0.1,0.01' is not strictly increasing"),
     (["--token-counts", "16,16"], "'16,16' is not strictly increasing"),
     (["--optimizer", "adam"], "'adam' is not one of 'line-search', 'momentum'"),
     (["--rank", "40"], "rank 40 exceeds width 32"),
     (["--seed", "5"], "No such option"), ([], "Missing option '--output'")],
)  # fmt: skip
def test_a_wrong_option_is_named_with_what_was_expected(options: list[str], message: str, tmp_path: Path):
    output = ["--output", str(tmp_path / "out")] if options else []
    result = CliRunner().invoke(cli.cli, ["figure2", *output, *options])
    assert result.exit_code == 2
    assert result.stderr.count("Error:") == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "reason"), [("file", ""), ("file/below", ""), ("full", "is not empty; name a new folder, or empty")]
)
def test_an_output_that_is_a_file_lies_below_one_or_is_not_empty_is_refused_before_anything_runs(
    output: str, reason: str, tmp_path: Path
):
    (tmp_path / "full").mkdir()
    for mine in ("file", "full/notes.txt"):
        (tmp_path / mine).write_text("mine")
    result = CliRunner().invoke(cli.cli, ["figure2", "--output", str(tmp_path / output)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert reason in result.stderr
    assert {(tmp_path / mine).read_text() for mine in ("file", "full/notes.txt")} == {"mine"}


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    result = CliRunner().invoke(cli.cli, ["figure2", "--output=~/full"])
    assert f"output {tmp_path}/full exists and is not empty" in result.stderr


def test_a_diverging_descent_is_one_message_and_no_files(tmp_path: Path):
    options = ["--optimizer", "momentum", "--step-size", "1e5", *TINY_OPTIONS, "--steps", "500"]
    result = CliRunner().invoke(cli.cli, ["figure2", "--output", str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert "error: gradient descent with momentum 0.9 and the fixed step size 100000 diverged" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_defaults_without_loading_torch():
    result = CliRunner().invoke(cli.cli, ["figure2", "--help"])
    assert result.exit_code == 0
    assert "[default: 10; quick: 5]" in " ".join(result.stdout.split())
    code = "import sys, compressx_attnprune.cli; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).strip() == "[]"
