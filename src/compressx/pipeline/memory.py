"""`prune`: prune a model that is in memory, without writing files."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from compressx._version import __version__
from compressx.api.record import RunReport
from compressx.data.chat import Document, given
from compressx.data.windows import windows_of
from compressx.evaluation.evaluators import evaluate, with_evaluators
from compressx.masks.file import MaskEntry, PackedMasks
from compressx.masks.maskset import MaskSet
from compressx.models.access import Access, InMemory
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids, first_token, generate
from compressx.models.hidden import Keep, Streams
from compressx.pipeline.accepted import check_model, check_tokenizer
from compressx.pipeline.context import Progress, RunContext
from compressx.pipeline.finished_block import FinishedBlock
from compressx.pipeline.finishing import Pruned, describe, evaluated, report_of, trained
from compressx.pipeline.journal import Allocated
from compressx.pipeline.log import run_log
from compressx.pipeline.preparation import RunTexts, calibration_batches, plan_in_memory, read_all
from compressx.pipeline.pruning import Pruning
from compressx.pipeline.room import memory_advised
from compressx.planning.plan import Plan
from compressx.plugins.manager import Plugins, load_plugins
from compressx.recipe.schema import recipe_in_memory
from compressx.recipe.sources import Generate
from compressx.runtime.allocator import freed_memory_kept
from compressx.runtime.code import library_versions
from compressx.runtime.determinism import deterministic, torchs_own_modes
from compressx.runtime.errors import ArtifactError, CalibrationError, CompressxError
from compressx.runtime.machine import machine
from compressx.runtime.ranks import ALONE
from compressx.runtime.timing import Timing, forget_peaks

_DENSE_STAGES = ("load", "calibrate", "evaluate dense", "allocate")
"""The stages that leave the model's weights as they were."""


@dataclass(frozen=True, eq=False)
class PrunedModel:
    """What `prune` returns.

    Attributes:
        model: the pruned model, with zeros; its config has the attribute `compressx`.
        masks: of its pruned linears.
        report: as a run writes it to `report.json`.
    """

    model: Any
    masks: MaskSet
    report: RunReport

    def __repr__(self) -> str:
        """Return one line, for notebooks."""
        return f"PrunedModel({type(self.model).__name__}, {self.report!r})"


