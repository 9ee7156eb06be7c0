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
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, WrapValidator, model_validator

from compressx.models.shards import OUTSIDE, of_file
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import checked_header, one_by_one, os_errors_named, written_whole

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Little-endian integers of 1, 2, 4 or 8 bytes."""

MOST = 1032
"""Bytes that a byte of DEFLATE can become: 258 in two bits."""

_SAMPLE = 2**16
_WORTH = 7.9
"""A stream is compressed if a sample of its bytes has at most this entropy, in bits a byte."""
_FIRST = 2**18
"""So many elements of a tensor tell whether its difference from a base is smaller."""


def dtype_of_size(size: int) -> np.dtype[Any]:
    """Return the dtype of elements of so many bytes."""
    return np.dtype(f"<u{size}")


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
    """Return the [elements] that `encode` was given, of `size` bytes each.

    Args:
        data: the streams, one after the other.
        lengths: of the streams in bytes.
        kept: number of stored elements.
        elements: number of elements of the piece.
        size: bytes of an element.

    Raises:
        ValueError: streams that `encode` did not return; says how.
    """
    wanted = contents(lengths, kept=kept, elements=elements, size=size)
    ends = np.cumsum(lengths)
    streams = [_inflated(data[end - x : end], y) for end, x, y in zip(ends, lengths, wanted, strict=True)]
    mask = streams.pop(0) if kept < elements else None
    if len(streams) == 1:
        values = np.frombuffer(streams[0], dtype_of_size(size))
    else:
        planes = [np.frombuffer(stream, np.uint8) for stream in streams]
        values = _rotated(np.stack(planes, axis=1).view(dtype_of_size(size)).reshape(kept), 8 * size - 1)
    if mask is None:
        return values
    stored = np.unpackbits(np.frombuffer(mask, np.uint8), count=elements, bitorder="little").view(bool)
    if (bits := int(np.count_nonzero(stored))) != kept:
        raise ValueError(f"{kept} elements are stored, {bits} in the mask")
    whole = np.zeros(elements, dtype_of_size(size))
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
    def _separate(cls, header: Any) -> Any:
        return {"metadata": header.pop("__metadata__", None), "tensors": header} if isinstance(header, dict) else header


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
    read = checked_header(path, header, _Header)
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


def pieces_of(file: BinaryIO, start: int, tensor: TensorBytes) -> Iterator[Elements]:
    """Yield the bytes of a tensor as integers, piece by piece; `start` is the byte after the file's header.

    Raises:
        ArtifactError: the file cannot be read.
    """
    file.seek(start + tensor.begin)
    for units in tensor.pieces:
        with os_errors_named("read", Path(file.name)):
            data = file.read(units * tensor.unit)
        yield np.frombuffer(data, dtype_of_size(tensor.unit))


def tensor_sha256(file: BinaryIO, start: int, tensor: TensorBytes) -> str:
    """Return the sha256 of a tensor's bytes, hexadecimal; arguments and errors are those of `pieces_of`."""
    digest = hashlib.sha256()
    for piece in pieces_of(file, start, tensor):
        digest.update(piece.data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Base:
    """The model from which tensors differ.

    Attributes:
        name: of the model, for messages.
        folder: with its files.
        tensors: by name; with the file, and the byte after its header.
    """

    name: str
    folder: Path
    tensors: Mapping[str, tuple[Path, int, TensorBytes]]

    def like(self, tensor: TensorBytes) -> bool:
        """Return whether there is a tensor of the same name, dtype and shape."""
        _, _, found = self.tensors.get(tensor.name, (None, 0, None))
        return found is not None and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)

    def pieces(self, name: str, digest: hashlib._Hash) -> Iterator[Elements]:
        """Yield a tensor as `pieces_of` does, and add what is yielded to a digest."""
        path, start, tensor = self.tensors[name]
        with path.open("rb") as file:
            for piece in pieces_of(file, start, tensor):
                digest.update(piece.data)
                yield piece


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _StoredTensor(BaseModel):
    """The metadata of one tensor."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    sha256: Sha256
    pieces: Annotated[list[Annotated[list[Size], Field(min_length=2, max_length=10)]], Field(fail_fast=True)] | None
    base: Sha256 | None = None


class _Metadata(BaseModel):
    """The JSON under the metadata key `compressx`; one key, because safetensors writes several in no fixed order."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
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
    """A tensor of the original, and what is stored of it: the bytes from `begin` to `end` after the header."""

    tensor: TensorBytes
    stored: _StoredTensor
    begin: int
    end: int

    @property
    def pieces(self) -> list[list[int]]:
        return _as_it_is(self.tensor) if self.stored.pieces is None else self.stored.pieces

    def fits(self, place: TensorBytes) -> bool:
        """Return whether `place` has the bytes of the pieces, and none of them says that it holds more than it can."""
        tensor, pieces = self.tensor, self.stored.pieces
        if pieces is None:
            same = (place.dtype, place.shape, place.bytes) == (tensor.dtype, tensor.shape, tensor.bytes)
            return same and self.stored.base is None
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
        differs: whether its difference from the base is stored, so that the zeros are what both have.
    """

    name: str
    bytes: int
    packed_bytes: int
    masked: bool
    differs: bool


class PackedFile:
    """A packed file: its metadata is read and checked, its tensors are not.

    Attributes:
        path: of the file.
        digest: of the original's header and of every tensor's sha256, pieces and base.
        base: the name of the model without which it cannot be unpacked, as it was packed against; None if there is
            none. For messages only: a file must not choose what is opened.

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
        self.base = None if metadata.base is None else one_line(metadata.base)[:200]
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
            masked = any(kept < n for n, (kept, *_) in zip(tensor.pieces, entry.pieces, strict=True))
            differs = entry.stored.base is not None
            yield PackedTensor(tensor.name, tensor.bytes, entry.end - entry.begin, masked, differs)

    def check_base(self, base: Base | None) -> None:
        """Refuse a base whose headers show that it is another one, or none where one is needed."""
        for tensor in (entry.tensor for entry in self._entries if entry.stored.base is not None):
            if base is None or not base.like(tensor):
                kind = f"{one_line(tensor.name)[:200]} of {tensor.dtype} {str([*tensor.shape])[:80]}"
                raise ArtifactError(
                    f"{self.path} holds what differs from a base model (packed against {self.base}); give that model's "
                    "folder or hub id by --base, in a recipe by model.base"
                    + ("" if base is None else f": {base.folder} has no {kind}")
                )

    def unpack(self, target: Path, *, base: Base | None = None) -> None:
        """Write the original, byte for byte, atomically; with a base, every tensor that is read of it is checked.

        Raises:
            ArtifactError: a tensor that does not have its sha256, another base, or files that cannot be read or
                written.
        """
        self.check_base(base)
        with self.path.open("rb") as file, written_whole(target) as beside, beside.open("wb") as out:
            header = self._header.encode()
            out.write(len(header).to_bytes(8, "little") + header)
            for entry in self._entries:
                digest, below = hashlib.sha256(), hashlib.sha256()
                name, used = entry.tensor.name, None if entry.stored.base is None else base
                others = repeat(None) if used is None else used.pieces(name, below)
                for piece, other in zip(self._decoded(file, entry), others, strict=False):
                    elements = added_to(piece, other)
                    digest.update(elements.data)
                    out.write(elements.data)
                if used is not None and below.hexdigest() != entry.stored.base:
                    raise ArtifactError(
                        f"{used.tensors[name][0]}: {one_line(name)[:200]} is not that of the base that {self.path} was "
                        f"packed against; give the same weights, to the bit, of {self.base}"
                    )
                if digest.hexdigest() != entry.stored.sha256:
                    raise _damaged(self.path, f"{entry.tensor.name} does not have its sha256")

    def is_of(self, original: Path) -> bool:
        """Return whether a file is the original, by header and sha256 of each tensor.

        Raises:
            ArtifactError: the file cannot be read, or is not a safetensors file.
        """
        found = layout_of(original)
        if found.header != self._header:
            return False
        with original.open("rb") as file:
            return all(tensor_sha256(file, found.start, entry.tensor) == entry.stored.sha256 for entry in self._entries)

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


