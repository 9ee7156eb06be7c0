"""The packed file: a safetensors file whose zeros, or what it shares with a base, are left out, without loss.

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

A file that is packed against a base model has version 2 and two keys more: `base` in the metadata, the name of that
model for messages, and `base` of a tensor, the sha256 of the base's tensor with the same name, dtype and shape. What is
packed of such a tensor is its difference from that one, modulo 2^bits, with all bits but the highest inverted where the
highest is set. So equal elements are zeros, and small differences of either sign have zeros above. Where all weights
moved by about a hundredth this is a seventh smaller than their XOR. A tensor that gains nothing is packed as above.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, WrapValidator, model_validator

from compressx.models.layout import (
    Described,
    Elements,
    Layout,
    Sha256,
    Size,
    TensorBytes,
    layout_in,
    layout_of,
    one_by_one,
)
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import os_errors_named, written_whole

MOST = 1032
"""Bytes that a byte of DEFLATE can become: 258 in two bits."""
_SAMPLE = 2**16
_WORTH = 7.9
"""A stream is compressed if a sample of its bytes has at most this entropy, in bits a byte."""
_FIRST = 2**18
"""So many elements of a tensor tell whether its difference from a base is smaller."""


def mask_bytes(elements: int) -> int:
    """Return the size of a mask: one bit an element."""
    return -(-elements // 8)


def encode(elements: Elements) -> tuple[int, list[bytes]]:
    """Leave the zeros of elements [elements] out, if their mask takes less than they do, and compress what is left.

    Returns:
        The number of stored elements, and the streams.
    """
    size, streams = elements.itemsize, []
    stored = elements != 0
    kept = int(np.count_nonzero(stored))
    if mask_bytes(elements.size) < (elements.size - kept) * size:
        mask = np.packbits(stored, bitorder="little")
        streams.append(_deflated(mask))
        elements = elements[stored]
    kept = elements.size
    planes = _rotated(elements, 1).view(np.uint8).reshape(kept, size).T  # [size, kept], the lowest byte first
    bytewise = [_deflated(np.ascontiguousarray(plane)) for plane in planes]
    if sum(map(len, bytewise)) == kept * size:
        bytewise = [elements.tobytes()]
    return kept, [*streams, *bytewise]


def contents(lengths: Sequence[int], *, kept: int, elements: int, size: int) -> list[int]:
    """Return how long the streams of a piece become; none if they are not of it. For the arguments see `decode`."""
    masks = [mask_bytes(elements)] if kept < elements else []
    found = masks + {1: [kept * size], size: [kept] * size}.get(len(lengths) - len(masks), [])
    fit = kept <= elements and len(lengths) == len(found)
    return found if fit and all(x <= y <= MOST * x for x, y in zip(lengths, found, strict=True)) else []


def decode(data: bytes, lengths: Sequence[int], *, kept: int, elements: int, size: int) -> Elements:
    """Return the [elements] that `encode` was given; a ValueError says why the streams are none of its.

    `data` has the streams one after the other, `lengths` theirs in bytes. `kept` elements of `size` bytes each are
    stored.
    """
    wanted = contents(lengths, kept=kept, elements=elements, size=size)
    ends = np.cumsum(lengths)
    streams = [_inflated(data[end - x : end], y) for end, x, y in zip(ends, lengths, wanted, strict=True)]
    mask = streams.pop(0) if kept < elements else None
    if len(streams) == 1:
        values = np.frombuffer(streams[0], f"<u{size}")
    else:
        planes = [np.frombuffer(stream, np.uint8) for stream in streams]
        values = _rotated(np.stack(planes, axis=1).view(f"<u{size}").reshape(kept), 8 * size - 1)
    if mask is None:
        return values
    stored = np.unpackbits(np.frombuffer(mask, np.uint8), count=elements, bitorder="little").view(bool)
    if (bits := int(np.count_nonzero(stored))) != kept:
        raise ValueError(f"{kept} elements are stored, {bits} in the mask")
    whole = np.zeros(elements, f"<u{size}")
    whole[stored] = values
    return whole


def _rotated(elements: Elements, bits: int) -> Elements:
    """Rotate each element left; bytes stay as they are, since one byte holds sign and exponent anyway."""
    width = 8 * elements.itemsize
    if width == 8:
        return elements
    left, right = elements.dtype.type(bits), elements.dtype.type(width - bits)
    return (elements << left) | (elements >> right)


def difference_from(elements: Elements, base: Elements | None) -> Elements:
    """Return what is stored of elements [elements], given those of the base; themselves if there is none."""
    return elements if base is None else _folded(elements - base)


def added_to(stored: Elements, base: Elements | None) -> Elements:
    """Return the elements of which `difference_from` returned `stored`."""
    return stored if base is None else _folded(stored) + base


def _folded(numbers: Elements) -> Elements:
    """Invert all bits but the highest of negative numbers; twice is not at all."""
    kind, width = numbers.dtype.type, 8 * numbers.itemsize
    negative = kind(0) - (numbers >> kind(width - 1))  # all bits are set, or none
    return numbers ^ (negative >> kind(1))


def _deflated(stream: NDArray[np.uint8]) -> bytes:
    """Compress bytes, or return them as they are if that would not make them fewer."""
    plain = stream.tobytes()
    sample = stream[:: 1 + stream.size // _SAMPLE]
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / max(1, sample.size)
    entropy = float(-(shares * np.log2(shares)).sum())  # bits a byte; 0 of none
    if entropy > _WORTH:
        return plain
    # Where bytes repeat, a Huffman code's least length of one bit would be too much.
    strategy = zlib.Z_RLE if entropy < 0.5 else zlib.Z_HUFFMAN_ONLY
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL + 1, strategy)
    packed = packer.compress(plain) + packer.flush()
    return packed if len(packed) < len(plain) else plain


def _inflated(stream: bytes, length: int) -> bytes:
    """Return the `length` bytes that `_deflated` was given."""
    if len(stream) == length:
        return stream
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plain = unpacker.decompress(stream, length + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacker.eof or unpacker.unused_data or len(plain) != length:
        raise ValueError("a compressed stream has another end than its own")
    return plain


@dataclass(frozen=True)
class Base:
    """The model from which tensors differ; `files` has by a tensor's name the file that has it."""

    name: str
    folder: Path
    files: Mapping[str, Layout]

    def like(self, name: str, tensor: TensorBytes) -> bool:
        """Return whether there is a tensor of the same name, dtype and shape."""
        found = self.files[name].tensors[name] if name in self.files else None
        return found is not None and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)


