"""What a run was asked for, which all its stages need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from compressx.plugins.manager import Plugins
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.ranks import Ranks
from compressx.runtime.timing import Timing

Stage: TypeAlias = Literal[
    "load", "calibrate", "evaluate", "evaluate dense", "allocate", "prune", "evaluate pruned", "finetune", "save",
    "evaluate finetuned",
]  # fmt: skip
Progress: TypeAlias = Callable[[Stage, int, int, str], None]
"""Told the stage, how much of it is done, how much there is, and what else there is to say: the loss, or nothing."""


@dataclass(frozen=True)
class RunContext:
    """A run's recipe and surroundings.

    Attributes:
        loaded: the recipe.
        plugins: what it can name.
        progress: who is told how far the run has got; None on all processes but the first.
        device: where the model runs.
        ranks: the processes.
        timing: of the stages.
    """

    loaded: LoadedRecipe
    plugins: Plugins
    progress: Progress | None
    device: torch.device
    ranks: Ranks
    timing: Timing = field(default_factory=Timing)

    def tell(self, stage: Stage, done: int, total: int, note: str = "") -> None:
        """Say how far a stage has got."""
        if self.progress is not None:
            self.progress(stage, done, total, note)
