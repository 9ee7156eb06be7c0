"""The context that all stages of a run share."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch

from compressx.api.record import Arithmetic
from compressx.models.arithmetic import choose
from compressx.pipeline.log import RunLog
from compressx.planning.plan import Plan
from compressx.plugins.manager import Plugins
from compressx.prompts.prepare import Selecting
from compressx.recipe.schema import LoadedRecipe
from compressx.recipe.sources import ComputeDtype
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
        arithmetic: dtype of matrix products where blocks are run or trained; None before it is chosen, and where none
            are.
    """

    loaded: LoadedRecipe
    plugins: Plugins
    progress: Progress | None
    device: torch.device
    ranks: Ranks
    timing: Timing
    log: RunLog
    arithmetic: Arithmetic | None = None

    def with_arithmetic(self, planned: Plan, weights: torch.dtype, recorded: str | None = None) -> RunContext:
        """Return the context with the arithmetic of the run, which the recipe names from then on.

        Args:
            planned: the plan.
            weights: dtype of the model's weights.
            recorded: the dtype that an interrupted run took, for a recipe that leaves it open.
        """
        recipe = self.loaded.recipe
        if not planned.needs_calibration and recipe.finetune is None:
            return self
        training = recipe.reconstruct_block is not None or recipe.finetune is not None
        if recipe.compute_dtype == "auto" and recorded is not None:
            chosen = Arithmetic(recorded, "as in the interrupted run")
        else:
            chosen = choose(recipe.compute_dtype, weights, self.device, training=training)
        chosen = Arithmetic(**self.ranks.broadcast(dataclasses.asdict(chosen)))  # the processes' rates differ
        self.log.write(logging.INFO, f"compute_dtype: {chosen}")
        named = {"compute_dtype": chosen.dtype} if chosen.dtype in get_args(ComputeDtype) else {}
        loaded = dataclasses.replace(self.loaded, recipe=recipe.model_copy(update=named))
        return dataclasses.replace(self, loaded=loaded, arithmetic=chosen)

    @property
    def products(self) -> torch.dtype | None:
        """Dtype of matrix products where blocks are run or trained; None: that of the weights."""
        return None if self.arithmetic is None else getattr(torch, self.arithmetic.dtype)

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
        """Write what was measured of a model to the log."""
        self.log.figures(f"evaluate {name}", figures)
