"""The stages that fill the output folder: the model, and the formats of `export`; and the checks of that folder."""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressx.api.exporter import FinishedModel
from compressx.blocks.difference import weights_folder
from compressx.data.documents import local_files
from compressx.evaluation.evaluators import run_evaluators
from compressx.masks.maskset import MaskSet
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of, text_config
from compressx.models.checkpoint import Checkpoint, keep_settings
from compressx.models.export import check_output, not_written, refuse_overwriting
from compressx.models.loading import load_model, load_tokenizer
from compressx.models.shards import save_model
from compressx.models.streaming import open_model
from compressx.pipeline.sizes import refuse_full_disk
from compressx.planning.plan import Plan
from compressx.recipe.document import path_text
from compressx.recipe.schema import LoadedRecipe, Recipe, load_recipe
from compressx.runtime.errors import ArtifactError, CalibrationError, CompressxError, Mistakes, RecipeError, blamed_on
from compressx.runtime.files import os_errors_named
from compressx.stages.state import RunState, Stage
from compressx.stages.store import differing


class Save(Stage):
    """Write the model to the output folder, if there is one."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse an output folder that cannot be written, must not be replaced or has no room."""
        if state.checkpoint is None and state.skeleton is not None:  # in memory
            return
        loaded, output = state.loaded, state.recipe.output
        with mistakes.collected(), loaded.at("output"):
            check_output(output, replace=state.replace)
            is_finished(loaded, replace=state.replace)
        if state.checkpoint is None:
            return
        if state.tokenizer is not None:
            with mistakes.collected(), loaded.at("model"):
                check_saving(state, state.checkpoint)
        with mistakes.collected(), loaded.at("output"):
            _refuse_overwriting(state.recipe, state.checkpoint)
            if plan is not None:
                refuse_full_disk(state, plan)

    def run(self, state: RunState) -> None:
        """Save, unless a smaller model is written in place of this one."""
        folder, checkpoint = state.folder, state.checkpoint
        if folder is None or checkpoint is None:
            return
        if not state.recipe.shrink:  # which has written a smaller one
            (folder / "units.json").unlink(missing_ok=True)  # of an interrupted run whose recipe had it
            shutil.rmtree(folder / "model", ignore_errors=True)
            state.access.save(state.tokenizer, state.store.blocks, folder / "model")
        copied, left = (", ".join(map(ascii, names)) for names in keep_settings(checkpoint, folder / "model"))
        for verb, names in (("copied", copied), ("left out", left)):
            if names:
                state.note(f"model: {verb} {names} of {checkpoint.location}")


