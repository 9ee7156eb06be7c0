"""The parts of a recipe that can be checked on their own, so that one mistake does not hide the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compressx.recipe.document import Node, Placed, Step
from compressx.recipe.rules import Rule
from compressx.recipe.schema import LoadedRecipe
from compressx.recipe.sources import DatasetField, DatasetSource, ModelField, ModelSource, WeightedField

_DATASETS = (("calibration", "dataset"), ("finetune", "dataset"))


@dataclass(frozen=True)
class Parts(Placed):
    """The parts of a recipe; of an invalid one, those that are valid.

    Attributes:
        model: the model's source, or None.
        output: the output folder, or None.
        rules: by position in `prune`.
        datasets: by location.
    """

    model: ModelSource | None
    output: Path | None
    rules: Mapping[int, Rule]
    datasets: Mapping[tuple[Step, ...], DatasetSource]


def parts_of(loaded: LoadedRecipe) -> Parts:
    """Return the parts of a valid recipe."""
    recipe = loaded.recipe
    return Parts(loaded.source, recipe.model, recipe.output, dict(enumerate(recipe.prune)), recipe.datasets())


def valid_parts(source: Node) -> Parts:
    """Return the parts of a document that are valid, whatever the rest of it is."""
    given = source.plain()
    datasets: dict[tuple[Step, ...], DatasetSource] = {
        loc: dataset for loc in _DATASETS if (dataset := _part(DatasetField, given, *loc)) is not None
    }
    mixed = [loc for section in ("calibration", "finetune") for loc in _items(given, section, "datasets")]
    datasets |= {loc: dataset for loc in mixed if (dataset := _part(WeightedField, given, *loc)) is not None}
    return Parts(
        source,
        _part(ModelField, given, "model"),
        _part(Path, given, "output"),
        {loc[-1]: rule for loc in _items(given, "prune") if (rule := _part(Rule, given, *loc)) is not None},
        datasets,
    )


def _items(given: Any, *loc: Step) -> list[tuple[Any, ...]]:
    """Return the locations of a list's items."""
    return [(*loc, i) for i in range(len(_part(list, given, *loc) or ()))]


def _part(kind: Any, given: Any, *loc: Step) -> Any:
    """Return the value at a location of plain data, or None if there is none or it is invalid."""
    try:
        for step in loc:
            given = given[step]
        return TypeAdapter(kind).validate_python(given, extra="forbid")
    except (LookupError, TypeError, ValidationError):
        return None
