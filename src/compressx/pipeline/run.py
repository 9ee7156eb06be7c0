"""`plan` and `run`: check a recipe, go through the stages with an output folder, and write the report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from compressx.api.record import RunReport, total_sparsity
from compressx.evaluation.evaluators import with_evaluators
from compressx.models.access import Device, device_for
from compressx.models.export import check_unfinished, forget_blocks, output_folder, unfinished
from compressx.models.streaming import open_model
from compressx.pipeline.card import card
from compressx.pipeline.inputs import open_model_of
from compressx.pipeline.saving import earlier_run, export_all, is_finished
from compressx.pipeline.sizes import memory_advised
from compressx.pipeline.stages import prepare, sections, walk
from compressx.planning.plan import Plan
from compressx.plugins.manager import Plugins, load_plugins
from compressx.recipe.schema import LoadedRecipe, load_recipe
from compressx.report import figures
from compressx.report.compare import read_report
from compressx.report.html import to_html
from compressx.report.markdown import to_markdown
from compressx.runtime.code import __version__, library_versions
from compressx.runtime.errors import RecipeError, noted
from compressx.runtime.files import atomic_write, json_text
from compressx.runtime.machine import command, machine
from compressx.runtime.modes import deterministic, reuse_freed_memory, torchs_own_modes
from compressx.runtime.ranks import joined_ranks
from compressx.runtime.timing import Timing, forget_peaks, peak_gpu_bytes, peak_resident_bytes
from compressx.stages.log import run_log
from compressx.stages.state import Progress, RunState
from compressx.stages.store import resumable_in


def loaded_recipe(
    recipe: LoadedRecipe | Path | str | Mapping[str, Any], overrides: Sequence[str], plugins: Plugins
) -> LoadedRecipe:
    """Load a recipe from a path or mapping, and validate the options of its evaluators.

    Raises:
        CompressxError: an invalid recipe.
    """
    if not isinstance(recipe, LoadedRecipe):
        recipe = load_recipe(Path(recipe) if isinstance(recipe, str) else recipe, overrides)
    elif overrides:
        raise RecipeError("overrides need a recipe that is not loaded yet")
    return with_evaluators(recipe, plugins)


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
        overrides: `a.b=VALUE`, as for `--set`.

    Raises:
        CompressxError: an error in the recipe, the plugins or the model.
    """
    plugins = plugins or load_plugins()
    state = RunState(loaded_recipe(recipe, overrides, plugins), plugins, measured=False)
    prepare(state)
    return state.plan


@reuse_freed_memory()
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
    started: float | None = None,
) -> RunReport:
    """Prune a model by a recipe and write the output folder.

    Args:
        recipe: a path, a mapping, or what `load_recipe` returned.
        plugins: what `load_plugins` returned; discovered when absent.
        overrides: `a.b=VALUE`, as for `--set`.
        progress: see `stages.state.Progress`.
        device: where the model runs; `auto` is CUDA if available.
        resume: continue after the last finished block of an interrupted run of the same recipe, if there is one; if
            the run is finished, return its report.
        restart: discard the finished blocks of an interrupted run.
        replace: replace a finished run of another recipe in the output folder, and files there that no run wrote.
        started: of `time.perf_counter`, from which seconds are counted; now when absent.

    Returns:
        The report, which is also written to the output folder.

    Raises:
        CompressxError: an error that the user can fix. The output folder is unchanged; finished blocks are kept beside
            it for `resume`.
    """
    timing = Timing("load", time.perf_counter() if started is None else started)
    with (
        joined_ranks(on := device_for(device)) as ranks,
        run_log(first=ranks.first) as log,
    ):
        log.header(on)
        plugins = plugins or load_plugins()
        state = RunState(
            loaded_recipe(recipe, overrides, plugins), plugins, on, ranks, log, timing,
            progress if ranks.first else None, measured=ranks.first, replace=replace,
        )  # fmt: skip
        output = state.recipe.output
        kept = noted(lambda: next(filter(None, map(resumable_in, unfinished(output))), ""))
        with deterministic(state.recipe.deterministic, on), memory_advised(state), kept:
            if resume and _is_finished_before(state):
                report = read_report(output) if state.first else None
            else:
                report = _run(state, resume=resume, restart=restart)
        return state.by_first(lambda: cast("RunReport", report), RunReport)


