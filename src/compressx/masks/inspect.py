"""What sparsity a saved model has: counted in its weights, whoever wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.masks.file import MaskEntry, read_masks
from compressx.models.architecture import survey
from compressx.models.checkpoint import find_checkpoint
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import open_model
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError

_GROUPS = (4, 8, 16, 32)
"""The M of N:M that are looked for; 4 is what hardware knows."""

_FULL = 0.98
"""Fraction of a pattern's groups that hold exactly N weights, for the pattern to be what was meant."""


@dataclass(frozen=True)
class Inspected:
    """The zeros of one linear.

    Attributes:
        name: fully qualified name.
        shape: [out_features, in_features].
        zeros: how many weights are zero.
        pattern: what `pattern_of` finds.
        two_four: whether no four consecutive input features keep more than two, as sparse tensor cores need it.
        mask: what the file of masks says of it; None where it does not name it.
        off_mask: weights that the mask drops and that are not zero; None likewise.
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
        folder: that was looked into.
        linears: in the model's order.
        masks: the file that they were compared with, or None.
    """

    folder: str
    linears: tuple[Inspected, ...]
    masks: str | None

    @property
    def sparsity(self) -> float:
        """Fraction of zeros over all linears."""
        return sparsity_of(self.linears)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        linears = [{**dataclasses.asdict(x), "sparsity": x.sparsity} for x in self.linears]
        return {"folder": self.folder, "masks": self.masks, "sparsity": self.sparsity, "linears": linears}


def sparsity_of(linears: Iterable[Inspected]) -> float:
    """Return the fraction of zeros over all weights of some linears."""
    counts = [(x.zeros, x.shape[0] * x.shape[1]) for x in linears]
    return sum(zeros for zeros, _ in counts) / sum(weights for _, weights in counts)


def pattern_of(zero: Tensor) -> str:
    """Say which pattern zeros follow.

    Args:
        zero: bool [out_features, in_features], True = zero.

    Returns:
        `dense`, `2:4` (or another N:M), `50% row` when every row has equally many zeros, else `50%`.
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
    """Say whether of every four consecutive input features of zero [out_features, in_features] two at most are kept."""
    if zero.shape[1] % 4:
        return False
    return bool(((~zero).view(len(zero), -1, 4).sum(dim=2) <= 2).all())


def inspect(source: ModelSource, masks: Path | None = None) -> Inspection:
    """Count the zeros of every linear in a model's blocks, a block in memory at a time where it is large.

    Args:
        source: the model.
        masks: a file of masks to compare with, in memory at a bit a weight; when absent, the one beside the model, or
            beside the `model` folder of a run.

    Raises:
        CompressxError: a model or file that cannot be read, or masks of another model.
    """
    if masks is None and source.path is not None:
        above = source.path.parent
        beside = [source.path, *([above] if source.path.name == "model" else [])]
        masks = next((p / "masks.safetensors" for p in beside if (p / "masks.safetensors").is_file()), None)
    entries = {} if masks is None else read_masks(masks)
    try:
        found = tuple(_inspected(source, entries))
    except _OtherModelError as error:
        raise ArtifactError(f"{masks}: {error}; give this model's masks with --masks") from None
    return Inspection(str(source.path or source.id or source.package), found, None if masks is None else str(masks))


class _OtherModelError(Exception):
    """The masks are of another model."""


@torch.no_grad()
def _inspected(source: ModelSource, entries: Mapping[str, MaskEntry]) -> Iterator[Inspected]:
    """Look at every linear in the blocks, and at those outside that masks name."""
    access = open_model(find_checkpoint(source), source.streaming, torch.device("cpu"))
    surveyed = survey(access.model)
    if unknown := entries.keys() - surveyed.linears.keys() - surveyed.outside.keys():
        raise _OtherModelError(f"it names {min(unknown)}, which {source.path or source.id} does not have")
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
                    off = int((~entry.keep & ~zero).sum())
                meant = None if entry is None else f"{entry.pruner} {entry.pattern}"
                yield Inspected(name, shape, int(zero.sum()), pattern_of(zero), fits_two_four(zero), meant, off)
