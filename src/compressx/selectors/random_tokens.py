"""Tokens at random, a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from compressx import TokenSelectorSpec, hookimpl
from compressx.selectors.one_block import by_position


def _drawn(n: int, keep: int) -> Tensor:
    """Draw without replacement; the draw depends on the prompt's length only."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:keep].sort().values


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `random`."""
    return by_position("random", "tokens at random, a baseline; reads no attention", _drawn)
