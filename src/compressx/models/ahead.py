"""Read the weights of the next block from disk while the current one is worked on.

The bytes go into the system's file cache and nowhere else, so that the process needs no more memory, and the system can
have it back when it is short.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

from compressx.models.shards import Shards

_CHUNK = 2**22
"""Bytes of one read; a request of the disk is smaller."""


class ReadAhead:
    """Reads one block at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def begin(self, shards: Shards, fqn: str) -> None:
        """Begin to read a block, after the one before is read."""
        self.end()
        self._thread = Thread(target=_read, args=(shards, fqn), name="read ahead", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until a block that was begun is read."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def ranges(shards: Shards, fqn: str) -> Iterator[tuple[Path, int, int]]:
    """Yield file, first byte and end of each tensor of a block, in the order of the files.

    Raises:
        OSError, ValueError, KeyError: a file that is missing or no safetensors file.
    """
    for file in sorted({shards.files[name] for name in shards.members[fqn]}):
        path = shards.folder / file
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError(f"{path} has a header of {length} bytes, more than the file")
            header = json.loads(opened.read(length))
        places = [header[name]["data_offsets"] for name in shards.members[fqn] if shards.files[name] == file]
        yield from ((path, 8 + length + start, 8 + length + end) for start, end in sorted(places))


def _read(shards: Shards, fqn: str) -> None:
    buffer = memoryview(bytearray(_CHUNK))
    with contextlib.suppress(OSError, ValueError, KeyError):  # loading the block says what is wrong
        for path, start, end in ranges(shards, fqn):
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                left = end - start
                while left > 0 and (count := file.readinto(buffer[:left])):
                    left -= count
