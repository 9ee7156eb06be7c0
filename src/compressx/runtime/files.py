"""Files that are written whole or not at all, and survive a power cut once written."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compressx.runtime.errors import ArtifactError

STATE = "state.json"
BLOCKS = "blocks"
"""In a run's folder while it is being built: how far the run has got, and the blocks that it has finished."""

_ADVICE = {
    errno.ENOSPC: "free some space there or choose another place",
    errno.EDQUOT: "free some of your quota or choose another place",
    errno.EACCES: "choose a place that you may write to",
    errno.EPERM: "choose a place that you may write to",
    errno.EROFS: "choose a place that you may write to",
}


@contextmanager
def os_errors_named(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into an `ArtifactError` that says what could not be done with which path."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        reason = error.strerror or str(error)
        raise ArtifactError(f"cannot {action} {path}: {reason}" + (f"; {advice}" if advice else "")) from error


def atomic_write(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; missing folders are made.

    Raises:
        ArtifactError: when it cannot be written; the old file is untouched then.
    """
    with written_whole(path) as beside:
        beside.write_bytes(data)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` when the block ends without an exception; folders are made.

    The new file stands beside the old one until it is on disk, so both need room. Its mode follows the umask, whatever
    mode it was written with.

    Raises:
        ArtifactError: when it cannot be written; the old file is untouched then.
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
    """Force one file, or the names in one folder, onto disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no folders, and writes renames through
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Force a folder and everything in it onto disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))
