"""The header of a safetensors file: where its tensors lie, and the metadata that compressx writes.

The format: the header's length in eight bytes, little-endian; the header, JSON; the tensors' bytes, without gaps, at
the offsets that the header says. The library itself needs all tensors of a file in memory to write it. What is missing,
damaged or of another kind is an `ArtifactError`, which names the file and the place.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WrapValidator, model_validator

from compressx.models.shards import OUTSIDE, of_file
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import os_errors_named

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Little-endian integers of 1, 2, 4 or 8 bytes."""
Size = Annotated[int, Field(ge=0, lt=2**63)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]

PIECE = 2**22
"""Elements of a piece of a tensor; a multiple of 8, so that masks of pieces end with a byte."""

_Form = TypeVar("_Form", bound=BaseModel)


def one_by_one(values: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate values by name up to the first wrong one: pydantic's errors on all of a large file take gigabytes."""
    if not isinstance(values, dict):
        return validate(values)
    return {name: found for item in values.items() for name, found in validate(dict([item])).items()}


class Described(BaseModel):
    """What a header says: these keys and no others, of these types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TensorBytes(Described):
    """A tensor in a safetensors file, as the header describes it: `data_offsets` begin after the header."""

    dtype: str = Field(pattern="^(BOOL|(BF|[CFIU])[0-9]{1,3}(_E[0-9]M[0-9](FNUZ)?)?)$")
    shape: list[Size] = Field(max_length=64)
    data_offsets: list[Size] = Field(min_length=2, max_length=2)

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.data_offsets[1] - self.data_offsets[0]

    @property
    def unit(self) -> int:
        """The bytes of an element; 1 if elements have not 1, 2, 4 or 8 bytes."""
        size, rest = divmod(self.bytes, math.prod(self.shape) or 1)
        return size if size in (1, 2, 4, 8) and not rest else 1

    @property
    def pieces(self) -> list[int]:
        """The number of units in each piece."""
        units = self.bytes // self.unit
        return [min(PIECE, units - start) for start in range(0, units, PIECE)]

    def __str__(self) -> str:
        return f"{self.dtype} {str(self.shape)[:80]}"


class _Header(Described):
    """The header of a safetensors file, where metadata stand among the tensors."""

    metadata: dict[str, str] | None
    tensors: Annotated[dict[str, TensorBytes], WrapValidator(one_by_one)]

    @model_validator(mode="before")
    @classmethod
    def _separate(cls, header: Any) -> Any:
        return {"metadata": header.pop("__metadata__", None), "tensors": header} if isinstance(header, dict) else header


@dataclass(frozen=True)
class Layout:
    """A safetensors file: its header as text, its metadata, and its tensors by name in the order of their bytes."""

    path: Path
    header: str
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorBytes]

    @property
    def start(self) -> int:
        """The byte after the header, which its length in eight bytes precedes."""
        return 8 + len(self.header.encode())

    def said(self, form: type[_Form], kind: str) -> _Form:
        """Return the metadata of compressx in the form of a kind of files."""
        if (text := self.metadata.get("compressx")) is None:
            raise ArtifactError(
                f"{self.path} is a safetensors file, but not {kind}: its metadata has no key 'compressx'"
            )
        return _validated(self.path, text, form)

    def elements(self, name: str, digest: hashlib._Hash | None = None) -> Iterator[Elements]:
        """Yield the bytes of a tensor as integers, piece by piece, and add them to a digest."""
        tensor = self.tensors[name]
        with os_errors_named("read", self.path), self.path.open("rb") as file:
            file.seek(self.start + tensor.data_offsets[0])
            for units in tensor.pieces:
                data = file.read(units * tensor.unit)
                if digest is not None:
                    digest.update(data)
                yield np.frombuffer(data, f"<u{tensor.unit}")

    def sha256(self, name: str) -> str:
        """Return the sha256 of a tensor's bytes, hexadecimal."""
        digest = hashlib.sha256()
        for _ in self.elements(name, digest):
            pass
        return digest.hexdigest()


def layout_of(path: Path) -> Layout:
    """Read the header of a safetensors file."""
    of_file(path, OUTSIDE)  # the library's own checks: that the header is whole, and the tensors fill the file
    with os_errors_named("read", path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length).decode()
    return layout_in(header, path)


def layout_in(header: str, path: Path) -> Layout:
    """Read a header that `path` has; sizes that are not of shape and dtype, and gaps, are refused."""
    read, before = _validated(path, header, _Header), 0
    tensors = dict(sorted(read.tensors.items(), key=lambda item: item[1].data_offsets))
    for name, tensor in tensors.items():
        bits, (begin, end) = re.search("[0-9]+", tensor.dtype), tensor.data_offsets
        if begin != before or 8 * tensor.bytes != int(bits[0] if bits else 8) * math.prod(tensor.shape):
            raise ArtifactError(
                f"{path} is damaged: its header gives {one_line(name)[:200]} bytes {begin} to {end}, expected those of "
                f"{tensor} from {before} on"
            )
        before = end
    return Layout(path, header, read.metadata or {}, tensors)


def _validated(path: Path, text: str, form: type[_Form]) -> _Form:
    try:
        return form.model_validate_json(text)
    except ValidationError as error:
        first: Any = {"input": "long", **error.errors(include_input=len(text) < 2**20)[0]}
        where = one_line(".".join(str(part) for part in first["loc"])[:200]) or "compressx"
        raise ArtifactError(
            f"{path}: {where} in its metadata is {str(first['input'])[:80]!r}: {first['msg']}; the file is damaged or "
            "was written by another version of compressx"
        ) from error
