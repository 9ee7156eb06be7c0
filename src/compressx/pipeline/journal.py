"""The record of a run's finished blocks: what an interrupted run leaves, and how the next one goes on from there.

A block is finished when `state.json` says so, which is written last: its weights, masks, report and matrices, and the
hidden states that enter the next block, are on disk by then. Whatever lies there beyond that is written again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from compressx.api.patterns import NM, Unstructured
from compressx.api.record import AllocationReport, BlockReport, LayerReport, ReconstructionReport
from compressx.masks.file import MaskEntry, join_masks, read_masks, write_masks
from compressx.models.access import Access
from compressx.models.hidden import Keep, Streams, in_memory
from compressx.models.shards import each, read, write
from compressx.report.figures import Matrices
from compressx.report.plots import Pooled
from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import BLOCKS, STATE, atomic_write, os_errors_named
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.timing import Timing


@dataclass(frozen=True, eq=False)
class FinishedBlock:
    """What a run keeps in memory of a block."""

    report: BlockReport
    matrices: tuple[Matrices, ...]


@dataclass(frozen=True)
class Allocated:
    """The sparsities that an allocation chose, and its report."""

    patterns: Mapping[str, Unstructured | NM]
    report: AllocationReport


ALLOCATED = TypeAdapter(Allocated)
"""Makes an `Allocated` of the plain data of one, as `state.json` holds it and processes exchange it."""


class Journal:
    """The finished blocks of one run.

    Args:
        folder: the run's, where `state.json` and `blocks` are.
        fingerprint: what decides the result, by name; a run goes on only where an earlier one had the same.
        ranks: the processes; the first writes, and each its own hidden states.
        timing: the run's; what an earlier one had spent is added to it.

    Raises:
        ArtifactError: a record that is damaged, or of a run with another fingerprint; the message names the difference.
    """

    def __init__(
        self, folder: Path, fingerprint: Mapping[str, Any], ranks: Ranks = ALONE, timing: Timing | None = None
    ) -> None:
        self.ranks = ranks
        self.timing = timing or Timing()
        self.state = folder / STATE
        self.blocks = folder / BLOCKS
        self.fingerprint = fingerprint
        self.finished: list[str] = []
        self.allocated: Allocated | None = None
        if self.state.exists():
            self._open()

    def allocate(self, allocated: Allocated) -> None:
        """Record what an allocation chose."""
        self.allocated = allocated
        self._write()

    def add(self, access: Access, block: FinishedBlock, masks: Mapping[str, MaskEntry], streams: Streams) -> None:
        """Record a block while its weights are there.

        Args:
            access: the model.
            block: what was done to it.
            masks: of its linears.
            streams: what enters the next block.

        Raises:
            ArtifactError: when something cannot be written; the block is not finished then.
        """
        fqn = block.report.fqn
        if self.ranks.first:
            access.write(fqn, self.blocks)
            write_masks(self._file(fqn, "masks.safetensors"), masks)
            pooled = {f"{i}.{j}": p for i, m in enumerate(block.matrices) for j, p in enumerate(_pooled(m))}
            write(self._file(fqn, "matrices.safetensors"), {name: p.values for name, p in pooled.items()})
            atomic_write(self._file(fqn, "json"), json.dumps(_block_to_dict(block)).encode())
        named = {"dense": streams.dense, "pruned": streams.pruned}
        states = {f"{name}.{i:06d}": state for name, some in named.items() for i, state in enumerate(some)}
        write(self._states(len(self.finished) + 1), states)
        self.ranks.barrier()
        self.finished.append(fqn)
        self._write()
        self.ranks.barrier()
        self._states(len(self.finished) - 1).unlink(missing_ok=True)

    def restore(self, access: Access, keep: Keep = in_memory) -> tuple[list[FinishedBlock], Streams]:
        """Give the model the weights of all finished blocks, and return what is known of them and the hidden states.

        Args:
            access: the model.
            keep: where the hidden states are kept.

        Raises:
            ArtifactError: files that are damaged or missing.
        """
        blocks = []
        for fqn in self.finished:
            if self.ranks.first:  # the others are done with this block
                access.read(fqn, self.blocks)
            path = self._file(fqn, "json")
            try:
                with os_errors_named("read", path):
                    told = json.loads(path.read_text(encoding="utf-8"))
                tensors = read(self._file(fqn, "matrices.safetensors"))
                read_masks(self._file(fqn, "masks.safetensors"))  # damage is better found now than at the end
                blocks.append(_block_from_dict(told, tensors))
            except (ValueError, KeyError, TypeError) as error:
                raise ArtifactError(f"{path} is damaged ({error!r}); begin anew with --restart") from error
        states: dict[str, list[Tensor]] = {"dense": [], "pruned": []}
        for name, state in each(self._states(len(self.finished))):
            states[name.partition(".")[0]].append(keep(state.to(access.device)))
        return blocks, Streams(**states)

    def save_masks(self, path: Path) -> None:
        """Write the masks of all finished blocks as one file.

        Raises:
            ArtifactError: as `join_masks`.
        """
        join_masks(path, [self._file(fqn, "masks.safetensors") for fqn in self.finished])

    def _open(self) -> None:
        try:
            with os_errors_named("read", self.state):
                told = json.loads(self.state.read_text(encoding="utf-8"))
            earlier, self.finished = dict(told["fingerprint"]), list(told["finished"])
            self.allocated = None if told["allocated"] is None else ALLOCATED.validate_python(told["allocated"])
            spent = {str(stage): float(seconds) for stage, seconds in told["seconds"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{self.state} is damaged ({error!r}); begin anew with --restart") from error
        now = json.loads(json.dumps(self.fingerprint))
        if lines := [x for name in {**earlier, **now} for x in _differing(name, earlier.get(name), now.get(name))]:
            raise ArtifactError(
                f"the interrupted run cannot be resumed, since what decides the result differs: {'; '.join(lines)}. "
                "Put it back, or begin anew with --restart"
            )
        self.timing.add(spent)

    def _write(self) -> None:
        if not self.ranks.first:
            return
        told = {
            "fingerprint": self.fingerprint,
            "allocated": None if self.allocated is None else dataclasses.asdict(self.allocated),
            "finished": self.finished,
            "seconds": self.timing.seconds(),
        }
        atomic_write(self.state, json.dumps(told, indent=1).encode())

    def _file(self, fqn: str, ending: str) -> Path:
        return self.blocks / f"{fqn or 'outside'}.{ending}"

    def _states(self, count: int) -> Path:
        return self.blocks / f"states-{count}.{self.ranks.rank}.safetensors"


def _differing(name: str, was: Any, now: Any) -> Iterator[str]:
    """Say what differs, down to single values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from _differing(f"{name}.{key}", was.get(key), now.get(key))
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for i, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from _differing(f"{name}[{i}]", before, after)
    elif was != now:
        yield f"{name}: was {_short(was)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _pooled(matrices: Matrices) -> list[Pooled]:
    return [*matrices.images.values(), *([] if matrices.difference is None else [matrices.difference])]


