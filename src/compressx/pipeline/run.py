"""`plan` and `run`. A run checks the recipe, reads text and model, evaluates, prunes, fine-tunes and writes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from compressx._version import __version__
from compressx.api.record import RunReport
from compressx.data.windows import fingerprint as fingerprint_of
from compressx.evaluation.evaluators import evaluate
from compressx.models.access import Access, Device, config_fingerprint, device_for, weights_fingerprint
from compressx.models.export import check_unfinished, output_folder, unfinished
from compressx.models.streaming import StreamedModel, open_model
from compressx.pipeline.checks import earlier_run, is_finished
from compressx.pipeline.context import Progress, RunContext
from compressx.pipeline.finishing import Pruned, finish
from compressx.pipeline.journal import Journal, recorded_dtype
from compressx.pipeline.log import run_log
from compressx.pipeline.preparation import (
    Prepared,
    RunTexts,
    calibration_batches,
    loaded_recipe,
    prepare,
    read_all,
    refuse_streamed,
)
from compressx.pipeline.pruning import Pruning
from compressx.pipeline.room import memory_advised
from compressx.pipeline.texts import OwnText
from compressx.planning.plan import Plan
from compressx.plugins.manager import Plugins, load_plugins
from compressx.recipe.schema import LoadedRecipe
from compressx.report.compare import read_report
from compressx.runtime.allocator import freed_memory_kept
from compressx.runtime.code import code_versions, library_versions
from compressx.runtime.determinism import deterministic, torchs_own_modes
from compressx.runtime.machine import machine
from compressx.runtime.ranks import Ranks, joined_ranks
from compressx.runtime.timing import Timing, forget_peaks

_REPORT = TypeAdapter(RunReport)


def plan(
    recipe: LoadedRecipe | Path | str | Mapping[str, Any],
    *,
    plugins: Plugins | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Check a recipe and plan the pruning of every linear, without loading weights or text.

    Args:
        recipe: a path, a mapping, or what `load_recipe` returned.
        plugins: what `load_plugins` returned; discovered when absent.
        overrides: `a.b=VALUE`, as for `--set`; only with a path.

    Raises:
        CompressxError: an error in the recipe, the plugins or the model.
    """
    plugins = plugins or load_plugins()
    return prepare(loaded_recipe(recipe, overrides, plugins), plugins).plan


@freed_memory_kept()
@torchs_own_modes()
def run(
    recipe: LoadedRecipe | Path | str | Mapping[str, Any],
    *,
    plugins: Plugins | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    device: Device = "auto",
    resume: bool = False,
    restart: bool = False,
    replace: bool = False,
    log_file: Path | None = None,
    started: float | None = None,
) -> RunReport:
    """Prune a model by a recipe and write the output folder.

    Args:
        recipe: a path, a mapping, or what `load_recipe` returned.
        plugins: what `load_plugins` returned; discovered when absent.
        overrides: `a.b=VALUE`, as for `--set`; only with a path.
        progress: see `context.Progress`.
        device: where the model runs; `auto` is CUDA if available.
        resume: continue after the last finished block of an interrupted run of the same recipe, if there is one; if
            the run is finished, return its report.
        restart: discard the finished blocks of an interrupted run.
        replace: replace a finished run of another recipe in the output folder, and files there that no run wrote.
        log_file: a file to append the log to, beside `run.log` in the output folder.
        started: of `time.perf_counter`, from which seconds are counted; now when absent.

    Returns:
        The report, which is also written to the output folder.

    Raises:
        CompressxError: an error that the user can fix. The output folder is unchanged; finished blocks are kept beside
            it for `resume`.
    """
    timing = Timing("load", time.perf_counter() if started is None else started)
    with (
        joined_ranks(where := device_for(device)) as ranks,
        run_log(first=ranks.first, file=log_file) as log,
    ):
        log.header(machine(where), {"compressx": __version__, **library_versions()})
        plugins = plugins or load_plugins()
        context = RunContext(
            loaded_recipe(recipe, overrides, plugins), plugins, progress if ranks.first else None, where,
            ranks, timing, log,
        )  # fmt: skip
        with deterministic(context.loaded.recipe.deterministic, where), memory_advised(context):
            if resume and _is_finished_before(context, replace=replace):
                report = read_report(context.loaded.recipe.output) if ranks.first else None
            else:
                report = _run(context, resume=resume, restart=restart, replace=replace)
        received = ranks.broadcast({} if report is None else dataclasses.asdict(report))
        return _REPORT.validate_python(received) if report is None else report


def _is_finished_before(context: RunContext, *, replace: bool) -> bool:
    """Return whether nothing is left to resume: the run of this recipe is finished, and no other has begun."""
    loaded, finished = context.loaded, False
    if context.ranks.first and not unfinished(loaded.recipe.output):
        with loaded.at("output"):
            finished = is_finished(loaded, replace=replace)
    if finished := context.ranks.broadcast(finished):
        context.log.write(logging.INFO, f"{loaded.recipe.output} is finished; nothing is left to resume")
    return finished


