"""Sparsity patterns, and the masks they make of scores.

A mask is bool with True = keep, and `sparsity` is the fraction of zeros (torch.ao multiplies weights by the mask).
Counts are exact: of `n` competing weights exactly `count_dropped(sparsity, n)` become zero, ties going to the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

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

NOT_FINITE = "scores must be finite: there are NaN or infinite weights or statistics"

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


@dataclass(frozen=True, eq=False)
class FixedMask:
    """A mask that is given: how a recipe hands one pruner's selection to another that only reconstructs.

    Attributes:
        keep: bool [out_features, in_features], True = keep.
        chosen_as: the pattern that it was selected for.
    """

    keep: Tensor
    chosen_as: Unstructured | NM

    @property
    def sparsity(self) -> float:
        """Fraction of zeros that the selection was asked for."""
        return self.chosen_as.sparsity

    def __str__(self) -> str:
        return str(self.chosen_as)


Pattern: TypeAlias = Unstructured | NM | FixedMask


def allocated_form(pattern: str) -> str:
    """Write a pattern without the sparsity that was chosen: `allocated row` of `50% row`, `allocated N:4` of `2:4`."""
    keep, colon, of = pattern.partition(":")
    return f"allocated N:{of}" if colon else f"allocated {keep.split()[-1]}"


def nearest(pattern: Unstructured | NM, sparsity: float) -> Unstructured | NM:
    """Return a pattern of the same kind at another sparsity; of an N:M one M stays, and 1 <= N < M is the nearest."""
    if isinstance(pattern, Unstructured):
        return Unstructured(sparsity, pattern.group)
    return NM(pattern.of - min(max(round(sparsity * pattern.of), 1), pattern.of - 1), pattern.of)


def count_dropped(sparsity: float, weights: int) -> int:
    """Return how many of so many competing weights become zero.

    Every count comes from here: with the factors in another order a product that lies half-way is rounded otherwise.
    """
    return round(sparsity * weights)


def zeros_in(pattern: Pattern, out_features: int, in_features: int) -> int | None:
    """Count the zeros that `pattern` puts into one weight; None for `joint`, where only the total is fixed."""
    if isinstance(pattern, FixedMask):
        return int(pattern.keep.numel() - pattern.keep.sum())
    if isinstance(pattern, NM):
        return out_features * (in_features // pattern.of) * (pattern.of - pattern.keep)
    if pattern.group == "row":
        return out_features * count_dropped(pattern.sparsity, in_features)
    if pattern.group == "layer":
        return count_dropped(pattern.sparsity, out_features * in_features)
    return None


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
    if not known_finite and not all_finite(scores):
        raise ValueError(NOT_FINITE)
    if count == 0:
        return torch.ones_like(scores, dtype=torch.bool)
    # A part at a time: what is needed on the way takes several times the memory of the scores.
    at_once = _PART if scores.device.type == "cpu" else _PART_OF_DEVICE
    parts = torch.split(scores, max(1, at_once // scores.shape[1]))
    drop = _drop_lowest_of_few if scores.shape[1] <= _FEW else _drop_lowest
    return torch.cat([drop(part, count) for part in parts])


def _drop_lowest_of_few(scores: Tensor, count: int) -> Tensor:
    """Compare all with all: of four scores that is three times as fast as selecting."""
    if scores.device.type != "cpu":
        return _drop_lowest_of_few_on_device(scores, count)
    columns = scores.T.contiguous()  # [n, groups]
    rank = torch.zeros(columns.shape, dtype=torch.uint8, device=scores.device)  # how many go before
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
    some = (tied.sum(dim=1, keepdim=True) > missing).flatten().nonzero().flatten()  # groups that keep some of them
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
    return keep, tied, count - (scores.shape[1] - (keep | tied).sum(dim=1, keepdim=True))


def keep_mask(scores: Tensor, pattern: Pattern, *, known_finite: bool = False) -> Tensor:
    """Turn the scores of one weight into its mask.

    Args:
        scores: [out_features, in_features]; the lowest are dropped.
        pattern: what to keep. `joint` over a single weight is the same as `layer`.
        known_finite: as for `drop_lowest`.

    Returns:
        bool [out_features, in_features], True = keep.

    Raises:
        ValueError: scores that are not finite, or in_features not divisible by the pattern's `of`.
    """
    rows, columns = scores.shape
    if isinstance(pattern, FixedMask):
        return pattern.keep
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

    Args:
        scores: by linear name, each [out_features, in_features].
        patterns: by linear name; the joint ones must have the same sparsity.
        known_finite: as for `drop_lowest`.

    Returns:
        By linear name, bool [out_features, in_features], True = keep.

    Raises:
        ValueError: as `keep_mask`, or joint patterns that differ in sparsity.
    """
    joint = [n for n, p in patterns.items() if isinstance(p, Unstructured) and p.group == "joint"]
    masks = {n: keep_mask(scores[n], patterns[n], known_finite=known_finite) for n in patterns if n not in joint}
    if joint:
        sparsities = {patterns[n].sparsity for n in joint}
        if len(sparsities) > 1:
            raise ValueError(f"linears that compete jointly need one sparsity, got {sorted(sparsities)}")
        flat = torch.cat([scores[n].reshape(-1) for n in joint])
        kept = drop_lowest(flat[None], count_dropped(sparsities.pop(), flat.numel()), known_finite=known_finite)[0]
        for name, part in zip(joint, torch.split(kept, [scores[n].numel() for n in joint]), strict=True):
            masks[name] = part.view(scores[name].shape)
    return {n: masks[n] for n in patterns}