class _StoredTensor(Described):
    """The metadata of one tensor."""

    sha256: Sha256
    pieces: Annotated[list[Annotated[list[Size], Field(min_length=2, max_length=10)]], Field(fail_fast=True)] | None
    base: Sha256 | None = None


class _Metadata(Described):
    """The JSON under the metadata key `compressx`; one key, because safetensors writes several in no fixed order."""

    format: Literal["packed"]
    version: Literal[1, 2]
    digest: Sha256
    header: str
    tensors: Annotated[dict[str, _StoredTensor], WrapValidator(one_by_one)]
    base: str | None = Field(None, max_length=200)

    @model_validator(mode="after")
    def _of_its_version(self) -> _Metadata:
        if len({self.version == 2, self.base is not None, any(x.base for x in self.tensors.values())}) > 1:
            raise ValueError("version 2, and no other, names a base and has tensors that differ from it")
        return self


class _Entry(NamedTuple):
    """A tensor of the original, what is stored of it, and where."""

    tensor: TensorBytes
    stored: _StoredTensor
    place: TensorBytes

    @property
    def pieces(self) -> list[list[int]]:
        return _as_it_is(self.tensor) if self.stored.pieces is None else self.stored.pieces

    def fits(self) -> bool:
        """Return whether the place has the bytes of the pieces, and none says that it holds more than it can."""
        tensor, pieces, place = self.tensor, self.stored.pieces, self.place
        if pieces is None:
            same = (place.dtype, place.shape, place.bytes) == (tensor.dtype, tensor.shape, tensor.bytes)
            return same and self.stored.base is None
        return (
            tensor.bytes <= 64 * MOST * place.bytes  # of a mask alone: each bit is an element of eight bytes
            and (place.dtype, place.shape, len(tensor.pieces)) == ("U8", [place.bytes], len(pieces))
            and sum(sum(lengths) for _, *lengths in pieces) == place.bytes
            and all(
                contents(lengths, kept=kept, elements=elements, size=tensor.unit)
                for elements, (kept, *lengths) in zip(tensor.pieces, pieces, strict=True)
            )
        )


@dataclass(frozen=True)
class PackedTensor:
    """The size of one tensor in a packed file, without its share of the header.

    `masked` says that zeros are left out; `differs` that its difference from the base is stored, so that the zeros are
    what both have.
    """

    name: str
    bytes: int
    packed_bytes: int
    masked: bool
    differs: bool


