"""Sparsity patterns, the units of structured ones, and the masks that patterns make of scores.

A mask is bool with True = keep, and `sparsity` is the fraction of zeros (torch.ao multiplies weights by the mask).
Counts are exact: of `n` competing weights exactly `count_dropped(sparsity, n)` become zero, ties going to the first.

Units are pieces of an architecture that are removed whole. A unit owns rows of some linears and columns of others. A
feed-forward neuron owns its row of the gate and of the up projection and its column of the down projection; a key/value
group its rows of key and value, those of the queries that share them, and their columns of the output projection; an
expert, and a decoder block, all rows of its linears.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from compressx.runtime.finite import all_finite

_PART = 1 << 22
"""Scores that are compared at once."""

_PART_OF_DEVICE = 1 << 26
"""The same off the CPU, where a part that is finished in microseconds would wait for its kernels to be launched."""

_FEW = 4
"""Scores in a group, as of 2:4, up to which comparing all with all is the fastest selection."""

UnitKind: TypeAlias = Literal["neurons", "kv-groups", "experts", "blocks"]

UNIT_KINDS: tuple[UnitKind, ...] = get_args(UnitKind)


@dataclass(frozen=True, eq=False)
class Owners:
    """Which unit each row, or each column, of one linear belongs to.

    Attributes:
        dim: 0: rows (out_features), 1: columns (in_features).
        unit: int64 [rows or columns], on the CPU.
    """

    dim: int
    unit: Tensor

    def spread(self, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Give each weight [out_features, in_features] of a linear the value of its unit; values are [units].

        It is expanded: entries along the other dimension share memory.
        """
        each = values[self.unit.to(values.device)]
        return (each[:, None] if self.dim == 0 else each[None, :]).expand(shape)


