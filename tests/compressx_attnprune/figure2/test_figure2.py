"""The paper's experiment: its claims on means over seeds, its files, and its command."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

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
@pytest.mark.parametrize("panel", ["n", "rho"])
@pytest.mark.parametrize("method", FACTORS)
def test_pruning_for_the_attention_matrix_has_the_lowest_error_at_every_n_and_every_ratio(
    quick: Figure, panel: str, method: str
):
    ours, theirs = of(quick, panel, OURS), of(quick, panel, method)
    assert [p.tokens for p in of(quick, "n", OURS)] == list(QUICK.token_counts)
    assert [p.sparsity for p in of(quick, "rho", OURS)] == list(QUICK.sparsities)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.sparsity) == (b.tokens, b.sparsity)
        assert a.mean < 0.7 * b.mean, f"at n = {a.tokens} and rho = {a.sparsity}"


@pytest.mark.slow
def test_the_error_grows_with_n_and_with_the_pruning_ratio(quick: Figure):
    for panel in ("n", "rho"):
        means = [p.mean for p in of(quick, panel, OURS)]
        assert means == sorted(means)


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


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="rank 9 exceeds width 6"):
        replace(TINY, rank=9)
    with pytest.raises(ValueError, match="two seeds or more, got 1"):
        replace(TINY, seeds=1)


@pytest.mark.slow
def test_the_same_figure_gives_the_same_files_and_intervals_that_hold_the_mean(tiny: Figure, tmp_path: Path):
    for name in ("a", "b"):
        with figure2_output.output_folder(tmp_path / name) as folder:
            figure2_output.write(figure2.measure(TINY) if name == "b" else tiny, folder)
    for name in ("figure2.csv", "figure2.json", "figure2.svg", "figure2.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for row in csv.DictReader((tmp_path / "a/figure2.csv").read_text().splitlines()):
        assert float(row["ci95_low"]) <= float(row["mean"]) <= float(row["ci95_high"])


def test_a_failure_while_writing_leaves_nothing_behind(tiny: Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure2_output, "plot", full_disk)
    with (
        pytest.raises(ArtifactError, match=r"cannot write .*No space left"),
        figure2_output.output_folder(tmp_path / "out") as folder,
    ):
        figure2_output.write(tiny, folder)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(figure2, "measure", interrupt)
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
    done = subprocess.run(
        [sys.executable, "-m", "compressx_attnprune", "figure2", "--output", "out", *TINY_OPTIONS],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    out = tmp_path / "out"
    assert sorted(p.name for p in out.iterdir()) == ["figure2.csv", "figure2.json", "figure2.png", "figure2.svg"]
    assert "choosing lambda on 1 tuning seeds, n = 8" in done.stderr
    assert "wrote out" in done.stderr
    assert "| method | rho = 0.5 | rho = 0.75 |" in done.stdout

    rows = list(csv.DictReader((out / "figure2.csv").read_text().splitlines()))
    columns = ["panel", "method", "lambda", "n", "rho", "seeds", "mean", "ci95_low", "ci95_high", "unconverged"]
    assert list(rows[0]) == columns
    assert len(rows) == (2 + 3) + 2 * 4 + 2 * 4
    for row, point in zip(rows, tiny.points, strict=True):
        assert (row["panel"], row["method"], int(row["n"])) == (point.panel, point.method, point.tokens)
        assert float(row["mean"]) == pytest.approx(point.mean, rel=1e-6)
        assert (row["lambda"] == "") is (row["method"] != OURS)

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "1"], "'1' is not a whole number from 2 to 1000"),
        (["--seeds", "five"], "'five' is not a whole number"),
        (["--scale", "nan"], "'nan' is not a number above 0, below 100"),
        (["--sparsity", "1"], "'1' is not a number above 0, below 1"),
        (["--sparsities", "0.5,1.5"], "'1.5' is not a number above 0, below 1"),
        (["--sparsities", "0.5,"], "'' is not a number above 0, below 1"),
        (["--regularizations", "0.1,0.01"], "'0.1,0.01' does not rise"),
        (["--token-counts", "16,16"], "'16,16' does not rise"),
        (["--optimizer", "adam"], "'adam' is not one of 'line-search', 'momentum'"),
        (["--rank", "40"], "rank 40 exceeds width 32"),
        (["--seed", "5"], "No such option"),
    ],
)
def test_a_wrong_option_is_named_with_what_was_expected(options: list[str], message: str, tmp_path: Path):
    result = CliRunner().invoke(cli.cli, ["figure2", "--output", str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert result.stderr.count("Error:") == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_an_output_folder_the_command_says_so():
    result = CliRunner().invoke(cli.cli, ["figure2"])
    assert result.exit_code == 2
    assert "Missing option '--output'" in result.stderr


@pytest.mark.slow
def test_an_output_that_is_not_empty_is_refused_before_anything_runs(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "compressx_attnprune", "figure2", "--output", "out"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: output ")
    assert len(done.stderr.splitlines()) == 1
    assert "is not empty; name a new folder, or empty this one" in done.stderr
    assert (tmp_path / "out/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("output", ["file", "file/below"])
def test_an_output_that_is_or_lies_below_a_file_is_refused(output: str, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    result = CliRunner().invoke(cli.cli, ["figure2", "--output", str(tmp_path / output)])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert (tmp_path / "file").read_text() == "mine"


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
