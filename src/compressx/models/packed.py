"""The packed file: a safetensors file whose zeros are left out, without loss.

The file has the tensors of the original under their names. A tensor that gets smaller is stored as uint8 [bytes]; the
others are as they were. The metadata key `compressx` holds JSON: `format`, `version`, `header` (the original's header,
as text), `tensors` (by name: the sha256 of the original bytes, and the pieces, or null for a tensor as it was) and
`digest`, the sha256 over the last two.

The elements of a packed tensor are read as little-endian integers of 1, 2, 4 or 8 bytes, or as bytes where the dtype
has another size, and cut into pieces of 2^22, the last one shorter. A piece is listed as its number of stored elements
and the lengths of its streams in bytes. Streams and pieces follow each other without gaps:

1. The mask, only if fewer elements are stored than the piece has: bit `i` (the least significant is 0) of byte `b` is 1
   if element `8 b + i` is stored. The others have no bit set, so `-0.0` is stored.
2. The stored elements. Either one stream, as they are. Or, if elements have several bytes, one stream for each byte,
   the lowest first, of the elements rotated left by one bit: so a floating-point number's exponent is in the highest
   byte.

A stream that is shorter than its content is compressed with DEFLATE (RFC 1951). Only its Huffman codes are used, since
numbers do not repeat. On the exponents of bfloat16 they are smaller than zstandard, and as small as ZipNN. A mask with
two of four takes 2.6 bits of 4, the entropy of its 6 combinations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, WrapValidator

from compressx.models.pieces import MOST, Elements, contents, decode, encode, mask_bytes
from compressx.models.tensor_bytes import Size, TensorBytes, layout_in, layout_of, opened, pieces_of, sha256_of
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import os_errors_named, written_whole
from compressx.runtime.metadata import one_by_one, validated


class _StoredPiece(BaseModel):
    """The metadata of one tensor."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    pieces: Annotated[list[Annotated[list[Size], Field(min_length=2, max_length=10)]], Field(fail_fast=True)] | None


class _Metadata(BaseModel):
    """The JSON under the metadata key `compressx`; one key, because safetensors writes several in no fixed order."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    format: Literal["packed"] = "packed"
    version: Literal[1] = 1
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    header: str
    tensors: Annotated[dict[str, _StoredPiece], WrapValidator(one_by_one)]


class _Entry(NamedTuple):
    """A tensor of the original, and what is stored of it: the bytes from `begin` to `end` after the header."""

    tensor: TensorBytes
    stored: _StoredPiece
    begin: int
    end: int

    @property
    def pieces(self) -> list[list[int]]:
        return _as_it_is(self.tensor) if self.stored.pieces is None else self.stored.pieces

    def fits(self, place: TensorBytes) -> bool:
        """Return whether `place` has the bytes of the pieces, and none of them says that it holds more than it can."""
        tensor, pieces = self.tensor, self.stored.pieces
        if pieces is None:
            return (place.dtype, place.shape, place.bytes) == (tensor.dtype, tensor.shape, tensor.bytes)
        return (
            tensor.bytes <= 64 * MOST * place.bytes  # of a mask alone: each bit is an element of eight bytes
            and (place.dtype, place.shape, len(tensor.pieces)) == ("U8", (place.bytes,), len(pieces))
            and sum(sum(lengths) for _, *lengths in pieces) == place.bytes
            and all(
                contents(lengths, kept=kept, elements=elements, size=tensor.unit)
                for elements, (kept, *lengths) in zip(tensor.pieces, pieces, strict=True)
            )
        )


@dataclass(frozen=True)
class PackedTensor:
    """The size of one tensor in a packed file.

    Attributes:
        name: in the file.
        bytes: before packing.
        packed_bytes: in the packed file, without its share of the header.
        masked: whether zeros are left out.
        mask_and_values: bytes of its masks and stored elements before compression, which is what arithmetic predicts.
    """

    name: str
    bytes: int
    packed_bytes: int
    masked: bool
    mask_and_values: int


class PackedFile:
    """A packed file: its metadata is read and checked, its tensors are not.

    Attributes:
        path: of the file.
        digest: of the original's header and of every tensor's sha256 and pieces.

    Raises:
        ArtifactError: a file that cannot be read, is truncated, was not written by `pack_file`, or whose metadata have
            changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        stored = layout_of(path)
        self._start = stored.start
        metadata = _metadata(path, stored.metadata.get("compressx"))
        self.digest, self._header = metadata.digest, metadata.header
        places = {place.name: place for place in stored.tensors}
        self._entries = []
        for tensor in layout_in(self._header, path).tensors:
            place, described = places.pop(tensor.name, None), metadata.tensors.get(tensor.name)
            if place is None or described is None:
                raise _damaged(path, f"it lacks {tensor.name}, which the original has")
            entry = _Entry(tensor, described, place.begin, place.end)
            if not entry.fits(place):
                raise _damaged(path, f"its metadata describes other bytes of {tensor.name} than there are")
            self._entries.append(entry)
        if odd := {*places, *metadata.tensors} - {entry.tensor.name for entry in self._entries}:
            raise _damaged(path, f"it has {min(odd)}, which the original lacks")

    @property
    def original_bytes(self) -> int:
        """The size of the file before packing."""
        return 8 + len(self._header.encode()) + sum(tensor.bytes for tensor, *_ in self._entries)

    def sizes(self) -> Iterator[PackedTensor]:
        """Yield the size of each tensor, in the order of the file."""
        for entry in self._entries:
            tensor = entry.tensor
            counts = [(n, kept) for n, (kept, *_) in zip(tensor.pieces, entry.pieces, strict=True)]
            predicted = sum(kept * tensor.unit + (kept < n) * mask_bytes(n) for n, kept in counts)
            masked = any(kept < n for n, kept in counts)
            yield PackedTensor(tensor.name, tensor.bytes, entry.end - entry.begin, masked, predicted)

    def unpack(self, target: Path) -> None:
        """Write the original, byte for byte, atomically.

        Raises:
            ArtifactError: a tensor that does not have its sha256, or files that cannot be read or written.
        """
        with opened(self.path) as file, written_whole(target) as beside, beside.open("wb") as out:
            header = self._header.encode()
            out.write(len(header).to_bytes(8, "little") + header)
            for entry in self._entries:
                digest = hashlib.sha256()
                for elements in self._decoded(file, entry):
                    digest.update(elements.data)
                    out.write(elements.data)
                if digest.hexdigest() != entry.stored.sha256:
                    raise _damaged(self.path, f"{entry.tensor.name} does not have its sha256")

    def is_of(self, original: Path) -> bool:
        """Return whether a file is the original: it has the same header, and each tensor its sha256.

        Raises:
            ArtifactError: the file cannot be read, or is not a safetensors file.
        """
        found = layout_of(original)
        if found.header != self._header:
            return False
        with opened(original) as file:
            return all(sha256_of(file, found.start, entry.tensor) == entry.stored.sha256 for entry in self._entries)

    def _decoded(self, file: BinaryIO, entry: _Entry) -> Iterator[Elements]:
        """Yield the elements of a tensor, piece by piece."""
        file.seek(self._start + entry.begin)
        for elements, (kept, *lengths) in zip(entry.tensor.pieces, entry.pieces, strict=True):
            with os_errors_named("read", self.path):
                data = file.read(sum(lengths))
            try:
                yield decode(data, lengths, kept=kept, elements=elements, size=entry.tensor.unit)
            except ValueError as error:
                raise _damaged(self.path, f"{entry.tensor.name} cannot be unpacked ({error})") from error