def pack_file(source: Path, target: Path, *, base: Base | None = None) -> None:
    """Write a safetensors file in packed form, atomically.

    Of a tensor that a base has, too, the difference is stored if that makes its first elements smaller.

    Raises:
        ArtifactError: the source or the base cannot be read, or the target cannot be written.
    """
    text, start, _, tensors = layout_of(source)
    room, entries = _room(text, tensors, base), []
    with source.open("rb") as file, written_whole(target) as beside, beside.open("wb") as out:
        out.seek(8 + room)
        for tensor in tensors:
            digest, below, pieces, begin = hashlib.sha256(), hashlib.sha256(), [], out.tell() - 8 - room
            used = base if base is not None and _pays(file, start, tensor, base) else None
            others = repeat(None) if used is None else used.pieces(tensor.name, below)
            for elements, other in zip(pieces_of(file, start, tensor), others, strict=False):
                digest.update(elements.data)
                kept, streams = encode(difference_from(elements, other))
                out.writelines(streams)
                pieces.append([kept, *map(len, streams)])
            under = None if used is None else below.hexdigest()
            whole = under is None and pieces == _as_it_is(tensor)
            stored = _StoredTensor(sha256=digest.hexdigest(), pieces=None if whole else pieces, base=under)
            entries.append(_Entry(tensor, stored, begin, out.tell() - 8 - room))
        header = _header_of(text, entries, base)
        assert len(header) <= room, f"{target}: the header takes {len(header)} bytes of {room}"  # noqa: S101
        out.seek(0)
        out.write(room.to_bytes(8, "little") + header.ljust(room))


