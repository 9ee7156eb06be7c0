"""Safetensors files as bytes: tensors of any dtype, read piece by piece, however large they are."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, WrapValidator, model_validator

from compressx.models.pieces import Elements, dtype_of_size
from compressx.models.shards import OUTSIDE, of_file
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import os_errors_named
from compressx.runtime.metadata import one_by_one, validated

PIECE = 2**22
"""Elements of a piece; a multiple of 8, so that masks of pieces end with a byte."""


@dataclass(frozen=True)
class TensorBytes:
    """A tensor in a safetensors file.

    Attributes:
        name: in the file.
        dtype: as safetensors writes it, such as `BF16`.
        shape: of the tensor.
        begin: its first byte after the header.
        end: the byte after its last one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.end - self.begin

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


Size = Annotated[int, Field(ge=0, lt=2**63)]


class _Described(BaseModel):
    """What a header says of a tensor."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    dtype: str = Field(pattern="^(BOOL|(BF|[CFIU])[0-9]{1,3}(_E[0-9]M[0-9](FNUZ)?)?)$")
    shape: list[Size] = Field(max_length=64)
    data_offsets: list[Size] = Field(min_length=2, max_length=2)


class _Header(BaseModel):
    """The header of a safetensors file, where metadata stand among the tensors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    metadata: dict[str, str] | None
    tensors: Annotated[dict[str, _Described], WrapValidator(one_by_one)]

    @model_validator(mode="before")
    @classmethod
    def _apart(cls, given: Any) -> Any:
        return {"metadata": given.pop("__metadata__", None), "tensors": given} if isinstance(given, dict) else given


class Layout(NamedTuple):
    """A safetensors file: its header as text and the byte after it, its metadata, and its tensors in order of bytes."""

    header: str
    start: int
    metadata: Mapping[str, str]
    tensors: tuple[TensorBytes, ...]


def layout_of(path: Path) -> Layout:
    """Read the header of a safetensors file.

    Raises:
        ArtifactError: the file is missing, damaged or truncated.
    """
    of_file(path, OUTSIDE)  # the library's own checks: that the header is whole, and the tensors fill the file
    with os_errors_named("read", path), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length).decode()
    return layout_in(header, path)


def layout_in(header: str, path: Path) -> Layout:
    """Read a header that `path` has; an `ArtifactError` refuses sizes that are not of shape and dtype, and gaps."""
    read = validated(path, header, _Header)
    found = [TensorBytes(n, x.dtype, tuple(x.shape), *x.data_offsets) for n, x in read.tensors.items()]
    tensors = tuple(sorted(found, key=lambda tensor: (tensor.begin, tensor.end)))
    for before, tensor in zip((0, *(x.end for x in tensors)), tensors, strict=False):
        bits = re.search("[0-9]+", tensor.dtype)
        if tensor.begin != before or 8 * tensor.bytes != int(bits[0] if bits else 8) * math.prod(tensor.shape):
            raise ArtifactError(
                f"{path} is damaged: its header gives {one_line(tensor.name)[:200]} bytes {tensor.begin} to "
                f"{tensor.end}, expected those of {tensor.dtype} {str([*tensor.shape])[:80]} from {before} on"
            )
    return Layout(header, 8 + len(header.encode()), read.metadata or {}, tensors)


def opened(path: Path) -> BinaryIO:
    """Open a file to read bytes.

    Raises:
        ArtifactError: it cannot be opened.
    """
    with os_errors_named("read", path):
        return path.open("rb")


def pieces_of(file: BinaryIO, start: int, tensor: TensorBytes) -> Iterator[Elements]:
    """Yield the bytes of a tensor as integers, piece by piece.

    Args:
        file: the opened safetensors file.
        start: the byte after its header.
        tensor: one of the file.

    Raises:
        ArtifactError: the file cannot be read.
    """
    file.seek(start + tensor.begin)
    for units in tensor.pieces:
        with os_errors_named("read", Path(file.name)):
            data = file.read(units * tensor.unit)
        yield np.frombuffer(data, dtype_of_size(tensor.unit))


def sha256_of(file: BinaryIO, start: int, tensor: TensorBytes) -> str:
    """Return the sha256 of a tensor's bytes, hexadecimal; arguments and errors are those of `pieces_of`."""
    digest = hashlib.sha256()
    for piece in pieces_of(file, start, tensor):
        digest.update(piece.data)
    return digest.hexdigest()
