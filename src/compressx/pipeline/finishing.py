"""The stages of a run after pruning: fine-tuning, evaluation, saving the model, the reports."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressx._version import __version__
from compressx.api.patterns import allocated_form
from compressx.api.record import AllocationReport, FinetuneReport, RunReport, total_sparsity
from compressx.data.windows import fingerprint as fingerprint_of
from compressx.evaluation.evaluators import ReadyEvaluator, evaluate
from compressx.masks.maskset import MaskSet
from compressx.models.access import Access, InMemory, weights_fingerprint
from compressx.models.architecture import find_blocks
from compressx.models.capture import skipped
from compressx.models.checkpoint import Checkpoint, find_checkpoint, keep_settings
from compressx.models.streaming import StreamedModel, open_model, open_streamed
from compressx.pipeline.card import card
from compressx.pipeline.context import RunContext, Stage
from compressx.pipeline.finished_block import FinishedBlock
from compressx.pipeline.journal import Journal
from compressx.pipeline.shrinking import save_smaller
from compressx.planning.plan import Plan
from compressx.recipe.sources import ModelSource
from compressx.recipe.training import Finetune
from compressx.report import figures, html, markdown
from compressx.report.contents import sections
from compressx.runtime.code import library_versions
from compressx.runtime.files import atomic_write
from compressx.runtime.machine import command, machine
from compressx.runtime.timing import peak_gpu_bytes, peak_resident_bytes
from compressx.training.finetune import finetune
from compressx.training.schedule import total_steps


@dataclass(frozen=True, eq=False)
class Pruned:
    """A run whose blocks are all pruned.

    Attributes:
        tokenizer: the model's.
        access: the model.
        plan: the executed plan.
        allocation: the allocation's report, or None without one.
        blocks: the finished blocks.
        dense: the dense model's figures under the key `dense`; empty when the recipe evaluates nothing.
        evaluators: with their text; none if nothing is measured.
        training: token ids to fine-tune on, [windows, tokens], or None.
    """

    tokenizer: Any
    access: Access
    plan: Plan
    allocation: AllocationReport | None
    blocks: Sequence[FinishedBlock]
    dense: Mapping[str, Mapping[str, Any]]
    evaluators: Sequence[ReadyEvaluator]
    training: Tensor | None


def finish(context: RunContext, pruned: Pruned, checkpoint: Checkpoint, journal: Journal, folder: Path) -> RunReport:
    """Fine-tune if the recipe does, evaluate, and fill the output folder.

    Raises:
        CompressxError: an error that the user can fix.
    """
    access, masks = pruned.access, folder / "masks.safetensors"
    context.report_progress("save", 0, 1)
    journal.save_masks(masks)
    evaluation, tuned = trained(
        context, pruned, lambda: MaskSet.load(masks),
        lambda: open_model(checkpoint, False, context.device).model,
        journal.blocks,
    )  # fmt: skip
    context.report_progress("save", 0, 1)
    drawn = _drawn(pruned, tuned, folder)
    describe(pruned)
    smaller: Mapping[str, Any] = {}
    if context.loaded.recipe.shrink:
        with context.loaded.at("shrink"):
            smaller = save_smaller(access, pruned.tokenizer, pruned.plan, MaskSet.load(masks), checkpoint, folder)
    else:
        access.save(pruned.tokenizer, journal.blocks, folder / "model")
    copied, left = (", ".join(map(ascii, names)) for names in keep_settings(checkpoint, folder / "model"))
    for verb, names in (("copied", copied), ("left out", left)):
        if names:
            context.log.write(logging.INFO, f"model: {verb} {names} of {checkpoint.location}")
    if isinstance(access, StreamedModel):
        access = open_streamed(checkpoint.at(folder / "model"), access.device)
    evaluation |= evaluated(context, pruned, access, "pruned" if tuned is None else "finetuned")
    context.report_progress("save", 0, 1)
    report = replace(report_of(context, pruned, evaluation, tuned, drawn), shrink=smaller)
    recipe = context.loaded.to_yaml()
    shown = sections(report, recipe)
    for name, text in {
        "recipe.yaml": recipe,
        "plan.json": json.dumps(pruned.plan.to_dict(), indent=1) + "\n",
        "report.md": markdown.page(shown),
        "report.html": html.page(shown, folder),
        "report.json": report.to_json(),
        "model/README.md": card(context.loaded, pruned.plan, report, checkpoint),
    }.items():
        atomic_write(folder / name, text.encode())
    context.report_progress("save", 1, 1)
    context.log.finished(report)
    return report


def trained(
    context: RunContext, pruned: Pruned, masks: Callable[[], MaskSet], teacher: Callable[[], Any],
    kept: Path | None,
) -> tuple[dict[str, Mapping[str, Any]], FinetuneReport | None]:  # fmt: skip
    """Fine-tune if the recipe does, from the checkpoint of an interrupted run if there is one.

    Args:
        context: recipe, device, processes and progress of the run.
        pruned: the pruned model, which is also evaluated before it is trained.
        masks: returns its masks.
        teacher: returns the dense model, if the recipe trains towards it.
        kept: a folder for checkpoints, or None for none.

    Returns:
        What was measured so far, and the report of the training; None without.
    """
    settings, windows = context.loaded.recipe.finetune, pruned.training
    if settings is None or windows is None:
        return dict(pruned.dense), None
    evaluation = {**pruned.dense, **evaluated(context, pruned, pruned.access, "pruned")}

    def progress(done: int, total: int, loss: float) -> None:
        context.report_progress("finetune", done, total, f"loss {loss:.4g}")

    context.report_progress("finetune", 0, total_steps(settings, 0, 0.0))
    with context.loaded.at("finetune"):
        model = _teacher(settings, context, teacher)
        checkpoint = kept and _checkpoint(kept, _tuning_fingerprint(settings, windows, model, context.products))
        blocks = find_blocks(pruned.access.model)
        with skipped({fqn: blocks[fqn] for fqn in pruned.plan.dropped}):  # they would take as long as the others
            return evaluation, finetune(
                pruned.access.model, masks(), windows, settings, teacher=model,
                products=context.products,
                checkpoint=checkpoint, progress=progress, tell=partial(context.log.write, logging.INFO),
            )  # fmt: skip


def _checkpoint(folder: Path, fingerprint: str) -> Path:
    """Return the file for a training's checkpoint, and remove those of other trainings of the same pruned model."""
    checkpoint = folder / f"finetune-{fingerprint}.safetensors"
    for other in folder.glob("finetune-*.safetensors"):
        if other != checkpoint:
            other.unlink()
    return checkpoint