class PackedFile:
    """A packed file that `pack_file` wrote: its metadata is read and checked, its tensors are not.

    Attributes:
        path: of the file.
        digest: of the original's header and of every tensor's sha256, pieces and base.
        base: the name of the model without which it cannot be unpacked, as it was packed against; None if there is
            none. For messages only: a file must not choose what is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, stored = path, layout_of(path)
        metadata = stored.said(_Metadata, "written by compressx pack")
        if _digest(metadata.header, metadata.tensors) != metadata.digest:
            raise _damaged(path, "its metadata do not have their digest")
        self._start, self.digest = stored.start, metadata.digest
        self.base = None if metadata.base is None else one_line(metadata.base)[:200]
        self._original, self._entries = layout_in(metadata.header, path), dict[str, _Entry]()
        for name, tensor in self._original.tensors.items():
            if name not in stored.tensors or name not in metadata.tensors:
                raise _damaged(path, f"it lacks {name}, which the original has")
            entry = self._entries[name] = _Entry(tensor, metadata.tensors[name], stored.tensors[name])
            if not entry.fits():
                raise _damaged(path, f"its metadata describes other bytes of {name} than there are")
        if odd := {*stored.tensors, *metadata.tensors} - {*self._entries}:
            raise _damaged(path, f"it has {min(odd)}, which the original lacks")

    @property
    def original_bytes(self) -> int:
        """The size of the file before packing."""
        return self._original.start + sum(entry.tensor.bytes for entry in self._entries.values())

    def sizes(self) -> Iterator[PackedTensor]:
        """Yield the size of each tensor, in the order of the file."""
        for name, entry in self._entries.items():
            masked = any(kept < n for n, (kept, *_) in zip(entry.tensor.pieces, entry.pieces, strict=True))
            yield PackedTensor(name, entry.tensor.bytes, entry.place.bytes, masked, entry.stored.base is not None)

    def check_base(self, base: Base | None) -> None:
        """Refuse a base whose headers show that it is another one, or none where one is needed."""
        for name, entry in self._entries.items():
            if entry.stored.base is not None and (base is None or not base.like(name, entry.tensor)):
                lacks = "" if base is None else f": {base.folder} has no {one_line(name)[:200]} of {entry.tensor}"
                raise ArtifactError(
                    f"{self.path} holds what differs from a base model (packed against {self.base}); give that model's "
                    f"folder or hub id by --base, in a recipe by model.base{lacks}"
                )

    def unpack(self, target: Path, *, base: Base | None = None) -> None:
        """Write the original, byte for byte, atomically; each tensor's sha256 is checked, those of a base too."""
        self.check_base(base)
        with self.path.open("rb") as file, written_whole(target) as beside, beside.open("wb") as out:
            header = self._original.header.encode()
            out.write(len(header).to_bytes(8, "little") + header)
            for name, entry in self._entries.items():
                digest, below = hashlib.sha256(), hashlib.sha256()
                used = None if base is None or entry.stored.base is None else base.files[name]
                others = repeat(None) if used is None else used.elements(name, below)
                for piece, other in zip(self._decoded(file, name), others, strict=False):
                    elements = added_to(piece, other)
                    digest.update(elements.data)
                    out.write(elements.data)
                if used is not None and below.hexdigest() != entry.stored.base:
                    raise ArtifactError(
                        f"{used.path}: {one_line(name)[:200]} is not that of the base that {self.path} was packed "
                        f"against; give the same weights, to the bit, of {self.base}"
                    )
                if digest.hexdigest() != entry.stored.sha256:
                    raise _damaged(self.path, f"{name} does not have its sha256")

    def is_of(self, original: Path) -> bool:
        """Return whether a file is the original, by header and sha256 of each tensor."""
        found, stored = layout_of(original), self._entries
        if found.header != self._original.header:
            return False
        return all(found.sha256(name) == entry.stored.sha256 for name, entry in stored.items())

    def _decoded(self, file: BinaryIO, name: str) -> Iterator[Elements]:
        """Yield the elements of a tensor, piece by piece."""
        entry = self._entries[name]
        file.seek(self._start + entry.place.data_offsets[0])
        for elements, (kept, *lengths) in zip(entry.tensor.pieces, entry.pieces, strict=True):
            with os_errors_named("read", self.path):
                data = file.read(sum(lengths))
            try:
                yield decode(data, lengths, kept=kept, elements=elements, size=entry.tensor.unit)
            except ValueError as error:
                raise _damaged(self.path, f"{name} cannot be unpacked ({error})") from error


