"""The contract of statistics behind a router: those of the linears of a mixture's experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from compressx.api.pruner import Reduction


class RoutedStatistic(Protocol):
    """A `Statistic` of a fused expert's linear that is told the router's weights, too.

    Experts that no token reaches keep an empty one; for other statistics that is an error.

    Attributes:
        routed: True.
    """

    routed: bool

    def update(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Take in one batch.

        Args:
            x: [tokens, in_features], of the tokens that the router sends to the expert.
            weights: [tokens], by which the expert's output is multiplied before it is added to the others'.
        """

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """As `Statistic.tensors`."""
