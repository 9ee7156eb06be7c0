"""Recipes for a model in memory, which has neither a source nor an output folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressx.recipe.document import Node, from_python, put
from compressx.recipe.schema import LoadedRecipe, read_recipe, recipe_from_source
from compressx.runtime.errors import RecipeError

_ARGUMENT = "the argument calibration"
_NOT_IN_MEMORY = {
    "model": "the model is the one that is passed to prune; leave it out, or call compressx.run",
    "output": "a model in memory is pruned without writing files; leave it out, or call compressx.run",
    "shrink": "the smaller model is written to an output folder; leave it out, or call compressx.run",
}


def recipe_in_memory(
    recipe: Path | Mapping[str, Any], model: str, calibration: Mapping[str, Any] | None, overrides: Sequence[str] = ()
) -> LoadedRecipe:
    """Load a recipe for a model that is in memory.

    Args:
        recipe: a YAML file, or the same structure in Python, without `model` and `output`.
        model: what the model is called in reports.
        calibration: the keys of `calibration` that the caller's own text decides; None without such text.
        overrides: as for `load_recipe`.

    Raises:
        RecipeError: as for `load_recipe`; a key that has no meaning here.
    """
    source = read_recipe(recipe, overrides) if isinstance(recipe, Path) else from_python(recipe, "<dict>")
    _refuse_keys(source, _NOT_IN_MEMORY)
    if calibration is not None:
        section = source.value.get("calibration") if isinstance(source.value, Mapping) else None
        decided = "the argument calibration decides it; leave it out of the recipe"
        _refuse_keys(section, dict.fromkeys([*calibration, "datasets"], decided), "calibration.")
        source = put(source, ["calibration"], section or Node({}, _ARGUMENT))
        for key, value in calibration.items():
            source = put(source, ["calibration", key], Node(value, _ARGUMENT))
    for key, value in (("model", model), ("output", ".")):
        source = put(source, [key], Node(value, source.place))
    return recipe_from_source(source)


def _refuse_keys(section: Node | None, reasons: Mapping[str, str], path: str = "") -> None:
    found = section.value if section is not None and isinstance(section.value, Mapping) else {}
    if lines := [f"{found[key].place}: {path}{key}: {why}" for key, why in reasons.items() if key in found]:
        raise RecipeError("\n".join(lines))
