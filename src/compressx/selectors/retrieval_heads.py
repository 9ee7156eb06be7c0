"""A few heads that look up what a question asks for, chosen once for a model on synthetic prompts.

Such heads are known (arXiv 2404.15574, 2410.10819) and found in blocks well before those where the sum over all heads
finds the answer, so fewer blocks have to read the whole prompt.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import AttentionRows, ModelFacts, TokenSelectorSpec, hookimpl
from compressx.numerics.tokens import attention_mass, first_good_block, highest, needles_kept, pooled


class RetrievalHeadsOptions(BaseModel):
    """Which heads of which block, and which tokens ask."""

    model_config = ConfigDict(extra="forbid")

    block: int | Literal["auto"] = Field("auto", description="index of the block; auto: chosen on synthetic prompts")
    heads: int = Field(1, ge=1, description="number of heads; those that keep most of the synthetic prompts' answers")
    queries: int = Field(16, ge=1, description="last tokens of the prompt whose attention counts: the question")
    pool: int = Field(25, ge=1, description="neighbours that a token's score is the mean of; about a sentence")


class RetrievalHeads:
    """Adds up the attention that a question's tokens pay in a few heads of one block."""

    def __init__(self, options: RetrievalHeadsOptions) -> None:
        self.options = options

    def observe(self, facts: ModelFacts) -> AttentionRows:
        """Choose the heads of each block, and the first block whose heads are good enough."""
        blocks, block, count = facts.needles[0].blocks, self.options.block, min(self.options.heads, facts.heads)
        if block != "auto" and block not in blocks:
            return AttentionRows((block,))  # which the host refuses, with the nearest one that it can run
        chosen = {b: self._best_heads(facts, i)[:count] for i, b in enumerate(blocks) if block in ("auto", b)}
        shares = {b: self._kept(facts, blocks.index(b), heads) for b, heads in chosen.items()}
        first, reason = first_good_block(facts, shares)
        heads = tuple(sorted(chosen[first]))
        told = f"head{'s' if count > 1 else ''} {', '.join(map(str, heads))}: {reason}"
        return AttentionRows((first,), heads, self.options.queries, told)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Keep the tokens with the most attention."""
        return highest(self._scores(scores[0]), keep)

    def _scores(self, scores: Tensor) -> Tensor:
        return pooled(attention_mass(scores), self.options.pool)

    def _best_heads(self, facts: ModelFacts, block: int) -> list[int]:
        """Return the heads of a block, the one that alone keeps most of the needles first."""
        shares = [self._kept(facts, block, [head]) for head in range(facts.heads)]
        return sorted(range(facts.heads), key=lambda head: -shares[head])

    def _kept(self, facts: ModelFacts, block: int, heads: list[int]) -> float:
        return needles_kept(facts.needles, lambda needle: self._scores(needle.scores[block][heads]))


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `retrieval-heads`."""
    return [
        TokenSelectorSpec(
            name="retrieval-heads",
            summary="what the question's tokens attend to in a few heads, chosen once on synthetic prompts",
            options=RetrievalHeadsOptions,
            build=RetrievalHeads,
            needles=lambda options: options.queries,
        )
    ]
