"""Sparsity patterns, and the masks they make of scores.

A mask is bool with True = keep, and `sparsity` is the fraction of zeros (torch.ao multiplies weights by the mask).
Counts are exact: of `n` competing weights exactly `count_dropped(sparsity, n)` become zero, ties going to the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressx.api.lowest import drop_lowest
from compressx.api.units import UnitKind, Units

Group: TypeAlias = Literal["row", "layer", "joint"]


@dataclass(frozen=True)
class Unstructured:
    """Zeros anywhere within a group.

    Attributes:
        sparsity: fraction of zeros, in [0, 1).
        group: what competes for the budget: each output `row`, the whole `layer`, or `joint`, all linears that one
            recipe rule names in one block.
    """

    sparsity: float
    group: Group = "row"

    def __post_init__(self) -> None:
        if not 0.0 <= self.sparsity < 1.0:
            raise ValueError(f"sparsity is the fraction of zeros and lies in [0, 1), got {self.sparsity}")

    def __str__(self) -> str:
        return f"{100 * self.sparsity:.6g}% {self.group}"


@dataclass(frozen=True)
class NM:
    """N:M sparsity: of every `of` consecutive input features, `keep` survive.

    Published tools disagree on what the first number counts; here it is the weights that are *kept*.
    """

    keep: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.of:
            raise ValueError(f"N:M keeps N of every M weights with 1 <= N <= M, got {self.keep}:{self.of}")

    @property
    def sparsity(self) -> float:
        """Fraction of zeros."""
        return 1.0 - self.keep / self.of

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"


@dataclass(frozen=True)
class Structured:
    """Whole units of the architecture, all rows and columns that they own.

    Linears of the same units get the same pattern object, and have to be decided together.

    Attributes:
        unit: which units.
        sparsity: fraction of them that goes, in [0, 1).
        units: those that this linear belongs to, which compete.
    """

    unit: UnitKind
    sparsity: float
    units: Units = field(compare=False, repr=False)

    @property
    def dropped(self) -> int:
        """How many units go."""
        return count_dropped(self.sparsity, self.units.count)

    def __str__(self) -> str:
        return f"{100 * self.sparsity:.6g}% of {self.unit}"


@dataclass(frozen=True, eq=False)
class FixedMask:
    """A mask that is given: how a recipe hands one pruner's selection to another that only reconstructs.

    Attributes:
        keep: bool [out_features, in_features], True = keep.
        chosen_as: the pattern that it was selected for.
    """

    keep: Tensor
    chosen_as: Asked

    @property
    def sparsity(self) -> float:
        """Fraction of zeros that the selection was asked for."""
        return self.chosen_as.sparsity

    def __str__(self) -> str:
        return str(self.chosen_as)


Asked: TypeAlias = Unstructured | NM | Structured
"""What a recipe can ask of a linear."""

Pattern: TypeAlias = Asked | FixedMask


def competing(patterns: Mapping[str, Pattern]) -> list[str]:
    """Name the linears that share one budget of zeros, those with `joint` patterns."""
    return [name for name, p in patterns.items() if isinstance(p, Unstructured) and p.group == "joint"]


def is_together(patterns: Mapping[str, Pattern]) -> bool:
    """Say whether linears have to be decided together: they share a budget, or parts of the same units."""
    return bool(competing(patterns)) or any(isinstance(p, Structured) for p in patterns.values())


def allocated_form(pattern: str) -> str:
    """Write a pattern without the sparsity that was chosen: `allocated row` of `50% row`, `allocated N:4` of `2:4`."""
    keep, colon, of = pattern.partition(":")
    return f"allocated N:{of}" if colon else f"allocated {keep.split()[-1]}"


def nearest(pattern: Asked, sparsity: float) -> Unstructured | NM:
    """Return a pattern of the same kind at another sparsity; of an N:M one M stays, and 1 <= N < M is the nearest."""
    if isinstance(pattern, Structured):
        raise TypeError(f"units have the sparsity of their rule, {pattern}")
    if isinstance(pattern, Unstructured):
        return Unstructured(sparsity, pattern.group)
    return NM(pattern.of - min(max(round(sparsity * pattern.of), 1), pattern.of - 1), pattern.of)


def count_dropped(sparsity: float, weights: int) -> int:
    """Return how many of so many competing weights become zero.

    Every count comes from here: with the factors in another order a product that lies half-way is rounded otherwise.
    """
    return round(sparsity * weights)


def groups_of(pattern: Pattern, in_features: int) -> tuple[int, int] | None:
    """Return how many consecutive input features a group of `pattern` has, and how many of them it keeps; or None."""
    if isinstance(pattern, NM):
        return pattern.of, pattern.keep
    if isinstance(pattern, Unstructured) and pattern.group == "row":
        return in_features, in_features - count_dropped(pattern.sparsity, in_features)
    return None


def sparsity_of(keep: Tensor) -> float:
    """Count the fraction of zeros in a mask."""
    return 1.0 - torch.count_nonzero(keep).item() / keep.numel()


def zeros_in(pattern: Pattern, out_features: int, in_features: int) -> int | None:
    """Count the zeros that `pattern` puts into one weight; None where only a total over several linears is fixed."""
    if isinstance(pattern, FixedMask):
        return int(pattern.keep.numel() - pattern.keep.sum())
    if isinstance(pattern, NM):
        return out_features * (in_features // pattern.of) * (pattern.of - pattern.keep)
    if isinstance(pattern, Structured) or pattern.group == "joint":
        return None
    if pattern.group == "row":
        return out_features * count_dropped(pattern.sparsity, in_features)
    return count_dropped(pattern.sparsity, out_features * in_features)


def keep_mask(scores: Tensor, pattern: Pattern, *, known_finite: bool = False) -> Tensor:
    """Turn the scores of one weight into its mask.

    Args:
        scores: [out_features, in_features]; the lowest are dropped.
        pattern: what to keep. `joint` over a single weight is the same as `layer`.
        known_finite: as for `drop_lowest`.

    Returns:
        bool [out_features, in_features], True = keep.

    Raises:
        ValueError: scores that are not finite, in_features not divisible by the pattern's `of`, or units, which own
            several linears: see `keep_masks`.
    """
    rows, columns = scores.shape
    if isinstance(pattern, FixedMask):
        return pattern.keep
    if isinstance(pattern, Structured):
        raise ValueError(  # noqa: TRY004 - a pattern like others, asked for the wrong way
            f"{pattern.units} own several linears; take keep_masks, with the scores of all of them"
        )
    if isinstance(pattern, NM):
        if columns % pattern.of:
            raise ValueError(f"in_features {columns} is not divisible by {pattern.of} (pattern {pattern})")
        shaped, count = scores.reshape(-1, pattern.of), pattern.of - pattern.keep
    elif pattern.group == "row":
        shaped, count = scores, count_dropped(pattern.sparsity, columns)
    else:
        shaped, count = scores.reshape(1, -1), count_dropped(pattern.sparsity, scores.numel())
    return drop_lowest(shaped, count, known_finite=known_finite).view(rows, columns)


def keep_masks(
    scores: Mapping[str, Tensor], patterns: Mapping[str, Pattern], *, known_finite: bool = False
) -> dict[str, Tensor]:
    """Turn the scores of several weights into masks; those whose group is `joint` share one threshold.

    The scores of units are the sums over their weights.

    Args:
        scores: by linear name, each [out_features, in_features].
        patterns: by linear name; the joint ones must have the same sparsity, and of units all linears must be there.
        known_finite: as for `drop_lowest`.

    Returns:
        By linear name, bool [out_features, in_features], True = keep.

    Raises:
        ValueError: as `keep_mask`, or joint patterns that differ in sparsity.
    """
    joint = competing(patterns)
    structured = {id(p.units): p for p in patterns.values() if isinstance(p, Structured)}
    single = [n for n, p in patterns.items() if n not in joint and not isinstance(p, Structured)]
    masks = {n: keep_mask(scores[n], patterns[n], known_finite=known_finite) for n in single}
    for pattern in structured.values():
        kept = drop_lowest(pattern.units.summed(scores)[None], pattern.dropped, known_finite=known_finite)[0]
        masks |= pattern.units.masks(kept, {n: (len(x), x.shape[1]) for n, x in scores.items()})
    if joint:
        sparsities = {patterns[n].sparsity for n in joint}
        if len(sparsities) > 1:
            raise ValueError(f"linears that compete jointly need one sparsity, got {sorted(sparsities)}")
        flat = torch.cat([scores[n].reshape(-1) for n in joint])
        kept = drop_lowest(flat[None], count_dropped(sparsities.pop(), flat.numel()), known_finite=known_finite)[0]
        for name, part in zip(joint, torch.split(kept, [scores[n].numel() for n in joint]), strict=True):
            masks[name] = part.view(scores[name].shape)
    return {n: masks[n] for n in patterns}
