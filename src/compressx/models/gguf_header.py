"""The header of a GGUF file, which is parsed in Python, entry by entry, and so only once a load."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from compressx.runtime.errors import ArtifactError, one_line

BLOCK = re.compile(r"^blk\.(\d+)\.")
"""How the names of tensors in a block begin."""
_MOST_READS = 8_000_000
"""Of strings and numbers in a header; the largest vocabularies take two millions."""


@dataclass(frozen=True, eq=False)
class GgufHeader:
    """The header of a GGUF file: its fields and tensors, as the package `gguf` reads them, no weights.

    transformers takes it for a `gguf.GGUFReader`.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Sequence[Any]

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> GgufHeader:
        """Read a file's header, if it is not the one that was read last and is as it was."""
        found = Path(path).stat()
        return _parsed(Path(path).absolute(), found.st_mtime_ns, found.st_size)

    @cached_property
    def as_llama(self) -> GgufHeader:
        """Of llama.cpp's `deci` the header of a `llama`, or `qwen2`, whose blocks have one size; others themselves."""
        return _of_one_size(self) if self.architecture == "deci" else self

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The values of the metadata by key, such as `general.license`; of an array `N entries`."""
        arrays = {key for key, field in self.fields.items() if field.types[0] == field.types[0].ARRAY}
        return {key: f"{len(x.data)} entries" if key in arrays else x.contents() for key, x in self.fields.items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors by name, rows first, in their order."""
        return {x.name: tuple(int(n) for n in x.shape[::-1]) for x in self.tensors}

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tensors."""
        return frozenset(x.name for x in self.tensors)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The names of the tensors, those of blocks without the blocks' numbers."""
        return frozenset(BLOCK.sub("", name) for name in self.names)

    @property
    def arrays(self) -> dict[str, Any]:
        """The stored arrays of the tensors by name, not dequantized."""
        return {x.name: x.data for x in self.tensors}

    @cached_property
    def architecture(self) -> str:
        """As llama.cpp calls it."""
        return str(self.fields["general.architecture"].contents())

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata, also an array, of whose texts nothing was known before."""
        try:
            return self.fields[key].contents() if key in self.fields else default
        except UnicodeDecodeError as error:
            raise ArtifactError(f"{self.path}: {key} has texts that are not in UTF-8; download it again") from error

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the architecture's metadata."""
        return self.value(f"{self.architecture}.{key}", default)

    @property
    def head(self) -> int:
        """The size of a head."""
        return int(self.get("attention.key_length") or self.get("embedding_length") // self.get("attention.head_count"))

    def foreign(self, name: str, there: object, here: object) -> ArtifactError:
        """Return the error about a file that is of another model than the one to write."""
        return ArtifactError(
            f"{self.path} is of another model: its {name} is {there!r:.200}, and {here!r:.200} in the one to export; "
            "give a GGUF file of the dense model, as llama.cpp's convert_hf_to_gguf.py makes it"
        )


@contextmanager
def read_once(path: Path) -> Iterator[None]:
    """Let transformers parse a file's header and make its map of tensor names once, inside the `with`.

    It would parse the header for the config, the tokenizer and the weights, and make the map of names for every module.
    """
    GgufHeader.of(path)  # checked before transformers parses it its own way
    with patch("gguf.GGUFReader", lambda path: GgufHeader.of(path).as_llama), names_mapped_once():
        yield


def names_mapped_once() -> Any:
    """Let transformers make its map of tensor names once, inside the `with`, and not for every module."""
    import gguf

    return patch("gguf.get_tensor_name_map", lru_cache(maxsize=1)(gguf.get_tensor_name_map))


def let_go() -> None:
    """Let go of the header that was read last, which keeps its file open and is large."""
    _parsed.cache_clear()


@lru_cache(maxsize=1)
def _parsed(path: Path, _modified: int, _size: int) -> GgufHeader:
    from gguf.gguf_reader import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc] # untyped
        """Slices a plain array of the file's bytes: slices of a `memmap` take four times as long.

        Its parent class believes every count and length, and goes on behind the end of the file.
        """

        reads = 0

        @property
        def data(self) -> np.ndarray:
            return self._bytes

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._bytes = mapped.view(np.ndarray)

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            self.reads += 1
            if offset + int(count) * np.dtype(dtype).itemsize > len(self.data) or self.reads > _MOST_READS:
                raise ValueError(f"{count} of {np.dtype(dtype)} at byte {offset} of {len(self.data)}")
            return super()._get(offset, dtype, count, override_order)

    try:
        with np.errstate(over="raise"):
            reader = Reader(path)
        header = GgufHeader(path, reader.fields, reader.tensors)
        wrong = _fault(header.values, [x.name for x in header.tensors])
    except Exception as error:  # whatever a damaged header leads to
        raise ArtifactError(
            f"{path} is not a GGUF file, or it is truncated: {one_line(str(error))[:300]}; download it again"
        ) from error
    if wrong or reader.byte_order != "I":
        raise ArtifactError(f"{path}: {(wrong or 'its numbers are in the other byte order')[:300]}")
    return header


