"""Weights with zeros where a mask drops them, and where masks keep others than their pattern says."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes."""


def zeroed(x: Tensor, keep: Tensor) -> Tensor:
    """Return `torch.where(keep, x, 0.0)`, identical to the bit, by multiplying x's bits as integers.

    On a CPU, `where` and `masked_fill` branch at every entry and mispredict half of an irregular mask.
    """
    return (x.view(_BITS[x.element_size()]) * keep).view(x.dtype)


def count_in_groups(keep: Tensor, of: int) -> Tensor:
    """Count what each `of` consecutive entries of a mask [out_features, in_features] keep, integers [groups].

    A product adds eight bytes or four: torch's sum over a short dimension takes three times as long, or thirty.
    """
    flat = (keep.clone() if keep.storage_offset() % 8 else keep).reshape(-1).view(torch.uint8)
    wide, dtype = next((x for x in ((8, torch.int64), (4, torch.int32)) if of % x[0] == 0), (0, torch.uint8))
    if not wide:
        return flat.view(-1, of).sum(dim=1, dtype=torch.int32)
    counts = flat.view(dtype) * int.from_bytes(b"\1" * wide, "little") >> 8 * (wide - 1)
    return counts if of == wide else counts.view(-1, of // wide).sum(dim=1)


def misplaced_groups(keep: Tensor, of: int, kept: int) -> str:
    """Say which groups of `of` input features of a mask keep another number than `kept`; empty if none does."""
    if keep.shape[1] % of:
        return f"{keep.shape[1]} input features are no multiple of {of}"
    counts = count_in_groups(keep, of)
    wrong = (counts != kept).nonzero().flatten()
    if not len(wrong):
        return ""
    row, column = divmod(int(wrong[0]) * of, keep.shape[1])
    columns = "" if of == keep.shape[1] else f", columns {column} to {column + of - 1}"
    return (
        f"{kept} of {of} input features are kept, but {len(wrong)} of {len(counts)} groups keep others: the first, "
        f"row {row}{columns}, keeps {int(counts[wrong[0]])}; groups lie along in_features, the last dimension of masks"
    )


def pattern_mismatch(keep: Tensor, pattern: str) -> str:
    """Say where a mask is not the N:M that `pattern`, as a masks file has it, says; empty if it is, or is none."""
    named = re.fullmatch(r"([0-9]{1,9}):([1-9][0-9]{0,8})", pattern)
    return "" if named is None else misplaced_groups(keep, int(named[2]), int(named[1]))
