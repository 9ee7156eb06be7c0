"""REAP (arXiv 2510.13999): drop the experts that add least to the hidden states of the tokens sent to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor

from compressx import (
    Block,
    NoOptions,
    Pattern,
    PruneResult,
    PrunerSpec,
    Statistic,
    Structured,
    UnsupportedModelError,
    drop_lowest,
    hookimpl,
)

_OUTPUT = "down_proj"
"""The linear whose output is the expert's."""


@dataclass
class RoutedOutputs:
    """Sum over the tokens of an expert of the router's weight times the norm of the expert's output."""

    weight: Tensor = field(repr=False, compare=False)  # of the expert's last linear, [hidden_size, intermediate_size]
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64), compare=False)
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64), compare=False)
    routed: bool = field(default=True, init=False)

    def update(self, x: Tensor, weights: Tensor | None = None) -> None:
        """Add the tokens that are sent to the expert, [tokens, intermediate_size], with the router's weights."""
        if weights is None:
            raise TypeError("expected the router's weights of the tokens; this is a statistic of an expert's linear")
        output = x @ self.weight.T.to(x.dtype)  # of a narrow product where the block has narrow ones
        norms = torch.linalg.vector_norm(output.float(), dim=-1)  # [tokens]
        self.total = self.total.to(x.device) + (weights.float() * norms).double().sum()
        self.count = self.count.to(x.device) + len(x)

    def tensors(self) -> Mapping[str, tuple[Tensor, Literal["sum"]]]:
        return {"total": (self.total, "sum"), "count": (self.count, "sum")}

    @property
    def score(self) -> float:
        """The mean over the expert's tokens (equation 9 of the paper); 0 of an expert without any."""
        return float(self.total / self.count.clamp_min(1))


class Reap:
    """Scores an expert by the mean of the router's weight times the norm of its output, over its tokens."""

    def observe(self, block: Block, name: str) -> RoutedOutputs | None:
        linear = block.linears[name]
        return RoutedOutputs(linear.weight) if linear.parameter == _OUTPUT else None

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        results: dict[str, PruneResult] = {}
        for pattern in {id(p.units): p for p in patterns.values() if isinstance(p, Structured)}.values():
            scores = torch.zeros(pattern.units.count, dtype=torch.float64)
            for name, own in pattern.units.owners.items():
                if name in stats:
                    scores[int(own.unit[0])] = cast("RoutedOutputs", stats[name]).score
            keep = drop_lowest(scores[None], pattern.dropped)[0]
            shapes = {n: (block.linears[n].out_features, block.linears[n].in_features) for n in pattern.units.owners}
            device = block.linears[next(iter(shapes))].weight.device
            for name, mask in pattern.units.masks(keep, shapes).items():
                score = float(scores[int(pattern.units.owners[name].unit[0])])
                results[name] = PruneResult(mask.to(device), info={"importance": score})
        return results


def _check(block: Block, patterns: Mapping[str, Pattern], _options: object) -> None:
    """Refuse experts that are modules of their own: the router's weights are known of fused ones only."""
    for name in patterns:
        if block.linears[name].expert is None or not hasattr(block.linears[name].module, _OUTPUT):
            raise UnsupportedModelError(
                f"{name} is not a slice of fused experts with {_OUTPUT}, of which alone the router's weights are known"
            )


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `reap`."""
    summary = "drops the experts of the least router weight x ||output|| (arXiv 2510.13999)"
    return [PrunerSpec("reap", summary, NoOptions, lambda _: Reap(), (), nm=False, units=("experts",), check=_check)]