def _fault(values: Mapping[str, Any], names: list[str]) -> str | None:
    """Return why a file is not the whole of a language model, and what to do."""
    kind, architecture, parts = map(values.get, ("general.type", "general.architecture", "split.count"))
    if kind not in {None, "model"} or architecture in {"clip", "controlvector"}:
        return f"this is no language model: general.type is {kind!r}, general.architecture {architecture!r}"
    odd = [name for name in (*names, *values) if not name.isprintable()] or names[:1]
    if not isinstance(architecture, str) or not architecture.isprintable() or odd != names[:1] or not names:
        return f"general.architecture is {architecture!r}, with names such as {odd!r}; download it again"
    if parts not in {None, 0, 1}:
        return f"split.count is {parts!r}, this is one part of {parts!r}; join them with llama-gguf-split --merge"
    blocks = {int(found[1]) for name in names if (found := re.search(r"\bblk\.(\d{1,6})\.", name))}
    whole = {f"{architecture}.block_count": 1 + max(blocks, default=-1), "split.tensors.count": len(names)}
    for key, count in whole.items():
        if values.get(key, count) != count or count > len(names):
            return f"{key} is {values.get(key)!r}, but the file has {count}; it is damaged, so download it again"
    return None


@dataclass(frozen=True, eq=False)
class _Padded:
    """A tensor of a block in the shape, rows first, that the largest block has, dequantized when it is read."""

    name: str
    shape: tuple[int, ...]
    stored: Any = None  # the tensor in the file, if it is there; entries that it lacks are zeros
    head: int = 0  # size of the heads whose rows are to lie as in Qwen2, first halves first; 0: as in Llama
    tensor_type = 0  # float32

    @property
    def data(self) -> np.ndarray:
        """Its numbers, float32."""
        from gguf import dequantize

        whole = np.zeros(self.shape, np.float32)
        if self.stored is not None:
            found = dequantize(self.stored.data, self.stored.tensor_type)
            if self.head:
                pairs = found.reshape(-1, self.head // 2, 2, *found.shape[1:])
                found = pairs.swapaxes(1, 2).reshape(found.shape)
            whole[tuple(slice(n) for n in found.shape)] = found
        return whole


def _of_one_size(header: GgufHeader) -> GgufHeader:
    """Return a file of `deci` as one of `llama`, or `qwen2`, whose blocks all have the size of the largest.

    What a block lacks are zeros: heads, neurons, or its attention.
    """
    from gguf.gguf_reader import ReaderField

    fields, shapes = header.fields, dict[str, tuple[int, ...]]()
    try:
        blocks: list[dict[str, Any]] = [{} for _ in range(header.get("block_count"))]
        for x in header.tensors:
            if x.name.startswith("blk."):
                _, number, own = x.name.split(".", 2)
                blocks[int(number)][own] = x
                shape = header.shapes[x.name]
                shapes[own] = tuple(map(max, shape, shapes.get(own, shape)))
        head = int(header.get("attention.key_length"))
        attending = [x for x in blocks if "attn_output.weight" in x]
        (per_group,) = {int(x["attn_q.weight"].shape[1]) / int(x["attn_k.weight"].shape[1]) for x in attending}
        (query, hidden), wide = shapes["attn_q.weight"], shapes["ffn_down.weight"][1]
        whole = per_group % 1 == 0 and query % head == 0
    except (LookupError, ValueError, TypeError, ArithmeticError) as error:
        raise ArtifactError(f"this is no Llama of the architecture deci: {one_line(str(error))[:200]}") from error
    if not whole:
        raise ArtifactError(f"this is no Llama of the architecture deci: {query} rows of queries for heads of {head}")
    # Biases of query, key and value, and not of the output, are Qwen2's; its query is square in transformers.
    kind = "qwen2" if "attn_q.bias" in shapes and "attn_output.bias" not in shapes else "llama"
    query = hidden if kind == "qwen2" else query
    for own, count in {"attn_q": query, "attn_k": query / per_group, "attn_v": query / per_group}.items():
        for name in {f"{own}.weight", f"{own}.bias"} & {*shapes}:
            shapes[name] = (int(count), *shapes[name][1:])
    shapes["attn_output.weight"] = (hidden, query)
    numbers = {"attention.head_count": query // head, "attention.head_count_kv": int(query / per_group) // head,
               "feed_forward_length": wide, "rope.dimension_count": head}  # fmt: skip
    seen = {key.replace("deci.", f"{kind}."): x for key, x in fields.items()}
    text, number32 = fields["general.architecture"], fields["deci.block_count"]
    seen["general.architecture"] = ReaderField(0, "", [np.frombuffer(kind.encode(), np.uint8)], [0], text.types)
    for key, value in numbers.items():
        seen[f"{kind}.{key}"] = ReaderField(0, "", [np.array([value], np.uint32)], [0], number32.types)
    tensors = [x for x in header.tensors if not x.name.startswith("blk.")]
    for (i, block), own in itertools.product(enumerate(blocks), shapes):
        turned = head if kind == "qwen2" and own.startswith(("attn_q", "attn_k")) else 0
        tensors.append(_Padded(f"blk.{i}.{own}", shapes[own], block.get(own), turned))
    return GgufHeader(header.path, seen, tensors)
