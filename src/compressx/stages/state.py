"""What the stages of a run share, and what a stage is. `compressx.pipeline.stages.STAGES` is their order."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor

from compressx.api.exporter import ExporterSpec, PlannedModel
from compressx.api.record import Arithmetic, BlockReport, RunReport
from compressx.models.access import Access
from compressx.models.architecture import text_config
from compressx.models.blockwise import KeepStates, StateFiles, in_memory
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import dtype_of
from compressx.planning.plan import Plan
from compressx.plugins.kinds import EVALUATOR, EXPORTER
from compressx.plugins.manager import Plugins
from compressx.recipe.schema import LoadedRecipe, Recipe
from compressx.recipe.sources import Streaming
from compressx.recipe.validation import validate_options
from compressx.report.figures import Matrices
from compressx.report.section import Section
from compressx.runtime.cache import cached
from compressx.runtime.errors import Mistakes, blamed_on
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.timing import Timing
from compressx.stages.log import RunLog
from compressx.stages.store import Store

StageName: TypeAlias = Literal[
    "load", "calibrate", "evaluate dense", "allocate", "prune", "evaluate pruned", "finetune", "save",
    "evaluate finetuned", "evaluate",
]  # fmt: skip
"""Also the names under `seconds` in the report; the last is that of `compressx eval`."""
Progress: TypeAlias = Callable[[StageName, int, int, str], None]
"""Called with the stage, the steps done, the total, and a note such as the loss, or an empty string."""

_Value = TypeVar("_Value")


@dataclass(eq=False)
class RunState:
    """A run: its recipe and environment, what its checks found, and what its stages have done so far.

    Attributes:
        loaded: the recipe.
        plugins: the loaded plugins.
        device: where the model runs.
        ranks: the processes.
        log: the run's.
        timing: seconds of each stage.
        progress: the progress callback; None on all processes but the first.
        measured: whether fine-tuning that this machine's memory cannot hold is refused; not by `plan`.
        replace: whether the output may replace another recipe's finished run.
        checkpoint: where the weights are; None of a model that is in memory.
        skeleton: the transformers model without its weights, or the one in memory; None before it is found.
        tokenizer: the model's.
        plan: what becomes of every linear; sparsities and dropped blocks are filled in as they are chosen.
        open: returns the model with its weights; called when they are needed, at the latest before pruning.
        access: the model with its weights.
        base: the model that it was fine-tuned from, where the recipe prunes the difference.
        dense: opens the dense model, streamed if told so, or `auto`; `access` may be pruned by then.
        folder: the output folder that is filled; None of a run in memory.
        inputs: everything that decides the pruned blocks, by name, in JSON types; empty of a run in memory.
        store: where finished blocks are kept.
        calibration: token ids, int64 [sequences, tokens], or None.
        training: likewise, to fine-tune on.
        evaluators: those of the recipe, each an `evaluation.evaluators.ReadyEvaluator` with its text.
        arithmetic: dtype of matmuls where blocks are run or trained; None before it is chosen, and where none
            are.
        sensitivities: mean squared gradients of the dense model's loss, a `blocks.fisher.FisherDiagonal`.
        blocks: reports of the finished blocks.
        matrices: of the finished blocks, to be drawn.
        evaluation: figures of the dense, the pruned and the trained model, by name.
        results: what stages report of their features, by field of `RunReport`.
    """

    loaded: LoadedRecipe
    plugins: Plugins
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ranks: Ranks = ALONE
    log: RunLog = field(default_factory=lambda: RunLog(first=False))
    timing: Timing = field(default_factory=lambda: Timing("load"))
    progress: Progress | None = None
    measured: bool = True
    replace: bool = False
    checkpoint: Checkpoint | None = None
    skeleton: Any = None
    tokenizer: Any = None
    plan: Plan = field(init=False)
    open: Callable[[], Access] = field(init=False)
    dense: Callable[[Streaming], Access] = field(init=False)
    access: Access = field(init=False)
    base: Access | None = None
    folder: Path | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    store: Store = field(init=False)
    calibration: Tensor | None = None
    training: Tensor | None = None
    evaluators: tuple[Any, ...] = ()
    arithmetic: Arithmetic | None = None
    sensitivities: Any = None
    blocks: list[BlockReport] = field(default_factory=list)
    matrices: list[Matrices] = field(default_factory=list)
    evaluation: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        """The recipe's values."""
        return self.loaded.recipe

    def exporter(self, i: int) -> tuple[ExporterSpec, Any]:
        """Build the exporter of `export[i]`.

        Raises:
            RecipeError: no plugin offers it, or options that are not its own.
            PluginError: it cannot be built.
        """
        export, loaded = self.recipe.export[i], self.loaded
        with loaded.at("export", i):
            spec = self.plugins.find(EXPORTER, export.format)
        given = validate_options(spec.options, export.options, lambda *loc: loaded.where("export", i, "options", *loc))
        with loaded.at("export", i), blamed_on(f"build of exporter {spec.name!r} failed"):
            return spec, spec.build(given)

    @property
    def processes(self) -> int:
        """How many processes share the run."""
        return self.ranks.size

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.ranks.first

    def by_first(self, work: Callable[[], _Value], kind: Any = Any) -> _Value:
        """Return what `work` returns in the first process, which alone does it; the others are given it as a `kind`."""
        value = self.ranks.broadcast(work() if self.first else cast("_Value", None))
        return value if self.first else cast("_Value", TypeAdapter(kind).validate_python(value))

    @property
    def compared_with(self) -> Callable[[], Access] | None:
        """What opens the dense model where it is measured beside another one; None if no evaluator compares."""
        offered = self.plugins.offers[EVALUATOR.key]
        compares = any(offered[name].compares for name in self.recipe.evaluate or ())
        return (lambda: self.dense(self.recipe.model.streaming)) if compares else None

    @property
    def needs_dense(self) -> bool:
        """Whether the dense model is needed after it was pruned: to train towards, or to compare with."""
        return self.compared_with is not None or getattr(self.recipe.finetune, "teacher", None) == "dense"

    @property
    def planned_model(self) -> PlannedModel:
        """The dense model as exporters see it before its weights are read."""
        source = None if self.checkpoint is None else self.checkpoint.file
        return PlannedModel(self.skeleton, source, self.recipe.own_widths, self.tokenizer)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the weights are loaded in."""
        return self.skeleton.dtype if self.checkpoint is None else dtype_of(self.checkpoint, self.skeleton.config)

    @property
    def matmul_dtype(self) -> torch.dtype | None:
        """Dtype of matmuls where blocks are run or trained; None: that of the weights."""
        return None if self.arithmetic is None else getattr(torch, self.arithmetic.dtype)

    @property
    def calibrated(self) -> Access:
        """The model, with the blocks' matmuls in the dtype of the run's arithmetic."""
        return dataclasses.replace(self.access, matmul_dtype=self.matmul_dtype)  # type: ignore[type-var]

    @property
    def pruned_against(self) -> Access:
        """As `calibrated`, with the base: each linear's weight is then the difference from the base's."""
        return dataclasses.replace(self.calibrated, base=self.base)  # type: ignore[type-var]

    @property
    def batches(self) -> Sequence[Tensor]:
        """Calibration token ids of all processes, each [batch, tokens]; none without text."""
        return self._batches(self.calibration)

    @property
    def mine(self) -> Sequence[Tensor]:
        """This process's share of the calibration token ids, in batches."""
        return self._batches(None if self.calibration is None else self.ranks.share(self.calibration))

    def _batches(self, sequences: Tensor | None) -> Sequence[Tensor]:
        settings = self.recipe.calibration
        return () if settings is None or sequences is None else torch.split(sequences, settings.batch_size)

    def keep(self, name: str, sequences: int) -> KeepStates:
        """Choose where to keep hidden states of that many sequences."""
        return StateFiles(self.store.blocks / name) if self.in_files(self.hidden_bytes(sequences)) else in_memory

    def hidden_bytes(self, sequences: int) -> int:
        """Return the bytes of hidden states of that many calibration sequences between two blocks; 0 without text."""
        settings, width = self.recipe.calibration, text_config(self.skeleton).hidden_size
        return 0 if settings is None else sequences * settings.sequence_length * width * self.dtype.itemsize

    def in_files(self, size: int) -> bool:
        """Return whether hidden states of a size are kept in files: they exceed the recipe's limit."""
        limit = None if self.recipe.calibration is None else self.recipe.calibration.memory_limit
        return limit is not None and size > limit

    def cached(self, key: Mapping[str, Any], compute: Callable[[], _Value], folder: str, kind: Any) -> _Value:
        """Do as `runtime.cache.cached`, but for a model that only exists in memory.

        It may compute something else than its weights and config say.
        """
        return cached(key, compute, folder, kind) if self.checkpoint is not None else compute()

    def report_progress(self, stage: StageName, done: int, total: int, note: str = "") -> None:
        """Say how far a stage is; another stage than before begins with that, on the clock and in the log."""
        self.timing.enter(stage)
        if self.progress is not None:
            self.progress(stage, done, total, note)
        self.log.step(stage, done, total, note)

    def report_figures(self, name: str, figures: Mapping[str, Any]) -> None:
        """Write what was measured of a model to the log."""
        self.log.figures(f"evaluate {name}", figures)

    def note(self, text: str) -> None:
        """Write a line to the log."""
        self.log.write(logging.INFO, text)


class Stage:
    """A stage of a run. What a stage has nothing to do with in a recipe, it leaves alone.

    Attributes:
        everywhere: whether every process runs it; otherwise the first alone.
    """

    everywhere = False

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse what can be refused before weights are loaded.

        Args:
            state: with the skeleton and the tokenizer, if the model was found.
            plan: None if none could be made.
            mistakes: collects the errors.
        """

    def run(self, state: RunState) -> None:
        """Do the work."""

    def sections(self, report: RunReport) -> Iterator[Section]:  # noqa: ARG002 - nothing by default
        """Yield the stage's part of the report."""
        return iter(())

    def sentences(self, report: RunReport) -> Iterator[str]:  # noqa: ARG002 - nothing by default
        """Yield a sentence for the model card if the stage did something to the weights."""
        return iter(())