@freed_memory_kept()
@torchs_own_modes()
def prune(
    model: Any,
    tokenizer: Any,
    recipe: Path | str | Mapping[str, Any],
    *,
    calibration: Tensor | Sequence[Document] | None = None,
    copy: bool = False,
    plugins: Plugins | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> PrunedModel:
    """Prune a model in memory, on its device and in its dtype; equal to a `run` on the same weights, to the bit.

    No files are written, except temporary ones if `calibration.memory_limit` asks for them. Modes, `requires_grad` and
    dtypes are kept.

    Args:
        model: a transformers causal language model, all on one device.
        tokenizer: its tokenizer; None if no text has to be read.
        recipe: a path or a mapping, without `model` and `output`.
        calibration: text in place of `calibration.dataset`: documents, or token ids, int64 [windows, tokens], which are
            used as they are. The other keys of `calibration` are optional then.
        copy: prune a copy, and leave the model as it is.
        plugins: what `load_plugins` returned; discovered when absent. `compressx_run_finished` is not called.
        overrides: `a.b=VALUE`, as for `--set`; only with a path.
        progress: see `context.Progress`.

    Raises:
        CompressxError: an error that the user can fix. After an error without `copy` the model is as it was, or the
            message says that blocks are already pruned; for other exceptions, the logger `compressx` says so.
    """
    timing = Timing("load")
    with run_log(first=True, file=None) as log:
        check_model(model)
        given = check_tokenizer(tokenizer)
        name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        path = Path(recipe) if isinstance(recipe, str | Path) else recipe
        plugins = plugins or load_plugins()
        loaded = with_evaluators(recipe_in_memory(path, name, _decided(calibration), overrides), plugins)
        access = InMemory(model)
        context = RunContext(loaded, plugins, progress, access.device, ALONE, timing, log)
        log.header(machine(access.device), {"compressx": __version__, **library_versions()})
        forget_peaks()
        work = deepcopy(model) if copy else model
        # Compiled modules call no hooks. Where torch's compiler is not imported, which takes seconds, there are none.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        with eager, evaluation_mode(model), evaluation_mode(work), TemporaryDirectory(prefix="compressx-") as folder:
            planned, texts = _read(context, model, given, calibration)
            context = context.with_arithmetic(planned, model.dtype)
            kept = Kept(Path(folder))
            changes_told = contextlib.nullcontext() if copy else _changes_told(context, kept, planned)
            fixed = deterministic(loaded.recipe.deterministic, access.device)
            with changes_told, fixed, memory_advised(context, streams=False):
                return _pruned(context, kept, planned, texts, model, work, given)


class Kept:
    """The finished blocks of a run in memory, which cannot be resumed; see `pruning.Record`."""

    def __init__(self, blocks: Path) -> None:
        self.blocks = blocks
        self.finished: list[str] = []
        self.allocated: Allocated | None = None
        self.scores: Mapping[str, float] = {}
        self.masks: list[PackedMasks] = []

    def allocate(self, allocated: Allocated) -> None:
        """Keep an allocation."""
        self.allocated = allocated

    def score(self, scores: Mapping[str, float]) -> None:
        """Keep the scores of decoder blocks."""
        self.scores = scores

    @contextlib.contextmanager
    def recording(self, access: Access) -> Iterator[None]:  # noqa: ARG002 - nothing is written
        """Do nothing: the blocks are in memory."""
        yield

    def add(self, access: Access, block: FinishedBlock, masks: Mapping[str, MaskEntry], streams: Streams) -> None:  # noqa: ARG002 - the weights are in the model
        """Keep the masks of a block."""
        self.finished.append(block.report.fqn)
        self.masks.append(PackedMasks.of(masks))

    def masks_of(self, fqn: str) -> Mapping[str, MaskEntry]:
        """Return the masks of a finished block."""
        return self.masks[self.finished.index(fqn)]

    def restore(self, access: Access, keep: Keep) -> tuple[list[FinishedBlock], Streams]:  # noqa: ARG002 - nothing is resumed
        """Return nothing: every run is a new one."""
        return [], Streams(())


def _pruned(
    context: RunContext, kept: Kept, planned: Plan, texts: RunTexts, model: Any, work: Any, tokenizer: Any
) -> PrunedModel:
    """Go through the stages of a run, with `work`: the dense model or a copy of it."""
    recipe = context.loaded.recipe
    # Training towards the dense model needs it beside the pruned one.
    distilled = recipe.finetune is not None and recipe.finetune.teacher == "dense"
    dense = deepcopy(model) if distilled and work is model else model
    access = InMemory(work)
    measured = {}
    if texts.evaluation:
        context.report_progress("evaluate dense", 0, 1)
        with context.loaded.at("evaluate"):
            # Not cached: a model in memory may compute something else than its weights and config say.
            measured["dense"] = evaluate(
                access, tokenizer, texts.evaluation, selecting=context.selecting,
                progress=partial(context.report_progress, "evaluate dense"),
            )  # fmt: skip
        context.report_figures("dense", measured["dense"])
    batches = calibration_batches(recipe.calibration, texts.calibration)
    final, allocation, blocks = Pruning(context, access, batches, batches, kept).run(planned)
    masks = MaskSet(PackedMasks.joined(kept.masks))
    pruned = Pruned(tokenizer, access, final, allocation, blocks, measured, texts.evaluation, texts.training)
    evaluation, tuned = trained(context, pruned, lambda: masks, lambda: dense, None)
    evaluation |= evaluated(context, pruned, access, "pruned" if tuned is None else "finetuned")
    if tuned is None and not masks.verify(work):
        raise ArtifactError("weights that masks drop are not zero after pruning; look for hooks that write to them")
    describe(pruned)
    report = report_of(context, pruned, evaluation, tuned, ())
    context.log.finished(report)
    return PrunedModel(work, masks, report)


@contextlib.contextmanager
def _changes_told(context: RunContext, kept: Kept, planned: Plan) -> Iterator[None]:
    """Say after an exception that the model is no longer as it was, unless it is."""
    try:
        yield
    except BaseException as error:
        if context.timing.stage in _DENSE_STAGES:
            raise
        total = len({x.block for x in planned.linears})
        told = (
            f"the model is no longer as it was: {len(kept.finished)} of {total} blocks are pruned, and one more may be "
            "in part; load it again, or prune a copy (copy=True)"
        )
        if isinstance(error, CompressxError):
            raise type(error)(f"{error}; {told}") from error
        context.log.write(logging.ERROR, told)
        raise


def _decided(calibration: Tensor | Sequence[Document] | None) -> Mapping[str, Any] | None:
    """Return the keys of the recipe's `calibration` that given text decides."""
    if calibration is None:
        return None
    if not isinstance(calibration, Tensor):
        if calibration and all(isinstance(x, list) and isinstance(next(iter(x), None), int) for x in calibration):
            raise CalibrationError(
                "calibration is a list of lists of numbers; token ids are expected as a tensor, int64 [windows, tokens]"
            )
        return {"dataset": "given/text"}
    if calibration.dim() != 2 or calibration.is_floating_point() or calibration.dtype == torch.bool:
        raise CalibrationError(
            f"calibration is {calibration.dtype} {[*calibration.shape]}, expected token ids, int64 [windows, tokens], "
            "or a list of documents"
        )
    windows, length = calibration.shape
    return {
        "dataset": "given/text",
        "samples": windows,
        "sequence_length": length,
        "windows": "pack",
        "seed": 0,
        "bos": False,
    }


def _read(
    context: RunContext, model: Any, tokenizer: Any, calibration: Tensor | Sequence[Document] | None
) -> tuple[Plan, RunTexts]:
    """Check the recipe, plan it, and read all text, with the caller's in place of the calibration dataset."""
    loaded, windows = context.loaded, None
    planned = plan_in_memory(loaded, context.plugins, model, tokenizer)
    context.log.rules(loaded, planned)
    context.report_progress("calibrate", 0, 1)
    settings = loaded.recipe.calibration
    if isinstance(calibration, Tensor):
        check_ids(model, windows := calibration.long().cpu(), None, "calibration")
    elif calibration is not None and settings is not None:
        windows = windows_of(given(calibration, "calibration"), settings.samples, settings.draw, tokenizer)

    def generated(settings: Generate, length: int) -> Tensor:
        return generate(
            model, first_token(tokenizer, model), settings, length,
            lambda i, n: context.report_progress("calibrate", i, n, "sequences generated"),
        )  # fmt: skip

    texts = read_all(loaded, context.plugins, planned, model, tokenizer, generated, calibration=windows)
    context.report_progress("load", 1, 2)
    return planned, texts
