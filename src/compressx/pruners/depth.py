"""Which decoder blocks go: by trial, or by a score of each block.

`depth` drops one block after the other, each time the one without which the predictions diverge least. `divergence` has
the same measure to second order (`blocks.fisher`), of each block alone; `shortgpt` (arXiv 2403.03853) looks at the
directions of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        description="solve for the last linear before each gap again, so that it adds what the dropped blocks added",
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


def influence(before: Tensor, after: Tensor) -> Tensor:
    """Return 1 - the cosine of a block's input and its output, [batch, tokens] (equation 1 of ShortGPT)."""
    return 1 - torch.cosine_similarity(before.float(), after.float(), dim=-1).double()


def divergence(before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
    """Return the divergence of the predictions without a block, to second order, in nats [batch, tokens]."""
    return ((before.float() - after.float()) * gradient.float()).sum(dim=-1).square().double() / 2


@dataclass
class TokenMean:
    """The mean over tokens of a figure.

    Attributes:
        figure: from hidden states before and after a block, [batch, tokens, hidden_size], to one for each token.
        total: the sum over tokens, float64 [].
        count: of tokens, int64 [].
    """

    figure: Callable[..., Tensor]
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def update(self, *states: Tensor) -> None:
        """Add a batch."""
        each = self.figure(*states)
        self.total = self.total.to(each.device) + each.sum()
        self.count = self.count.to(each.device) + each.numel()

    def tensors(self) -> Mapping[str, tuple[Tensor, Literal["sum"]]]:
        """Return the sum and the number of tokens."""
        return {"total": (self.total, "sum"), "count": (self.count, "sum")}


@dataclass
class BlockScores:
    """Scores a block by the mean over tokens of a figure."""

    figure: Callable[..., Tensor]
    reads_gradients: bool = False

    def observe_block(self, block: Block) -> TokenMean:  # noqa: ARG002 - the protocol
        """Ask for the hidden states before and after it."""
        return TokenMean(self.figure)

    def score_block(self, block: Block, statistic: TokenMean) -> float:  # noqa: ARG002 - the protocol
        """Return the mean."""
        return float(statistic.total / statistic.count)


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `depth`, `divergence` and `shortgpt`."""
    return [
        PrunerSpec(name, summary, options, build, groups=(), nm=False, units=("blocks",))
        for name, summary, options, build in (
            ("depth", "drops blocks by trial, those without which the predictions change least", Options, Depth),
            ("divergence", "drops blocks, or reverts them to a base, where that changes the predictions least",
             NoOptions, lambda _: BlockScores(divergence, reads_gradients=True)),
            ("shortgpt", "drops the blocks that turn the hidden states least (arXiv 2403.03853)",
             NoOptions, lambda _: BlockScores(influence)),
        )
    ]  # fmt: skip
