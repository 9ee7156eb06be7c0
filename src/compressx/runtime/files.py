"""Atomic, durable file writes."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressx.runtime.errors import ArtifactError

STATE = "state.json"
BLOCKS = "blocks"
"""Names in the folder of an unfinished run: its progress, and its finished blocks."""

_ADVICE = {
    errno.ENOSPC: "free some space there or choose another place",
    errno.EDQUOT: "free some of your quota or choose another place",
    errno.EACCES: "choose a place that you may write to",
    errno.EPERM: "choose a place that you may write to",
    errno.EROFS: "choose a place that you may write to",
    errno.ENOLCK: "choose a place on a drive that can lock files",
    errno.ENOSYS: "choose a place on a drive that can lock files",
}


@contextmanager
def os_errors_named(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into an `ArtifactError` with the action and the path."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        reason = error.strerror or str(error)
        raise ArtifactError(f"cannot {action} {path}: {reason}" + (f"; {advice}" if advice else "")) from error


def regular(path: Path) -> Path:
    """Return a path, unless an `ArtifactError` says that there is a FIFO or device, which would be waited for."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ArtifactError(f"{path} is a FIFO, a device or a socket, expected a regular file; remove it")
    return path


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file; an `ArtifactError` says that it cannot be read."""
    with os_errors_named("read", path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file atomically; missing folders are created.

    Raises:
        ArtifactError: the file cannot be written; the old one is left unchanged.
    """
    with written_whole(path) as beside:
        beside.write_bytes(data)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends without an exception; folders are created.

    Old and new file exist side by side until the new one is on disk, so both need space. The new file's mode follows
    the umask, whatever mode it was written with.

    Raises:
        ArtifactError: the file cannot be written; the old one is left unchanged.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with os_errors_named("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.touch(exist_ok=False)
            mode = beside.stat().st_mode
            yield beside
            beside.chmod(mode)
            sync(beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush one file, or the entries of one folder, to disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders, and writes renames through
    # Windows flushes only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
