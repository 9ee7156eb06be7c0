"""GemFilter (arXiv 2409.17422): the tokens that the last one attends to in an early block, summed over heads."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import AttentionRows, ModelFacts, TokenSelectorSpec, hookimpl
from compressx.numerics.tokens import all_heads_of, highest, pooled

POOL = 5
"""Neighbours that a token's score is the mean of, as published."""


class GemFilterOptions(BaseModel):
    """The published method has one block per model."""

    model_config = ConfigDict(extra="forbid")

    block: int | Literal["auto"] = Field("auto", description="index of the block; auto: chosen on synthetic prompts")


class GemFilter:
    """Sums the last query's scores over heads, before the softmax, as published."""

    def __init__(self, options: GemFilterOptions) -> None:
        self.block = options.block

    def observe(self, facts: ModelFacts) -> AttentionRows:
        """Ask for one block's scores of the last token."""
        return all_heads_of(facts, self.block, self._scores)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Keep the highest pooled sums (Algorithm 1 of the paper), in the prompt's order."""
        return highest(self._scores(scores[0]), keep)

    def _scores(self, scores: Tensor) -> Tensor:
        return pooled(scores[:, -1].sum(0), POOL)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `gemfilter`."""
    return [
        TokenSelectorSpec(
            name="gemfilter",
            summary="what the last token attends to in an early block, summed over heads (arXiv 2409.17422)",
            options=GemFilterOptions,
            build=GemFilter,
            needles=lambda options: 1 if options.block == "auto" else 0,
        )
    ]