def _pays(file: BinaryIO, start: int, tensor: TensorBytes, base: Base) -> bool:
    """Return whether the first elements of a tensor are smaller as differences from the base, if that has the tensor.

    Zeros that pruning made are none in a difference, and every tensor of an unrelated model differs.
    """
    if not base.like(tensor) or not tensor.pieces:
        return False
    elements = next(pieces_of(file, start, tensor))[:_FIRST]
    ways = (difference_from(elements, next(base.pieces(tensor.name, hashlib.sha256()))[:_FIRST]), elements)
    less, plain = (sum(map(len, encode(way)[1])) for way in ways)
    return less < plain


def _room(original: str, tensors: Sequence[TensorBytes], base: Base | None) -> int:
    """Return how long the header can become, since it stands first but is known last.

    No number will be larger than here, and what describes tensors as they were is no longer than the original header.
    """
    entries, under = [], None if base is None else "0" * 64
    for tensor in tensors:
        pieces = [[n, mask_bytes(n), *[n] * tensor.unit] for n in tensor.pieces]
        stored = _StoredTensor(sha256="0" * 64, pieces=pieces, base=under)
        entries.append(_Entry(tensor, stored, tensor.begin, tensor.end))
    length = len(_header_of(original, entries, base)) + len(original)
    return length + -length % 8


def _header_of(original: str, entries: Sequence[_Entry], base: Base | None) -> bytes:
    described: dict[str, Any] = {}
    for tensor, stored, begin, end in entries:
        kind = (tensor.dtype, [*tensor.shape]) if stored.pieces is None else ("U8", [end - begin])
        described[tensor.name] = {"dtype": kind[0], "shape": kind[1], "data_offsets": [begin, end]}
    tensors = {entry.tensor.name: entry.stored for entry in entries}
    name = base.name[:200] if base is not None and any(x.base for x in tensors.values()) else None
    metadata = _Metadata(
        format="packed", version=1 if name is None else 2, digest=_digest(original, tensors), header=original,
        tensors=tensors, base=name,
    )  # fmt: skip
    described["__metadata__"] = {"compressx": metadata.model_dump_json(exclude_defaults=True)}
    return json.dumps(described, separators=(",", ":")).encode()


def _as_it_is(tensor: TensorBytes) -> list[list[int]]:
    """Return the pieces of a tensor of which everything is stored, uncompressed."""
    return [[elements, elements * tensor.unit] for elements in tensor.pieces]


def _digest(original: str, tensors: Mapping[str, _StoredTensor]) -> str:
    described = {name: stored.model_dump(exclude_defaults=True) for name, stored in tensors.items()}
    return hashlib.sha256(json.dumps([original, described]).encode()).hexdigest()


def _metadata(path: Path, text: str | None) -> _Metadata:
    if text is None:
        raise ArtifactError(
            f"{path} is a safetensors file, but was not written by compressx pack: its metadata has no key 'compressx'"
        )
    found = checked_header(path, text, _Metadata)
    if _digest(found.header, found.tensors) != found.digest:
        raise _damaged(path, "its metadata do not have their digest")
    return found


def _damaged(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} is damaged: {one_line(what)[:300]}; use another copy, or pack the model again")
