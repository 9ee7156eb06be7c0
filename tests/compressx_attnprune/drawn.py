"""Numbers that are drawn for tests: tensors, and tables of a rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rotary(tokens: int, rotary_dim: int, *, interleaved: bool = False, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of random angles, both partners of a pair having the same."""
    angles = normal(tokens, rotary_dim // 2, seed=11)
    both = angles.repeat_interleave(2, dim=-1) if interleaved else torch.cat([angles, angles], dim=-1)
    return scale * both.cos(), scale * both.sin()