def _teacher(settings: Finetune, context: RunContext, dense: Callable[[], Any]) -> Any | None:
    """Return the model to train towards, if there is one."""
    if isinstance(settings.teacher, ModelSource):
        return open_model(find_checkpoint(settings.teacher), False, context.device).model
    return dense() if settings.teacher == "dense" else None


def _tuning_fingerprint(settings: Finetune, windows: Tensor, teacher: Any | None, products: torch.dtype | None) -> str:
    """Return a hash that distinguishes checkpoints of different trainings of the same pruned model.

    The dense model is the same for all of them, but another teacher may have changed where it is.
    """
    chosen = settings.model_dump_json(exclude={"checkpoint_every", "dataset", "samples", "sequence_length", "bos"})
    taught = weights_fingerprint(InMemory(teacher)) if isinstance(settings.teacher, ModelSource) else ""
    return hashlib.sha256(f"{chosen} {fingerprint_of(windows)} {taught} {products}".encode()).hexdigest()[:16]


def evaluated(
    context: RunContext, pruned: Pruned, access: Access, name: Literal["pruned", "finetuned"]
) -> dict[str, Mapping[str, Any]]:
    """Evaluate a pruned model as the recipe specifies, if it does; the figures are under `name`."""
    if not pruned.evaluators or not pruned.plan.linears:
        return {}
    stage: Stage = "evaluate pruned" if name == "pruned" else "evaluate finetuned"
    context.report_progress(stage, 0, 1)
    figures = evaluate(
        access, pruned.tokenizer, pruned.evaluators, selecting=context.selecting,
        progress=partial(context.report_progress, stage),
    )  # fmt: skip
    context.report_figures(name, figures)
    return {name: figures}


def describe(pruned: Pruned) -> None:
    """Write the sparsity into the model's config, where transformers keeps it as the attribute `compressx`."""
    layers = [layer for block in pruned.blocks for layer in block.report.layers]
    pruned.access.model.config.compressx = {
        "version": __version__,
        "sparsity": total_sparsity(layers),
        "patterns": list(dict.fromkeys(allocated_form(x.pattern) if pruned.allocation else x.pattern for x in layers)),
        "pruners": list(dict.fromkeys(layer.pruner for layer in layers)),
    }


def _drawn(pruned: Pruned, tuned: FinetuneReport | None, folder: Path) -> tuple[Mapping[str, str], ...]:
    """Remove what an interrupted run has left, and write the figures; return their list for the report."""
    for name in ("plots", "model"):  # left incomplete by an interrupted run
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / "units.json").unlink(missing_ok=True)  # `shrink` may have been taken out of the recipe since
    matrices = [m for block in pruned.blocks for m in block.matrices]
    return figures.draw([block.report for block in pruned.blocks], matrices, folder / "plots", tuned)


def report_of(
    context: RunContext, pruned: Pruned, evaluation: Mapping[str, Any], tuned: FinetuneReport | None,
    drawn: tuple[Mapping[str, str], ...],
) -> RunReport:  # fmt: skip
    """Return the report of a finished run."""
    blocks = tuple(block.report for block in pruned.blocks)
    calibration = context.loaded.recipe.calibration
    drawn_by = {"samples", "sequence_length", "seed"}
    return RunReport(
        compressx=__version__,
        model=context.loaded.recipe.model.model_dump(mode="json", exclude_none=True),
        sparsity=total_sparsity(layer for block in blocks for layer in block.layers),
        blocks=blocks,
        skipped=tuple({"name": n, "reason": r} for n, r in pruned.plan.skipped.items()),
        evaluation=evaluation,
        seconds=context.timing.seconds(),
        peak_memory_bytes=peak_resident_bytes(),
        peak_gpu_memory_bytes=peak_gpu_bytes(),
        plugins=tuple(
            {"name": p.name, "version": p.version, "source": p.source, "module": p.module}
            for p in context.plugins.records
            if p.status == "loaded"
        ),
        versions=library_versions(),
        figures=drawn,
        allocation=pruned.allocation,
        finetune=tuned,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command(),
        hardware=machine(context.device),
        calibration={} if calibration is None else calibration.model_dump(include=drawn_by),
        arithmetic=context.arithmetic,
        unread=getattr(pruned.access.model, "unread", ()),
    )
