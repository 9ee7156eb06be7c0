"""When a run records its hidden states, and what is left of it if it is killed in between."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.pipeline.runs import artifacts, leftovers, recipe, stopped
from tests.compressx.processes import in_two, joined

from compressx.api.record import BlockReport
from compressx.models import access, shards
from compressx.models.blockwise import HiddenStates, in_memory
from compressx.models.shards import read_tensors
from compressx.pipeline.run import run
from compressx.runtime.errors import ArtifactError
from compressx.runtime.ranks import ALONE, Ranks
from compressx.stages import store as journal
from compressx.stages.store import Journal

REBUILT: dict[str, Any] = {"reconstruct_block": {"passes": 1}}
SENSITIVE = {"targets": ["*"], "pruner": "sensitivity", "sparsity": 0.5}


class Clock:
    """A clock that only moves when something is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Weights:
    """A model whose blocks take so many seconds to prune, and nothing to write."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def write(self, fqn: str, folder: Path, then: Callable[[], None] | None) -> None:
        self.clock.now += self.seconds
        if then is not None:
            then()

    def written(self) -> None:
        pass


def recorded(
    folder: Path, block: float, states: float, blocks: int = 40, ranks: Ranks = ALONE
) -> tuple[list[int], float]:
    """Add blocks to a journal, each of so many seconds; return after which it recorded states, and its seconds."""
    clock, seen = Clock(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "time", clock)

        def written(path: Path, tensors: dict[str, torch.Tensor]) -> None:
            if path.name.startswith("states-"):
                clock.now += states
                seen.append(int(path.name.removeprefix("states-").partition(".")[0]))

        patch.setattr(journal, "write_tensors", written)
        kept, access = Journal(folder, {}, ranks), Weights(clock, block)
        with kept.recording(access):  # type: ignore[arg-type]
            for i in range(blocks):
                hidden = HiddenStates([torch.zeros(1, 2, 3)] if i + 1 < blocks else ())
                if not ranks.first:
                    clock.now += block  # only the first process writes weights
                kept.add(access, BlockReport(i, f"block.{i}", (), 0.0), (), {}, hidden)  # type: ignore[arg-type]
    return seen, clock.now


def test_hidden_states_are_written_after_the_first_block_and_then_seldom_enough_to_cost_three_percent(tmp_path):
    seen, seconds = recorded(tmp_path, block=10.0, states=1.0)
    assert seen == [*range(1, 40, 4), 40], "1 second is 3% of 33, which are four blocks"
    assert len(seen) - 1 <= 0.03 * seconds + 1
    assert json.loads((tmp_path / "state.json").read_text())["finished"] == [f"block.{i}" for i in range(40)]
    assert recorded(tmp_path / "a", block=10.0, states=0.1)[0] == [*range(1, 41)]
    assert recorded(tmp_path / "b", block=10.0, states=100.0)[0] == [1, 40]


def _recorded_by(ranks: Ranks, folder: Path) -> list[int]:
    slow = 1.0 if ranks.first else 30.0  # alone, the second process would not write again
    return recorded(folder, block=10.0, states=slow, blocks=10, ranks=ranks)[0]


def _scored(ranks: Ranks, folder: Path) -> dict[str, float]:
    """Record scores, and return those that were there; the second process is late."""
    time.sleep(0 if ranks.first else 0.3)
    kept = Journal(folder, {}, ranks)
    found = dict(kept.scores)
    kept.score({"model.layers.0": 0.5}, {})
    return found


@pytest.mark.parametrize(("action", "expected"), [(_recorded_by, [1, 5, 9, 10]), (_scored, {})])
def test_processes_write_after_the_same_blocks_and_what_one_just_wrote_is_not_of_an_interrupted_run(
    action, expected, tmp_path
):
    assert in_two(partial(joined, partial(action, folder=tmp_path)), tmp_path, start="fork") == [expected] * 2


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_blocks_after_the_last_states_or_that_cannot_be_written_are_pruned_again_to_the_same_files(
    model, streaming, full, monkeypatch
):
    asked = recipe(model, SENSITIVE, **REBUILT, model={"path": str(model), "streaming": streaming})
    run({**asked, "output": "whole"})
    if full:
        fill_the_disk(asked, monkeypatch)
    else:
        stopped(asked, 2, share=0.0)
    (left,) = leftovers()
    assert json.loads((left / "state.json").read_text())["finished"] == ["model.layers.0"]
    assert (left / "blocks/model.layers.1.safetensors").is_file() != full, "weights are written with every block"
    told: list[tuple[int, str]] = []
    run(asked, resume=True, progress=lambda stage, done, _, note: stage == "prune" and told.append((done, note)))
    assert told[0] == (1, "resumed after model.layers.0, 1 of 3")
    assert [done for done, _ in told] == [1, 2, 3]
    assert artifacts("out") == artifacts("whole")


def fill_the_disk(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a recipe whose second block cannot be written."""
    write = shards.write_tensors

    def full(path: Path, tensors: Any) -> None:
        if path.name == "model.layers.1.safetensors":
            raise ArtifactError(f"cannot write {path}: No space left on device")
        write(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(journal, "SHARE", float("inf"))
        patch.setattr(shards, "write_tensors", full)
        with pytest.raises(ArtifactError, match=r"cannot write .*model\.layers\.1\.safetensors: No space left"):
            run(asked)


def test_states_are_written_in_the_dtype_of_the_model_and_not_kept_when_all_blocks_are_finished(model):
    asked = recipe(model, SENSITIVE, **REBUILT, model={"path": str(model), "dtype": "bfloat16"})
    states = read_tensors(stopped(asked, 2) / "blocks/states-2.0.safetensors")
    assert {name.partition(".")[0] for name in states} == {"dense", "pruned"}
    assert {x.dtype for x in states.values()} == {torch.bfloat16}
    left = stopped(asked, 1, resume=True)
    assert [(p.name, read_tensors(p)) for p in left.glob("blocks/states-*")] == [("states-3.0.safetensors", {})]


# --- weights that are still being written


class Behind:
    """A model whose blocks are written only when somebody waits for them."""

    def __init__(self, state: Path) -> None:
        self.state, self.pending = state, ""
        self.then: Callable[[], None] | None = None
        self.on_disk: list[str] = []

    def listed(self) -> list[str]:
        return list(json.loads(self.state.read_text())["finished"]) if self.state.exists() else []

    def write(self, fqn: str, folder: Path, then: Callable[[], None] | None) -> None:
        self.written()
        self.pending, self.then = fqn, then

    def written(self) -> None:
        assert self.pending not in self.listed()
        self.on_disk += [self.pending] * bool(self.pending)
        self.pending = ""
        if self.then is not None:
            self.then()
        self.then = None


def add(kept: Journal, access: Any, number: int) -> None:
    block = BlockReport(number, f"block.{number}", (), 0.0)
    kept.add(access, block, (), {}, HiddenStates([torch.zeros(1, 2, 3)]))


def test_a_block_is_listed_when_its_weights_are_on_disk_and_states_from_before_are_kept_until_then(tmp_path):
    kept, access = Journal(tmp_path, {}), Behind(tmp_path / "state.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SHARE", float("inf"))
        with kept.recording(access):  # type: ignore[arg-type]
            for i in range(4):
                add(kept, access, i)
                assert access.pending == f"block.{i}", "nobody has waited for it"
                assert access.listed() == access.on_disk == [f"block.{j}" for j in range(i)]
                if i:
                    assert (tmp_path / f"blocks/states-{i}.0.safetensors").exists()
    assert access.listed() == access.on_disk == [f"block.{j}" for j in range(4)]
    assert [p.name for p in tmp_path.glob("blocks/states-*")] == ["states-4.0.safetensors"]


class Two(Ranks):
    """The first of two processes, of which the other ends after it has written its states."""

    met = 0

    def barrier(self) -> None:
        Two.met += 1
        assert Two.met == 1, "nobody comes"

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value


def interrupted(kept: Journal, access: Behind) -> None:
    """Add a block, and be interrupted before it is known to be on disk."""
    with kept.recording(access):  # type: ignore[arg-type]
        add(kept, access, 0)
        raise KeyboardInterrupt


class Lost(Behind):
    """A model whose blocks cannot be written, for want of memory."""

    def written(self) -> None:
        if self.pending:
            raise MemoryError


@pytest.mark.parametrize(
    ("ranks", "kind", "listed"), [(Two(0, 2), Behind, ["block.0"]), (ALONE, Lost, [])], ids=["two", "no memory"]
)
def test_an_interruption_ends_as_one_whatever_the_other_process_does_and_if_a_block_cannot_be_written_either(
    ranks, kind, listed, tmp_path
):
    """One of several processes waits for its own writing, and not for the others."""
    kept, access = Journal(tmp_path, {}, ranks), kind(tmp_path / "state.json")
    with pytest.raises(KeyboardInterrupt):
        interrupted(kept, access)
    assert access.on_disk == access.listed() == listed


@pytest.mark.parametrize("streaming", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_is_interrupted_ends_when_its_last_block_is_on_disk_and_listed(model, streaming, monkeypatch):
    write = shards.write_tensors

    def slow(path: Path, tensors: Any) -> None:
        time.sleep(0.3)
        write(path, tensors)

    monkeypatch.setattr(shards, "write_tensors", slow)
    left = stopped(recipe(model, model={"path": str(model), "streaming": streaming}), 2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("write ")]
    assert not [*left.rglob("*.partial")]
    assert json.loads((left / "state.json").read_text())["finished"] == ["model.layers.0", "model.layers.1"]
    assert read_tensors(left / "blocks/model.layers.1.safetensors")


# --- killed between any two changes of its files


class Killed(BaseException):
    """Ends a run where a kill would."""


class AtOnce(ThreadPoolExecutor):
    """Does its work when it is given, so that changes of files have one order."""

    def submit(self, fn: Any, /, *_: Any, **__: Any) -> Any:
        done: Future[Any] = Future()
        try:
            done.set_result(fn())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            done.set_exception(error)
        return done


class Killing:
    """Ends a run before its n-th change to what it records; then nothing is tidied up any more."""

    def __init__(self, patch: pytest.MonkeyPatch, before: int) -> None:
        self.before, self.seen = before, list[str]()
        patch.setattr(access, "ThreadPoolExecutor", AtOnce)
        replace, unlink = Path.replace, Path.unlink
        patch.setattr(Path, "replace", lambda path, to: self.change(to) or replace(path, to))
        patch.setattr(Path, "unlink", lambda path, **how: self.remove(path) and unlink(path, **how))

    def change(self, path: Path, kind: str = "") -> None:
        if path.parent.name == "blocks" or path.name == "state.json":
            if len(self.seen) >= self.before:
                raise Killed(path.name)
            self.seen.append(kind + re.sub(r"\d+", "", path.name))

    def remove(self, path: Path) -> bool:
        if path.name.startswith("states-") and path.exists():
            self.change(path, "without ")
        return not (len(self.seen) >= self.before and path.name.endswith(".partial"))


def killed(asked: dict[str, Any], share: float, before: int) -> list[str]:
    """Kill a run before one of its changes; returns what it has changed until then, by the kind of file."""
    with pytest.MonkeyPatch.context() as patch:
        killing = Killing(patch, before)
        patch.setattr(journal, "SHARE", share)
        with suppress(Killed):
            run(asked, restart=True)
    return killing.seen


def listed_is_whole(left: Path) -> None:
    """Check that of every block that a record lists all files are there."""
    state = left / "state.json"
    for fqn in json.loads(state.read_text())["finished"] if state.exists() else ():
        for ending in ("json", "safetensors", "masks.safetensors"):
            assert (left / f"blocks/{fqn}.{ending}").is_file()


@pytest.mark.parametrize(
    ("share", "every"),  # states are written when a run begins and ends, or after every block
    [(0.0, False), *(pytest.param(share, True, marks=pytest.mark.slow) for share in (0.0, float("inf")))],
)
def test_killed_at_a_change_of_each_kind_of_its_files_a_run_goes_on_to_the_same_end(model, share, every):
    asked = recipe(model)
    changes = killed({**asked, "output": "whole"}, share, 10**6)
    last = {kind: number for number, kind in enumerate(changes)}
    assert last.keys() == {"state.json", "states-..safetensors", "without states-..safetensors"} | {
        f"model.layers..{of}" for of in ("json", "safetensors", "masks.safetensors", "matrices.safetensors")
    }
    expected = artifacts("whole")
    for kind in last if every else ("model.layers..safetensors",):
        point = last[kind] if share else changes.index(kind)
        assert len(killed(asked, share, point)) == point
        for left in leftovers():
            listed_is_whole(left)
        run(asked, resume=True)
        assert artifacts("out") == expected, f"killed before {kind}"
        assert not leftovers()


# --- what stands in a record is data


@pytest.mark.parametrize(
    "forged",
    [{"finished": ["../../secret"]}, {"finished": ["a\\b"]}, {"finished": 3}, {"finished": [3]}, {"scores": [1]},
     {"chosen": [1]}, {"seconds": {"prune": None}}, {"fingerprint": 7}, {"allocated": {"patterns": []}}],
)  # fmt: skip
def test_a_forged_record_is_damaged_and_no_block_is_read_elsewhere(forged: dict[str, Any], tmp_path: Path) -> None:
    kept = Journal(tmp_path, {})
    kept.score({"block.0": 1.0}, {})
    record = json.loads((tmp_path / "state.json").read_text())
    Journal(tmp_path, {})  # as it was written it is read
    for text in (json.dumps({**record, **forged}), "[" * 100_000, "[]", "null"):
        (tmp_path / "state.json").write_text(text)
        with pytest.raises(ArtifactError, match=r"state\.json is damaged .*; start over with --restart$"):
            Journal(tmp_path, {})


@pytest.mark.parametrize(
    ("file", "forged"),
    [("json", {"seconds": "long"}), ("json", {"matrices": [[]]}), ("json", {"layers": [{"info": 9}]}),
     ("json", {"fqn": 3}), ("json", []), ("states", {"other.000000": torch.zeros(1)})],
)  # fmt: skip
def test_a_forged_block_is_damaged(file: str, forged: Any, tmp_path: Path) -> None:
    class Loaded(Weights):
        device = torch.device("cpu")

        def read(self, fqn: str, folder: Path) -> None:
            pass

    access, kept = Loaded(Clock(), 0.0), Journal(tmp_path, {})
    report = BlockReport(0, "block.0", (), 0.0)
    with kept.recording(access):  # type: ignore[arg-type]
        kept.add(access, report, (), {}, HiddenStates([torch.zeros(1, 2, 3)]))  # type: ignore[arg-type]
    kept._record()()
    assert Journal(tmp_path, {}).restore(access, in_memory)[0][0] == report  # type: ignore[arg-type]
    if file == "states":
        shards.write_tensors(tmp_path / "blocks" / "states-1.0.safetensors", forged)
    else:
        path = tmp_path / "blocks" / "block.0.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **forged} if forged else forged))
    with pytest.raises(ArtifactError, match=r"is damaged .*; start over with --restart$"):
        Journal(tmp_path, {}).restore(access, in_memory)  # type: ignore[arg-type]
