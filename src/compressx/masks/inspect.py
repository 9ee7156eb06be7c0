"""Count the zeros of any saved model; measure stable ranks, and what differs from a base."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.api.projections import find_projections, head_size
from compressx.api.pruner import Block, Linear
from compressx.masks.file import MaskEntry, read_masks
from compressx.masks.maskset import shrunk_note
from compressx.models.access import Access, differences
from compressx.models.architecture import survey, text_config
from compressx.models.checkpoint import find_checkpoint
from compressx.models.packed_folder import Sizes, is_packed, sizes_of
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import open_base, open_model
from compressx.numerics.masked import count_in_groups, pattern_mismatch
from compressx.numerics.spectra import Change, squared_singular_values, stable_rank, stable_ranks_of_heads
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.runtime.finite import refuse_damage

_GROUPS = (4, 8, 16, 32)
"""The values of M that N:M patterns are searched with; hardware supports 4."""

AS_BASE = ", as base"
"""Ends what is said of a mask that drops weights to a base's."""

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
        mask: pruner and pattern in the masks file, with `AS_BASE` if so, or None if the linear has no mask.
        off_mask: number of nonzero weights that the mask drops, or None if the linear has no mask. Where the mask drops
            to a base's weights, of those that are not the base's; None if no base is given.
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
    names = [str(x.path or x.id or x.package) for x in (source, base) if x is not None]
    if base is not None:
        access = replace(access, base=open_base(base, torch.device("cpu")))  # type: ignore[type-var]
    path = None if source.path is None else source.path.expanduser()
    if masks is None and path is not None and not shrunk_note(access.model):
        above = path.parent if path.name else path.resolve().parent  # of `.` the parent has no name of its own
        beside = [path, *([above] if path.resolve().name == "model" else [])]
        masks = next((p / "masks.safetensors" for p in beside if (p / "masks.safetensors").is_file()), None)
    entries = {} if masks is None else read_masks(masks)
    unread: list[str] = []
    try:
        _refuse_other_linears(access, names, entries)
        found = tuple(_inspected(access, names, entries, spectrum, unread, progress))
    except _OtherModelError as error:
        told = shrunk_note(access.model) or "; give this model's masks with --masks"
        raise ArtifactError(f"{masks}: {error}{told}") from None
    packed = sizes_of(path) if path is not None and is_packed(path) else None
    compared = None if masks is None else str(masks)
    return Inspection(names[0], found, compared, packed, names[1] if base else None, tuple(unread))


def _refuse_other_linears(access: Access, names: Sequence[str], entries: Iterable[str]) -> None:
    """Refuse masks of linears that the model has not, and a base with other linears in its blocks."""
    here, there = (survey(x.model) for x in (access, access.base or access))
    if unknown := {*entries} - here.linears.keys() - here.outside.keys():
        raise _OtherModelError(f"it has a mask for {min(unknown)}, which {names[0]} does not have")
    for name in dict.fromkeys((*here.linears, *there.linears)):
        shapes = [[*x.linears[name].held.shape] if name in x.linears else "missing" for x in (there, here)]
        if shapes[0] != shapes[1]:
            raise ArtifactError(
                f"{names[1]}: {name} is {shapes[0]}, and {shapes[1]} in {names[0]}; expected the model that it was "
                "tuned from, of the same shapes"
            )


def _heads(block: Block) -> tuple[str, tuple[float, ...]]:
    """Return the linear of a block's queries, and the stable rank of W_Q^T W_K of each head.

    Raises:
        UnsupportedModelError: an attention whose queries and keys are no linears of heads.
    """
    attention = find_projections(block)
    size = head_size(block.submodule(attention.attention), block.config)
    ranks = stable_ranks_of_heads(attention.query.weight, attention.key.weight, size)
    return attention.query.name, tuple(ranks.tolist())


class _OtherModelError(Exception):
    """The masks are of another model."""


@torch.no_grad()
def _inspected(
    access: Access, names: Sequence[str], entries: Mapping[str, MaskEntry], spectrum: bool, unread: list[str],
    progress: Callable[[str], None],
) -> Iterator[Inspected]:  # fmt: skip
    """Inspect every linear in the blocks, and those outside that have a mask; `unread` gets blocks without heads."""
    surveyed, config = survey(access.model), text_config(access.model)
    for fqn in (*surveyed.blocks, OUTSIDE):
        progress(fqn)
        inside = {n: x for n, x in surveyed.outside.items() if n in entries} if fqn == OUTSIDE else surveyed.inside(fqn)
        with access.materialise(fqn) as module, differences(access, fqn, inside) as linears:
            heads: dict[str, tuple[float, ...]] = {}
            if fqn != OUTSIDE and (spectrum or access.base is not None):
                refuse_damage(module, f"{names[0]}: {fqn}")
            if fqn != OUTSIDE and access.base is not None:
                refuse_damage(access.base.model.get_submodule(fqn), f"{names[1]}: {fqn}")
            if fqn != OUTSIDE and spectrum:
                try:
                    heads = dict([_heads(Block(0, fqn, module, inside, (), config))])
                except UnsupportedModelError as error:
                    unread.append(str(error))
            for name, linear in linears.items():
                zero, entry = linear.held == 0, entries.get(name)
                mask = None if entry is None else f"{entry.pruner} {entry.pattern}{AS_BASE if entry.base else ''}"
                yield Inspected(
                    name, (linear.out_features, linear.in_features), int(zero.sum()), pattern_of(zero),
                    fits_two_four(zero), mask,
                    None if entry is None else _off_mask(linear, entry),
                    float(stable_rank(squared_singular_values(linear.held))) if spectrum and fqn != OUTSIDE else None,
                    heads.get(name, ()),
                    None if linear.base is None else Change.of(linear.held, linear.base, spectrum=spectrum),
                )  # fmt: skip


def _off_mask(linear: Linear, entry: MaskEntry) -> int | None:
    """Count the weights that a mask drops and that are not zero, or not the base's; None without the base it needs."""
    if entry.keep.shape != linear.held.shape:
        raise _OtherModelError(f"{linear.name}: its mask is {[*entry.keep.shape]}, the weight {[*linear.held.shape]}")
    if unlike := pattern_mismatch(entry.keep, entry.pattern):
        raise _OtherModelError(f"{linear.name}: its mask is called {entry.pattern}, but is none: {unlike}")
    wanted = 0 if entry.base is None else linear.base
    return None if wanted is None else int((~entry.keep & (linear.held != wanted)).sum())
