"""DARE (arXiv 2311.03099): drop weights at random, and rescale the others, so that the expected weight stays the same.

It is for what fine-tuning changed in a model; of whole weights no model survives it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field

from compressx import Block, Pattern, PruneResult, PrunerSpec, Statistic, hookimpl, keep_masks


class DareOptions(BaseModel):
    """What is drawn."""

    model_config = ConfigDict(extra="forbid")

    seed: int = Field(0, ge=0, lt=2**63, description="seed of the draw; each linear has its own")


class Dare:
    """Draws a mask for each linear; with a share p dropped, the others are divided by 1 - p."""

    def __init__(self, options: DareOptions) -> None:
        self.seed = options.seed

    def observe(self, block: Block, name: str) -> None:
        """Ask for nothing."""

    def prune(
        self,
        block: Block,
        patterns: Mapping[str, Pattern],
        stats: Mapping[str, Statistic],  # noqa: ARG002 - the protocol's
    ) -> dict[str, PruneResult]:
        """Draw. Every weight of a linear is kept with the same probability, the share that its pattern keeps."""
        results = {}
        for name, pattern in patterns.items():
            weight = block.linears[name].weight
            seed = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8], "little") >> 1
            drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(seed))  # the same on each device
            keep = keep_masks({name: drawn.to(weight.device)}, {name: pattern})[name]
            results[name] = PruneResult(keep, weight.float() * (keep.numel() / keep.sum().clamp_min(1)))
        return results


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `dare`."""
    summary = "drops what fine-tuning changed at random and rescales the others (arXiv 2311.03099)"
    return [PrunerSpec("dare", summary, DareOptions, Dare, ("layer", "row"), separable=True)]
