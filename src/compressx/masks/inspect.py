"""Count the zeros of any saved model; measure stable ranks, and what differs from a base."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressx.api.projections import find_projections, head_size
from compressx.api.pruner import Block, Linear
from compressx.masks.file import MaskEntry, read_masks
from compressx.masks.maskset import shrunk_note
from compressx.models.access import Access
from compressx.models.architecture import survey, text_config
from compressx.models.checkpoint import find_checkpoint
from compressx.models.packed_folder import Sizes, is_packed, sizes_of
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import open_model
from compressx.numerics.masked import count_in_groups, pattern_mismatch
from compressx.numerics.spectra import Change, squared_singular_values, stable_rank, stable_ranks_of_heads
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.runtime.finite import refuse_damage

_GROUPS = (4, 8, 16, 32)
"""The values of M that N:M patterns are searched with; hardware supports 4."""

_FULL = 0.98
"""Minimum fraction of groups with exactly N kept weights for zeros to be called N:M."""


@dataclass(frozen=True)
class Inspected:
    """The zeros of one linear, and what else was asked for.

    Attributes:
        name: fully qualified name.
        shape: [out_features, in_features].
        zeros: number of zero weights.
        pattern: from `pattern_of`.
        two_four: whether every four consecutive input features keep two at most, as sparse tensor cores require.
        mask: pruner and pattern in the masks file, or None if the linear has no mask.
        off_mask: number of nonzero weights that the mask drops, or None if the linear has no mask.
        stable_rank: of the weight, with spectra.
        heads: with spectra, at the linear of the queries: the stable rank of W_Q^T W_K of each head.
        change: what differs from the base, with one.
    """

    name: str
    shape: tuple[int, int]
    zeros: int
    pattern: str
    two_four: bool
    mask: str | None = None
    off_mask: int | None = None
    stable_rank: float | None = None
    heads: tuple[float, ...] = ()
    change: Change | None = None

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
        base: the base's source, or None.
        unread: why blocks have no W_Q^T W_K of heads, with spectra.
    """

    folder: str
    linears: tuple[Inspected, ...]
    masks: str | None
    packed: Sizes | None = None
    base: str | None = None
    unread: tuple[str, ...] = ()

    @property
    def sparsity(self) -> float:
        """Fraction of zeros over all linears."""
        return sparsity_of(self.linears)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        linears = [{**dataclasses.asdict(x), "sparsity": x.sparsity} for x in self.linears]
        packed = None if self.packed is None else self.packed.to_dict()
        found = {"folder": self.folder, "masks": self.masks, "packed": packed, "base": self.base, "unread": self.unread}
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


