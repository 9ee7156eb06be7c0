"""The header of a GGUF file, which is parsed in Python, entry by entry: once a load, and not again for its strings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

_FLOATS = ("F64", "F32", "F16")


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        numbers: in it.
        size: bytes that they take.
        kind: name of their type, such as `F32` or `Q4_K`.
    """

    numbers: int
    size: int
    kind: str

    @property
    def quantized(self) -> bool:
        """Whether they are not stored as floats."""
        return self.kind not in _FLOATS


@dataclass(frozen=True)
class Contents:
    """What reading a file has to go through.

    Attributes:
        size: bytes of the file.
        entries: numbers and strings in its metadata, most of them the vocabulary's.
        tensors: in the order of the file.
    """

    size: int
    entries: int
    tensors: tuple[Stored, ...]

    @property
    def quantized(self) -> int:
        """Numbers that are not stored as floats."""
        return sum(x.numbers for x in self.tensors if x.quantized)


@contextmanager
def read_once() -> Iterator[None]:
    """Let transformers parse a file's header and make its map of tensor names once, inside the `with`.

    It would parse the header for the config, the tokenizer and the weights, and make the map of names for every module.
    """
    import gguf

    with (
        patch("gguf.GGUFReader", _reader),
        patch("gguf.get_tensor_name_map", lru_cache(maxsize=1)(gguf.get_tensor_name_map)),
    ):
        yield


def close(path: Path) -> None:
    """Let go of a parsed header, which keeps the file open; its own strings stay."""
    strings_of(path)
    _parsed.cache_clear()


def contents_of(path: Path) -> Contents:
    """Count what is in a file."""
    parsed = _reader(path)
    tensors = tuple(Stored(int(x.n_elements), int(x.n_bytes), x.tensor_type.name) for x in parsed.tensors)
    return Contents(path.stat().st_size, sum(len(field.data) for field in parsed.fields.values()), tensors)


def strings_of(path: Path) -> Mapping[str, str]:
    """Return the strings under `general` in a file's metadata, such as `general.license`, by key."""
    return _strings(*_version(path))


def _reader(path: str | os.PathLike[str]) -> Any:
    return _parsed(*_version(path))


def _version(path: str | os.PathLike[str]) -> tuple[str, int, int]:
    found = Path(path).stat()
    return str(Path(path).absolute()), found.st_mtime_ns, found.st_size


@lru_cache(maxsize=1)
def _parsed(path: str, _modified: int, _size: int) -> Any:
    import numpy as np
    from gguf.gguf_reader import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc] # untyped
        """Slices a plain array of the file's bytes: slices of a `memmap` take four times as long."""

        @property
        def data(self) -> np.ndarray:
            return self._bytes

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._bytes = mapped.view(np.ndarray)

    return Reader(path)


@lru_cache(maxsize=1)
def _strings(path: str, modified: int, size: int) -> Mapping[str, str]:
    fields = _parsed(path, modified, size).fields
    found = {key: field.contents() for key, field in fields.items() if key.startswith("general.")}
    return {key: value for key, value in found.items() if isinstance(value, str)}
