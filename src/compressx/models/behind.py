"""Write a pruned block to disk while the next one is read and worked on.

One block at most is being written, so a streamed model takes the memory of one block more. The bytes that are written
are those of the tensors that were handed over, which must not change until they are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from torch import Tensor

from compressx.models import shards
from compressx.runtime.transfer import begin_to_host


class WriteBehind:
    """Writes one block at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._fqn: str | None = None
        self._error: BaseException | None = None

    def begin(
        self, fqn: str, path: Path, tensors: Callable[[], Mapping[str, Tensor]], then: Callable[[], None] | None = None
    ) -> None:
        """Begin to write a block, after the one before is written.

        Args:
            fqn: the block's name.
            path: the file.
            tensors: returns what to write by name; copied to the host first if it is elsewhere.
            then: called in the thread when the file is on disk.

        Raises:
            ArtifactError: the block before could not be written.
        """
        self.end()
        copies = {name: begin_to_host(tensor) for name, tensor in tensors().items()}
        for _, arrived in copies.values():
            arrived()
        held = {name: copied for name, (copied, _) in copies.items()}
        self._fqn = fqn
        # No daemon: a program that ends waits for it, and so leaves no part of a file.
        self._thread = Thread(target=self._write, args=(path, held, then), name=f"write {path.name}")
        del held, copies
        self._thread.start()

    def end(self, fqn: str | None = None) -> None:
        """Wait until a block is written, or whichever was begun if none is named.

        Raises:
            ArtifactError: this block or one before could not be written; nothing is left of its file. Raised by every
                further call, because the file is still missing.
        """
        if self._thread is not None and fqn in (None, self._fqn):
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Wait at the end of a `with` for what was begun in it, also when it is left by an error, which then counts."""
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self.end()
            raise
        self.end()

    def _write(self, path: Path, tensors: Mapping[str, Tensor], then: Callable[[], None] | None) -> None:
        try:
            shards.write(path, tensors)
            if then is not None:
                then()
        except BaseException as error:  # noqa: BLE001 - raised by `end`, in the thread that works on
            self._error = error