def inspect(
    source: ModelSource, masks: Path | None = None, *, base: ModelSource | None = None, spectrum: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Inspection:  # fmt: skip
    """Count the zeros of every linear in a model's blocks; a large model is streamed block by block.

    Args:
        source: the model.
        masks: a masks file to compare with, held at one bit per weight; by default the one in the model's folder, or
            beside the `model` folder of a run, unless the run has shrunk the model: those are the original's.
        base: a model to compare the linears in the blocks with; streamed beside it unless it is a GGUF file.
        spectrum: whether to take singular values, for stable ranks.
        progress: is told each block.

    Raises:
        CompressxError: a model or file that cannot be read, masks of another model, a base with other linears, or,
            with a base or spectra, weights that are not finite.
    """
    access = open_model(find_checkpoint(source), source.streaming, torch.device("cpu"))
    path = None if source.path is None else source.path.expanduser()
    if masks is None and path is not None and not shrunk_note(access.model):
        above = path.parent if path.name else path.resolve().parent  # of `.` the parent has no name of its own
        beside = [path, *([above] if path.resolve().name == "model" else [])]
        masks = next((p / "masks.safetensors" for p in beside if (p / "masks.safetensors").is_file()), None)
    entries = {} if masks is None else read_masks(masks)
    asked = _Asked(access.model, source, base, spectrum)
    try:
        found = tuple(_inspected(access, asked, entries, progress))
    except _OtherModelError as error:
        told = shrunk_note(access.model) or "; give this model's masks with --masks"
        raise ArtifactError(f"{masks}: {error}{told}") from None
    packed = sizes_of(path) if path is not None and is_packed(path) else None
    compared, other = None if masks is None else str(masks), asked.names[1] if base else None
    return Inspection(asked.names[0], found, compared, packed, other, tuple(asked.unread))


class _Asked:
    """What is asked for of the linears in a model's blocks: spectra, and how they differ from a base's."""

    def __init__(self, skeleton: Any, source: ModelSource, base: ModelSource | None, spectrum: bool) -> None:
        self.names = [str(x.path or x.id or x.package) for x in (source, base) if x is not None]
        self.surveyed, self.config, self.spectrum = survey(skeleton), text_config(skeleton), spectrum
        self.unread: list[str] = []
        self.before: Mapping[str, Linear] = {}
        if base is not None:
            checkpoint = find_checkpoint(base)
            streaming = bool(base.streaming) and checkpoint.gguf_file is None
            self.base = open_model(checkpoint, streaming, torch.device("cpu"))
            self.before = survey(self.base.model).linears
            both = (self.surveyed.linears, self.before)
            for name in dict.fromkeys((*both[0], *both[1])):
                here, there = ([*linears[name].weight.shape] if name in linears else "missing" for linears in both)
                if here != there:
                    told = f"{self.names[1]}: {name} is {there}, and {here} in {self.names[0]}"
                    raise ArtifactError(f"{told}; expected the model that it was tuned from, of the same shapes")

    def measured(self, fqn: str, block: nn.Module) -> Mapping[str, dict[str, Any]]:
        """Return fields of `Inspected` by linear of a loaded block; the base's is loaded beside it."""
        linears, found = self.surveyed.inside(fqn), defaultdict[str, dict[str, Any]](dict)
        if self.before or self.spectrum:
            refuse_damage(block, f"{self.names[0]}: {fqn}")
        if self.spectrum:
            for name, linear in linears.items():
                found[name]["stable_rank"] = float(stable_rank(squared_singular_values(linear.weight)))
            try:
                attention = find_projections(whole := Block(0, fqn, block, linears, (), self.config))
                size = head_size(whole.submodule(attention.attention), self.config)
                ranks = stable_ranks_of_heads(attention.query.weight, attention.key.weight, size)
                found[attention.query.name]["heads"] = tuple(ranks.tolist())
            except UnsupportedModelError as error:
                self.unread.append(str(error))
        if self.before:
            with self.base.materialise(fqn) as other:
                refuse_damage(other, f"{self.names[1]}: {fqn}")
                for name, linear in linears.items():
                    found[name]["change"] = Change.of(linear.weight, self.before[name].weight, spectrum=self.spectrum)
        return found


class _OtherModelError(Exception):
    """The masks are of another model."""


@torch.no_grad()
def _inspected(
    access: Access, asked: _Asked, entries: Mapping[str, MaskEntry], progress: Callable[[str], None]
) -> Iterator[Inspected]:
    """Inspect every linear in the blocks, and those outside that have a mask."""
    surveyed = asked.surveyed
    if unknown := entries.keys() - surveyed.linears.keys() - surveyed.outside.keys():
        raise _OtherModelError(f"it has a mask for {min(unknown)}, which {asked.names[0]} does not have")
    for fqn in (*surveyed.blocks, OUTSIDE):
        progress(fqn)
        linears = {n: x for n, x in surveyed.linears.items() if fqn != OUTSIDE and n.startswith(f"{fqn}.")}
        if fqn == OUTSIDE:
            linears = {n: x for n, x in surveyed.outside.items() if n in entries}
        with access.materialise(fqn) as module:
            more = {} if fqn == OUTSIDE else asked.measured(fqn, module)
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
                counted = (int(zero.sum()), pattern_of(zero), fits_two_four(zero), mask, off)
                yield Inspected(name, shape, *counted, **more.get(name, {}))
