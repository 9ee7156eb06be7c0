"""Run a recipe for every combination of some of its values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from compressx.evaluation.evaluators import with_evaluators
from compressx.models.access import Device
from compressx.pipeline.inputs import read_all
from compressx.pipeline.run import run
from compressx.pipeline.saving import is_finished
from compressx.pipeline.stages import prepare
from compressx.plugins.manager import Plugins
from compressx.recipe.document import parse_yaml, steps_of
from compressx.recipe.schema import LoadedRecipe, load_recipe
from compressx.runtime.errors import CompressxError, RecipeError
from compressx.stages.state import Progress, RunState


@dataclass(frozen=True, eq=False)
class SweepRun:
    """One combination of values.

    Attributes:
        values: `KEY=VALUE` of each axis.
        loaded: the recipe with these values and its own output folder.
    """

    values: tuple[str, ...]
    loaded: LoadedRecipe

    @property
    def output(self) -> Path:
        """The run's output folder."""
        return self.loaded.recipe.output

    def is_finished(self) -> bool:
        """Return whether the output folder holds a finished run of this recipe."""
        values = " ".join(self.values)
        return is_finished(self.loaded, f"this one is with {values}; choose another --output, or remove it")

    def run(
        self, plugins: Plugins, progress: Progress | None = None, device: Device = "auto", *, restart: bool = False
    ) -> bool:
        """Run the recipe, resuming an interrupted run unless `restart`; return False if it was already finished.

        Raises:
            CompressxError: as `run`; the message begins with the values.
        """
        if self.is_finished():
            return False
        try:
            run(self.loaded, plugins=plugins, progress=progress, device=device, resume=not restart, restart=restart)
        except CompressxError as error:
            raise type(error)(f"{' '.join(self.values)}: {error}") from error
        return True


def runs_of(
    recipe: Path, axes: Sequence[str], overrides: Sequence[str], output: Path | None, plugins: Plugins
) -> list[SweepRun]:
    """Make a recipe for every combination of values; the last axis varies fastest.

    Args:
        recipe: the file.
        axes: `KEY=VALUE,VALUE...` for each key, values in YAML.
        overrides: `KEY=VALUE` for all recipes.
        output: the folder of all outputs; when absent, the recipe's output with `-sweep` appended.
        plugins: that offer the evaluators.
    """
    named = [_axis(axis) for axis in axes]
    keys = [key for key, _ in named]
    combinations = list(product(*(values for _, values in named)))
    wrong = [f"--grid {key}: given twice; list all its values once" for key in keys if keys.count(key) > 1]
    wrong += [
        f"--set {one}: --grid also sets this key; remove one of the two"
        for one in overrides if ".".join(steps_of(one.partition("=")[0])) in keys
    ]  # fmt: skip
    if len(set(combinations)) < len(combinations):
        wrong.append(f"--grid {' '.join(axes)}: a value is given twice")
    if wrong:
        raise RecipeError("\n".join(dict.fromkeys(wrong)))
    given = [tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True)) for values in combinations]
    if output is None:  # not inside the recipe's own output, which a run of it replaces
        run_alone = load_recipe(recipe, overrides, given[0]).recipe.output
        output = run_alone.with_name(f"{run_alone.name}-sweep")
    names = _folder_names(keys, combinations)
    cells = []
    for one, name in zip(given, names, strict=True):
        own = [*overrides, f"output={json.dumps(str(output.expanduser() / name))}"]
        cells.append(SweepRun(one, with_evaluators(load_recipe(recipe, own, one), plugins)))
    return cells


def check_runs(cells: Iterable[SweepRun], plugins: Plugins) -> None:
    """Check every combination, including the amount of text, before weights are loaded."""
    counted: set[str] = set()
    for cell in cells:
        if cell.is_finished():
            continue
        state = RunState(cell.loaded, plugins, measured=False)
        prepare(state)
        recipe = cell.loaded.recipe
        named = f"{recipe.model} {recipe.datasets()} {recipe.draws()} {recipe.evaluate}"
        if (texts := f"{state.plan.needs_calibration} {named}") in counted:
            continue
        try:
            read_all(state, lambda text, draw: torch.zeros(text.samples, draw.sequence_length, dtype=torch.int64))
        except CompressxError as error:
            raise type(error)(f"{' '.join(cell.values)}: {error}") from error
        counted.add(texts)


def _axis(axis: str) -> tuple[str, list[str]]:
    """Split `KEY=VALUE,VALUE...` into the key and its values, each as JSON (one-line YAML)."""
    path, equals, text = axis.partition("=")
    key, place = ".".join(steps_of(path)), f"--grid {axis}"
    if not equals or not key or not text.strip():
        raise RecipeError(f"{place}: expected KEY=VALUE,VALUE..., such as prune.1.sparsity=0.4,0.5,0.6")
    if key == "output":
        raise RecipeError(
            f"{place}: every run of a sweep gets its own folder, named after its values; use --output FOLDER for the "
            "folder that contains them"
        )
    values = parse_yaml(f"[{text}]", "", place=place).value
    return key, [json.dumps(value, ensure_ascii=False) for value in values]


def _folder_names(keys: Sequence[str], combinations: Sequence[Sequence[str]]) -> list[str]:
    """Name folders after their values, with the last part of each key where those are distinct."""
    short = [key.rsplit(".", 1)[-1] for key in keys]
    shown = short if len(set(short)) == len(short) else keys
    names = []
    for values in combinations:
        parts = [f"{name}={value.strip(chr(34))}" for name, value in zip(shown, values, strict=True)]
        names.append(re.sub(r"[^\w.=+-]+", "-", "_".join(parts)).strip("-")[:120])
    if len(set(names)) < len(names):  # they differ only in replaced characters or after the cut
        names = [f"{name[:110]}-{number}" for number, name in enumerate(names, start=1)]
    return names