def pack_file(source: Path, target: Path, *, compress: bool = True) -> None:
    """Write a safetensors file in packed form, atomically.

    Args:
        source: the safetensors file.
        target: the packed file; its folder is created if missing.
        compress: whether masks and exponents are compressed; else a tensor is its mask and its values.

    Raises:
        ArtifactError: the source cannot be read, or the target cannot be written.
    """
    text, start, _, tensors = layout_of(source)
    room, entries = _room(text, tensors), []
    with opened(source) as file, written_whole(target) as beside, beside.open("wb") as out:
        out.seek(8 + room)
        for tensor in tensors:
            digest, pieces, begin = hashlib.sha256(), [], out.tell() - 8 - room
            for elements in pieces_of(file, start, tensor):
                digest.update(elements.data)
                kept, streams = encode(elements, compress=compress)
                out.writelines(streams)
                pieces.append([kept, *map(len, streams)])
            stored = _StoredPiece(sha256=digest.hexdigest(), pieces=None if pieces == _as_it_is(tensor) else pieces)
            entries.append(_Entry(tensor, stored, begin, out.tell() - 8 - room))
        header = _header_of(text, entries)
        assert len(header) <= room, f"{target}: the header takes {len(header)} bytes of {room}"  # noqa: S101
        out.seek(0)
        out.write(room.to_bytes(8, "little") + header.ljust(room))


def _room(original: str, tensors: Sequence[TensorBytes]) -> int:
    """Return how long the header can become, since it stands first but is known last.

    No number will be larger than here, and what describes tensors as they were is no longer than the original header.
    """
    entries = []
    for tensor in tensors:
        pieces = [[n, mask_bytes(n), *[n] * tensor.unit] for n in tensor.pieces]
        entries.append(_Entry(tensor, _StoredPiece(sha256="0" * 64, pieces=pieces), tensor.begin, tensor.end))
    length = len(_header_of(original, entries)) + len(original)
    return length + -length % 8


def _header_of(original: str, entries: Sequence[_Entry]) -> bytes:
    described: dict[str, Any] = {}
    for tensor, stored, begin, end in entries:
        kind = (tensor.dtype, [*tensor.shape]) if stored.pieces is None else ("U8", [end - begin])
        described[tensor.name] = {"dtype": kind[0], "shape": kind[1], "data_offsets": [begin, end]}
    tensors = {entry.tensor.name: entry.stored for entry in entries}
    metadata = _Metadata(digest=_digest(original, tensors), header=original, tensors=tensors)
    described["__metadata__"] = {"compressx": metadata.model_dump_json()}
    return json.dumps(described, separators=(",", ":")).encode()


def _as_it_is(tensor: TensorBytes) -> list[list[int]]:
    """Return the pieces of a tensor of which everything is stored, uncompressed."""
    return [[elements, elements * tensor.unit] for elements in tensor.pieces]


def _digest(original: str, tensors: Mapping[str, _StoredPiece]) -> str:
    described = json.dumps([original, {name: stored.model_dump() for name, stored in tensors.items()}])
    return hashlib.sha256(described.encode()).hexdigest()


def _metadata(path: Path, text: str | None) -> _Metadata:
    if text is None:
        raise ArtifactError(
            f"{path} is a safetensors file, but was not written by compressx pack: its metadata has no key 'compressx'"
        )
    found = validated(path, text, _Metadata)
    if _digest(found.header, found.tensors) != found.digest:
        raise _damaged(path, "its metadata do not have their digest")
    return found


def _damaged(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} is damaged: {one_line(what)[:300]}; use another copy, or pack the model again")