@dataclass(frozen=True, eq=False)
class Units:
    """Units of one kind that compete for one budget.

    Attributes:
        kind: what they are.
        fqn: fully qualified name of the module that holds them, such as `model.layers.0.mlp`.
        count: number of units.
        owners: by fully qualified name of a linear, whose rows or columns are whose.
    """

    kind: UnitKind
    fqn: str
    count: int
    owners: Mapping[str, Owners]

    def summed(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Add up the scores of each unit's weights: [units], on their device, in float32 at least.

        Scores are [out_features, in_features] by linear name; linears that are left out count nothing.
        """
        total: Tensor | None = None
        for name, own in self.owners.items():
            if name not in scores:
                continue
            of = scores[name].sum(dim=1 - own.dim, dtype=torch.promote_types(scores[name].dtype, torch.float32))
            total = of.new_zeros(self.count) if total is None else total
            total.index_add_(0, own.unit.to(of.device), of)
        if total is None:
            raise ValueError(f"scores are for {sorted(scores)}, none of which belongs to {', '.join(self.owners)}")
        return total

    def masks(self, keep: Tensor, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Tensor]:
        """Turn the choice of units, bool [units], into masks by linear name; shapes are [out_features, in_features]."""
        return {name: own.spread(keep, shapes[name]).contiguous() for name, own in self.owners.items()}

    def kept(self, masks: Mapping[str, Tensor]) -> Tensor:
        """Return which units have a weight that some mask keeps, bool [units]."""
        some = next(iter(masks.values()))
        kept = torch.zeros(self.count, dtype=torch.int32, device=some.device)
        for name, own in self.owners.items():
            of = masks[name].any(dim=1 - own.dim).int()
            kept.index_add_(0, own.unit.to(of.device), of)
        return kept > 0

    def __str__(self) -> str:
        return f"{self.count} {self.kind} of {self.fqn}"


Group: TypeAlias = Literal["row", "layer", "joint"]


class _Pattern:
    """What a pattern says of itself, unless its class knows more."""

    @property
    def asked(self) -> Self | RulePattern:
        """What a rule asks for: the pattern itself, of a given mask the one that it was selected for."""
        return self

    @property
    def joint(self) -> bool:
        """Whether several linears share one budget of zeros."""
        return False

    @property
    def together(self) -> bool:
        """Whether linears have to be decided together: they share a budget, or parts of the same units."""
        return self.joint

    def groups(self, _rows: int, _columns: int) -> tuple[int, int] | None:
        """Return how many consecutive weights of a linear compete, and how many of them are dropped, in each group.

        None where only a total over several linears is fixed.
        """
        return None

    def zeros(self, rows: int, columns: int) -> int | None:
        """Count the zeros in one weight [rows, columns]; None where only a total over several linears is fixed."""
        groups = self.groups(rows, columns)
        return None if groups is None else rows * columns // groups[0] * groups[1]


@dataclass(frozen=True)
class Unstructured(_Pattern):
    """Zeros anywhere within a group.

    Attributes:
        sparsity: fraction of zeros, in [0, 1]; 1 where all of a difference is dropped.
        group: what competes for the budget: each output `row`, the whole `layer`, or `joint`, all linears that one
            recipe rule names in one block.
    """

    sparsity: float
    group: Group = "row"

    def __post_init__(self) -> None:
        if not 0.0 <= self.sparsity <= 1.0:
            raise ValueError(f"sparsity is the fraction of zeros and lies in [0, 1], got {self.sparsity}")

    @property
    def joint(self) -> bool:
        return self.group == "joint"

    def groups(self, rows: int, columns: int) -> tuple[int, int] | None:
        weights = columns if self.group == "row" else rows * columns
        return None if self.joint else (weights, count_dropped(self.sparsity, weights))

    def at(self, sparsity: float) -> Unstructured:
        """Return the pattern at another sparsity."""
        return Unstructured(sparsity, self.group)

    def __str__(self) -> str:
        return f"{100 * self.sparsity:.6g}% {self.group}"


@dataclass(frozen=True)
class NM(_Pattern):
    """N:M sparsity: of every `of` consecutive input features, `keep` are kept.

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

    def groups(self, _rows: int, columns: int) -> tuple[int, int]:
        """Return M, and how many of so many weights are dropped; ValueError where M does not divide the columns."""
        if columns % self.of:
            raise ValueError(f"in_features {columns} is not divisible by {self.of} (pattern {self})")
        return self.of, self.of - self.keep

    def at(self, sparsity: float) -> NM:
        """Return the pattern with this M and 1 <= N < M that is nearest to a sparsity."""
        return NM(self.of - min(max(round(sparsity * self.of), 1), self.of - 1), self.of)

    def __str__(self) -> str:
        return f"{self.keep}:{self.of}"


@dataclass(frozen=True)
class Structured(_Pattern):
    """Whole units of the architecture, all rows and columns that they own.

    Linears of the same units get the same pattern object, and have to be decided together.

    Attributes:
        unit: which units.
        sparsity: fraction of them that is removed, in [0, 1).
        units: those that this linear belongs to, which compete.
        multiple: of which the number that is kept is one; it divides the number of units.
    """

    unit: UnitKind
    sparsity: float
    units: Units = field(compare=False, repr=False)
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.units.count % self.multiple:
            raise ValueError(f"the {self.units} are no multiple of {self.multiple}")

    @property
    def dropped(self) -> int:
        """How many units are removed: of the multiples, the nearest to what the sparsity asks for."""
        asked = count_dropped(self.sparsity, self.units.count)
        return round(asked / self.multiple) * self.multiple

    @property
    def together(self) -> bool:
        return True

    def at(self, sparsity: float) -> Structured:
        """Return the pattern at the nearest sparsity that removes a multiple and keeps one; a single one is kept."""
        count, one = self.units.count, self.multiple
        return replace(self, sparsity=min(max(replace(self, sparsity=sparsity).dropped, one), count - one) / count)

    def __str__(self) -> str:
        return f"{self.units.count - self.dropped} of {self.units.count} {self.unit}"


@dataclass(frozen=True, eq=False)
class FixedMask(_Pattern):
    """A mask that is given: how a recipe hands one pruner's selection to another that only reconstructs.

    Attributes:
        keep: bool [out_features, in_features], True = keep.
        chosen_as: the pattern that it was selected for.
    """

    keep: Tensor
    chosen_as: RulePattern

    @property
    def sparsity(self) -> float:
        """Fraction of zeros that the selection was asked for."""
        return self.chosen_as.sparsity

    @property
    def asked(self) -> RulePattern:
        return self.chosen_as

    def __str__(self) -> str:
        return str(self.chosen_as)


RulePattern: TypeAlias = Unstructured | NM | Structured
"""What a rule of a recipe can ask of a linear."""

Pattern: TypeAlias = RulePattern | FixedMask


def competing(patterns: Mapping[str, Pattern]) -> list[str]:
    """Name the linears that share one budget of zeros, those with `joint` patterns."""
    return [name for name, p in patterns.items() if p.joint]


def of_units(patterns: Iterable[Pattern]) -> list[Structured]:
    """Return the patterns of units among some, one for each set of units that compete."""
    return list({id(p.units): p for p in patterns if isinstance(p, Structured)}.values())


def allocated_form(pattern: str) -> str:
    """Write a pattern without the sparsity that was chosen: `allocated row` of `50% row`, `allocated N:4` of `2:4`."""
    keep, colon, of = pattern.partition(":")
    return f"allocated N:{of}" if colon else f"allocated {keep.split()[-1]}"


def count_dropped(sparsity: float, weights: int) -> int:
    """Return how many of so many competing weights become zero.

    Every count comes from here: with the factors in another order a product that lies half-way is rounded otherwise.
    """
    return round(sparsity * weights)


def sparsity_of(keep: Tensor) -> float:
    """Count the fraction of zeros in a mask."""
    return 1.0 - torch.count_nonzero(keep).item() / keep.numel()


def keep_mask(scores: Tensor, pattern: Pattern, *, known_finite: bool = False) -> Tensor:
    """Turn the scores of one weight into its mask, bool [out_features, in_features], True = keep.

    Args:
        scores: [out_features, in_features]; the lowest are dropped.
        pattern: what to keep. `joint` over a single weight is the same as `layer`.
        known_finite: as for `drop_lowest`.

    Raises:
        ValueError: scores that are not finite, in_features not divisible by the pattern's `of`, or units, which own
            several linears: see `keep_masks`.
    """
    if isinstance(pattern, FixedMask):
        return pattern.keep
    if isinstance(pattern, Structured):
        raise ValueError(  # noqa: TRY004 - a pattern like others, asked for the wrong way
            f"{pattern.units} own several linears; take keep_masks, with the scores of all of them"
        )
    groups = pattern.groups(*scores.shape) or (scores.numel(), count_dropped(pattern.sparsity, scores.numel()))
    return drop_lowest(scores.reshape(-1, groups[0]), groups[1], known_finite=known_finite).view(scores.shape)


def keep_masks(
    scores: Mapping[str, Tensor], patterns: Mapping[str, Pattern], *, known_finite: bool = False
) -> dict[str, Tensor]:
    """Turn the scores of several weights into masks by linear name; those whose group is `joint` share one threshold.

    The scores of units are the sums over their weights.

    Args:
        scores: by linear name, each [out_features, in_features].
        patterns: by linear name; the joint ones must have the same sparsity, and of units all linears must be there.
        known_finite: as for `drop_lowest`.

    Raises:
        ValueError: as `keep_mask`, or joint patterns that differ in sparsity.
    """
    joint = competing(patterns)
    masks = {n: keep_mask(scores[n], p, known_finite=known_finite) for n, p in patterns.items() if not p.together}
    for pattern in of_units(patterns.values()):
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


def check_scores(scores: Tensor, name: str = "") -> None:
    """Refuse scores, or what they are made of, that are NaN or infinite; `name` is that of a linear."""
    if not all_finite(scores):
        told = "scores must be finite: there are NaN or infinite weights or statistics"
        raise ValueError(f"{name}: {told}" if name else told)


def drop_lowest(scores: Tensor, count: int, *, known_finite: bool = False) -> Tensor:
    """Mark all but the `count` lowest scores of each row.

    Args:
        scores: [groups, n], finite.
        count: how many of each row to drop, 0 <= count <= n.
        known_finite: skip the check that scores are finite, which waits for the device. The caller checks for NaN
            before or later, since counts are exact only without. Infinite scores are ordered like others then.

    Returns:
        bool [groups, n], True = keep, with exactly `count` False in each row; among equal scores the first is dropped.

    Raises:
        ValueError: when a score is not finite, since no order exists then.
    """
    if not known_finite:
        check_scores(scores)
    if count == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # A part at a time: what is needed on the way takes several times the memory of the scores.
    at_once = _PART if scores.device.type == "cpu" else _PART_OF_DEVICE
    parts = torch.split(scores, max(1, at_once // scores.shape[1]))
    drop = _drop_lowest_of_few if scores.shape[1] <= _FEW else _drop_lowest
    kept = [drop(part, count) for part in parts]
    return kept[0] if len(kept) == 1 else torch.cat(kept)


def _drop_lowest_of_few(scores: Tensor, count: int) -> Tensor:
    """Compare all with all: of four scores that is three times as fast as selecting."""
    if scores.device.type != "cpu":
        return _drop_lowest_of_few_on_device(scores, count)
    columns = scores.T.contiguous()  # [n, groups]
    rank = torch.zeros(columns.shape, dtype=torch.uint8)  # how many go before
    for i, column in enumerate(columns):
        rank[i + 1 :] += column <= columns[i + 1 :]
        rank[:i] += column < columns[:i]
    return (rank >= count).T.contiguous()


def _drop_lowest_of_few_on_device(scores: Tensor, count: int) -> Tensor:
    """Compare all with all in few kernels: an N:M sweep selects among as few scores as a weight has rows, and often."""
    first, second = scores[:, :, None], scores[:, None, :]
    n = scores.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1)  # of equals the first goes before
    before = torch.where(earlier, first <= second, first < second)  # [groups, n, n]
    return before.sum(dim=1) >= count


def _drop_lowest(scores: Tensor, count: int) -> Tensor:
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.float64):
        return _drop_lowest_on_device(scores, count)
    # The same selection as torch's, two to four times as fast, and masks are chosen often.
    parted = np.partition(scores.detach().numpy(), count - 1, axis=1)
    threshold = torch.from_numpy(np.ascontiguousarray(parted[:, count - 1 : count]))
    keep, tied, missing = _compared(scores, threshold, count)
    some = (_counts(tied) > missing).flatten().nonzero().flatten()  # groups that keep some of them
    keep[some] |= tied[some] & (tied[some].cumsum(dim=1) > missing[some])
    return keep


def _drop_lowest_on_device(scores: Tensor, count: int) -> Tensor:
    """Select without waiting for the device.

    On CUDA `topk` is a radix selection over all multiprocessors: five reads of float32 scores, 8 bits at a time, and 12
    bytes for each that it returns, so the shorter end is asked for. `kthvalue` reads 2 bits at a time, 17 times in all,
    a row of 10^8 scores on one multiprocessor.
    """
    above = scores.shape[1] - count + 1  # the count-th lowest is the lowest of so many highest
    if count < above:
        threshold = scores.topk(count, dim=1, largest=False, sorted=False).values.amax(dim=1, keepdim=True)
    else:
        threshold = scores.topk(above, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
    keep, tied, missing = _compared(scores, threshold, count)
    # Of all groups: to find out which of them split their ties would be to wait. Rows have less than 2^31 scores.
    return keep.logical_or_(tied & (tied.cumsum(dim=1, dtype=torch.int32) > missing))


def _compared(scores: Tensor, threshold: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is above and what is at each row's threshold, and how many of the latter to drop, [groups, 1]."""
    keep, tied = scores > threshold, scores == threshold
    return keep, tied, count - (scores.shape[1] - _counts(keep | tied))


def _counts(chosen: Tensor) -> Tensor:
    """Count what is True in each row, [groups, 1]; a sum along rows would make 8 bytes of each first."""
    return torch.count_nonzero(chosen).view(1, 1) if len(chosen) == 1 else chosen.sum(dim=1, keepdim=True)
