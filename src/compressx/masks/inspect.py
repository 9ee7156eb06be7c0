"""Count the zeros of any saved model, and what differs from a base."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.masks.file import MaskEntry, misfit, read_masks
from compressx.masks.maskset import shrunk_note
from compressx.models.access import Access, differences
from compressx.models.architecture import architecture_of
from compressx.models.checkpoint import find_checkpoint
from compressx.models.packed_folder import Sizes, is_packed, packed_sizes
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import open_base, open_model
from compressx.numerics.masked import count_in_groups
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError
from compressx.runtime.finite import refuse_damage

_GROUPS = (4, 8, 16, 32)
"""The values of M that N:M patterns are searched with; hardware supports 4."""

_FULL = 0.98
"""Minimum fraction of groups with exactly N kept weights for zeros to be called N:M."""


@dataclass(frozen=True)
class Inspected:
    """The zeros of one linear [out_features, in_features], and what else was asked for.

    Attributes:
        pattern: from `pattern_of`.
        mask: pruner and pattern in the masks file, with `as base` if so, or None if the linear has no mask.
        off_mask: number of weights that the mask drops, and that are not zero, or not the base's; None without a mask,
            or if no base is given that it needs.
        change: with a base, ||W - W_0||_F / ||W_0||_F; None if only W_0 is zero.
        unchanged: with a base, the fraction of weights that are the base's.
    """

    name: str
    shape: tuple[int, int]
    zeros: int
    pattern: str
    mask: str | None = None
    off_mask: int | None = None
    change: float | None = None
    unchanged: float | None = None

    @property
    def sparsity(self) -> float:
        """Fraction of zeros."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class Inspection:
    """The zeros of a model, with the sources of what it was compared with, and its sizes if it is packed."""

    folder: str
    linears: tuple[Inspected, ...]
    masks: str | None
    packed: Sizes | None = None
    base: str | None = None

    @property
    def sparsity(self) -> float:
        """Fraction of zeros over all linears."""
        return share_of_zeros(self.linears)

    @property
    def compared(self) -> str:
        """Say how the masks fit, and what changes are from."""
        counts = [x.off_mask for x in self.linears if x.off_mask is not None]
        off = f"{sum(counts)} weights are not as it drops them" if counts else "which needs its base: give it by --base"
        told = f"; compared with {self.masks}, {off}" if self.masks else ""
        return f"{told}; changes are from {self.base}" if self.base else told

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        linears = [{**dataclasses.asdict(x), "sparsity": x.sparsity} for x in self.linears]
        packed = None if self.packed is None else self.packed.to_dict()
        return {
            "folder": self.folder, "masks": self.masks, "packed": packed, "base": self.base, "sparsity": self.sparsity,
            "linears": linears,
        }  # fmt: skip


def share_of_zeros(linears: Iterable[Inspected]) -> float:
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
            kept = count_in_groups(~zero, of)  # [rows * columns / of]
            most = int(kept.max())
            if 0 < most < of and float((kept == most).float().mean()) >= _FULL:
                return f"{most}:{of}"
    each = zero.sum(dim=1)
    share = f"{100 * zeros / zero.numel():.4g}%"
    return f"{share} row" if rows > 1 and bool((each == each[0]).all()) else share


def inspect_model(
    source: ModelSource, masks: Path | None = None, *, base: ModelSource | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Inspection:  # fmt: skip
    """Count the zeros of every linear in a model's blocks; a large model is streamed block by block.

    The masks to compare with are by default those in the model's folder, or beside the `model` folder of a run, unless
    the run has shrunk the model: those are the original's. Linears in the blocks are compared with those of the base,
    which is streamed beside the model unless it is a GGUF file. Refused are masks of another model, a base with other
    linears, and, with a base, weights that are not finite.
    """
    access = open_model(find_checkpoint(source), source.streaming, torch.device("cpu"))
    names = [str(x.path or x.id or x.package) for x in (source, base) if x is not None]
    path = None if source.path is None else source.path.expanduser()
    if masks is None and path is not None and not shrunk_note(access.model):
        above = path.parent if path.name else path.resolve().parent  # of `.` the parent has no name of its own
        beside = [path, *([above] if path.resolve().name == "model" else [])]
        masks = next((p / "masks.safetensors" for p in beside if (p / "masks.safetensors").is_file()), None)
    entries = {} if masks is None else read_masks(masks)
    here = architecture_of(access.model)
    known = {**here.linears, **here.outside}
    for name, entry in entries.items():
        wrong = f"it has a mask for {name}, which {names[0]} does not have"
        if name not in known or (wrong := misfit(name, entry, known[name].held.shape)):
            told = shrunk_note(access.model) or "; give this model's masks with --masks"
            raise ArtifactError(f"{masks}: {wrong}{told}")
    if base is not None:
        access = replace(access, base=open_base(base, torch.device("cpu")))  # type: ignore[type-var]
        _refuse_other_linears(access, names)
    found = tuple(_inspected(access, names, entries, progress))
    packed = packed_sizes(path) if path is not None and is_packed(path) else None
    return Inspection(names[0], found, None if masks is None else str(masks), packed, names[1] if base else None)


def _refuse_other_linears(access: Access, names: Sequence[str]) -> None:
    """Refuse a base with other linears in its blocks."""
    assert access.base is not None  # noqa: S101 - the caller has asked
    found = [architecture_of(x.model).linears for x in (access, access.base)]
    here, there = ({n: [*x.held.shape] for n, x in linears.items()} for linears in found)
    if odd := next((n for n in (*here, *there) if here.get(n) != there.get(n)), None):
        raise ArtifactError(
            f"{names[1]}: {odd} is {there.get(odd, 'missing')}, and {here.get(odd, 'missing')} in {names[0]}; expected "
            "the model that it was tuned from, of the same shapes"
        )


@torch.no_grad()
def _inspected(
    access: Access, names: Sequence[str], entries: Mapping[str, MaskEntry], progress: Callable[[str], None]
) -> Iterator[Inspected]:
    """Inspect every linear in the blocks, and those outside that have a mask."""
    surveyed = architecture_of(access.model)
    for fqn in (*surveyed.blocks, OUTSIDE):
        progress(fqn)
        inside = {n: x for n, x in surveyed.outside.items() if n in entries} if fqn == OUTSIDE else surveyed.inside(fqn)
        with access.materialise(fqn) as module, differences(access, fqn, inside) as linears:
            if fqn != OUTSIDE and access.base is not None:
                refuse_damage(module, f"{names[0]}: {fqn}")
                refuse_damage(access.base.model.get_submodule(fqn), f"{names[1]}: {fqn}")
            for name, linear in linears.items():
                held, base, entry = linear.held, linear.base, entries.get(name)
                zero, mask, off_mask, change, unchanged = held == 0, None, None, None, None
                if entry is not None:
                    mask = f"{entry.pruner} {entry.pattern}{', as base' if entry.base else ''}"
                    wanted = base if entry.base else 0
                    off_mask = None if wanted is None else int((~entry.keep & (held != wanted)).sum())
                if base is not None:
                    size, before = float((held.double() - base.double()).norm()), float(base.double().norm())
                    change, unchanged = size / before if before else None, float((held == base).double().mean())
                yield Inspected(
                    name, (linear.out_features, linear.in_features), int(zero.sum()), pattern_of(zero),
                    mask, off_mask, change, unchanged,
                )  # fmt: skip
