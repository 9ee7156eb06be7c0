"""StreamingLLM (arXiv 2309.17453): the last tokens of a prompt; `protect.first` keeps its first ones."""

from __future__ import annotations

import torch

from compressx import TokenSelectorSpec, hookimpl
from compressx.selectors.one_block import by_position


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `recent`."""
    summary = "the last tokens; reads no attention (arXiv 2309.17453)"
    return by_position("recent", summary, lambda n, keep: torch.arange(n - keep, n))
