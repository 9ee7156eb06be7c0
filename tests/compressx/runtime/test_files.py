"""Files: written whole, and locked by one process at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from compressx.api.record import LayerReport
from compressx.runtime import files
from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import atomic_write, json_text, locked, sync_tree, written_whole


def test_a_file_is_written_replaced_and_its_folders_made_with_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    path, plain = tmp_path / "a" / "b" / "file", tmp_path / "plain"
    atomic_write(path, b"one")
    atomic_write(path, b"two")
    plain.write_bytes(b"")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]
    assert path.stat().st_mode == plain.stat().st_mode


def test_an_interrupted_write_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    atomic_write(tmp_path / "file", b"old")

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_place_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file" / "below", tmp_path):
        with pytest.raises(ArtifactError, match=f"cannot write {path}: "):
            atomic_write(path, b"")


def test_the_data_are_on_disk_before_the_name_points_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), real_fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append("replace"), real_replace(a, b))[1])
    atomic_write(tmp_path / "file", b"x")
    assert events == ["fsync", "replace", "fsync"]


def test_every_file_and_folder_of_a_tree_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).write_text(name)
    synced: set[int] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    sync_tree(tmp_path)
    assert synced == {p.stat().st_ino for p in (tmp_path, *tmp_path.rglob("*"))}


def test_the_second_is_told_who_holds_the_lock_and_the_file_goes_with_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / ".out.lock"
    with locked(lock, "a run"):
        message = (
            rf"^a run is active, by process {os.getpid()} on \S+, and holds {lock}; wait for it, or choose another$"
        )
        with pytest.raises(ArtifactError, match=message), locked(lock, "a run"):
            pytest.fail("the block must not run")
        assert lock.exists()
    assert not lock.exists()


def test_a_file_that_a_killed_process_left_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 7 on a machine with a long name\n")
    with locked(tmp_path / "lock", "a run"):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "lock").exists()


NO_LOCK_FILES: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda lock, precious: lock.symlink_to(precious),
    "a link to nothing": lambda lock, precious: lock.symlink_to(precious.with_name("absent")),
    "a second name": lambda lock, precious: lock.hardlink_to(precious),
    "a pipe": lambda lock, _: os.mkfifo(lock),
    "a folder": lambda lock, _: lock.mkdir(),
}


@pytest.mark.parametrize("made", NO_LOCK_FILES)
@pytest.mark.parametrize("wait", [False, True])
def test_what_is_no_lock_file_is_refused_and_neither_followed_nor_changed(
    tmp_path: Path, made: str, wait: bool
) -> None:
    precious, lock = tmp_path / "precious.txt", tmp_path / "lock"
    precious.write_text("years of work")
    NO_LOCK_FILES[made](lock, precious)
    before = lock.lstat()
    message = rf"^{lock} is not a lock file but a link, a folder or the like; look at it and remove it$"
    with pytest.raises(ArtifactError, match=message), locked(lock, "a run", wait=wait):
        pytest.fail("the block must not run")
    assert precious.read_text() == "years of work"
    assert (lock.lstat().st_ino, lock.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("owner", "function", "number", "advice"),
    [
        (fcntl, "flock", errno.ENOLCK, "choose a place on a drive that can lock files"),
        (fcntl, "flock", errno.ENOSYS, "choose a place on a drive that can lock files"),
        (files.os, "write", errno.ENOSPC, "free some space there or choose another place"),
    ],
)
def test_a_drive_that_cannot_lock_or_is_too_full_for_the_lock_file_is_named_with_what_to_do(
    owner: object, function: str, number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, "not here")

    with monkeypatch.context() as patched:
        patched.setattr(owner, function, fails)
        message = rf"^cannot lock {tmp_path / 'lock'}: not here; {advice}$"
        with pytest.raises(ArtifactError, match=message), locked(tmp_path / "lock", "a run"):
            pytest.fail("the block must not run")
    with locked(tmp_path / "lock", "a run"):
        pass


def test_a_forked_child_that_outlives_the_owner_of_a_lock_does_not_keep_it(tmp_path: Path) -> None:
    lock, reader, writer = tmp_path / "lock", *os.pipe()
    if (owner := os.fork()) == 0:
        with locked(lock, "a run"):
            if os.fork() == 0:
                os.write(writer, str(os.getpid()).encode())  # what it inherited is closed by now
            signal.pause()
    os.close(writer)
    child = int(os.read(reader, 100))
    os.close(reader)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    try:
        assert lock.exists()
        with locked(lock, "a run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_who_waits_says_for_whom_and_goes_on_when_the_lock_is_free(tmp_path, caplog):
    lock, order = tmp_path / "lock", []

    def second() -> None:
        with locked(lock, "another process", wait=True):
            order.append("second")
            assert lock.exists()

    waiting = threading.Thread(target=second)
    with locked(lock, "a run"):
        waiting.start()
        while not caplog.messages:
            time.sleep(0.01)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]
    (message,) = caplog.messages
    assert message.startswith(f"waiting: another process is active, by process {os.getpid()} on ")
    assert not lock.exists()


def test_numbers_that_json_lacks_are_written_as_pydantic_reads_them() -> None:
    info = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 0.1, "e": 1e-300}
    layer = LayerReport("x", "p", "50%", (2, 3), 0.5, 0.5, 1.0, info=info, history={"h": (float("nan"), 1.0)})
    text = json_text({"layers": [asdict(layer)], "flag": True, "none": None, 1: "x"}, indent=1)
    found = json.loads(text, parse_constant=pytest.fail)
    assert (found["flag"], found["none"], found["1"]) == (True, None, "x")
    assert repr(TypeAdapter(LayerReport).validate_python(found["layers"][0])) == repr(layer)


def test_what_a_killed_process_left_is_removed_and_the_file_of_a_live_one_is_not(tmp_path: Path) -> None:
    path, other = tmp_path / "x[1].json", tmp_path / "x1.json"
    left = [tmp_path / f".{path.name}.{token}.partial" for token in ("0a1b2c3d", "ffffffff")]
    foreign = [tmp_path / name for name in (".x[1].json.partial", ".x[1].json.my.partial", ".x1.json.0a1b2c3d.partial")]
    for file in (*left, *foreign):
        file.write_bytes(b"half")
    with written_whole(path) as beside:
        beside.write_bytes(b"of the first")
        assert not any(file.exists() for file in left)
        atomic_write(path, b"of the second")
        assert beside.exists()
        assert path.read_bytes() == b"of the second"
    assert path.read_bytes() == b"of the first"
    assert all(file.exists() for file in foreign)
    atomic_write(other, b"x")
    assert {*tmp_path.iterdir()} == {path, other, *foreign[:2]}