class Export(Stage):
    """Write the model in the formats that the recipe names."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:  # noqa: ARG002 - of no plan
        """Refuse formats that no plugin offers or that are there twice, and invalid options."""
        seen: set[str] = set()
        for i, export in enumerate(state.recipe.export):
            with mistakes.collected(), state.loaded.at("export", i):
                if export.format in seen:
                    raise RecipeError(f"format {export.format!r} is there already; write each once")
                seen.add(export.format)
            with mistakes.collected():
                _, exporter = state.exporter(i)
                if state.skeleton is not None and (check := getattr(exporter, "check", None)) is not None:
                    with state.loaded.at("export", i), blamed_on(f"exporter {export.format!r}"):
                        check(state.planned_model)


def export_all(state: RunState, output: Path) -> Iterator[dict[str, Any]]:
    """Write a model in every format of a recipe, once `model` has its card; remove it if it is none of them.

    Yields:
        What `RunReport.exports` has of each.
    """
    masks = MaskSet.load(output / "masks.safetensors")
    source, access = state.planned_model.source, state.access
    several = {*(getattr(text_config(access.model), "layer_types", None) or [])}
    if state.recipe.shrink and state.checkpoint is not None and not (state.plan.dropped and len(several) > 1):
        # Of blocks of several kinds the file needs all, in their order: those that went are zeros there.
        access = open_model(state.checkpoint.at(output / "model"), state.recipe.model.streaming, state.device)
    model = FinishedModel(output / "model", access, state.tokenizer, masks, weights_folder(state), source)
    shutil.rmtree(output / "exports", ignore_errors=True)  # left by an interrupted run
    kept = False
    for i, export in enumerate(state.recipe.export):
        spec, exporter = state.exporter(i)
        folder, kept = model.folder if spec.dense else output / "exports" / export.format, kept or spec.dense
        with os_errors_named("create", folder):
            folder.mkdir(parents=True, exist_ok=spec.dense)
        with state.loaded.at("export", i), blamed_on(f"exporter {export.format!r}"):
            if written := exporter.export(model, folder):
                state.note(f"{export.format}: {written}")
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        found = {"format": export.format, "folder": folder.relative_to(output).as_posix(), "bytes": size}
        yield found | _measured(state, export.format, folder, getattr(exporter, "loads", None))
    if not kept:
        shutil.rmtree(model.folder)


def _measured(state: RunState, of: str, folder: Path, file: str | None) -> dict[str, Any]:
    """Read a file again that was written, and return its zeros and its perplexity, if the recipe measures that."""
    ready = [x for x in state.evaluators if x.name in ("token_perplexity", "fidelity")]
    if file is None or not ready:
        return {}
    if not isinstance(state.access, InMemory):
        state.note(f"{of}: not measured, since {file} would have to be read whole, and the model is streamed")
        return {}
    try:
        access = InMemory(load_model(Checkpoint(str(folder), folder / file)).to(state.device))
        linears = architecture_of(access.model).linears.values()
        zeros = sum(int((x.weight == 0).sum()) for x in linears) / sum(x.weight.numel() for x in linears)
        figures = run_evaluators(access, state.tokenizer, ready, dense=state.compared_with)
    except CompressxError as error:
        state.note(f"{of}: not measured, since {file} cannot be read here: {str(error).partition('; ')[0]}")
        return {}
    state.report_figures(of, figures)
    return {"zeros": zeros, "evaluation": figures}


def check_saving(state: RunState, checkpoint: Checkpoint) -> None:
    """Save everything but weights to a temporary folder, as the end of a run does."""
    model = copy.copy(state.skeleton)
    model.config = copy.deepcopy(model.config)  # saving changes it
    with tempfile.TemporaryDirectory(prefix="compressx-") as folder:
        save_model(model, state.tokenizer, Path(folder) / "model", {})
        keep_settings(checkpoint, Path(folder) / "model")
        if checkpoint.file is not None:  # of which transformers may read another tokenizer than it has written
            written = load_tokenizer(Checkpoint(str(Path(folder) / "model")))
            state.tokenizer.differs = getattr(written, "differs", None)


def _refuse_overwriting(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Refuse an output folder that holds the input model, packed or not, or text."""
    for path in (Path(checkpoint.location), *recipe.model.folders):
        refuse_overwriting(recipe.output, "input model", path)
    for i, export in enumerate(recipe.export):
        for name, value in export.options.items():
            with contextlib.suppress(OSError):  # of no possible path
                refuse_overwriting(recipe.output, f"file of export[{i}].options.{name}", Path(str(value)))
    for place, dataset in recipe.datasets().items():
        with contextlib.suppress(CalibrationError):  # which `Inputs.check` reports
            for file in local_files(dataset):
                refuse_overwriting(recipe.output, f"text of {path_text(place)}", file)


def is_finished(
    loaded: LoadedRecipe, advice: str = "choose another output, or replace it with --replace", *, replace: bool = False
) -> bool:
    """Return whether the output folder holds a finished run of a recipe."""
    changed = _changed(loaded)
    if changed and not replace:
        raise ArtifactError(f"{loaded.recipe.output} was written by another recipe ({'; '.join(changed)}); {advice}")
    return changed == []


def earlier_run(loaded: LoadedRecipe) -> str:
    """Describe the finished run that a run of a recipe replaces, and what else is in its folder; empty without one."""
    if (changed := _changed(loaded)) is None:
        return ""
    whose = f"of another recipe ({'; '.join(changed)})" if changed else "of the same recipe"
    with_it = f", and with it {others}" if (others := not_written(loaded.recipe.output)) else ""
    return f"the finished run in {loaded.recipe.output}, {whose}{with_it}"


def _changed(loaded: LoadedRecipe) -> list[str] | None:
    """Name values, three at most, in which the recipe of the finished run in the output differs; None without one."""
    recipe = loaded.recipe
    written = recipe.output.expanduser() / "recipe.yaml"
    if not written.is_file():
        return None
    # `output` may be written differently there, such as a relative path; `auto` is there as what was taken.
    known = {"output": recipe.output} | ({"compute_dtype": "auto"} if recipe.compute_dtype == "auto" else {})
    try:
        earlier = load_recipe(written).recipe.model_copy(update=known)
    except CompressxError as error:
        return [str(error).partition("\n")[0]]
    was, now = (x.model_dump(mode="json", by_alias=True, exclude_none=True) for x in (earlier, recipe))
    lines = [line for key in {**now, **was} for line in differing(key, was.get(key), now.get(key))]
    return [*lines[:3], f"and {len(lines) - 3} more"] if len(lines) > 3 else lines
