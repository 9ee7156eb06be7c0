"""Where a run keeps its finished blocks: in a journal on disk, from which an interrupted run resumes, or in memory.

A block is finished when `state.json` lists it. That file is written last, after the block's weights, masks, report and
matrices and the hidden states that enter the next block. Files of unfinished blocks are overwritten. Weights are
written in the background (`WriteBehind`), and after them the file that lists them.

Hidden states can be larger than all weights of a block. So they are written only when enough time has passed since the
last time, and only then do the blocks up to there count as finished. A resumed run prunes the later ones again.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor
from typing_extensions import override

from compressx.api.patterns import NM, Unstructured
from compressx.api.record import AllocationReport, Arithmetic, BlockReport
from compressx.masks.file import MaskEntry, PackedMasks, join_masks, read_masks, write_masks
from compressx.masks.maskset import MaskSet
from compressx.models.access import Access
from compressx.models.blockwise import HiddenStates, KeepStates
from compressx.models.shards import each_tensor, read_tensors, write_tensors
from compressx.report.figures import Matrices
from compressx.report.plots import Thumbnail
from compressx.report.section import counted
from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import BLOCKS, STATE, atomic_write, json_text, os_errors_named
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.timing import Timing

SHARE = 0.03
"""Fraction of a run's time that the writing of hidden states may take."""


@dataclass(frozen=True)
class Allocated:
    """The sparsities that an allocation chose, those of whole units written as those of weights, and its report."""

    patterns: Mapping[str, Unstructured | NM]
    report: AllocationReport


ALLOCATED = TypeAdapter(Allocated)
"""Validates an `Allocated` from plain data, as read from `state.json` or received from another process."""

_REPORT = TypeAdapter(BlockReport)
_MEASURED = TypeAdapter(dict[str, float | list[list[float]]])
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of reading data that no run has written."""


class Store:
    """The finished blocks of a run, in memory: it cannot be resumed.

    Attributes:
        blocks: a folder for large temporary files.
        finished: names of the finished blocks, in order.
        allocated: the chosen sparsities; None before they are chosen.
        measured: what an allocation has measured so far, in JSON types; empty once it has chosen.
        scores: of decoder blocks that may be dropped, by name; empty before they are measured.
        chosen: the names of those that are dropped, each with the divergence that it reached.
    """

    def __init__(self, blocks: Path) -> None:
        self.blocks = blocks
        self.finished: list[str] = []
        self.allocated: Allocated | None = None
        self.measured: Mapping[str, Any] = {}
        self.scores: Mapping[str, float] = {}
        self.chosen: Mapping[str, float] = {}
        self._masks: list[PackedMasks] = []

    def allocate(self, allocated: Allocated) -> None:
        """Keep the chosen sparsities."""
        self.allocated, self.measured = allocated, {}  # what was measured is needed no more

    def measure(self, measured: Mapping[str, Any]) -> None:
        """Keep what an allocation has measured so far; called by the first process alone."""
        self.measured = measured

    def score(self, scores: Mapping[str, float], chosen: Mapping[str, float]) -> None:
        """Keep the scores of decoder blocks, and those that were chosen."""
        self.scores, self.chosen = scores, chosen

    def recording(self, access: Access) -> AbstractContextManager[None]:  # noqa: ARG002 - a journal's
        """Return a context manager within which blocks are added; at its end all are kept."""
        return nullcontext()

    def add(
        self,
        access: Access,  # noqa: ARG002 - these three are a journal's
        report: BlockReport,
        matrices: Sequence[Matrices],  # noqa: ARG002
        masks: Mapping[str, MaskEntry],
        hidden: HiddenStates,  # noqa: ARG002
    ) -> None:
        """Keep a pruned block: its report, what is drawn of it, its masks, and the next block's hidden states."""
        self.finished.append(report.fqn)
        self._masks.append(PackedMasks.of(masks))

    def restore(
        self,
        access: Access,  # noqa: ARG002 - a journal's
        keep: KeepStates,  # noqa: ARG002
    ) -> tuple[list[BlockReport], list[Matrices], HiddenStates]:
        """Return to the state after the last finished block, which is the start without a journal."""
        return [], [], HiddenStates(())

    def masks_of(self, fqn: str) -> Mapping[str, MaskEntry]:
        """Return the masks of a finished block; ArtifactError if their file is missing or damaged."""
        return self._masks[self.finished.index(fqn)]

    def finish(self) -> None:
        """Join the masks of all blocks, once all are finished."""

    def masks(self) -> MaskSet:
        """Return the masks of all blocks, once they are joined."""
        return MaskSet(PackedMasks.joined(self._masks))


