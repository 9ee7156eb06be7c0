"""Whether all entries of a tensor are numbers, at the price of one sum."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(x: Tensor) -> bool:
    """Say whether no entry is NaN or infinite.

    A sum of finite entries may overflow and one with a NaN or an infinity is never finite, so that only a sum which is
    not finite needs a second look.
    """
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())