def _run(context: RunContext, *, resume: bool, restart: bool, replace: bool) -> RunReport | None:
    """Run all stages. Only the first process evaluates, writes, and returns a report."""
    loaded, ranks = context.loaded, context.ranks
    forget_peaks()
    if ranks.first:
        with loaded.at("output"):
            check_unfinished(loaded.recipe.output, resume=resume, restart=restart)
    context.report_progress("load", 0, 2)
    prepared = prepare(loaded, context.plugins, ranks.size, context.device if ranks.first else None, replace=replace)
    if ranks.first and (earlier := earlier_run(loaded)):
        context.log.write(logging.INFO, f"replaces {earlier}")
    context.log.rules(loaded, prepared.plan)
    options = {"resume": resume, "restart": restart, "replace": replace}
    with _folder(loaded.recipe.output, options, ranks) as folder:
        context.log.open(folder)
        given = _read(context, prepared)
        context = context.with_arithmetic(given.prepared.plan, given.access.model.dtype, recorded_dtype(folder))
        fingerprint = ranks.broadcast(_fingerprint(context, given) if ranks.first else {})
        journal = Journal(folder, fingerprint, ranks, context.timing)
        evaluation = _evaluate_dense(context, given, fingerprint["model"])
        pruning = Pruning(context, given.access, given.batches, given.mine, journal, fingerprint)
        final, allocation, finished = pruning.run(given.prepared.plan)
        if not ranks.first:
            return None
        pruned = Pruned(
            given.prepared.tokenizer, given.access, final, allocation, finished, evaluation, given.texts.evaluation,
            given.texts.training,
        )  # fmt: skip
        report = finish(context, pruned, given.prepared.checkpoint, journal, folder)
        context.log.close()  # Windows renames no folder with an open file
    context.plugins.manager.hook.compressx_run_finished(report=report, output=loaded.recipe.output.expanduser())
    return report


@dataclass(frozen=True, eq=False)
class _Inputs:
    """The inputs of a run.

    Attributes:
        prepared: the plan, the model's checkpoint and its tokenizer.
        texts: as token ids.
        batches: calibration token ids, each [batch, tokens].
        mine: this process's share of them.
        access: the model.
    """

    prepared: Prepared
    texts: RunTexts
    batches: Sequence[torch.Tensor]
    mine: Sequence[torch.Tensor]
    access: Access


def _read(context: RunContext, prepared: Prepared) -> _Inputs:
    """Read the text, and open the model: last, or when text is to be generated with it."""
    loaded, ranks = context.loaded, context.ranks
    opened = functools.cache(lambda: _opened(context, prepared))
    context.report_progress("calibrate", 0, 1)
    own = OwnText(context, prepared.tokenizer, opened)
    texts = read_all(
        loaded, context.plugins, prepared.plan, prepared.skeleton, prepared.tokenizer, own, evaluated=ranks.first
    )
    windows = texts.calibration
    batches = calibration_batches(loaded.recipe.calibration, windows)
    mine = calibration_batches(loaded.recipe.calibration, None if windows is None else ranks.share(windows))
    context.report_progress("load", 1, 2)
    access = opened()
    return _Inputs(prepared, texts, batches, mine, access)


def _opened(context: RunContext, prepared: Prepared) -> Access:
    """Open the model, and refuse what its weights cannot do if they are streamed."""
    loaded = context.loaded
    with loaded.at("model"):
        access = open_model(prepared.checkpoint, loaded.recipe.model.streaming, context.device)
    if isinstance(access, StreamedModel):
        refuse_streamed(loaded)
    if unread := access.model.unread:
        context.log.write(
            logging.WARNING, f"nothing reads {', '.join(unread[:3])} of the checkpoint"
            + (f", nor {len(unread) - 3} others" if unread[3:] else "") + "; report.json names all",
        )  # fmt: skip
    return access


def _evaluate_dense(context: RunContext, given: _Inputs, model: str) -> dict[str, Any]:
    """Evaluate the dense model, whose weights have the fingerprint `model`, if the recipe evaluates anything."""
    if not given.texts.evaluation:
        return {}
    context.report_progress("evaluate dense", 0, 1)
    with context.loaded.at("evaluate"):
        dense = evaluate(
            given.access, given.prepared.tokenizer, given.texts.evaluation, fingerprint=model,
            selecting=context.selecting, progress=lambda i, n: context.report_progress("evaluate dense", i, n),
        )  # fmt: skip
    context.report_figures("dense", dense)
    return {"dense": dense}


@contextlib.contextmanager
def _folder(output: Path, options: Mapping[str, bool], ranks: Ranks) -> Iterator[Path]:
    """Yield the folder that the first process fills."""
    if not ranks.first:
        yield Path(ranks.broadcast(""))
        return
    with output_folder(output, **options) as folder:
        ranks.broadcast(str(folder))
        yield folder


def _fingerprint(context: RunContext, given: _Inputs) -> dict[str, Any]:
    """Return everything that determines the pruned blocks, by names that appear in error messages."""
    planned, access, windows = given.prepared.plan, given.access, given.texts.calibration
    used = {spec.name for rule in planned.rules for spec in (rule.pruner, rule.reconstructor) if spec is not None}
    recipe = context.loaded.recipe.model_dump(mode="json", exclude_none=True)
    plugins = [p for p in context.plugins.records if p.status == "loaded" and used & {*p.offers["pruners"]}]
    return {
        "model": weights_fingerprint(access),
        "model config": config_fingerprint(access.model),
        "prune": recipe["prune"],
        "ignore": recipe.get("ignore"),
        "compute_dtype": context.arithmetic and context.arithmetic.dtype,
        "allocation": recipe.get("allocation"),
        "reconstruct_block": recipe.get("reconstruct_block"),
        "calibration tokens": None if windows is None else fingerprint_of(windows),
        "calibration batch_size": None if windows is None else recipe["calibration"]["batch_size"],
        "plugins": {p.name: f"{p.version or 'no version'}, code {p.code()}" for p in plugins},
        "versions": code_versions(),
        "device": access.device.type,
        "deterministic": recipe["deterministic"],
        "processes": context.ranks.size,
    }
