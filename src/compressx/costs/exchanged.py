"""The bytes that the processes of a run hand to one another, counted from the shapes of what they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from compressx.api.depth import DepthPruner
from compressx.api.pruner import Block
from compressx.api.work import Windows
from compressx.costs.block import BlockCost
from compressx.costs.gathered import Filled, Gathered, Tensors
from compressx.models.architecture import Architecture
from compressx.recipe.schema import ReconstructBlock
from compressx.training.trainable import small_parameters

_SUM = 8
"""Bytes of a number that is summed: processes add in float64."""


@dataclass
class Exchanged:
    """What is summed or broadcast, in bytes, every tensor once: no process hands over or receives more of it.

    Messages of some kilobytes a block, figures for the report and text that the model generates are left out.

    Attributes:
        whole: in the whole run, by what it is: `statistics`, `states`, `masks`, `weights`, `gradients`.
        block: the same of the decoder block that takes the most.
    """

    whole: dict[str, float] = field(default_factory=dict)
    block: dict[str, float] = field(default_factory=dict)

    def add(self, parts: Mapping[str, float], *, of_block: bool = False) -> None:
        """Add what takes place once: of a block as it is pruned, or elsewhere."""
        for name, size in parts.items():
            self.whole[name] = self.whole.get(name, 0.0) + size
        if of_block and sum(parts.values()) > sum(self.block.values()):
            self.block = dict(parts)


def of_decisions(cost: BlockCost) -> dict[str, float]:
    """Count what the decisions of a block take: of each linear the mask, a byte for each weight, and new weights."""
    return {
        "masks": float(sum(task.weights for task in cost.tasks)),
        "weights": float(sum(task.returned for task in cost.tasks)),
    }


class OfStatistics:
    """Counts what statistics take.

    Args:
        shares: calibration windows of each process.
        text: those of the first.
        unknown: filled with what cannot be told, in words.
    """

    def __init__(self, shares: Sequence[int], text: Windows, unknown: dict[str, None]) -> None:
        self.shares, self.text, self.unknown = shares, text, unknown
        self.filled = Filled()

    def __call__(self, block: Block, gathered: Iterable[Gathered]) -> dict[str, float]:
        """Return bytes by what they are: sums and maxima are `statistics`, inputs to concatenate are `states`."""
        found = {"statistics": 0.0, "states": 0.0}
        for shared in gathered:
            placed = zip(self.shares, accumulate(self.shares, initial=0), strict=False)
            parts = [self.filled(shared, block, replace(self.text, count=n), before) for n, before in placed]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                self.unknown[f"what processes exchange of {type(shared.statistic).__name__}"] = None
                continue
            for name, size in _sizes(known).items():
                found[name] += size
        return found


def _sizes(parts: Sequence[Tensors]) -> dict[str, float]:
    """Return the bytes of statistics of which each process has a part."""
    found = {"statistics": 0.0, "states": 0.0}
    for name, (tensor, reduction) in parts[0].items():
        if reduction == "cat":
            found["states"] += sum(part[name][0].nbytes for part in parts)
        else:
            found["statistics"] += tensor.numel() * (_SUM if reduction == "sum" else tensor.element_size())
    return found


def of_scores(pruner: DepthPruner, blocks: Iterable[Block]) -> dict[str, float]:
    """Count what the scores of whole blocks take."""
    size = 0.0
    for block in blocks:
        with torch.device("meta"):
            tensors = pruner.observe_block(block).tensors()
        size += _sizes([tensors])["statistics"]
    return {"statistics": size}


def of_sensitivities(found: Architecture, names: Iterable[str], width: int) -> dict[str, float]:
    """Count what mean squared gradients take, of linears' outputs and of every block's channels."""
    numbers = sum(found.linears[name].out_features for name in names) + width * len(found.blocks)
    return {"gradients": float(_SUM * numbers)}


def of_training(block: Block, masked: Iterable[str], settings: ReconstructBlock, steps: int) -> dict[str, float]:
    """Count the gradients of a block that is trained: float32, summed at every step."""
    linears = [block.linears[name] for name in masked]
    trained = [getattr(x.module, x.parameter) for x in linears]
    trained += small_parameters(block.module, set(), norms=settings.norms, biases=settings.biases)
    return {"gradients": 4.0 * steps * sum({id(p): p.numel() for p in trained}.values())}


def windows_of(processes: int, samples: int) -> list[int]:
    """Return how many windows each process has of so many, the first ones no fewer than the others."""
    return [samples // processes + (rank < samples % processes) for rank in range(processes)]
