"""Count the zeros in the weights of any saved model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.masks.file import MaskEntry, read_masks
from compressx.masks.maskset import shrunk_note
from compressx.models.access import Access
from compressx.models.architecture import survey
from compressx.models.checkpoint import find_checkpoint
from compressx.models.packed_folder import Sizes, is_packed, sizes_of
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import open_model
from compressx.numerics.masked import count_in_groups, pattern_mismatch
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError

_GROUPS = (4, 8, 16, 32)
"""The values of M that N:M patterns are searched with; hardware supports 4."""

_FULL = 0.98
"""Minimum fraction of groups with exactly N kept weights for zeros to be called N:M."""


@dataclass(frozen=True)
class Inspected:
    """The zeros of one linear.

    Attributes:
        name: fully qualified name.
        shape: [out_features, in_features].
        zeros: number of zero weights.
        pattern: from `pattern_of`.
        two_four: whether every four consecutive input features keep two at most, as sparse tensor cores require.
        mask: pruner and pattern in the masks file, or None if the linear has no mask.
        off_mask: number of nonzero weights that the mask drops, or None if the linear has no mask.
    """

    name: str
    shape: tuple[int, int]
    zeros: int
    pattern: str
    two_four: bool
    mask: str | None = None
    off_mask: int | None = None

    @property
    def sparsity(self) -> float:
        """Fraction of zeros."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class Inspection:
    """The zeros of a model.

    Attributes:
        folder: the model's source: a folder, hub id or package.
        linears: in the model's order.
        masks: the masks file they were compared with, or None.
        packed: the sizes of a packed folder, else None.
    """

    folder: str
    linears: tuple[Inspected, ...]
    masks: str | None
    packed: Sizes | None = None

    @property
    def sparsity(self) -> float:
        """Fraction of zeros over all linears."""
        return sparsity_of(self.linears)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        linears = [{**dataclasses.asdict(x), "sparsity": x.sparsity} for x in self.linears]
        packed = None if self.packed is None else self.packed.to_dict()
        found = {"folder": self.folder, "masks": self.masks, "packed": packed}
        return {**found, "sparsity": self.sparsity, "linears": linears}


def sparsity_of(linears: Iterable[Inspected]) -> float:
    """Return the fraction of zeros over all weights of some linears."""
    counts = [(x.zeros, x.shape[0] * x.shape[1]) for x in linears]
    return sum(zeros for zeros, _ in counts) / sum(weights for _, weights in counts)


def pattern_of(zero: Tensor) -> str:
    """Name the pattern of a weight's zeros, bool [out_features, in_features].

    `dense`, `2:4` (or another N:M), `50% row` if every row has the same number of zeros, else `50%`.
    """
    rows, columns = zero.shape
    zeros = int(zero.sum())
    if zeros == 0:
        return "dense"
    for of in _GROUPS:
        if columns % of == 0:
            kept = (~zero).view(rows, columns // of, of).sum(dim=2)
            most = int(kept.max())
            if 0 < most < of and float((kept == most).float().mean()) >= _FULL:
                return f"{most}:{of}"
    each = zero.sum(dim=1)
    share = f"{100 * zeros / zero.numel():.4g}%"
    return f"{share} row" if rows > 1 and bool((each == each[0]).all()) else share


def fits_two_four(zero: Tensor) -> bool:
    """Return whether every four consecutive columns of `zero` [out_features, in_features] have two zeros or more."""
    return zero.shape[1] % 4 == 0 and bool((count_in_groups(~zero, 4) <= 2).all())


def inspect(source: ModelSource, masks: Path | None = None) -> Inspection:
    """Count the zeros of every linear in a model's blocks; a large model is streamed block by block.

    Args:
        source: the model.
        masks: a masks file to compare with, held at one bit per weight; by default the one in the model's folder, or
            beside the `model` folder of a run, unless the run has shrunk the model: those are the original's.

    Raises:
        CompressxError: a model or file that cannot be read, or masks of another model.
    """
    access = open_model(find_checkpoint(source), source.streaming, torch.device("cpu"))
    path = None if source.path is None else source.path.expanduser()
    if masks is None and path is not None and not shrunk_note(access.model):
        above = path.parent if path.name else path.resolve().parent  # of `.` the parent has no name of its own
        beside = [path, *([above] if path.resolve().name == "model" else [])]
        masks = next((p / "masks.safetensors" for p in beside if (p / "masks.safetensors").is_file()), None)
    entries = {} if masks is None else read_masks(masks)
    try:
        found = tuple(_inspected(access, source, entries))
    except _OtherModelError as error:
        told = shrunk_note(access.model) or "; give this model's masks with --masks"
        raise ArtifactError(f"{masks}: {error}{told}") from None
    packed = sizes_of(path) if path is not None and is_packed(path) else None
    name = str(source.path or source.id or source.package)
    return Inspection(name, found, None if masks is None else str(masks), packed)


class _OtherModelError(Exception):
    """The masks are of another model."""


@torch.no_grad()
def _inspected(access: Access, source: ModelSource, entries: Mapping[str, MaskEntry]) -> Iterator[Inspected]:
    """Inspect every linear in the blocks, and those outside that have a mask."""
    surveyed = survey(access.model)
    if unknown := entries.keys() - surveyed.linears.keys() - surveyed.outside.keys():
        raise _OtherModelError(f"it has a mask for {min(unknown)}, which {source.path or source.id} does not have")
    for fqn in (*surveyed.blocks, OUTSIDE):
        linears = {n: x for n, x in surveyed.linears.items() if fqn != OUTSIDE and n.startswith(f"{fqn}.")}
        if fqn == OUTSIDE:
            linears = {n: x for n, x in surveyed.outside.items() if n in entries}
        with access.materialise(fqn):
            for name, linear in linears.items():
                zero = linear.weight == 0
                shape = (linear.out_features, linear.in_features)
                entry, off = entries.get(name), None
                if entry is not None:
                    if entry.keep.shape != zero.shape:
                        raise _OtherModelError(f"{name}: its mask is {[*entry.keep.shape]}, the weight {list(shape)}")
                    if unlike := pattern_mismatch(entry.keep, entry.pattern):
                        raise _OtherModelError(f"{name}: its mask is called {entry.pattern}, but is none: {unlike}")
                    off = int((~entry.keep & ~zero).sum())
                mask = None if entry is None else f"{entry.pruner} {entry.pattern}"
                yield Inspected(name, shape, int(zero.sum()), pattern_of(zero), fits_two_four(zero), mask, off)
