"""Which decoder blocks go: by trial, or by a score of each block.

`depth` drops one block after the other, each time the one without which the predictions diverge least. `divergence` has
the same measure to second order, of each block alone; `shortgpt` (arXiv 2403.03853) looks at the directions of the
hidden states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import BaseModel, Field, StrictBool, StrictInt
from torch import Tensor

from compressx import Block, Divergences, NoOptions, PrunerSpec, hookimpl

_WIDTH = 8
"""Blocks tried beside others that go, those that cost least when last tried. What a block costs changes slowly."""


class Options(BaseModel):
    """The options of `depth`."""

    windows: StrictInt = Field(8, ge=1, description="calibration windows that trials run on, the first ones")
    solve: StrictBool = Field(
        True,
        description="solve the down projection before blocks that go anew, so that it adds what they would have added",
    )


class Depth:
    """Drops one block after the other, each time the one without which the predictions diverge least."""

    def __init__(self, options: Options) -> None:
        self.windows, self.solves = options.windows, options.solve

    def choose(self, blocks: Sequence[str], count: int, divergences: Divergences) -> list[str]:
        """Return blocks in the order in which they go."""
        gone: list[str] = []
        costs = dict.fromkeys(blocks, 0.0)  # by how much the divergence grew when each was last tried beside others
        while len(gone) < count:
            left = sorted((fqn for fqn in blocks if fqn not in gone), key=lambda fqn: costs[fqn])
            some = left[:_WIDTH] if gone else left
            before, *found = divergences([gone, *([*gone, fqn] for fqn in some)])
            costs |= {fqn: x - before for fqn, x in zip(some, found, strict=True)}
            gone.append(min(zip(found, some, strict=True))[1])
        return gone


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
    """Offer `depth`, `divergence` and `shortgpt`."""
    return [
        PrunerSpec(name, summary, options, build, groups=(), nm=False, units=("blocks",))
        for name, summary, options, build in (
            ("depth", "drops blocks by trial, those without which the predictions change least", Options, Depth),
            ("divergence", "drops blocks, or reverts them to a base, where that changes the predictions least",
             NoOptions, lambda _: Divergence()),
            ("shortgpt", "drops the blocks that turn the hidden states least (arXiv 2403.03853)",
             NoOptions, lambda _: ShortGPT()),
        )
    ]  # fmt: skip
