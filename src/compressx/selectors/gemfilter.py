"""GemFilter (arXiv 2409.17422): the tokens that the last one attends to in an early block, summed over heads."""

from __future__ import annotations

from torch import Tensor

from compressx import TokenSelectorSpec, hookimpl
from compressx.numerics.tokens import pooled
from compressx.selectors.one_block import by_one_block

POOL = 5
"""Neighbours that a token's score is the mean of, as published."""


def _score(scores: Tensor) -> Tensor:
    """Sum the last query's scores over heads, before the softmax (Algorithm 1 of the paper)."""
    return pooled(scores[:, -1].sum(0), POOL)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `gemfilter`."""
    summary = "what the last token attends to in an early block, summed over heads (arXiv 2409.17422)"
    return by_one_block("gemfilter", summary, 1, _score)
