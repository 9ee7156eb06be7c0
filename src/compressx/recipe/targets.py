"""How a recipe names linears: globs and numbers of decoder blocks."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, PlainValidator, Tag

from compressx.recipe.validation import Strict

_RANGE = r"([0-9]{1,9})-([0-9]{1,9})"


def _listed(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _number(value: object) -> int | str:
    if type(value) is int:
        return value
    found = re.fullmatch(_RANGE, value) if isinstance(value, str) else None
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError("expected the number of a layer, such as 3 or -1, or a range that rises, such as 4-27")
    return found[0]


_Input = int | Annotated[str, Field(pattern=f"^{_RANGE}$")]
_Number = Annotated[int | str, PlainValidator(_number, json_schema_input_type=_Input)]


class Layers(Strict):
    """All linears of some decoder blocks."""

    layers: Annotated[list[_Number], BeforeValidator(_listed, json_schema_input_type=_Input | list[_Input])] = Field(
        min_length=1, description="numbers of decoder blocks from 0, such as 4-27 or [0, 1, -1]; -1 is the last"
    )

    def __str__(self) -> str:
        listed = ", ".join(map(str, self.layers))
        return f"layers: [{listed}]" if len(self.layers) > 1 else f"layers: {listed}"

    def of(self, depth: int) -> set[int]:
        """Return the blocks' numbers from 0 in a model of `depth` blocks.

        Raises:
            ValueError: a number that the model does not have; the message says which there are.
        """
        numbers = [n for part in self.layers for n in ([part] if isinstance(part, int) else _within(part))]
        if beyond := [n for n in numbers if not -depth <= n < depth]:
            raise ValueError(f"the model has no layer {beyond[0]}; its layers are 0-{depth - 1}, and -1 is the last")
        return {n % depth for n in numbers}


def _within(part: str) -> range:
    first, last = map(int, part.split("-"))
    return range(first, last + 1)


Target: TypeAlias = Annotated[
    Annotated[str, Tag("name")] | Annotated[Layers, Tag("mapping")],
    Discriminator(lambda value: "mapping" if isinstance(value, dict | Layers) else "name"),
]


def matches(glob: str, name: str) -> bool:
    """Return whether a glob matches a linear's whole name."""
    return fnmatchcase(name, glob)
