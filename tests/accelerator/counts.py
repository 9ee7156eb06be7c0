"""What is counted of an accelerator's work: waits of the host, kernels, bytes copied, bytes alive."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

_SKIPPED = (str(Path(torch.__file__).parent), contextmanager.__code__.co_filename, str(Path(__file__).parent))


@dataclass
class Counts:
    """What an accelerator did in a section of a program.

    Attributes:
        waits: how often the host waited for the device, by (file:line of the caller, what it asked for), such as
            `("pruners/mine.py:12", "item")`.
        launches: how many operators computed something on the device. Views, metadata, empty allocations and copies
            from or to the host start no kernel.
        to_device_bytes: copied from the host.
        to_host_bytes: copied to the host.
        pageable: how often a tensor was copied from or to memory of the host that is not pinned, by file:line of the
            caller. Numbers are not counted.
        peak_bytes: the most bytes of the device that were alive at once.
    """

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    launches: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    pageable: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0

    @property
    def synchronisations(self) -> int:
        """How often the host waited for the device."""
        return self.waits.total()

    def places(self) -> str:
        """List where the host waited, the most frequent places first, for messages."""
        return ", ".join(f"{count} x {what} at {place}" for (place, what), count in self.waits.most_common(12))


class Record(Counts):
    """The counts of a pretended accelerator from its beginning; sections of it are counted by `counted`."""

    def __init__(self) -> None:
        super().__init__()
        self.alive_bytes = 0  # of the device, now
        self._counting: list[Counts] = [self]
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._late: list[Callable[[], object]] = []  # copies that no wait has been for, in order
        self._arrived = 0
        self._lock = threading.RLock()  # threads that load weights count, too

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count a section: what happens in the `with` is added to the `Counts` that it yields, and nothing else is."""
        section = Counts(peak_bytes=self.alive_bytes)
        with self._lock:
            self._counting.append(section)
        try:
            yield section
        finally:
            with self._lock:
                self._counting = [each for each in self._counting if each is not section]

    def forget_peak(self) -> None:
        """Begin to look for the peak anew, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_bytes = self.alive_bytes

    def wait(self, what: str, until: int | None = None) -> None:
        """Count that the host waited, and let what has arrived meanwhile be seen.

        Until is `copies_begun` when the event was recorded that it waited for; by default everything is waited for.
        """
        where = (_place(), what)
        with self._lock:
            for each in self._counting:
                each.waits[where] += 1
            arrived = len(self._late) if until is None else max(0, until - self._arrived)
            for arrive in self._late[:arrived]:
                arrive()
            del self._late[:arrived]
            self._arrived += arrived

    def arrives_late(self, arrive: Callable[[], object]) -> None:
        """Keep what a copy to the host that does not block does when the host waits for it."""
        with self._lock:
            self._late.append(arrive)

    @property
    def copies_begun(self) -> int:
        """How many copies to the host were begun that do not block."""
        return self._arrived + len(self._late)

    def launch(self) -> None:
        """Count a kernel."""
        with self._lock:
            for each in self._counting:
                each.launches += 1

    def copied(self, *, to_device: int = 0, to_host: int = 0, pageable: bool = False) -> None:
        """Count bytes that were copied, and whether memory of the host was not pinned."""
        where = _place() if pageable else ""
        with self._lock:
            for each in self._counting:
                each.to_device_bytes += to_device
                each.to_host_bytes += to_host
                each.pageable.update([where] * pageable)

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as the device's until nothing holds it any more; one that is known already is not counted."""
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            with self._lock:
                del self._alive[key]
                self.alive_bytes -= size

        with self._lock:
            self._alive[key] = weakref.ref(storage, freed)
            self.alive_bytes += size
            for each in self._counting:
                each.peak_bytes = max(each.peak_bytes, self.alive_bytes)


def _place() -> str:
    """Return file:line of the innermost caller that is neither torch's nor the pretended device's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            return f"{'/'.join(Path(file).parts[-3:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread of torch"
