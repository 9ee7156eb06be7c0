"""Run a recipe for every combination of some of its values, or of methods, sparsities and seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial, reduce
from itertools import chain, product
from pathlib import Path

import torch
from torch import nn

from compressx.api.projections import find_projections
from compressx.api.pruner import Block
from compressx.evaluation.evaluators import with_evaluators
from compressx.models.access import Device
from compressx.models.architecture import architecture_of, text_config
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_skeleton
from compressx.pipeline.inputs import read_all
from compressx.pipeline.run import run
from compressx.pipeline.saving import is_finished
from compressx.pipeline.stages import prepare
from compressx.planning.targets import kinds
from compressx.plugins.manager import Plugins
from compressx.recipe.document import PlacedValue, override, parse_yaml, read_plain, read_yaml, steps_of
from compressx.recipe.schema import LoadedRecipe, load_recipe
from compressx.runtime.errors import CompressxError, RecipeError, UnsupportedModelError, one_line
from compressx.stages.state import Progress, RunState


@dataclass(frozen=True, eq=False)
class SweepRun:
    """One combination of values.

    Attributes:
        values: `KEY=VALUE` of each axis; or method, sparsity and seed.
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
    wrong += _set_twice(overrides, keys, "--grid")
    if len(set(combinations)) < len(combinations):
        wrong.append(f"--grid {' '.join(axes)}: a value is given twice")
    if wrong:
        raise RecipeError("\n".join(dict.fromkeys(wrong)))
    document = reduce(override, overrides, read_yaml(recipe))
    given = [tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True)) for values in combinations]
    made = {one: reduce(partial(override, option="--grid"), one, document) for one in given}
    short = [key.rsplit(".", 1)[-1] for key in keys]
    shown = short if len(set(short)) == len(short) else keys
    texts = ["_".join(f"{k}={v.strip(chr(34))}" for k, v in zip(shown, x, strict=True)) for x in combinations]
    return _in_folders(made, texts, output, plugins)


def runs_by_name(
    recipe: Path, methods: Sequence[str], sparsities: Sequence[str], seeds: int | None, overrides: Sequence[str],
    output: Path | None, plugins: Plugins,
) -> list[SweepRun]:  # fmt: skip
    """Make a recipe for every method, sparsity and seed in place of its `prune` and `allocation`; seeds vary fastest.

    Sparsities are fractions or N:M, in YAML. `seeds` says how many, from 0, calibration and fine-tuning get; None
    leaves those of the recipe. The others are as for `runs_of`.
    """
    levels = [read_plain(text) for text in sparsities]
    wrong = _set_twice(overrides, ["prune", "allocation"], "--methods")
    wrong += _set_twice(overrides, ["calibration.seed", "finetune.seed"] if seeds else [], "--seeds")
    wrong += _wrong_names(methods, levels)
    if wrong:
        raise RecipeError("\n".join(dict.fromkeys(wrong)))
    document = reduce(override, overrides, read_yaml(recipe)).replaced(["allocation"], PlacedValue(None, {(): ""}))
    some = [{"targets": ["*"], "pruner": "any", "sparsity": 0.5}]
    loaded = load_recipe(document.replaced(["prune"], PlacedValue(some, {(): "--methods"})))
    if seeds and loaded.recipe.calibration is None:
        loaded.refuse("--seeds are those of calibration, and the recipe has none; add it, or leave out --seeds")
    with loaded.at("model"):
        model = load_skeleton(find_checkpoint(loaded.recipe.model))
    made = {}
    for method, level, seed in product(methods, levels, [None] if seeds is None else range(seeds)):
        one = document.replaced(["prune"], rules_of(method, level, model))
        for section in ("calibration", "finetune"):
            if seed is not None and getattr(loaded.recipe, section) is not None:
                one = one.replaced([section, "seed"], PlacedValue(seed, {(): f"--seeds {seeds}"}))
        made[(method, str(level), *([] if seed is None else [f"seed{seed}"]))] = one
    return _in_folders(made, ["_".join(values) for values in made], output, plugins)


