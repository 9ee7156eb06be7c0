"""The header of a safetensors file, and what compressx writes into its metadata, read back and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from compressx.runtime.errors import ArtifactError, one_line

if TYPE_CHECKING:
    from pydantic import BaseModel

_Form = TypeVar("_Form", bound="BaseModel")


def validated(path: Path, text: str, form: type[_Form]) -> _Form:
    """Return what a header or its metadata say, in the form that they were written in.

    Args:
        path: the file, for messages.
        text: JSON.
        form: what they have to be.

    Raises:
        ArtifactError: they are something else; the message names the file and the place.
    """
    from pydantic import ValidationError

    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = one_line(".".join(str(part) for part in first["loc"])[:200]) or "compressx"
        raise ArtifactError(
            f"{path}: {where} in its metadata is {str(first['input'])[:80]!r}: {first['msg']}; the file is damaged or "
            "was written by another version of compressx"
        ) from error
