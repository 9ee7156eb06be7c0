from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from compressx.runtime import locks
from compressx.runtime.errors import ArtifactError
from compressx.runtime.locks import locked


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


def test_a_disk_too_full_for_the_lock_file_is_named_with_it(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(locks.os, "write", full)
        with (
            pytest.raises(
                ArtifactError, match=rf"cannot write {tmp_path / 'lock'}: No space left on device; free some"
            ),
            locked(tmp_path / "lock", "a run"),
        ):
            pytest.fail("the block must not run")
    with locked(tmp_path / "lock", "a run"):
        pass


def test_a_file_that_a_killed_process_left_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 7 on a machine with a long name\n")
    with locked(tmp_path / "lock", "a run"):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "lock").exists()


def linked(lock: Path, precious: Path) -> None:
    lock.symlink_to(precious)


def dangling(lock: Path, precious: Path) -> None:
    lock.symlink_to(precious.with_name("absent"))


def second_name(lock: Path, precious: Path) -> None:
    lock.hardlink_to(precious)


def pipe(lock: Path, _precious: Path) -> None:
    os.mkfifo(lock)


def folder(lock: Path, _precious: Path) -> None:
    lock.mkdir()


@pytest.mark.parametrize("made", [linked, dangling, second_name, pipe, folder])
@pytest.mark.parametrize("wait", [False, True])
def test_what_is_no_lock_file_is_refused_and_neither_followed_nor_changed(
    tmp_path: Path, made: Callable[[Path, Path], None], wait: bool
) -> None:
    precious, lock = tmp_path / "precious.txt", tmp_path / "lock"
    precious.write_text("years of work")
    made(lock, precious)
    before = lock.lstat()
    message = rf"^{lock} is not a lock file but a link, a folder or the like; look at it and remove it$"
    with pytest.raises(ArtifactError, match=message), locked(lock, "a run", wait=wait):
        pytest.fail("the block must not run")
    assert precious.read_text() == "years of work"
    assert (lock.lstat().st_ino, lock.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not (tmp_path / "absent").exists()


def test_where_files_cannot_be_locked_the_file_itself_is_the_lock(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with locked(tmp_path / "lock", "a run"):
        message = "is active, by process .*; wait .* If that process has ended, remove the file"
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


def test_a_lock_whose_file_was_removed_while_it_was_opened_is_no_lock(tmp_path, monkeypatch):
    real, opened = locks._opened, []

    def opened_late(path: Path) -> tuple[int, bool]:
        found = real(path)
        if not opened:
            path.unlink()  # as the last holder does between the open and the lock
        opened.append(found)
        return found

    monkeypatch.setattr(locks, "_opened", opened_late)
    with locked(tmp_path / "lock", "a run"):
        assert len(opened) == 2
        assert (tmp_path / "lock").exists()


def test_where_files_cannot_be_locked_it_is_told_what_is_waited_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(locks, "fcntl", None)
    lock, waits = tmp_path / "lock", []
    lock.write_text("process 1 on another\n")

    def slept(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            lock.unlink()  # as the message says

    monkeypatch.setattr(locks.time, "sleep", slept)
    with locked(lock, "another process", wait=True):
        assert lock.exists()
    (told,) = caplog.messages
    assert told.startswith(f"waiting: another process is active, by process 1 on another, and holds {lock}; ")
    assert "remove the file" in told