def _block_to_dict(block: FinishedBlock) -> dict[str, Any]:
    """Write a report so that what linears share is there once, and shared again when it is read."""
    report = block.report
    infos = {id(x.info): x.info for x in report.layers}
    histories = {id(x.history): x.history for x in report.layers}
    layers = [
        {**vars(x), "info": list(infos).index(id(x.info)), "history": list(histories).index(id(x.history))}
        for x in report.layers
    ]
    matrices = [
        {"linears": m.linears, "names": [*m.images], "shapes": [p.shape for p in _pooled(m)]} for m in block.matrices
    ]
    return {
        **vars(report),
        "layers": layers,
        "infos": [dict(x) for x in infos.values()],
        "histories": [dict(x) for x in histories.values()],
        "reconstruction": None if report.reconstruction is None else vars(report.reconstruction),
        "matrices": matrices,
    }


def _block_from_dict(told: dict[str, Any], tensors: Mapping[str, Tensor]) -> FinishedBlock:
    infos = told["infos"]
    histories = [{name: tuple(curve) for name, curve in h.items()} for h in told["histories"]]
    layers = tuple(
        LayerReport(**{**x, "shape": tuple(x["shape"]), "info": infos[x["info"]], "history": histories[x["history"]]})
        for x in told["layers"]
    )
    matrices = []
    for i, one in enumerate(told["matrices"]):
        pooled = [Pooled(tensors[f"{i}.{j}"], tuple(shape)) for j, shape in enumerate(one["shapes"])]
        images = dict(zip(one["names"], pooled, strict=False))
        matrices.append(Matrices(tuple(one["linears"]), images, pooled[-1] if len(pooled) > len(images) else None))
    trained = told["reconstruction"]
    reconstruction = (
        None if trained is None else ReconstructionReport(**{**trained, "history": tuple(trained["history"])})
    )
    report = BlockReport(told["index"], told["fqn"], layers, told["seconds"], told["output_error"], reconstruction)
    return FinishedBlock(report, tuple(matrices))
