from __future__ import annotations

import os
from pathlib import Path

import pytest

from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import atomic_write, sync_tree


def test_a_file_is_written_replaced_and_its_folders_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    atomic_write(path, b"one")
    atomic_write(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    atomic_write(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


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
