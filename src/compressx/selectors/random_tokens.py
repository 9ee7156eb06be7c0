"""Tokens at random, a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from compressx import AttentionRows, ModelFacts, NoOptions, TokenSelectorSpec, hookimpl


class Random:
    """Keeps what a draw without replacement says; it depends on the prompt's length only."""

    def observe(self, facts: ModelFacts) -> AttentionRows:  # noqa: ARG002 - the same for all models
        """Ask for no scores."""
        return AttentionRows()

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Draw positions."""
        drawn = torch.randperm(scores.shape[-1], generator=torch.Generator().manual_seed(0))
        return drawn[:keep].sort().values.to(scores.device)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `random`."""
    return [
        TokenSelectorSpec(
            name="random",
            summary="tokens at random, a baseline; reads no attention",
            options=NoOptions,
            build=lambda _: Random(),
        )
    ]
