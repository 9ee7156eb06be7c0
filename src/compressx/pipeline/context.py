"""The context that all stages of a run share."""

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
"""Called with the stage, the steps done, the total, and a note such as the loss, or an empty string."""


@dataclass(frozen=True)
class RunContext:
    """A run's recipe and environment.

    Attributes:
        loaded: the recipe.
        plugins: the loaded plugins.
        progress: the progress callback; None on all processes but the first.
        device: where the model runs.
        ranks: the processes.
        timing: seconds of each stage.
    """

    loaded: LoadedRecipe
    plugins: Plugins
    progress: Progress | None
    device: torch.device
    ranks: Ranks
    timing: Timing = field(default_factory=Timing)

    def report_progress(self, stage: Stage, done: int, total: int, note: str = "") -> None:
        """Call the progress callback, if there is one."""
        if self.progress is not None:
            self.progress(stage, done, total, note)
