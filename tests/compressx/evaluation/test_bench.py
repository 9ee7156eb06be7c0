"""Models that take turns, and what becomes of a process that dies."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.evaluation.benched import Inside, inside
from tests.compressx.saved import save_tiny

from compressx import ArtifactError, CalibrationError, CompressxError, RecipeError
from compressx.evaluation import bench as benching
from compressx.evaluation import speed
from compressx.evaluation.bench import BenchSettings, bench, file_bytes, process
from compressx.evaluation.saved import source_of
from compressx.evaluation.speed import Task
from compressx.models.checkpoint import Checkpoint
from compressx.models.packed_folder import pack_folder
from compressx.recipe.sources import ModelSource
from compressx.report.speeds import Length
from compressx.runtime.errors import OutOfMemoryError

SHORT, LONG = Length(4, 2), Length(8, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    save_tiny(folder / "llama", "llama")
    save_tiny(folder / "gpt2", "gpt2")
    return folder


class Told:
    """Answers with seconds that are told, and logs what it is asked; no model is loaded."""

    def __init__(self, task: Task, log: list[Any]) -> None:
        self.task, self.log = task, log
        self.asked: Mapping[str, int] | None = None

    def ask(self, request: Mapping[str, int]) -> None:
        self.asked = request
        self.log.append((self.task.name, request["prompt"], request["new"]))

    def answer(self) -> dict[str, Any]:
        if self.asked is None:
            return {"machine": "", "dtype": "", "parameters": 1, "weight_bytes": 1,
                    "read_bytes": 1, "memory_bytes": {"before": 1, "load": 1}}  # fmt: skip
        turn = float(len(self.log))
        return {"seconds": {"prefill": turn, "decode": 100 + turn}, "peak_bytes": len(self.log)}


def told(log: list[Any]) -> Any:
    @contextmanager
    def start(task: Task) -> Iterator[Told]:
        yield Told(task, log)

    return start


def sources(folder: Path, *names: str) -> list[Any]:
    return [source_of(str(folder / name)) for name in names]


def test_models_take_turns_in_every_round_and_the_first_round_does_not_count(folder: Path) -> None:
    log: list[Any] = []
    found = bench(sources(folder, "llama", "gpt2"), BenchSettings((SHORT, LONG), rounds=2), start=told(log))
    names = [str(folder / name) for name in ("llama", "gpt2")]
    one = [(name, length.prompt, length.new) for length in (SHORT, LONG) for name in names]
    assert log == one * 3
    assert [m.seconds[LONG]["prefill"] for m in found.models] == [[7.0, 11.0], [8.0, 12.0]]
    assert [m.seconds[SHORT]["decode"] for m in found.models] == [[105.0, 109.0], [106.0, 110.0]]
    assert [m.memory_bytes["run"] for m in found.models] == [11, 12]
    assert found.rounds == 2


def test_the_same_ids_are_given_to_models_of_different_vocabularies(folder: Path, monkeypatch: Any) -> None:
    seen: list[torch.Tensor] = []
    seconds = {"prefill": 1, "decode": 1}
    monkeypatch.setattr(speed, "timed", lambda _model, ids, _new: seen.append(ids) or (seconds, ids))
    sizes = iter((90, 40))
    monkeypatch.setattr(benching, "vocabulary", lambda _: next(sizes))
    found = bench(sources(folder, "llama", "gpt2"), BenchSettings((SHORT, LONG), batch=3, rounds=1), start=inside)
    assert found.below == 40
    assert max(int(ids.max()) for ids in seen) < 40
    assert [tuple(ids.shape) for ids in seen] == [(3, 4), (3, 4), (3, 8), (3, 8)] * 2
    assert all(torch.equal(a, b) for a, b in zip(seen[::2], seen[1::2], strict=True))


def test_real_models_are_measured(folder: Path) -> None:
    llama, gpt2 = bench(sources(folder, "llama", "gpt2"), BenchSettings((SHORT,), rounds=2), start=inside).models
    assert (llama.parameters, gpt2.parameters) == (108992, 166464)
    assert all(len(m.seconds[SHORT][stage]) == 2 for m in (llama, gpt2) for stage in ("prefill", "decode"))
    assert all(s > 0 for m in (llama, gpt2) for each in m.seconds[SHORT].values() for s in each)


def test_a_model_given_twice_gets_a_number(folder: Path) -> None:
    found = bench(sources(folder, "llama", "gpt2", "llama"), BenchSettings((SHORT,), rounds=1), start=told([]))
    assert [m.name for m in found.models] == [str(folder / name) for name in ("llama", "gpt2", "llama (2)")]


def test_the_file_is_the_safetensors_of_a_folder_the_packed_ones_or_the_gguf(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))
    weights = folder / "llama" / "model.safetensors"
    pack_folder(folder / "llama", tmp_path / "packed")
    packed = source_of(str(tmp_path / "packed"))
    plain, small = bench([*sources(folder, "llama"), packed], BenchSettings((SHORT,), rounds=1), start=inside).models
    assert plain.file_bytes == weights.stat().st_size
    assert small.file_bytes == (tmp_path / "packed" / "model.packed.safetensors").stat().st_size < plain.file_bytes
    assert small.weight_bytes == plain.weight_bytes
    (tmp_path / "M.gguf").write_bytes(b"12345")
    assert file_bytes(source_of(str(tmp_path / "M.gguf")), Checkpoint("elsewhere")) == 5
    package = ModelSource(package="p", version="1", file="M.gguf", sha256="0" * 64)
    assert file_bytes(package, Checkpoint(str(tmp_path), "M.gguf")) == 5
    assert file_bytes(ModelSource(id="a/b"), Checkpoint(str(folder / "llama"))) == plain.file_bytes


def test_weights_that_lie_beside_those_that_are_loaded_are_not_counted(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "llama", tmp_path / "both")
    weights = tmp_path / "both" / "model.safetensors"
    shutil.copyfile(weights, weights.with_name("consolidated.safetensors"))
    source = source_of(str(tmp_path / "both"))
    assert file_bytes(source, Checkpoint(str(tmp_path / "both"))) == weights.stat().st_size
    sizes = pack_folder(tmp_path / "both", tmp_path / "packed")
    assert file_bytes(source_of(str(tmp_path / "packed")), Checkpoint("elsewhere")) == sizes.packed_bytes


# --- what is refused, before anything is loaded


def unstarted(_: Task) -> Any:
    raise AssertionError("a process was started")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (BenchSettings((SHORT,), rounds=0), "--rounds 0: expected at least 1"),
        (BenchSettings((SHORT,), batch=0), "--batch 0: expected at least 1"),
        (BenchSettings((SHORT,), threads=0), "--threads 0: expected at least 1"),
        (BenchSettings((SHORT, Length(0, 2))), "--prompt-tokens 0: expected at least 1"),
        (
            BenchSettings((SHORT, Length(1, 1))),
            "--new-tokens 1: expected at least 2; the first new token belongs to prefill",
        ),
    ],
)
def test_a_number_that_is_too_small_is_refused(folder: Path, asked: BenchSettings, said: str) -> None:
    with pytest.raises(RecipeError, match=f"^{said}$"):
        bench(sources(folder, "llama"), asked, start=unstarted)


def test_what_a_model_has_no_positions_for_is_refused_before_any_is_loaded(folder: Path) -> None:
    with pytest.raises(CalibrationError, match=r"gpt2: --prompt-tokens 120, --new-tokens 9: a prompt of .* 128 pos"):
        bench(sources(folder, "gpt2"), BenchSettings((SHORT, Length(120, 9))), start=unstarted)
    bench(sources(folder, "gpt2"), BenchSettings((Length(120, 8),), rounds=1), start=told([]))


def test_a_model_that_is_not_there_is_refused_before_any_is_loaded(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="gone does not exist"):
        bench(sources(folder, "llama", "gone"), BenchSettings((SHORT,)), start=unstarted)


# --- processes


@pytest.mark.slow
def test_a_process_answers_like_this_one_and_is_ended_with_the_block(folder: Path) -> None:
    task = Task("mine", Checkpoint(str(folder / "llama")), "cpu", 1, 2, 128)
    with process(task) as worker:
        there, here = worker.answer(), Inside(task).answer()
        assert {k: v for k, v in there.items() if k != "memory_bytes"} == {
            k: v for k, v in here.items() if k != "memory_bytes"
        }
        worker.ask({"prompt": 4, "new": 2})
        assert min(worker.answer()["seconds"].values()) > 0
        os.kill(worker.process.pid, signal.SIGKILL)  # as Linux does when memory runs out
        worker.process.wait()
        worker.ask({"prompt": 4, "new": 2})
        with pytest.raises(
            OutOfMemoryError, match=r"^mine: its process was killed \(SIGKILL\), as Linux does when mem"
        ):
            worker.answer()
    assert worker.process.stdin is not None
    assert worker.process.stdin.closed


@pytest.mark.slow
def test_an_error_in_a_process_is_raised_here_as_what_it_was(folder: Path) -> None:
    with process(Task("mine", Checkpoint(str(folder / "gone")), "cpu", None, 1, 9)) as worker:
        with pytest.raises(ArtifactError, match=r"cannot load .*gone"):
            worker.answer()
        assert worker.process.wait(60) == 0


def test_other_ends_of_a_process_are_told_apart() -> None:
    killed = benching._death("mine", -signal.SIGSEGV)
    assert isinstance(killed, CompressxError)
    assert str(killed).startswith("mine: its process was ended by SIGSEGV while it was loaded or timed")
    bug = benching._death("mine", 1)
    assert type(bug) is RuntimeError, "its traceback is shown"
    assert str(bug) == "mine: its process ended with exit status 1 and no answer; its message is above"


def test_a_process_that_is_waited_for_ends_when_this_one_is_interrupted(folder: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        process(Task("mine", Checkpoint(str(folder / "llama")), "cpu", None, 1, 9)) as worker,
    ):
        raise KeyboardInterrupt
    assert worker.process.poll() == -signal.SIGKILL
