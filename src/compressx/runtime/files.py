"""Files: written atomically and durably, and locked."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

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
    """Write a file as `written_whole` does."""
    with written_whole(path) as beside:
        beside.write_bytes(data)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block ends without an exception; folders are created.

    What killed processes left of `path` is removed first: only a live one holds a lock on its temporary file. Old and
    new file exist side by side until the new one is on disk, so both need space. The new file's mode follows the umask,
    whatever mode it was written with.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    with os_errors_named("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.partial"):
            with suppress(OSError, ImportError), _held(left):
                left.unlink()
        try:
            with ExitStack() as stack:
                (new := beside.with_suffix(".new")).touch(exist_ok=False)  # nobody takes it for a leftover
                with suppress(OSError, ImportError):  # a drive without locks, or Windows: there leftovers stay
                    stack.enter_context(_held(new))
                mode = new.rename(beside).stat().st_mode
                yield beside
                beside.chmod(mode)
                sync(beside)
                beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        sync(path.parent)


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a lock on a file, which the kernel releases however the process dies; an OSError if another one has it."""
    import fcntl

    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


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


_log = logging.getLogger(__name__)


@contextmanager
def locked(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file for the duration of a `with`; it is created at the start and removed at the end.

    The kernel releases the lock however the process dies, so a file that is left behind does not matter.

    Args:
        path: the lock file, in an existing folder.
        what: start of the message, such as `another run for output runs/mixed`.
        wait: wait for whoever holds the lock, after saying so in the log.
    """
    with os_errors_named("lock", path), suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:  # its content will be replaced
            raise ArtifactError(f"{path} is not a lock file but a link, a folder or the like; look at it and remove it")
    # Where flock is missing filelock would take a file's existence for the lock, which a killed process leaves.
    lock = FileLock(path, on_acquired=_sign, fallback_to_soft=False)
    with os_errors_named("lock", path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            signed = ""
            with suppress(OSError):  # its holder may remove it meanwhile
                signed = path.read_bytes()[:200].decode(errors="replace").strip()
            by = f", by {signed}" if signed else ""
            held = ArtifactError(f"{what} is active{by}, and holds {path}; wait for it, or choose another")
            if not wait:
                raise held from None
            _log.warning("waiting: %s", held)
            lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        if lock.is_locked:  # not in a forked child, which must not end its parent's lock
            with suppress(OSError):
                path.unlink()  # before the lock is released: afterwards it may be another's
            lock.release()


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def json_text(value: Any, **style: Any) -> str:
    """Return JSON; numbers that it lacks are written as pydantic reads them: "NaN", "Infinity" and "-Infinity"."""
    return json.dumps(_writable(value), allow_nan=False, **style)


def _writable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _writable(x) for key, x in value.items()}
    return [_writable(x) for x in value] if isinstance(value, list | tuple) else value
