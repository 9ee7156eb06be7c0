"""Experiment trackers: what they are given, and that none costs a run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.compressx.pipeline.runs import recipe, stopped

from compressx import CompressxError
from compressx.pipeline.run import plan, run


class Fake:
    """A tracker like accelerate's; fails in the methods that it is told to."""

    name = "wandb"
    fails: tuple[str, ...] = ()
    made: ClassVar[list[Fake]] = []

    def __init__(self, *given: Any, **more: Any) -> None:
        self.given, self.settings, self.logged, self.ended = (given, more), {}, [], 0
        self.made.append(self)

    def _may_fail(self, method: str) -> None:
        if method in self.fails:
            raise ConnectionError(f"no network in {method}")

    def start(self) -> None:
        self._may_fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, float], step: int) -> None:
        self._may_fail("log")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended += 1
        self._may_fail("finish")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """Put a tracker in the place of wandb's."""
    import accelerate.tracking

    kind = type("Kind", (Fake,), {"made": []})
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", kind)
    monkeypatch.setattr(accelerate.tracking, "get_available_trackers", lambda: ["wandb"])
    return kind


def test_a_tracker_gets_settings_every_block_losses_and_figures(model, fake):
    asked = recipe(model, evaluated=True, finetune={"steps": 2}, reconstruct_block={"passes": 1})
    report = run(asked | {"track": {"to": ["wandb"], "project": "tiny"}})
    (tracker,) = fake.made
    assert tracker.given == (("tiny",), {"name": "out"})
    assert tracker.settings["prune.0.pruner"] == "wanda"
    assert tracker.settings["calibration.samples"] == 8
    assert {"torch", "device"} <= {*tracker.settings}
    assert [step for step, _ in tracker.logged] == list(range(8)), "dense, three blocks, pruned, two steps, finetuned"
    values = [x for _, x in tracker.logged]
    assert values[0] == {"dense/token_perplexity": report.evaluation["dense"]["token_perplexity"]}
    for block, logged in zip(report.blocks, values[1:4], strict=True):
        assert logged == {
            "block/index": block.index, "block/sparsity": 0.5, "block/seconds": block.seconds,
            "block/output_error": block.output_error, "reconstruction/before": block.reconstruction.before,
            "reconstruction/after": block.reconstruction.after,
        }  # fmt: skip
    assert [x["finetune/loss"] for x in values[5:7]] == list(report.finetune.losses)
    assert values[7] == {"finetuned/token_perplexity": report.evaluation["finetuned"]["token_perplexity"]}
    assert tracker.ended == 1


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_left_out_with_a_warning_and_the_model_is_written(model, fake, method, caplog):
    fake.fails = (method,)
    run(recipe(model) | {"track": "wandb"})
    assert Path("out/model/model.safetensors").is_file()
    message = f"the tracker wandb failed and is left out: ConnectionError: no network in {method}"
    assert [record.getMessage() for record in caplog.records] == [message]
    assert f"WARNING {message}" in Path("out/run.log").read_text()


def test_a_tracker_ends_with_an_interrupted_run_too(model, fake):
    stopped(recipe(model) | {"track": "wandb"}, 1)
    assert fake.made[0].ended == 1


def test_a_resumed_run_goes_on_with_the_numbers_of_the_steps_of_the_interrupted_one(model, fake):
    tuned = {"steps": 4, "batch_size": 2, "checkpoint_every": 2}
    asked = recipe(model, evaluated=True, finetune=tuned) | {"track": "wandb"}
    stopped(asked, 2)

    def progress(stage: str, done: int, *_: Any) -> None:
        if stage == "finetune" and done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, resume=True, progress=progress)
    run(asked, resume=True)
    first, second, last = ([step for step, _ in tracker.logged] for tracker in fake.made)
    assert first == [0, 1, 2], "dense, two blocks"
    assert second == [0, 3, 4, 5, 6, 7], "dense again, the last block, pruned, three steps"
    assert last == [0, 4, 7, 8, 9], "dense and pruned again, two steps after the checkpoint, finetuned"


def test_a_tracker_that_is_not_installed_is_refused_by_the_plan(model, fake):
    for track, missing in (("mlflow", "tracker mlflow"), (["mlflow", "wandb", "trackio"], "trackers mlflow, trackio")):
        packages = missing.partition(" ")[2].replace(",", "")
        with pytest.raises(CompressxError, match=re.escape(f"{missing} not installed; pip install {packages}")):
            plan(recipe(model) | {"track": track})
    with pytest.raises(CompressxError, match="track is 'wandbb'; did you mean 'wandb'"):
        plan(recipe(model) | {"track": "wandbb"})


@pytest.mark.slow
def test_trackio_and_tensorboard_keep_a_run_on_disk_without_network(model, monkeypatch):
    monkeypatch.setitem(os.environ, "TRACKIO_DIR", str(Path("trackio").resolve()))  # read when it is imported
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    report = run(recipe(model, evaluated=True) | {"track": ["trackio", "tensorboard"]})
    logged = storage.get_logs("compressx", "out")
    assert [x["block/output_error"] for x in logged if "block/output_error" in x] == [
        pytest.approx(block.output_error) for block in report.blocks
    ]
    assert logged[-1]["pruned/token_perplexity"] == pytest.approx(report.evaluation["pruned"]["token_perplexity"])

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("out/tensorboard")
    events.Reload()
    assert [x.value for x in events.Scalars("block/output_error")] == [
        pytest.approx(block.output_error) for block in report.blocks
    ]
