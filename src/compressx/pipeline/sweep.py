"""A recipe run for every combination of some of its values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from compressx.models.access import Device
from compressx.models.loading import load_tokenizer
from compressx.pipeline.context import Progress
from compressx.pipeline.preparation import prepare, read_all
from compressx.pipeline.run import run
from compressx.plugins.manager import Plugins
from compressx.recipe.schema import LoadedRecipe, load_recipe
from compressx.recipe.yamlfile import parse_yaml, steps_of
from compressx.runtime.errors import ArtifactError, CompressxError, RecipeError


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

    def is_finished(self) -> bool:
        """Say whether the output folder is that of this very recipe.

        Raises:
            ArtifactError: it is that of another one.
        """
        told = self.output / "recipe.yaml"
        if not told.is_file():
            return False
        # the folder is this one, whichever way the recipe there names it
        if load_recipe(told).recipe.model_copy(update={"output": self.output}) == self.loaded.recipe:
            return True
        raise ArtifactError(
            f"{self.output} was made by another recipe than {' '.join(self.values)} of this one; name another "
            "--output, or remove it"
        )

    def run(
        self, plugins: Plugins, progress: Progress | None = None, device: Device = "auto", *, restart: bool = False
    ) -> bool:
        """Run the recipe, going on with an interrupted run or beginning anew; False when it was finished before.

        Raises:
            CompressxError: as `run`.
        """
        if self.is_finished():
            return False
        run(self.loaded, plugins=plugins, progress=progress, device=device, resume=not restart, restart=restart)
        return True


def grid(recipe: Path, axes: Sequence[str], overrides: Sequence[str], output: Path | None) -> list[Cell]:
    """Make a recipe for every combination of values, the last axis changing fastest.

    Args:
        recipe: the file.
        axes: `KEY=VALUE,VALUE...`, values in YAML, for each key.
        overrides: `KEY=VALUE` for all of them.
        output: the folder of all outputs; when absent, the recipe's own with `-sweep` after its name.

    Raises:
        RecipeError: an axis without values, a key given twice or to both, and all that is wrong with a recipe.
    """
    named = [_axis(axis) for axis in axes]
    keys = [key for key, _ in named]
    if repeated := next((key for key in keys if keys.count(key) > 1), None):
        raise RecipeError(f"--grid {repeated}: given twice; list all its values once")
    if both := next((one for one in overrides if ".".join(steps_of(one.partition("=")[0])) in keys), None):
        raise RecipeError(f"--set {both}: --grid gives the same key its values; leave one of the two out")
    combinations = list(product(*(values for _, values in named)))
    if len(set(combinations)) < len(combinations):
        raise RecipeError(f"--grid {' '.join(axes)}: a value is given twice")
    given = [tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True)) for values in combinations]
    if output is None:  # beside the recipe's own output, which a run of it would replace with all that is inside
        own = load_recipe(recipe, overrides, given[0]).recipe.output
        output = own.with_name(f"{own.name}-sweep")
    names = _folder_names(keys, combinations)
    return [
        Cell(one, load_recipe(recipe, [*overrides, f"output={json.dumps(str(output.expanduser() / name))}"], one))
        for one, name in zip(given, names, strict=True)
    ]


def check(cells: Iterable[Cell], plugins: Plugins) -> None:
    """Find what can be found wrong with any combination before weights are loaded, its windows of text counted.

    Raises:
        CompressxError: as `plan`; text that is too short; an output folder that is another recipe's.
    """
    counted: set[str] = set()
    for cell in cells:
        prepared = prepare(cell.loaded, plugins)
        if cell.is_finished():
            continue
        named = cell.loaded.recipe.model_dump_json(include={"model", "calibration", "finetune", "evaluate"})
        if (texts := f"{prepared.plan.needs_calibration} {named}") in counted:
            continue
        try:
            read_all(cell.loaded, prepared.plan, load_tokenizer(prepared.checkpoint))
        except CompressxError as error:
            raise type(error)(f"{' '.join(cell.values)}: {error}") from error
        counted.add(texts)


def _axis(axis: str) -> tuple[str, list[str]]:
    """Part `KEY=VALUE,VALUE...` into the key and its values, each as JSON, which is YAML on one line."""
    path, equals, text = axis.partition("=")
    key, place = ".".join(steps_of(path)), f"--grid {axis}"
    if not equals or not key or not text.strip():
        raise RecipeError(f"{place}: expected KEY=VALUE,VALUE..., such as prune.1.sparsity=0.4,0.5,0.6")
    if key == "output":
        raise RecipeError(
            f"{place}: every run of a sweep has a folder of its own, named after its values; expected another key, and "
            "the folder of all of them as --output FOLDER"
        )
    values = parse_yaml(f"[{text}]", "", place=place).plain()
    return key, [json.dumps(value, ensure_ascii=False) for value in values]


def _folder_names(keys: Sequence[str], combinations: Sequence[Sequence[str]]) -> list[str]:
    """Name folders by their values; keys are as short as they can be and differ, and so are names."""
    short = [key.rsplit(".", 1)[-1] for key in keys]
    shown = short if len(set(short)) == len(short) else keys
    names = []
    for values in combinations:
        parts = [f"{name}={value.strip(chr(34))}" for name, value in zip(shown, values, strict=True)]
        names.append(re.sub(r"[^\w.=+-]+", "-", "_".join(parts)).strip("-")[:120])
    if len(set(names)) < len(names):  # by signs that no folder's name has, or beyond its length
        names = [f"{name[:110]}-{number}" for number, name in enumerate(names, start=1)]
    return names