def _wrong_names(methods: Sequence[str], levels: Sequence[object]) -> list[str]:
    """Say which sparsities are none, and what is given twice."""
    wanted = "expected a fraction of zeros between 0 and 1, such as 0.5, or N:M, such as 2:4"
    found = [
        f"--sparsities {one_line(str(x))}: {wanted}"
        for x in levels if not (0 < x < 1 if isinstance(x, float) else re.fullmatch("[0-9]+:[0-9]+", str(x)))
    ]  # fmt: skip
    for option, values in (("--methods", [*methods]), ("--sparsities", [*map(str, levels)])):
        found += [f"{option} {one_line(x)}: given twice; list it once" for x in values if values.count(x) > 1]
    return found


def rules_of(method: str, sparsity: object, model: nn.Module) -> PlacedValue:
    """Return a recipe's `prune` for `PRUNER`, or `PRUNER:TARGET,TARGET+PRUNER`, whose last pruner takes the rest.

    A target is `qk`, the query and key projections of the model, or a glob. No weights are read.
    """
    place = f"--methods {one_line(method)}"
    parts = [part.partition(":") for part in method.split("+")]
    if [bool(targets) for *_, targets in parts] != [True] * len(parts[1:]) + [False] or parts[-1][1]:
        raise RecipeError(
            f"{place}: expected PRUNER, such as wanda, or PRUNER:TARGETS+PRUNER, such as attnprune:qk+sparsegpt, of "
            "which only the last has no targets; a target is qk or a glob, such as *.down_proj"
        )
    key, rules = "pattern" if isinstance(sparsity, str) else "sparsity", []
    with PlacedValue(None, {(): f"{place}: qk"}).at():
        for pruner, _, targets in parts:
            globs = [_query_and_key(model) if x == "qk" else [x] for x in (targets or "*").split(",")]
            rules.append({"targets": [*chain(*globs)], "pruner": pruner, key: sparsity})
    return PlacedValue(rules, {(): f"{place} --sparsities {sparsity}"})


def _query_and_key(model: nn.Module) -> list[str]:
    """Return globs of the linears that hold queries and keys, or names where globs would match others, too."""
    found, names = architecture_of(model), dict[str, None]()
    blocks = [Block(i, n, x, found.inside(n), (), text_config(model)) for i, (n, x) in enumerate(found.blocks.items())]
    for block in blocks:
        with suppress(UnsupportedModelError):
            own = find_projections(block)
            names |= dict.fromkeys((own.query.name, own.key.name))
    if not names:
        find_projections(blocks[0])  # which says why there are none
    globs = [*kinds(names)]
    return globs if {x for x in found.linears if any(fnmatchcase(x, y) for y in globs)} == {*names} else [*names]


def _set_twice(overrides: Sequence[str], keys: Sequence[str], option: str) -> list[str]:
    """Say which overrides another option replaces."""
    paths = [(one, ".".join(steps_of(one.partition("=")[0]))) for one in overrides]
    told = f"{option} also sets this key; remove one of the two"
    return [f"--set {one}: {told}" for one, path in paths if any(f"{path}.".startswith(f"{key}.") for key in keys)]


def _in_folders(
    made: Mapping[tuple[str, ...], PlacedValue], texts: Sequence[str], output: Path | None, plugins: Plugins
) -> list[SweepRun]:
    """Load the recipe of each combination of values, with a folder in `output` that is named after a text."""
    if output is None:  # not inside the recipe's own output, which a run of it replaces
        run_alone = load_recipe(next(iter(made.values()))).recipe.output
        output = run_alone.with_name(f"{run_alone.name}-sweep")
    cells = []
    for (values, document), name in zip(made.items(), _folder_names(texts), strict=True):
        own = f"output={json.dumps(str(output.expanduser() / name))}"
        cells.append(SweepRun(values, with_evaluators(load_recipe(document, [own]), plugins)))
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


def _folder_names(texts: Sequence[str]) -> list[str]:
    """Name folders after texts, in characters that every file system takes."""
    names = [re.sub(r"[^\w.=+-]+", "-", text).strip("-")[:120] for text in texts]
    if len(set(names)) < len(names):  # they differ only in replaced characters or after the cut
        names = [f"{name[:110]}-{number}" for number, name in enumerate(names, start=1)]
    return names
