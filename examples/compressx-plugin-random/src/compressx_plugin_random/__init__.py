"""Random pruning: scores drawn from a seed, so that every pattern and budget is met and nothing is measured."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from pydantic import BaseModel, Field

from compressx import Block, Pattern, PruneResult, PrunerSpec, Statistic, hookimpl, keep_masks


class Options(BaseModel):
    """What a recipe may say under `options`."""

    seed: int = Field(0, ge=0, lt=2**31, description="of the scores")


class RandomPruner:
    """Gives every weight a random score."""

    def __init__(self, options: Options) -> None:
        self.seed = options.seed

    def observe(self, block: Block, name: str) -> None:
        """Ask for nothing: a recipe of this pruner alone needs no calibration."""

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> Mapping[str, PruneResult]:
        """Draw scores from the seed and the linear's name, so that each linear's are its own wherever it is decided."""
        scores = {}
        for name in patterns:
            linear = block.linears[name]
            generator = torch.Generator().manual_seed(self.seed ^ zlib.crc32(name.encode()))
            drawn = torch.rand(linear.out_features, linear.in_features, generator=generator)
            scores[name] = drawn.to(linear.weight.device)
        return {name: PruneResult(keep) for name, keep in keep_masks(scores, patterns).items()}


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `random`."""
    return [PrunerSpec("random", "weights at random, a floor for every method", Options, RandomPruner, separable=True)]
