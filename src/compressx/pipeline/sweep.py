"""A recipe run for every combination of some of its values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from compressx.errors import ArtifactError, RecipeError
from compressx.models.access import Device
from compressx.pipeline.asked import Progress
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import Plugins
from compressx.recipe.schema import LoadedRecipe, load_recipe
from compressx.recipe.yamlfile import dump_yaml, parse_yaml


@dataclass(frozen=True, eq=False)
class Cell:
    """One combination.

    Attributes:
        values: `KEY=VALUE` of each axis.
        loaded: the recipe with these values, its output a folder of its own.
    """

    values: tuple[str, ...]
    loaded: LoadedRecipe

    @property
    def output(self) -> Path:
        """Where the run is written."""
        return self.loaded.recipe.output

    def check(self, plugins: Plugins) -> None:
        """Find what can be found wrong before weights are loaded, a finished run of another recipe included.

        Raises:
            CompressxError: as `plan`.
        """
        plan(self.loaded, plugins=plugins)
        self.is_finished()

    def is_finished(self) -> bool:
        """Say whether the output folder is that of this very recipe.

        Raises:
            ArtifactError: it is that of another one.
        """
        told = self.output / "recipe.yaml"
        if not told.is_file():
            return False
        if load_recipe(told).recipe == self.loaded.recipe:
            return True
        raise ArtifactError(
            f"{self.output} was made by another recipe than {' '.join(self.values)} of this one; name another "
            "--output, or remove it"
        )

    def run(self, plugins: Plugins, progress: Progress | None = None, device: Device = "auto") -> bool:
        """Run the recipe, going on with an interrupted run; False when it was finished before.

        Raises:
            CompressxError: as `run`.
        """
        if self.is_finished():
            return False
        run(self.loaded, plugins=plugins, progress=progress, device=device, resume=True)
        return True


def grid(recipe: Path, axes: Sequence[str], overrides: Sequence[str], output: Path | None) -> list[Cell]:
    """Make a recipe for every combination of values, the last axis changing fastest.

    Args:
        recipe: the file.
        axes: `KEY=VALUE,VALUE...`, values in YAML, for each key.
        overrides: `KEY=VALUE` for all of them.
        output: the folder of all outputs; when absent, the recipe's own with `-sweep` after its name.

    Raises:
        RecipeError: an axis without values, a key given twice, and everything that is wrong with one of the recipes.
    """
    named = [_axis(axis) for axis in axes]
    keys = [key for key, _ in named]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise RecipeError(f"--grid {repeated}: given twice; list all its values once")
    if output is None:  # beside the recipe's own output, which a run of it would replace with all that is inside
        own = load_recipe(recipe, overrides).recipe.output
        output = own.with_name(f"{own.name}-sweep")
    cells = []
    for values in product(*(values for _, values in named)):
        given = tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        place = output / _folder_name(given, keys)
        cells.append(Cell(given, load_recipe(recipe, [*overrides, *given, f"output={dump_yaml(str(place)).strip()}"])))
    outputs = [cell.output for cell in cells]
    if len(set(outputs)) < len(outputs):
        raise RecipeError(f"--grid {' '.join(axes)}: a value is given twice")
    return cells


def _axis(axis: str) -> tuple[str, list[str]]:
    key, equals, text = axis.partition("=")
    key, place = key.strip(), f"--grid {axis}"
    if not equals or not key or not text.strip():
        raise RecipeError(f"{place}: expected KEY=VALUE,VALUE..., such as prune.1.sparsity=0.4,0.5,0.6")
    values = parse_yaml(f"[{text}]", "", place=place).plain()
    return key, [dump_yaml([value]).strip().removeprefix("- ") for value in values]


def _folder_name(given: Sequence[str], keys: Sequence[str]) -> str:
    """Name a folder by its values; keys are as short as they can be and differ."""
    short = [key.rsplit(".", 1)[-1] for key in keys]
    shown = short if len(set(short)) == len(short) else keys
    parts = [f"{name}={value.partition('=')[2]}" for name, value in zip(shown, given, strict=True)]
    return re.sub(r"[^\w.=+-]+", "-", "_".join(parts)).strip("-")[:120]
