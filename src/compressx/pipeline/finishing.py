"""The stages of a run after pruning: fine-tuning, evaluation, saving the model, the reports."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from compressx._version import __version__
from compressx.api.record import AllocationReport, FinetuneReport, RunReport, total_sparsity
from compressx.data.windows import fingerprint as fingerprint_of
from compressx.evaluation.perplexity import Texts, evaluate
from compressx.masks.maskset import MaskSet
from compressx.models.access import Access
from compressx.models.checkpoint import Checkpoint
from compressx.models.streaming import StreamedModel, open_model, open_streamed
from compressx.pipeline.context import RunContext, Stage
from compressx.pipeline.journal import FinishedBlock, Journal
from compressx.planning.plan import Plan
from compressx.recipe.tuning import Finetune
from compressx.report import figures, html, markdown
from compressx.report.contents import sections
from compressx.runtime.files import atomic_write
from compressx.runtime.timing import peak_memory_bytes
from compressx.training.finetune import finetune

_VERSIONS_OF = ("torch", "transformers", "lm_eval", "datasets", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide the result."""
    return {"python": platform.python_version(), **{n: metadata.version(n) for n in _VERSIONS_OF}}


@dataclass(frozen=True, eq=False)
class Pruned:
    """A run whose blocks are all pruned.

    Attributes:
        checkpoint: of the dense model.
        tokenizer: the model's.
        access: the model.
        plan: the executed plan.
        allocation: the allocation's report, or None without one.
        blocks: the finished blocks.
        dense: the dense model's figures under the key `dense`; empty when the recipe evaluates nothing.
        texts: evaluation text, or None.
        training: token ids to fine-tune on, [windows, tokens], or None.
    """

    checkpoint: Checkpoint
    tokenizer: Any
    access: Access
    plan: Plan
    allocation: AllocationReport | None
    blocks: Sequence[FinishedBlock]
    dense: Mapping[str, Mapping[str, Any]]
    texts: Texts | None
    training: Tensor | None


def finish(context: RunContext, pruned: Pruned, journal: Journal, folder: Path) -> RunReport:
    """Fine-tune if the recipe does, evaluate, and fill the output folder.

    A model that is fine-tuned is also evaluated before.

    Raises:
        CompressxError: an error that the user can fix.
    """
    access, masks = pruned.access, folder / "masks.safetensors"
    context.report_progress("save", 0, 1)
    journal.save_masks(masks)
    evaluation = dict(pruned.dense)
    tuned = None
    if pruned.training is not None:
        evaluation |= _evaluated(context, pruned, access, "pruned")
        tuned = _finetuned(context, pruned, pruned.training, MaskSet.load(masks), journal)
    context.report_progress("save", 0, 1)
    drawn = _save(pruned, tuned, journal, folder)
    if isinstance(access, StreamedModel):
        access = open_streamed(pruned.checkpoint.at(folder / "model"), access.device)
    evaluation |= _evaluated(context, pruned, access, "pruned" if tuned is None else "finetuned")
    context.report_progress("save", 0, 1)
    context.tracking.close()
    report = _report(context, pruned, evaluation, tuned, drawn)
    recipe = context.loaded.to_yaml()
    shown = sections(report, recipe)
    for name, text in {
        "recipe.yaml": recipe,
        "plan.json": json.dumps(pruned.plan.to_dict(), indent=1) + "\n",
        "report.md": markdown.page(shown),
        "report.html": html.page(shown, folder),
        "report.json": report.to_json(),
    }.items():
        atomic_write(folder / name, text.encode())
    context.report_progress("save", 1, 1)
    context.log.finished(report)
    return report


def _finetuned(
    context: RunContext, pruned: Pruned, windows: Tensor, masks: MaskSet, journal: Journal
) -> FinetuneReport:
    """Train the remaining weights, from the checkpoint of an interrupted run if there is one."""
    settings = context.loaded.recipe.finetune
    assert settings is not None  # noqa: S101 - `windows` exist only with these settings

    def progress(done: int, total: int, loss: float) -> None:
        context.tracking.values({"finetune/step": float(done), "finetune/loss": loss})
        context.report_progress("finetune", done, total, f"loss {loss:.4g}")

    context.report_progress("finetune", 0, settings.steps)
    with context.loaded.at("finetune"):
        dense = open_model(pruned.checkpoint, False, context.device).model if settings.teacher == "dense" else None
        return finetune(
            pruned.access.model, masks, windows, settings, teacher=dense,
            checkpoint=journal.blocks / f"finetune-{_tuning_fingerprint(settings, windows)}.safetensors",
            progress=progress,
        )  # fmt: skip


def _tuning_fingerprint(settings: Finetune, windows: Tensor) -> str:
    """Return a hash that distinguishes checkpoints of different trainings of the same pruned model."""
    chosen = settings.model_dump_json(exclude={"checkpoint_every", "dataset", "samples", "sequence_length", "bos"})
    return hashlib.sha256(f"{chosen} {fingerprint_of(windows)}".encode()).hexdigest()[:16]


def _evaluated(
    context: RunContext, pruned: Pruned, access: Access, name: Literal["pruned", "finetuned"]
) -> dict[str, Mapping[str, Any]]:
    """Evaluate as the recipe specifies, if it does."""
    settings, texts = context.loaded.recipe.evaluate, pruned.texts
    if settings is None or texts is None:
        return {}
    stage: Stage = "evaluate pruned" if name == "pruned" else "evaluate finetuned"
    context.report_progress(stage, 0, 1)
    figures = evaluate(access, pruned.tokenizer, settings, texts, progress=partial(context.report_progress, stage))
    context.report_figures(name, figures)
    return {name: figures}


def _save(
    pruned: Pruned, tuned: FinetuneReport | None, journal: Journal, folder: Path
) -> tuple[Mapping[str, str], ...]:
    """Write figures and model; return the list of figures for the report."""
    for name in ("plots", "model"):  # left incomplete by an interrupted run
        shutil.rmtree(folder / name, ignore_errors=True)
    matrices = [m for block in pruned.blocks for m in block.matrices]
    losses = () if tuned is None else tuned.losses
    drawn = figures.draw([block.report for block in pruned.blocks], matrices, folder / "plots", losses)
    pruned.access.save(pruned.tokenizer, journal.blocks, folder / "model")
    return drawn


def _report(
    context: RunContext, pruned: Pruned, evaluation: Mapping[str, Any], tuned: FinetuneReport | None,
    drawn: tuple[Mapping[str, str], ...],
) -> RunReport:  # fmt: skip
    blocks = tuple(block.report for block in pruned.blocks)
    return RunReport(
        compressx=__version__,
        model=context.loaded.recipe.model.model_dump(mode="json", exclude_none=True),
        sparsity=total_sparsity(layer for block in blocks for layer in block.layers),
        blocks=blocks,
        skipped=tuple({"name": n, "reason": r} for n, r in pruned.plan.skipped.items()),
        evaluation=evaluation,
        seconds=context.timing.seconds(),
        peak_memory_bytes=peak_memory_bytes(),
        plugins=tuple(
            {"name": p.name, "version": p.version, "source": p.source, "module": p.module}
            for p in context.plugins.records
            if p.status == "loaded"
        ),
        versions=versions(),
        figures=drawn,
        allocation=pruned.allocation,
        finetune=tuned,
    )
