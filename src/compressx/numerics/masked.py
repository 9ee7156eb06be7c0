"""Weights with zeros where a mask drops them."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes."""


def zeroed(x: Tensor, keep: Tensor) -> Tensor:
    """Return `torch.where(keep, x, 0.0)`, identical to the bit, by multiplying x's bits as integers.

    On a CPU, `where` and `masked_fill` branch at every entry and mispredict half of an irregular mask.

    Args:
        x: any shape and float dtype.
        keep: bool, of x's shape, on its device.
    """
    return (x.view(_BITS[x.element_size()]) * keep).view(x.dtype)
