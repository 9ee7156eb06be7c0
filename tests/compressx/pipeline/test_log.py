"""What a run says while it goes: its lines, `run.log`, and the names of its seconds."""

from __future__ import annotations

import logging
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.pipeline.runs import recipe, stopped

from compressx import hookimpl, load_plugins
from compressx.pipeline.run import run
from compressx.stages import log as module
from compressx.stages.log import RunLog

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def lines(path: str | Path) -> list[str]:
    """Return what a log says, after each line's time."""
    written = Path(path).read_text().splitlines()
    assert all(re.match(STAMP, line) for line in written)
    return [re.sub(STAMP, "", line) for line in written]


def test_a_run_logs_what_it_is_its_stages_every_block_and_its_end(model):
    """Its seconds count from where the caller says."""
    asked, started = recipe(model, evaluated=True, reconstruct_block={"passes": 1}), time.perf_counter() - 1000
    report = run(asked, started=started)
    assert report.seconds["load"] > 1000
    said = lines("out/run.log")
    assert [x.partition(":")[0] for x in said[:3]] == ["INFO command", "INFO machine", "INFO versions"]
    assert "threads" in said[1]
    assert ", torch " in said[2]
    stages = [m[1] for x in said if (m := re.fullmatch(r"INFO (\D+)  peak \d+\.\d\d GiB", x))]
    assert stages == ["load", "calibrate", "load", "evaluate dense", "calibrate", "prune", "save", "evaluate pruned",
                      "save"]  # fmt: skip
    blocks = [x for x in said if x.startswith("INFO prune ") and " of 3 " in x]
    for number, (line, block) in enumerate(zip(blocks, report.blocks, strict=True), start=1):
        trained = block.reconstruction
        assert re.fullmatch(
            rf"INFO prune {number} of 3  {block.fqn}  output error {block.output_error:.4g}  held-out error "
            rf"{trained.before:.4g}, reconstructed {trained.after:.4g}  \d+\.\d s  \d+ s left  peak \d\.\d\d GiB",
            line,
        )
    assert f"INFO evaluate pruned  token_perplexity {report.evaluation['pruned']['token_perplexity']:.6g}" in said
    assert said[-1].startswith("INFO finished  sparsity 50.00%  seconds: load ")


def test_an_interrupted_run_keeps_its_log_which_a_resumed_one_continues(model):
    left = stopped(recipe(model), 1)
    before = lines(left / "run.log")
    assert before[-1] == "ERROR the run ended: KeyboardInterrupt"
    run(recipe(model), resume=True)
    after = lines("out/run.log")
    assert after[: len(before)] == before
    told = [x for x in after if " of 3 " in x]
    assert told.pop(1).startswith("INFO prune  resumed after model.layers.0, 1 of 3")
    assert [x[:17] for x in told] == [f"INFO prune {i} of 3" for i in (1, 2, 3)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
def test_a_log_that_cannot_be_written_is_left_out_with_one_warning(tmp_path, caplog, capsys):
    (tmp_path / "run.log").symlink_to("/dev/full")
    log = RunLog()
    log.open(tmp_path)
    for text in ("one", "two"):
        log.write(logging.INFO, text)
    log.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"the log {tmp_path}/run.log cannot be written and is left out: No space left on device"]
    assert capsys.readouterr().err == ""


def test_warnings_of_libraries_and_of_parts_of_compressx_are_in_the_log(model):
    class Warner:
        @hookimpl
        def compressx_block_pruned(self, report: Any) -> None:
            if report.index == 0:
                warnings.warn("from python", UserWarning, stacklevel=1)
                logging.getLogger("transformers").warning("from a library")
                logging.getLogger("compressx.runtime.cache").warning("from a part of compressx")

    plugins = load_plugins()
    plugins.manager.register(Warner())
    show = warnings.showwarning
    with pytest.warns(UserWarning, match="from python"):
        run(recipe(model), plugins=plugins)
    said = ("WARNING UserWarning: from python", "WARNING from a library", "WARNING from a part of compressx")
    assert [lines("out/run.log").count(line) for line in said] == [1, 1, 1]
    assert warnings.showwarning is show
    for logger in ("compressx", "transformers"):
        assert not any(isinstance(x, RunLog) for x in logging.getLogger(logger).handlers)


def test_a_long_stage_says_twice_a_minute_how_far_it_is_and_how_long_it_takes(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(module, "_peak", lambda: "")
    log = RunLog()
    with caplog.at_level(logging.INFO, "compressx"):
        for done in range(101):
            log.step("finetune", done, 100, f"loss {done}")
            now += 10
        log.step("save", 0, 1)
    said = [record.getMessage() for record in caplog.records]
    assert said[:3] == ["finetune  loss 0", "finetune 3 of 100  loss 3  16 min left",
                        "finetune 6 of 100  loss 6  16 min left"]  # fmt: skip
    assert said[-2:] == ["finetune 99 of 100  loss 99  10 s left", "save"]


def test_every_second_of_a_run_is_under_the_name_of_a_stage_that_progress_told(model):
    rule = {"targets": ["*"], "pruner": "wanda"}
    allocation = {"method": "divergence", "target": 0.5, "samples": 4}
    asked = recipe(model, rule, evaluated=True, allocation=allocation, finetune={"steps": 2})
    told: list[str] = []
    times: list[float] = []

    def progress(stage: str, *_: Any) -> None:
        told.append(stage)
        times.append(time.perf_counter())

    began = time.perf_counter()
    seconds = dict(run(asked, progress=progress).seconds)
    took = times[-2] - began  # at the last but one the report is made, at the last it is written
    total = seconds.pop("total")
    assert list(seconds) == list(dict.fromkeys(told)), "in the order of the run, as the bars have them"
    assert sum(seconds.values()) == pytest.approx(total)
    assert total == pytest.approx(took, rel=0.1, abs=0.1)
    assert all(spent > 0 for spent in seconds.values())


def test_the_logger_gets_the_lines_only_where_its_level_lets_them_pass(model, caplog):
    run(recipe(model))
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "compressx"):
        run(recipe(model))
    said = [record.getMessage() for record in caplog.records]
    assert len([x for x in said if x.startswith("model.layers.") and "  wanda  50% row  sparsity 0.5000  " in x]) == 21
    assert any("wanda  50% row" in x for x in lines("out/run.log"))
