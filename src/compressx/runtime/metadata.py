"""The header of a safetensors file, and what compressx writes into its metadata, read back and checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from compressx.runtime.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from pydantic import BaseModel

_Form = TypeVar("_Form", bound="BaseModel")


def one_by_one(values: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate values by name up to the first wrong one: pydantic's errors on all of a large file take gigabytes."""
    if not isinstance(values, dict):
        return validate(values)
    return {name: found for item in values.items() for name, found in validate(dict([item])).items()}


def validated(path: Path, text: str, form: type[_Form]) -> _Form:
    """Return what the header of a file or its metadata say, JSON, in the form that they were written in.

    Raises:
        ArtifactError: they are something else; the message names the file and the place.
    """
    from pydantic import ValidationError

    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        first: Any = {"input": "long", **error.errors(include_input=len(text) < 2**20)[0]}
        where = one_line(".".join(str(part) for part in first["loc"])[:200]) or "compressx"
        raise ArtifactError(
            f"{path}: {where} in its metadata is {str(first['input'])[:80]!r}: {first['msg']}; the file is damaged or "
            "was written by another version of compressx"
        ) from error
