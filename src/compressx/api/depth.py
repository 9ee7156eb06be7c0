"""The contract of pruners that score whole decoder blocks; the host drops those of the lowest scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from compressx.api.pruner import Block, Reduction


class StreamStatistic(Protocol):
    """A running summary of what a block changes in the hidden states that pass through it."""

    def update(self, before: Tensor, after: Tensor) -> None:
        """Take in one batch; both tensors are only to be read.

        Args:
            before: the block's input, [batch, tokens, hidden_size], in the model's dtype.
            after: its output, likewise.
        """

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """Return the accumulators themselves, each with its reduction across processes: `sum` or `max`."""


@runtime_checkable
class DepthPruner(Protocol):
    """Scores decoder blocks, for rules with `pattern: blocks`.

    The host runs the dense model on the calibration text, one block after the other, fills a statistic of each block
    that may go, and drops as many blocks as the recipe asks for, those of the lowest scores; of equal ones the first.
    """

    def observe_block(self, block: Block) -> StreamStatistic:
        """Return a fresh statistic for a block."""

    def score_block(self, block: Block, statistic: Any, /) -> float:
        """Return how much the model would lose without a block, in any unit.

        Args:
            block: the block with its dense weights.
            statistic: what `observe_block` returned for it, filled.
        """
