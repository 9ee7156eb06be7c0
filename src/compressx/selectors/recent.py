"""StreamingLLM (arXiv 2309.17453): the last tokens of a prompt; `protect.first` keeps its first ones."""

from __future__ import annotations

import torch
from torch import Tensor

from compressx import AttentionRows, ModelFacts, NoOptions, TokenSelectorSpec, hookimpl


class Recent:
    """Keeps what stands last."""

    def observe(self, facts: ModelFacts) -> AttentionRows:  # noqa: ARG002 - the same for all models
        """Ask for no scores."""
        return AttentionRows()

    def select(self, scores: Tensor, keep: int) -> Tensor:
        """Keep the last tokens."""
        n = scores.shape[-1]
        return torch.arange(n - keep, n, device=scores.device)


@hookimpl
def compressx_token_selectors() -> list[TokenSelectorSpec]:
    """Offer `recent`."""
    return [
        TokenSelectorSpec(
            name="recent",
            summary="the last tokens; reads no attention (arXiv 2309.17453)",
            options=NoOptions,
            build=lambda _: Recent(),
        )
    ]
