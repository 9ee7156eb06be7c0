from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressx.models.packed import Elements, decode, dtype_of_size, encode, mask_bytes


def back(elements: Elements, *, compress: bool) -> Elements:
    kept, streams = encode(elements, compress=compress)
    size = elements.itemsize
    return decode(b"".join(streams), [*map(len, streams)], kept=kept, elements=elements.size, size=size)


@st.composite
def pieces(draw: st.DrawFn) -> Elements:
    """Bytes of any kind, more or less of them zero, and of some bytes only a few values, as exponents have."""
    size, count = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(0, 3000))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    planes = numbers.integers(0, 256, (count, size), dtype=np.uint8)
    if draw(st.booleans()):
        planes[:, -1] = numbers.integers(0, draw(st.integers(1, 9)), count)
    elements = planes.reshape(-1).view(dtype_of_size(size)).copy()
    elements[numbers.random(count) < draw(st.sampled_from([0, 0.02, 0.5, 0.9, 1]))] = 0
    return elements


@given(pieces(), st.booleans())
def test_every_element_comes_back(elements: Elements, compress: bool) -> None:
    found = back(elements, compress=compress)
    assert found.dtype == elements.dtype
    assert np.array_equal(found, elements)


@given(pieces(), st.booleans())
def test_no_piece_grows_and_compression_makes_none_larger(elements: Elements, compress: bool) -> None:
    _, streams = encode(elements, compress=compress)
    _, plain = encode(elements, compress=False)
    assert sum(map(len, streams)) <= sum(map(len, plain)) <= elements.nbytes


def test_minus_zero_and_nan_payloads_are_stored_bit_by_bit() -> None:
    bits = np.tile(np.array([0, 0, 0, 0x8000, 0x7FC1, 0xFFFF, 0, 1], dtype="<u2"), 100)
    for compress in (False, True):
        assert np.array_equal(back(bits, compress=compress), bits)
    assert encode(bits, compress=False)[0] == 400  # half of them have no bit set


def test_a_mask_has_a_bit_for_each_element_the_least_significant_first() -> None:
    elements = np.array([7, 0, 0, 9, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0], dtype="<u4")
    kept, (mask, values) = encode(elements, compress=False)
    assert (kept, mask) == (3, bytes([0b00001001, 0b00000010]))
    assert values == np.array([7, 9, 5], dtype="<u4").tobytes()


@pytest.mark.parametrize(("size", "zeros"), [(1, 1), (2, 1), (4, 0)])
def test_few_zeros_stay_where_they_are_because_a_mask_would_take_more(size: int, zeros: int) -> None:
    """Eight elements have a mask of one byte: one zero of more than a byte pays it."""
    elements = np.arange(1, 9).astype(dtype_of_size(size))
    elements[:zeros] = 0
    kept, streams = encode(elements, compress=False)
    assert (kept, len(streams)) == ((8, 1) if zeros * size <= 1 else (7, 2))


def bfloat16(values: np.ndarray) -> Elements:
    return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")


def test_normal_numbers_take_little_more_than_the_entropy_of_their_exponents() -> None:
    elements = bfloat16(np.random.default_rng(0).normal(0, 0.02, 2**20))
    exponents = np.bincount((elements >> 7) & 0xFF, minlength=256) / elements.size
    entropy = -sum(p * math.log2(p) for p in exponents if p)
    bits = 8 * sum(map(len, encode(elements, compress=True)[1])) / elements.size
    assert entropy < 3
    assert 8 + entropy - 0.05 < bits < 8 + entropy + 0.1


def test_masks_of_two_in_four_take_the_bits_of_six_combinations() -> None:
    pairs = np.array([*itertools.combinations(range(4), 2)])
    chosen = np.random.default_rng(0).choice(pairs, 2**16)  # [groups, 2]
    elements = np.zeros((len(chosen), 4), dtype="<u2")
    elements[np.arange(len(chosen))[:, None], chosen] = 1
    _, (mask, *_) = encode(elements.reshape(-1), compress=True)
    assert 8 * len(mask) / len(chosen) == pytest.approx(math.log2(6), rel=0.03)
    assert mask_bytes(elements.size) == 4 * len(chosen) / 8


@pytest.mark.parametrize("compress", [False, True])
def test_other_streams_are_refused_with_what_is_wrong(compress: bool) -> None:
    elements = bfloat16(np.random.default_rng(0).normal(0, 1, 4096))
    elements[::2] = 0
    elements[::8] = 1
    kept, streams = encode(elements, compress=compress)
    data, lengths = b"".join(streams), [*map(len, streams)]

    def refused(message: str, data: bytes = data, lengths: list[int] = lengths, kept: int = kept) -> None:
        with pytest.raises(ValueError, match=message):
            decode(data, lengths, kept=kept, elements=4096, size=2)

    refused(r"\d+ bytes expected, \d+ found", data[:-1])
    refused("stream", lengths=[*lengths[:-1], lengths[-1] - 1, 1])
    refused(r"elements are stored, .* in the mask|a stream of|end", kept=kept - 1)
    if not compress:
        refused("elements are stored, .* in the mask", bytes([data[0] ^ 4]) + data[1:])


def test_a_compressed_stream_ends_with_its_last_byte() -> None:
    elements = bfloat16(np.random.default_rng(0).normal(0, 1, 1024))
    kept, (mantissas, exponents) = encode(elements, compress=True)
    assert len(exponents) < kept
    for other in (exponents[:-1], exponents + b"\0"):  # both have all exponents
        with pytest.raises(ValueError, match="another end"):
            decode(mantissas + other, [len(mantissas), len(other)], kept=kept, elements=1024, size=2)


def test_a_compressed_stream_with_a_flipped_bit_never_comes_back_as_what_it_was() -> None:
    elements = bfloat16(np.random.default_rng(0).normal(0, 1, 1024))
    kept, streams = encode(elements, compress=True)
    lengths, data = [*map(len, streams)], bytearray(b"".join(streams))
    for bit in range(0, 8 * len(data), 97):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            found = decode(bytes(changed), lengths, kept=kept, elements=1024, size=2)
        except ValueError:
            continue
        assert not np.array_equal(found, elements)
