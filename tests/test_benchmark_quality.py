"""What the benchmarks would do in their hours is found out in seconds: every row of quality.py plans, and is kept."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.compressx.saved import save_tiny

from compressx.api.patterns import NM
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import load_plugins
from compressx.report.compare import read_report


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    return importlib.import_module("quality")


@pytest.fixture(scope="module")
def settings(quality: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    model = save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama")
    text = str(model.with_name("text.txt"))
    return quality.Settings(str(model), text, {"text": text}, 8, 32, 2, "float32")


@pytest.mark.parametrize("budget", ["50%", "70%", "80%", "2:4"])
def test_every_method_plans_every_linear_at_every_budget(quality, settings, budget, tmp_path):
    plugins = load_plugins()
    for name, sections in {**quality.METHODS, **quality.INGREDIENTS}.items():
        planned = plan(settings.recipe(tmp_path / "out", **sections(budget)), plugins=plugins)
        assert len(planned.linears) == 3 * 7, name
        patterns = {str(x.pattern).split()[0] for x in planned.linears if x.pattern is not None}
        if ":" in budget:
            assert patterns == {str(NM(*map(int, budget.split(":"))))}, name
        elif planned.allocation is None:
            assert patterns == {budget}, name
        else:
            assert planned.allocation.target == int(budget.rstrip("%")) / 100, name


@pytest.fixture
def measure(quality, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))
    told = {
        "model": settings.model, "calibration": settings.calibration, "evaluation": f"text={settings.calibration}",
        "samples": "8", "sequence-length": "32", "windows": "2", "output": str(tmp_path / "q"),
    }  # fmt: skip
    common = [part for name, value in told.items() for part in (f"--{name}", value)]
    in_process = lambda command: run(Path(command[4]), resume=command[5:] == ["--resume"])  # noqa: E731 - seconds less

    def measure(*arguments: str, by_process: bool = False) -> None:
        with monkeypatch.context() as patch:
            if not by_process:
                patch.setattr(quality, "_run", in_process)
            patch.setattr(sys, "argv", ["quality.py", *common, *arguments])
            quality.main()

    return measure


@pytest.mark.slow
def test_one_run_measures_a_model_before_and_after_training(quality, settings, measure, tmp_path, capsys):
    asked = ("--methods", "magnitude", "--budgets", "50%", "--steps", "3")
    measure(*asked, "--training", settings.calibration, "--training-samples", "8")
    assert "[1/1] magnitude, 50%" in capsys.readouterr().out
    rows = quality.Table(tmp_path / "q", ["text"]).rows
    report = read_report(tmp_path / "q/reports/magnitude-50")
    assert (report.finetune.steps, report.finetune.windows) == (3, (7, 32))
    for name, stage in (("magnitude", "pruned"), ("magnitude, trained", "finetuned")):
        assert rows[name, "50%"]["perplexity text"] == report.evaluation[stage]["text"]["token_perplexity"]
    assert rows["magnitude", "50%"]["seconds"] < rows["magnitude, trained", "50%"]["seconds"]
    with pytest.raises(SystemExit, match="measured with other settings"):
        measure(*asked)


@pytest.mark.slow
def test_rows_are_measured_once_with_bos_in_the_recipe_and_in_the_dense_figure_alike(
    quality, settings, measure, tmp_path, capsys
):
    asked = ("--methods", "Wanda", "--budgets", "50%", "2:4", "--bos", "true")
    measure(*asked)
    assert "[2/2] Wanda, 2:4: perplexity text" in capsys.readouterr().out
    report = read_report(tmp_path / "q/reports/Wanda-2-4")
    assert {layer.pattern for layer in report.layers} == {"2:4"}
    assert report.blocks[0].output_error is not None
    measure(*asked)
    assert "Wanda, 2:4: perplexity text" not in capsys.readouterr().out  # both rows are there
    rows = quality.Table(tmp_path / "q", ["text"]).rows
    measured = read_report(tmp_path / "q/reports/Wanda-50").evaluation
    assert rows["dense", ""]["perplexity text"] == measured["dense"]["text"]["token_perplexity"]
    assert rows["dense", ""]["perplexity text"] != quality.dense(settings)["perplexity text"]
