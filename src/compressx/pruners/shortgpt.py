"""ShortGPT (arXiv 2403.03853): drop the decoder blocks that turn the hidden states least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from compressx import Block, NoOptions, PrunerSpec, hookimpl


@dataclass
class BlockInfluence:
    """Sum over tokens of the cosine between a block's input and its output (equation 1 of the paper).

    Attributes:
        cosines: their sum, float64 [].
        count: of tokens, int64 [].
    """

    cosines: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def update(self, before: Tensor, after: Tensor) -> None:
        """Add a batch of hidden states before and after the block, both [batch, tokens, hidden_size]."""
        cosine = torch.cosine_similarity(before.float(), after.float(), dim=-1)  # [batch, tokens]
        self.cosines = self.cosines.to(cosine.device) + cosine.double().sum()
        self.count = self.count.to(cosine.device) + cosine.numel()

    def tensors(self) -> Mapping[str, tuple[Tensor, Literal["sum"]]]:
        """Return the sum of the cosines and the number of tokens."""
        return {"cosines": (self.cosines, "sum"), "count": (self.count, "sum")}


class ShortGPT:
    """Scores a block by its influence: 1 - the mean cosine of its input and its output."""

    def observe_block(self, block: Block) -> BlockInfluence:  # noqa: ARG002 - the protocol
        """Ask for cosines."""
        return BlockInfluence()

    def score_block(self, block: Block, statistic: BlockInfluence) -> float:  # noqa: ARG002 - the protocol
        """Return the block's influence, in [0, 2]."""
        return float(1 - statistic.cosines / statistic.count)


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `shortgpt`."""
    return [
        PrunerSpec(
            name="shortgpt",
            summary="drops the blocks that turn the hidden states least (arXiv 2403.03853)",
            options=NoOptions,
            build=lambda _: ShortGPT(),
            groups=(),
            nm=False,
            units=("blocks",),
        )
    ]
