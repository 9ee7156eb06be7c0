"""Safetensors files as bytes: tensors of any dtype, read piece by piece, however large they are."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from compressx.models.pieces import Elements, dtype_of_size
from compressx.models.shards import OUTSIDE, of_file
from compressx.runtime.files import os_errors_named

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


class Layout(NamedTuple):
    """A safetensors file: its header as text, the byte after it, and the tensors in the order of their bytes."""

    header: str
    start: int
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
    return Layout(header, 8 + length, tensors_in(header))


def tensors_in(header: str) -> tuple[TensorBytes, ...]:
    """Return the tensors of a safetensors header, in the order of their bytes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: another text.
    """
    described = json.loads(header)
    described.pop("__metadata__", None)
    found = [TensorBytes(name, x["dtype"], tuple(x["shape"]), *x["data_offsets"]) for name, x in described.items()]
    return tuple(sorted(found, key=lambda tensor: (tensor.begin, tensor.end)))


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
