"""Drop the decoder blocks without which the model's predictions change least, or revert them to a base model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from compressx import Block, NoOptions, PrunerSpec, hookimpl


@dataclass
class BlockDivergence:
    """The divergence of the predictions without a block, to second order: `blocks.fisher.divergences` at each token.

    Attributes:
        total: the sum over tokens, in nats, float64 [].
        count: of tokens, int64 [].
    """

    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def update(self, before: Tensor, after: Tensor, gradient: Tensor | None = None) -> None:
        """Add a batch; all are [batch, tokens, hidden_size]."""
        assert gradient is not None  # noqa: S101 - the pruner reads them
        each = ((before.float() - after.float()) * gradient.float()).sum(dim=-1).square() / 2  # [batch, tokens]
        self.total = self.total.to(each.device) + each.double().sum()
        self.count = self.count.to(each.device) + each.numel()

    def tensors(self) -> Mapping[str, tuple[Tensor, Literal["sum"]]]:
        """Return the sum and the number of tokens."""
        return {"total": (self.total, "sum"), "count": (self.count, "sum")}


class Divergence:
    """Scores a block by the mean divergence of the predictions without it, in nats."""

    reads_gradients = True

    def observe_block(self, block: Block) -> BlockDivergence:  # noqa: ARG002 - the protocol
        """Ask for the changes of the hidden states, and gradients."""
        return BlockDivergence()

    def score_block(self, block: Block, statistic: BlockDivergence) -> float:  # noqa: ARG002 - the protocol
        """Return the mean over tokens."""
        return float(statistic.total / statistic.count)


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `divergence`."""
    return [
        PrunerSpec(
            name="divergence",
            summary="drops blocks, or reverts them to a base, where that changes the predictions least",
            options=NoOptions,
            build=lambda _: Divergence(),
            groups=(),
            nm=False,
            units=("blocks",),
        )
    ]
