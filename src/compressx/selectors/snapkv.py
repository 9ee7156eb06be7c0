"""SnapKV's score (arXiv 2404.14469) on one block: the attention of the last tokens, over all heads."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import AttentionRows, ModelFacts, TokenSelectorSpec, hookimpl
from compressx.numerics.tokens import all_heads_of, attention_mass, highest, pooled

QUERIES = 32
"""Last tokens of the prompt whose attention counts."""
POOL = 5
"""Neighbours that a token's score is the mean of."""


class SnapKVOptions(BaseModel):
    """SnapKV keeps other keys in each head and block; a prompt is shortened once, so here all heads vote."""

    model_config = ConfigDict(extra="forbid")

    block: int | Literal["auto"] = Field("auto", description="index of the block; auto: chosen on synthetic prompts")


class SnapKV:
    """Adds up the attention that the last tokens pay in all heads of one block."""

    def __init__(self, options: SnapKVOptions) -> None:
        self.block = options.block

    def observe(self, facts: ModelFacts) -> AttentionRows:
        """Ask for one block's scores of the last tokens."""
        return all_heads_of(facts, self.block, self._scores, QUERIES)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Keep the tokens with the most attention."""
        return highest(self._scores(scores[0]), keep)

    def _scores(self, scores: Tensor) -> Tensor:
        return pooled(attention_mass(scores), POOL)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `snapkv`."""
    return [
        TokenSelectorSpec(
            name="snapkv",
            summary="what the last tokens attend to in one block, over all heads (after arXiv 2404.14469)",
            options=SnapKVOptions,
            build=SnapKV,
            needles=lambda options: QUERIES if options.block == "auto" else 0,
        )
    ]
