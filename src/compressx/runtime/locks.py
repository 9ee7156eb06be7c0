"""A lock file: one process at a time holds it, and a killed process releases it."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import os_errors_named

_log = logging.getLogger(__name__)


@contextmanager
def locked(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file for the duration of a `with`; it is created at the start and removed at the end.

    The kernel releases the lock however the process dies, so a file that is left behind does not matter.

    Args:
        path: the lock file, in an existing folder.
        what: start of the message, such as `another run for output runs/mixed`.
        wait: wait for whoever holds the lock, after saying so in the log.

    Raises:
        ArtifactError: another process, or another thread of this one, holds the lock, and `wait` is false; or the file
            cannot be created or locked, or is no lock file.
    """
    _refuse_other_files(path)
    # Where flock is missing filelock would take a file's existence for the lock, which a killed process leaves.
    lock = FileLock(path, on_acquired=_sign, fallback_to_soft=False)
    with os_errors_named("lock", path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            held = ArtifactError(f"{what} is active{_holder(path)}, and holds {path}; wait for it, or choose another")
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


def _refuse_other_files(path: Path) -> None:
    """Refuse what is no file of its own: its content will be replaced."""
    with os_errors_named("lock", path), suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise ArtifactError(f"{path} is not a lock file but a link, a folder or the like; look at it and remove it")


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _holder(path: Path) -> str:
    with suppress(OSError):  # its holder may remove it meanwhile
        if signed := path.read_bytes()[:200].decode(errors="replace").strip():
            return f", by {signed}"
    return ""
