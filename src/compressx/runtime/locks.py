"""A lock file: one process at a time holds it, and a killed process releases it."""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import os_errors_named

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

_held: set[int] = set()
"""Descriptors of the locks that this process holds."""


class HeldError(ArtifactError):
    """Another process, or another thread of this one, holds the lock."""


@contextmanager
def locked(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file for the duration of a `with`; it is created at the start and removed at the end.

    The kernel releases the lock however the process dies, so a file that is left behind does not matter. Where files
    cannot be locked (Windows, some network drives) its existence is the lock, and a user removes what a killed process
    left.

    Args:
        path: the lock file, in an existing folder.
        what: start of the message, such as `another run for output runs/mixed`.
        wait: wait for whoever holds the lock, after saying so in the log.

    Raises:
        HeldError: another process, or another thread of this one, holds the lock, and `wait` is false.
        ArtifactError: the file cannot be created.
    """
    descriptor = _waited_for(path, what) if wait else _taken(path, what)
    _held.add(descriptor)
    try:
        with os_errors_named("write", path):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if descriptor in _held:  # not in a forked child, which must not end its parent's lock
            _held.discard(descriptor)
            if os.name == "nt":  # an open file cannot be removed there
                os.close(descriptor)
            with suppress(OSError):
                path.unlink()  # before the lock is released: afterwards it may be another's
            if os.name != "nt":
                os.close(descriptor)


def _waited_for(path: Path, what: str) -> int:
    """Do as `_taken` when the lock is free; what a killed process left where files cannot be locked never is."""
    told = False
    while True:
        try:
            return _taken(path, what)
        except HeldError as error:
            if not told:
                _log.warning("waiting: %s", error)
            told = True
            time.sleep(0.2)


def _taken(path: Path, what: str) -> int:
    """Return the descriptor of a lock file that this process now holds."""
    while True:
        descriptor, created = _opened(path)
        advice = ""
        try:
            if fcntl is None:
                raise OSError  # noqa: TRY301 - as on a drive without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        except OSError:
            free = created
            advice = ". If that process has ended, remove the file; it stays after a crash where files cannot be locked"
        if free and _is_at(descriptor, path):
            return descriptor
        holder = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        if not free:
            by = f", by {holder}" if holder else ""
            raise HeldError(f"{what} is active{by}, and holds {path}; wait for it, or choose another{advice}")


def _opened(path: Path) -> tuple[int, bool]:
    """Open a lock file, created if missing; return its descriptor, and whether it was created.

    Its content will be replaced, so it is no other file: no link, and no second name of one.
    """
    with os_errors_named("create", path):
        while True:
            with suppress(FileExistsError):
                return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
            with suppress(FileNotFoundError):  # its holder removed it meanwhile
                found = path.lstat()
                if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                    raise ArtifactError(
                        f"{path} is not a lock file but a link, a folder or the like; look at it and remove it"
                    )
                return os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)), False


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`; its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _close_inherited() -> None:
    """Close a forked child's copies of descriptors, which would hold the locks after their owner has died."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
