"""SnapKV's score (arXiv 2404.14469) on one block: the attention of the last tokens, over all heads.

SnapKV keeps other keys in each head and block; a prompt is shortened once, so here all heads vote.
"""

from __future__ import annotations

from torch import Tensor

from compressx import TokenSelectorSpec, hookimpl
from compressx.numerics.tokens import attention_mass, pooled
from compressx.selectors.one_block import by_one_block

QUERIES = 32
"""Last tokens of the prompt whose attention counts."""
POOL = 5
"""Neighbours that a token's score is the mean of."""


def _score(scores: Tensor) -> Tensor:
    """Average the attention that the last tokens pay in all heads."""
    return pooled(attention_mass(scores), POOL)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `snapkv`."""
    summary = "what the last tokens attend to in one block, over all heads (after arXiv 2404.14469)"
    return by_one_block("snapkv", summary, QUERIES, _score)