class Journal(Store):
    """The finished blocks of one run.

    Args:
        folder: the run's folder, with `state.json` and `blocks`.
        fingerprint: everything that determines the result, by name; a run resumes only if it is unchanged.
        ranks: the processes; the first writes the record, and each its own hidden states.
        timing: the run's; the seconds of the interrupted run are added to it.
    """

    def __init__(
        self, folder: Path, fingerprint: Mapping[str, Any], ranks: Ranks = ALONE, timing: Timing | None = None
    ) -> None:
        super().__init__(folder / BLOCKS)
        self.ranks = ranks
        self.timing = timing or Timing("prune")
        self.state = folder / STATE
        self._joined = folder / "masks.safetensors"
        self.fingerprint = fingerprint
        self._cost, self._since = 0.0, time.perf_counter()  # seconds of the last writing of states, and when it ended
        self._outdated = False  # whether hidden states of earlier blocks are still to be deleted
        if self.state.exists():
            self._open()
        for cut_off in self.blocks.glob(".*.partial") if ranks.first else ():  # by a kill during a write
            cut_off.unlink(missing_ok=True)

    @override
    def allocate(self, allocated: Allocated) -> None:
        super().allocate(allocated)
        self._write()

    @override
    def measure(self, measured: Mapping[str, Any]) -> None:
        super().measure(measured)
        self._record()()  # without a barrier: the other processes wait for what it chooses

    @override
    def score(self, scores: Mapping[str, float], chosen: Mapping[str, float]) -> None:
        super().score(scores, chosen)
        self._write()

    @contextmanager
    def recording(self, access: Access) -> Iterator[None]:
        """Add blocks within a `with`; at its end all of them are on disk, and finished ones are listed.

        The same holds if an error or Ctrl-C ends it, but then no process waits for the others.
        """
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the error from elsewhere counts
                access.written()
                if self.ranks.size == 1:
                    self._delete_outdated(access)
            raise
        access.written()
        self._delete_outdated(access)

    def add(
        self, access: Access, report: BlockReport, matrices: Sequence[Matrices], masks: Mapping[str, MaskEntry],
        hidden: HiddenStates,
    ) -> None:  # fmt: skip
        """Record a block while its weights are loaded; it counts as finished once hidden states are written, too.

        They are written after the first block, and again when writing them takes at most `SHARE` of the time since.
        All processes do so after the same blocks. The weights are written in the background, and the block is listed
        when they are on disk.
        """
        self._delete_outdated(access)
        fqn = report.fqn
        if self.ranks.first:
            write_masks(self._file(fqn, "masks.safetensors"), masks)
            images = {f"{i}.{j}": p for i, m in enumerate(matrices) for j, p in enumerate(_images(m))}
            write_tensors(self._file(fqn, "matrices.safetensors"), {name: p.values for name, p in images.items()})
            atomic_write(self._file(fqn, "json"), json_text(_block_to_dict(report, matrices)).encode())
        self.finished.append(fqn)
        named = {"dense": hidden.dense, "pruned": hidden.pruned}
        states = {f"{name}.{i:06d}": state for name, some in named.items() for i, state in enumerate(some)}
        started = time.perf_counter()
        complete = self.ranks.broadcast(not states or self._cost <= SHARE * (started - self._since))
        if complete:
            write_tensors(self._states(len(self.finished)), states)
            self._since = time.perf_counter()
            self._cost = self._since - started if states else self._cost
            self.ranks.barrier()  # the record vouches for the hidden states of all processes
        if self.ranks.first:  # last: it goes on in the background during the next block, and needs the disk alone
            access.write(fqn, self.blocks, self._record() if complete else None)
        self._outdated = bool(complete)

    def _delete_outdated(self, access: Access) -> None:
        """Delete hidden states of earlier blocks once the record lists a later one."""
        if not self._outdated:
            return
        if self.ranks.first:
            access.written()
        self.ranks.barrier()
        for earlier in {*self.blocks.glob(self._states("*").name)} - {self._states(len(self.finished))}:
            earlier.unlink(missing_ok=True)
        self._outdated = False

    def restore(self, access: Access, keep: KeepStates) -> tuple[list[BlockReport], list[Matrices], HiddenStates]:
        """Load the weights of all finished blocks into the model; return reports, matrices and the hidden states."""
        reports, matrices = [], []
        for fqn in self.finished:
            if self.ranks.first:  # all processes have finished this block
                access.read(fqn, self.blocks)
            path = self._file(fqn, "json")
            try:
                with os_errors_named("read", path):
                    data = json.loads(path.read_text(encoding="utf-8"))
                tensors = read_tensors(self._file(fqn, "matrices.safetensors"))
                read_masks(self._file(fqn, "masks.safetensors"))  # fail now on a damaged file, not at the end
                report, images = _block_from_dict(data, tensors)
            except _DAMAGE as error:
                raise _damaged(path, error) from error
            reports.append(report)
            matrices += images
        states: dict[str, list[Tensor]] = {"dense": [], "pruned": []}
        for name, state in each_tensor(path := self._states(len(self.finished))):
            if (kind := name.partition(".")[0]) not in states:
                raise _damaged(path, f"it holds {name!r}")
            states[kind].append(keep(state.to(access.device)))
        return reports, matrices, HiddenStates(**states)

    @override
    def masks_of(self, fqn: str) -> Mapping[str, MaskEntry]:
        return read_masks(self._file(fqn, "masks.safetensors"))

    @override
    def finish(self) -> None:
        join_masks(self._joined, [self._file(fqn, "masks.safetensors") for fqn in self.finished])

    @override
    def masks(self) -> MaskSet:
        return MaskSet.load(self._joined)

    def _open(self) -> None:
        try:
            with os_errors_named("read", self.state):
                data = json.loads(self.state.read_text(encoding="utf-8"))
            earlier, self.finished = dict(data["fingerprint"]), [*data["finished"]]
            if any({"/", "\\"} & {*fqn} for fqn in self.finished):  # they name files
                raise ValueError(f"blocks {self.finished}")
            self.allocated = None if data["allocated"] is None else ALLOCATED.validate_python(data["allocated"])
            self.measured = _MEASURED.validate_python(data.get("measured", {}))
            self.scores = {str(fqn): float(score) for fqn, score in data["scores"].items()}
            self.chosen = {str(fqn): float(reached) for fqn, reached in data["chosen"].items()}
            spent = {str(stage): float(seconds) for stage, seconds in data["seconds"].items()}
        except _DAMAGE as error:
            raise _damaged(self.state, error) from error
        now = json.loads(json_text(self.fingerprint))
        for values in (earlier, now):
            values.pop("arithmetic", None)  # measured anew in each run; only its dtype, compute_dtype, has to agree
        if None in (earlier.get("compute_dtype"), now.get("compute_dtype")):
            # A run without calibration text multiplies only in fine-tuning, which a resumed run may add or omit.
            earlier["compute_dtype"] = now["compute_dtype"] = None
        if lines := [x for name in {**earlier, **now} for x in differing(name, earlier.get(name), now.get(name))]:
            raise ArtifactError(
                f"the interrupted run cannot be resumed, because its inputs have changed: {'; '.join(lines)}. "
                "Restore them, or start over with --restart"
            )
        self.timing.add(spent)

    def _write(self) -> None:
        self.ranks.barrier()  # a later one would read this record, and skip what the others do together
        if self.ranks.first:
            self._record()()

    def _record(self) -> Callable[[], None]:
        """Return what writes the record as it is now."""
        data = {
            "fingerprint": self.fingerprint,
            "allocated": None if self.allocated is None else dataclasses.asdict(self.allocated),
            **({"measured": self.measured} if self.measured else {}),
            "scores": {**self.scores},
            "chosen": {**self.chosen},
            "finished": self.finished,
            "seconds": self.timing.seconds(),
        }
        return partial(atomic_write, self.state, json_text(data, indent=1).encode())

    def _file(self, fqn: str, ending: str) -> Path:
        return self.blocks / f"{fqn or 'outside'}.{ending}"

    def _states(self, count: int | str) -> Path:
        return self.blocks / f"states-{count}.{self.ranks.rank}.safetensors"


