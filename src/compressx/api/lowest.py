"""The lowest scores of each group, exactly so many, on any device.

Most of the time of a score-based pruner goes here.
"""

from __future__ import annotations

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
