"""A head that looks up what a question asks for, chosen once for a model on synthetic prompts.

Such heads are known (arXiv 2404.15574, 2410.10819) and found in blocks well before those where the sum over all heads
finds the answer, so fewer blocks have to read the whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from compressx import AttentionRows, ModelFacts, TokenSelectorSpec, hookimpl
from compressx.numerics.tokens import attention_mass, first_good_block, highest, needles_kept, pooled
from compressx.selectors.one_block import BlockOptions

QUERIES = 16
"""Last tokens of the prompt whose attention counts: the question."""
POOL = 25
"""Neighbours that a token's score is the mean of; about a sentence."""


def _score(scores: Tensor) -> Tensor:
    """Add up the attention that the last tokens pay in some heads."""
    return pooled(attention_mass(scores), POOL)


@dataclass(frozen=True)
class RetrievalHeads:
    """Adds up the attention that a question's tokens pay in one head."""

    options: BlockOptions

    def observe(self, facts: ModelFacts) -> AttentionRows:
        """Choose the head of each block that keeps most of the needles, and the first block whose head is good."""
        blocks, block = facts.needles[0].blocks, self.options.block
        if block != "auto" and block not in blocks:
            return AttentionRows((block,))  # which the host refuses, with the nearest one that it can run

        def share(i: int, head: int) -> float:
            """Return the share of the needles that a head keeps, of the block at an index of the needles' scores."""
            return needles_kept(facts.needles, lambda needle: _score(needle.scores[i][[head]]))

        asked = [(i, b) for i, b in enumerate(blocks) if block in ("auto", b)]
        shares = {b: [share(i, head) for head in range(facts.heads)] for i, b in asked}
        first, reason = first_good_block(facts, {b: max(found) for b, found in shares.items()})
        head = shares[first].index(max(shares[first]))
        return AttentionRows((first,), (head,), QUERIES, f"head {head}: {reason}")

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Keep the tokens with the most attention."""
        return highest(_score(scores[0]), keep)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `retrieval-heads`."""
    return [
        TokenSelectorSpec(
            name="retrieval-heads",
            summary="what the question's tokens attend to in one head, chosen once on synthetic prompts",
            options=BlockOptions,
            build=RetrievalHeads,
            needles=lambda _: QUERIES,
        )
    ]
