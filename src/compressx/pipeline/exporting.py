"""The recipe's `export` section: the formats that a run writes, checked before weights are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compressx.api.exporter import Exporter, FinishedModel
from compressx.masks.maskset import MaskSet
from compressx.planning.plan import Plan
from compressx.plugins.kinds import EXPORTER
from compressx.recipe.validation import validate_options
from compressx.runtime.errors import Mistakes, RecipeError, blamed_on
from compressx.runtime.files import os_errors_named
from compressx.stages.state import RunState, Stage

_OWN = "safetensors"
"""What a run writes into `model` in any case, evaluates, and gives to all exporters."""


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
                _built(state, i)


def _built(state: RunState, i: int) -> Exporter:
    export, loaded = state.recipe.export[i], state.loaded
    with loaded.at("export", i):
        spec = state.plugins.find(EXPORTER, export.format)
    options = validate_options(spec.options, export.options, lambda *loc: loaded.where("export", i, "options", *loc))
    with loaded.at("export", i), blamed_on(f"build of exporter {spec.name!r} failed"):
        return spec.build(options)


def written(state: RunState, output: Path) -> Iterator[dict[str, Any]]:
    """Write a model in every format of a recipe, once `model` has its card; remove it if it is none of them.

    Yields:
        `format`, `folder` inside the output and `bytes` of each, for the report.

    Raises:
        PluginError: an exporter that fails.
    """
    masks = MaskSet.load(output / "masks.safetensors")
    model = FinishedModel(output / "model", state.access, state.tokenizer, masks)
    shutil.rmtree(output / "exports", ignore_errors=True)  # left by an interrupted run
    for i, export in enumerate(state.recipe.export):
        folder = model.folder if export.format == _OWN else output / "exports" / export.format
        exporter = _built(state, i)
        with os_errors_named("create", folder):
            folder.mkdir(parents=True, exist_ok=folder == model.folder)
        with state.loaded.at("export", i), blamed_on(f"exporter {export.format!r}"):
            exporter.export(model, folder)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        yield {"format": export.format, "folder": folder.relative_to(output).as_posix(), "bytes": size}
    if _OWN not in {export.format for export in state.recipe.export}:
        shutil.rmtree(model.folder)