def pack_file(source: Path, target: Path, *, base: Base | None = None) -> None:
    """Write a safetensors file in packed form, atomically.

    Of a tensor that a base has, too, the difference is stored if that makes its first elements smaller.
    """
    original, entries, end = layout_of(source), dict[str, _Entry](), 0
    room = _room(original, base)
    with written_whole(target) as beside, beside.open("wb") as out:
        out.seek(8 + room)
        for name, tensor in original.tensors.items():
            digest, below, pieces, begin = hashlib.sha256(), hashlib.sha256(), [], end
            used = base.files[name] if base is not None and _pays(original, name, base) else None
            others = repeat(None) if used is None else used.elements(name, below)
            for elements, other in zip(original.elements(name, digest), others, strict=False):
                kept, streams = encode(difference_from(elements, other))
                out.writelines(streams)
                pieces.append([kept, *map(len, streams)])
                end += sum(map(len, streams))
            under = None if used is None else below.hexdigest()
            whole = under is None and pieces == _as_it_is(tensor)
            stored = _StoredTensor(sha256=digest.hexdigest(), pieces=None if whole else pieces, base=under)
            kind, shape = (tensor.dtype, tensor.shape) if whole else ("U8", [end - begin])
            entries[name] = _Entry(tensor, stored, TensorBytes(dtype=kind, shape=shape, data_offsets=[begin, end]))
        header = _header_of(original, entries, base)
        assert len(header) <= room, f"{target}: the header takes {len(header)} bytes of {room}"  # noqa: S101
        out.seek(0)
        out.write(room.to_bytes(8, "little") + header.ljust(room))


def _pays(original: Layout, name: str, base: Base) -> bool:
    """Return whether the first elements of a tensor are smaller as differences from the base, if that has the tensor.

    Zeros that pruning made are none in a difference, and every tensor of an unrelated model differs.
    """
    if not base.like(name, original.tensors[name]) or not original.tensors[name].pieces:
        return False
    elements, below = (next(x.elements(name))[:_FIRST] for x in (original, base.files[name]))
    less, plain = (sum(map(len, encode(way)[1])) for way in (difference_from(elements, below), elements))
    return less < plain


def _room(original: Layout, base: Base | None) -> int:
    """Return how long the header can become, since it stands first but is known last.

    No number will be larger than here, and what describes tensors as they were is no longer than the original header.
    """
    entries, under = {}, None if base is None else "0" * 64
    for name, tensor in original.tensors.items():
        pieces = [[n, mask_bytes(n), *[n] * tensor.unit] for n in tensor.pieces]
        place = TensorBytes(dtype="U8", shape=[tensor.bytes], data_offsets=tensor.data_offsets)
        entries[name] = _Entry(tensor, _StoredTensor(sha256="0" * 64, pieces=pieces, base=under), place)
    length = len(_header_of(original, entries, base)) + len(original.header)
    return length + -length % 8


def _header_of(original: Layout, entries: Mapping[str, _Entry], base: Base | None) -> bytes:
    tensors = {name: entry.stored for name, entry in entries.items()}
    called = base.name[:200] if base is not None and any(x.base for x in tensors.values()) else None
    metadata = _Metadata(
        format="packed", version=1 if called is None else 2, digest=_digest(original.header, tensors),
        header=original.header, tensors=tensors, base=called,
    )  # fmt: skip
    described: dict[str, Any] = {name: entry.place.model_dump() for name, entry in entries.items()}
    described["__metadata__"] = {"compressx": metadata.model_dump_json(exclude_defaults=True)}
    return json.dumps(described, separators=(",", ":")).encode()


def _as_it_is(tensor: TensorBytes) -> list[list[int]]:
    """Return the pieces of a tensor of which everything is stored, uncompressed."""
    return [[elements, elements * tensor.unit] for elements in tensor.pieces]


def _digest(original: str, tensors: Mapping[str, _StoredTensor]) -> str:
    described = {name: stored.model_dump(exclude_defaults=True) for name, stored in tensors.items()}
    return hashlib.sha256(json.dumps([original, described]).encode()).hexdigest()


def _damaged(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} is damaged: {one_line(what)[:300]}; use another copy, or pack the model again")