def _damaged(path: Path, error: object) -> ArtifactError:
    return ArtifactError(f"{path} is damaged ({' '.join(str(error).split()):.200}); start over with --restart")


def recorded_arithmetic(folder: Path) -> Arithmetic | None:
    """Return the arithmetic that the interrupted run in a folder recorded; None without a readable record."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))["fingerprint"]["arithmetic"]
        return TypeAdapter(Arithmetic | None).validate_python(found)
    except (OSError, ValueError, KeyError, TypeError):  # opening the journal reports the damage
        return None


def resumable_in(folder: Path) -> str:
    """Say what an interrupted run has finished in a folder; nothing if there is nothing to resume from."""
    try:
        data = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if measured := data.get("measured"):
            return f"measurements of {counted(measured, 'unit')} for the allocation"
        return counted(done, "finished block") if (done := data["finished"]) else "the choice of blocks or sparsities"
    except (OSError, *_DAMAGE):
        return ""


def differing(name: str, was: Any, now: Any) -> Iterator[str]:
    """Yield a line for each value that differs."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differing(f"{name}.{key}", was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from differing(f"{name}[{i}]", before, after)
    elif was != now:
        yield f"{name}: was {_short(was)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _images(matrices: Matrices) -> list[Thumbnail]:
    """Return the images of some linears in the order in which they are stored."""
    return [*matrices.images.values(), *([] if matrices.difference is None else [matrices.difference])]


def _block_to_dict(report: BlockReport, drawn: Sequence[Matrices]) -> dict[str, Any]:
    """Convert a block to plain data."""
    matrices = [{"linears": m.linears, "names": [*m.images], "shapes": [p.shape for p in _images(m)]} for m in drawn]
    return {**dataclasses.asdict(report), "matrices": matrices}


def _block_from_dict(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> tuple[BlockReport, list[Matrices]]:
    """Make a block of what `_block_to_dict` returned.

    Args:
        data: plain data.
        tensors: the pooled images; `i.j` is the j-th of the i-th matrices.
    """
    matrices = []
    for i, one in enumerate(data["matrices"]):
        stored = [Thumbnail(tensors[f"{i}.{j}"], tuple(shape)) for j, shape in enumerate(one["shapes"])]
        images = dict(zip(one["names"], stored, strict=False))
        matrices.append(Matrices(tuple(one["linears"]), images, stored[-1] if len(stored) > len(images) else None))
    return _REPORT.validate_python({k: v for k, v in data.items() if k != "matrices"}), matrices
