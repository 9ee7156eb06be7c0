"""The context that all stages of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from compressx.pipeline.log import RunLog
from compressx.pipeline.tracking import Tracking
from compressx.plugins.manager import Plugins
from compressx.prompts.prepare import Selecting
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.ranks import Ranks
from compressx.runtime.timing import Timing

Stage: TypeAlias = Literal[
    "load", "calibrate", "evaluate dense", "allocate", "prune", "evaluate pruned", "finetune", "save",
    "evaluate finetuned", "evaluate",
]  # fmt: skip
"""Also the names under `seconds` in the report; the last is that of `compressx eval`."""
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
        log: the run's.
        tracking: the run's trackers.
    """

    loaded: LoadedRecipe
    plugins: Plugins
    progress: Progress | None
    device: torch.device
    ranks: Ranks
    timing: Timing
    log: RunLog
    tracking: Tracking

    @property
    def selecting(self) -> Selecting | None:
        """How prompts are shortened, if the recipe does."""
        settings = self.loaded.recipe.select_tokens
        return None if settings is None else Selecting(settings, self.plugins)

    def report_progress(self, stage: Stage, done: int, total: int, note: str = "") -> None:
        """Say how far a stage is; another stage than before begins with that, on the clock and in the log, too."""
        self.timing.enter(stage)
        if self.progress is not None:
            self.progress(stage, done, total, note)
        self.log.step(stage, done, total, note)

    def report_figures(self, name: str, figures: Mapping[str, Any]) -> None:
        """Write what was measured of a model to the log and to the trackers."""
        self.log.figures(f"evaluate {name}", figures)
        self.tracking.figures(name, figures)
