"""Pieces of packed tensors: the elements that are not zero, a bit mask of where they are, and Huffman codes of both.

The layout is that of `models/packed.py`. Everything here is exact: an element is zero if all of its bits are, so `-0.0`
and every NaN come back as they were.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Elements: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Little-endian integers of 1, 2, 4 or 8 bytes."""

MOST = 1032
"""Bytes that a byte of DEFLATE can become: 258 in two bits."""

_SAMPLE = 2**16
_WORTH = 7.9
"""A stream is compressed if a sample of its bytes has at most this entropy, in bits a byte."""


def dtype_of_size(size: int) -> np.dtype[Any]:
    """Return the dtype of elements of so many bytes."""
    return np.dtype(f"<u{size}")


def mask_bytes(elements: int) -> int:
    """Return the size of a mask: one bit an element."""
    return -(-elements // 8)


def encode(elements: Elements, *, compress: bool) -> tuple[int, list[bytes]]:
    """Leave the zeros out, if their mask takes less than they do, and compress what is left.

    Args:
        elements: [elements].
        compress: whether streams are compressed, and elements stored byte by byte for it.

    Returns:
        The number of stored elements, and the streams.
    """
    size, streams = elements.itemsize, []
    stored = elements != 0
    kept = int(np.count_nonzero(stored))
    if mask_bytes(elements.size) < (elements.size - kept) * size:
        mask = np.packbits(stored, bitorder="little")
        streams.append(_deflated(mask) if compress else mask.tobytes())
        elements = elements[stored]
    kept = elements.size
    if not compress:
        return kept, [*streams, elements.tobytes()]
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
    """Return what `encode` was given.

    Args:
        data: the streams, one after the other.
        lengths: of the streams in bytes.
        kept: number of stored elements.
        elements: number of elements of the piece.
        size: bytes of an element.

    Returns:
        [elements].

    Raises:
        ValueError: streams that `encode` did not return; says how.
    """
    if len(data) != sum(lengths):
        raise ValueError(f"{sum(lengths)} bytes expected, {len(data)} found")
    if not (wanted := contents(lengths, kept=kept, elements=elements, size=size)):
        raise ValueError(f"there is a stream of another length than {kept} of {elements} elements take")
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


def _deflated(stream: NDArray[np.uint8]) -> bytes:
    """Compress bytes, or return them as they are if that would not make them fewer."""
    plain = stream.tobytes()
    entropy = _entropy(stream[:: 1 + stream.size // _SAMPLE])
    if entropy > _WORTH:
        return plain
    # Where bytes repeat, a Huffman code's least length of one bit would be too much.
    strategy = zlib.Z_RLE if entropy < 0.5 else zlib.Z_HUFFMAN_ONLY
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL + 1, strategy)
    packed = packer.compress(plain) + packer.flush()
    return packed if len(packed) < len(plain) else plain


def _entropy(sample: NDArray[np.uint8]) -> float:
    """Return the entropy of bytes, in bits a byte; 0 of none."""
    counts = np.bincount(sample, minlength=256)
    shares = counts[counts > 0] / max(1, sample.size)
    return float(-(shares * np.log2(shares)).sum())


def _inflated(stream: bytes, length: int) -> bytes:
    """Return the `length` bytes that `_deflated` was given."""
    if len(stream) >= length:
        plain = stream
    else:
        unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            plain = unpacker.decompress(stream, length + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError("a compressed stream has another end than its own")
    if len(plain) != length:
        raise ValueError(f"a stream of {length} bytes expected, {len(plain)} found")
    return plain
