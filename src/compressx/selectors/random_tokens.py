"""Tokens at random, a baseline."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import AttentionRows, ModelFacts, TokenSelectorSpec, hookimpl


class RandomOptions(BaseModel):
    """The draw's seed."""

    model_config = ConfigDict(extra="forbid")

    seed: int = Field(0, ge=0, lt=2**63, description="of the draw, which depends on the prompt's length too")


class Random:
    """Keeps what a draw without replacement says."""

    def __init__(self, options: RandomOptions) -> None:
        self.seed = options.seed

    def observe(self, facts: ModelFacts) -> AttentionRows:  # noqa: ARG002 - the same for all models
        """Ask for no scores."""
        return AttentionRows()

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Draw places."""
        drawn = torch.randperm(scores.shape[-1], generator=torch.Generator().manual_seed(self.seed))
        return drawn[:keep].sort().values.to(scores.device)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `random`."""
    return [
        TokenSelectorSpec(
            name="random",
            summary="tokens at random, a baseline; reads no attention",
            options=RandomOptions,
            build=Random,
        )
    ]
