"""What selectors share that score tokens by the attention of one block, or by no attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import AttentionRows, ModelFacts, NoOptions, TokenSelectorSpec
from compressx.numerics.tokens import all_heads_of, highest


class BlockOptions(BaseModel):
    """Which block."""

    model_config = ConfigDict(extra="forbid")

    block: int | Literal["auto"] = Field("auto", description="index of the block; auto: chosen on synthetic prompts")


@dataclass(frozen=True)
class OneBlock:
    """Keeps the tokens with the highest scores in one block.

    Attributes:
        block: its index, or `auto`.
        queries: how many of the prompt's last tokens are queries.
        score: from attention scores [heads, queries, n] to scores of tokens [n].
    """

    block: int | Literal["auto"]
    queries: int
    score: Callable[[Tensor], Tensor]

    def observe(self, facts: ModelFacts) -> AttentionRows:
        """Ask for all heads of the block."""
        return all_heads_of(facts, self.block, self.score, self.queries)

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Keep the highest scores, in the prompt's order."""
        return highest(self.score(scores[0]), keep)


def by_one_block(name: str, summary: str, queries: int, score: Callable[[Tensor], Tensor]) -> list[TokenSelectorSpec]:
    """Offer a selector by the scores of one block; arguments as for `OneBlock`."""
    needles = lambda options: queries if options.block == "auto" else 0  # noqa: E731
    build = lambda options: OneBlock(options.block, queries, score)  # noqa: E731
    return [TokenSelectorSpec(name, summary, BlockOptions, build, needles)]


@dataclass(frozen=True)
class WithoutScores:
    """Keeps tokens by their positions alone.

    Attributes:
        choose: from the number of tokens, and of those to keep, to positions, int64 [keep], ascending.
    """

    choose: Callable[[int, int], Tensor]

    def observe(self, facts: ModelFacts) -> AttentionRows:  # noqa: ARG002 - the same for all models
        """Ask for no scores."""
        return AttentionRows()

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Choose positions."""
        return self.choose(scores.shape[-1], keep).to(scores.device)


def by_position(name: str, summary: str, choose: Callable[[int, int], Tensor]) -> list[TokenSelectorSpec]:
    """Offer a selector that reads no attention."""
    return [TokenSelectorSpec(name, summary, NoOptions, lambda _: WithoutScores(choose))]