def _is_finished_before(state: RunState) -> bool:
    """Return whether there is nothing to resume: the run of this recipe is finished, and no other has begun."""
    output = state.recipe.output

    def look_up() -> bool:
        with state.loaded.at("output"):
            if found := not unfinished(output) and is_finished(state.loaded, replace=state.replace):
                forget_blocks(output.expanduser())  # a run that is killed here leaves them
        return found

    if finished := state.by_first(look_up):
        state.note(f"{output} is finished; there is nothing to resume")
    return finished


def _run(state: RunState, *, resume: bool, restart: bool) -> RunReport | None:
    """Run all stages. Only the first process evaluates, writes, and returns a report."""
    forget_peaks()
    output = state.recipe.output
    if state.first:
        with state.loaded.at("output"):
            check_unfinished(output, resume=resume, restart=restart)
    state.report_progress("load", 0, 2)
    prepare(state)
    if state.first and (earlier := earlier_run(state.loaded)):
        state.note(f"replaces {earlier}")
    checkpoint = state.checkpoint
    assert checkpoint is not None  # noqa: S101 - found by the checks
    state.open = functools.cache(lambda: open_model_of(state))
    state.dense = lambda streaming: open_model(checkpoint, streaming, state.device)
    with contextlib.ExitStack() as opened:  # by the first process, which fills it
        folder = output_folder(output, resume=resume, restart=restart, replace=state.replace)
        state.folder = state.by_first(lambda: opened.enter_context(folder), Path)
        state.log.open(state.folder)
        walk(state)
        if not state.first:
            return None
        report = _write_reports(state, state.folder)
        state.log.close()  # Windows renames no folder with an open file
    state.plugins.manager.hook.compressx_run_finished(report=report, output=output.expanduser())
    return report


def _write_reports(state: RunState, folder: Path) -> RunReport:
    """Draw the figures, and write the report, the plan, the recipe and the model card."""
    state.report_progress("save", 0, 1)
    shutil.rmtree(folder / "plots", ignore_errors=True)  # left incomplete by an interrupted run
    report = report_of(state)
    report = dataclasses.replace(report, figures=figures.draw(report, state.matrices, folder / "plots"))
    assert state.checkpoint is not None  # noqa: S101 - found by the checks
    written_card = card(state.loaded, state.plan, report, state.checkpoint, state.tokenizer)
    atomic_write(folder / "model/README.md", written_card.encode())
    report = dataclasses.replace(report, exports=tuple(export_all(state, folder)))
    recipe = state.loaded.to_yaml()
    shown = [*sections(report, recipe)]
    for name, text in {
        "recipe.yaml": recipe,
        "plan.json": json_text(state.plan.to_dict(), indent=1) + "\n",
        "report.md": to_markdown(shown),
        "report.html": to_html(shown, folder),
        "report.json": report.to_json(),
    }.items():
        atomic_write(folder / name, text.encode())
    state.report_progress("save", 1, 1)
    state.log.finished(report)
    return report


def report_of(state: RunState) -> RunReport:
    """Return the report of a finished run."""
    blocks, calibration = tuple(state.blocks), state.recipe.calibration
    loaded = [p for p in state.plugins.records if p.status == "loaded"]
    return RunReport(
        compressx=__version__,
        model=state.recipe.model.model_dump(mode="json", exclude_none=True),
        sparsity=total_sparsity(layer for block in blocks for layer in block.layers),
        blocks=blocks,
        skipped=tuple({"name": n, "reason": r} for n, r in state.plan.skipped.items()),
        evaluation=state.evaluation,
        seconds=state.timing.seconds(),
        peak_memory_bytes=peak_resident_bytes(),
        peak_gpu_memory_bytes=peak_gpu_bytes(),
        plugins=tuple({x: getattr(p, x) for x in ("name", "version", "source", "module")} for p in loaded),
        versions=library_versions(),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command(),
        hardware=machine(state.device),
        calibration={}
        if calibration is None
        else calibration.model_dump(include={"samples", "sequence_length", "seed"}),
        arithmetic=state.arithmetic,
        unread=getattr(state.access.model, "unread", ()),
        targeted=state.plan.targeted,
        **state.results,
    )
