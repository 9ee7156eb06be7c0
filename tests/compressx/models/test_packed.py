"""Packed files come back to the bit, are as small as arithmetic says, and others are refused."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressx.models import layout, packed
from compressx.models.layout import Elements, layout_of
from compressx.models.packed import (
    Base,
    PackedFile,
    added_to,
    decode,
    difference_from,
    encode,
    mask_bytes,
    pack_file,
)
from compressx.runtime.errors import ArtifactError


def back(elements: Elements) -> Elements:
    kept, streams = encode(elements)
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
    elements = planes.reshape(-1).view(f"<u{size}").copy()
    elements[numbers.random(count) < draw(st.sampled_from([0, 0.02, 0.5, 0.9, 1]))] = 0
    return elements


@given(pieces())
def test_every_element_comes_back_and_no_piece_grows(elements: Elements) -> None:
    found = back(elements)
    assert found.dtype == elements.dtype
    assert np.array_equal(found, elements)
    assert sum(map(len, encode(elements)[1])) <= elements.nbytes


def test_minus_zero_and_nan_payloads_are_stored_bit_by_bit() -> None:
    bits = np.tile(np.array([0, 0, 0, 0x8000, 0x7FC1, 0xFFFF, 0, 1], dtype="<u2"), 100)
    assert np.array_equal(back(bits), bits)
    assert encode(bits)[0] == 400  # half of them have no bit set


def test_a_mask_has_a_bit_for_each_element_the_least_significant_first() -> None:
    elements = np.array([7, 0, 0, 9, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0], dtype="<u4")
    kept, (mask, *_) = encode(elements)
    assert (kept, mask) == (3, bytes([0b00001001, 0b00000010]))


@pytest.mark.parametrize(("size", "zeros"), [(1, 1), (2, 1), (4, 0)])
def test_few_zeros_stay_where_they_are_because_a_mask_would_take_more(size: int, zeros: int) -> None:
    """Eight elements have a mask of one byte: one zero of more than a byte pays it."""
    elements = np.arange(1, 9).astype(f"<u{size}")
    elements[:zeros] = 0
    assert encode(elements)[0] == (8 if zeros * size <= 1 else 7)


def bfloat16(values: np.ndarray) -> Elements:
    return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")


def test_normal_numbers_take_little_more_than_the_entropy_of_their_exponents() -> None:
    elements = bfloat16(np.random.default_rng(0).normal(0, 0.02, 2**20))
    exponents = np.bincount((elements >> 7) & 0xFF, minlength=256) / elements.size
    entropy = -sum(p * math.log2(p) for p in exponents if p)
    bits = 8 * sum(map(len, encode(elements)[1])) / elements.size
    assert entropy < 3
    assert 8 + entropy - 0.05 < bits < 8 + entropy + 0.1


def test_masks_of_two_in_four_take_the_bits_of_six_combinations() -> None:
    pairs = np.array([*itertools.combinations(range(4), 2)])
    chosen = np.random.default_rng(0).choice(pairs, 2**16)  # [groups, 2]
    elements = np.zeros((len(chosen), 4), dtype="<u2")
    elements[np.arange(len(chosen))[:, None], chosen] = 1
    _, (mask, *_) = encode(elements.reshape(-1))
    assert 8 * len(mask) / len(chosen) == pytest.approx(math.log2(6), rel=0.03)
    assert mask_bytes(elements.size) == 4 * len(chosen) / 8


def test_a_compressed_stream_ends_with_its_last_byte() -> None:
    elements = bfloat16(np.random.default_rng(0).normal(0, 1, 1024))
    kept, (mantissas, exponents) = encode(elements)
    assert len(exponents) < kept
    for other in (exponents[:-1], exponents + b"\0"):  # both have all exponents
        with pytest.raises(ValueError, match="another end"):
            decode(mantissas + other, [len(mantissas), len(other)], kept=kept, elements=1024, size=2)


def test_a_stream_is_inflated_no_further_than_its_elements_go() -> None:
    bomb = zlib.compress(bytes(2**26), 9, -zlib.MAX_WBITS)  # 65 kB
    tracemalloc.start()
    with pytest.raises(ValueError, match="another end"):
        decode(bomb, [len(bomb)], kept=len(bomb) + 1, elements=len(bomb) + 1, size=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def round_trip(source: Path, *, base: Base | None = None) -> PackedFile:
    """Pack a file and unpack it beside; the bytes are those of the source."""
    target, again = source.with_name("model.packed.safetensors"), source.with_name("again.safetensors")
    pack_file(source, target, base=base)
    found = PackedFile(target)
    found.unpack(again, base=base)
    assert again.read_bytes() == source.read_bytes()
    assert found.original_bytes == source.stat().st_size
    assert found.is_of(source)
    return found


def half_zero(*shape: int, dtype: torch.dtype = torch.float32, sparsity: float = 0.5) -> torch.Tensor:
    weight = torch.randn(shape).to(dtype)
    weight[torch.rand(shape) < sparsity] = 0
    return weight


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of any dtype and shape, scalars and empty ones included, of any bits, more or less of them zero."""
    found = {}
    for number in range(draw(st.integers(0, 5))):
        shape = draw(st.lists(st.integers(0, 17), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        size = torch.tensor([], dtype=dtype).element_size()
        random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        top = 2 if dtype == torch.bool else 256
        raw = torch.randint(0, top, (*shape, size), generator=random, dtype=torch.uint8)
        raw[torch.rand(shape, generator=random) < draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))] = 0
        bits = raw.view(-1).view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
        found[f"{draw(st.sampled_from(['a', 'ü.mask', 'x.values']))}.{number}"] = bits
    return found


@pytest.mark.parametrize(("dtype", "size"), [("F4", 6), ("F6_E2M3", 9), ("F8_E8M0", 12)])
def test_elements_of_less_than_a_byte_and_unusual_dtypes_are_packed_as_bytes(
    tmp_path: Path, dtype: str, size: int
) -> None:
    described = {"x": {"dtype": dtype, "shape": [3, 400], "data_offsets": [0, 100 * size]}}
    header = json.dumps(described).encode()
    data = bytes([0] * (50 * size) + [0x80, 1] * (25 * size))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    (found,) = round_trip(tmp_path / "model.safetensors").sizes()
    assert found.masked


def test_a_packed_tensor_is_bytes_and_the_others_are_as_they_were(tmp_path: Path) -> None:
    """So a loader that knows nothing of packing gets no weight of the right shape from a packed tensor."""
    noise = torch.randint(0, 256, (64,)).byte()
    given = {"linear": half_zero(64, 64), "noise": noise, "empty": torch.ones(0, 3), "count": torch.tensor(7)}
    save_file(given, tmp_path / "model.safetensors")
    round_trip(tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.packed.safetensors")
    assert (found["linear"].dtype, found["linear"].dim()) == (torch.uint8, 1)
    for name in ("noise", "empty", "count"):
        assert torch.equal(found[name], given[name])
        assert found[name].dtype == given[name].dtype


@pytest.mark.parametrize("with_base", [False, True])
def test_memory_does_not_grow_with_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_base: bool) -> None:
    monkeypatch.setattr(layout, "PIECE", 2**14)
    peaks = []
    for rows in (64, 2048):
        weight = half_zero(rows, 1024)
        save_file({"weight": weight}, tmp_path / "model.safetensors")
        save_file({"weight": some_changed(weight, 0.1)}, tmp_path / "base.safetensors")
        base = base_of(tmp_path / "base.safetensors") if with_base else None
        tracemalloc.start()
        pack_file(tmp_path / "model.safetensors", tmp_path / "packed.safetensors", base=base)
        PackedFile(tmp_path / "packed.safetensors").unpack(tmp_path / "again.safetensors", base=base)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]  # of a tensor 32 times as large
    assert peaks[1] < 2**20 < (tmp_path / "model.safetensors").stat().st_size / 4


# --- against a base


def base_of(path: Path) -> Base:
    return Base("its name", path.parent, dict.fromkeys((found := layout_of(path)).tensors, found))


def some_changed(weight: torch.Tensor, share: float, scale: float = 0.02) -> torch.Tensor:
    """Move a share of the entries by about so much of their size."""
    moved = (weight.float() * (1 + scale + scale * torch.rand(weight.shape))).to(weight.dtype)
    return torch.where(torch.rand(weight.shape) < share, moved, weight)


@given(pieces(), st.integers(0, 2**32))
def test_a_difference_gives_every_element_back_and_is_zero_where_they_are_equal(elements: Elements, seed: int) -> None:
    random = np.random.default_rng(seed)
    base = random.permutation(elements)
    base[::2] = elements[::2]
    stored = difference_from(elements, base)
    assert stored.dtype == elements.dtype
    assert np.array_equal(stored == 0, elements == base)
    assert np.array_equal(added_to(stored, base), elements)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_difference_of_either_sign_has_no_bits_above_those_that_it_needs(size: int) -> None:
    """5 - 8 = -3 is the sign and the inverted bits of -3, which are 2."""
    dtype, sign = np.dtype(f"<u{size}"), 1 << (8 * size - 1)
    base = np.array([8, 8, 8, 0], dtype=dtype)
    elements = np.array([11, 8, 5, 2 * sign - 1], dtype=dtype)
    assert difference_from(elements, base).tolist() == [3, 0, sign | 2, sign]


METADATA = st.sampled_from([None, {"format": "pt", "ä": "\n"}])


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(tensors(), st.none() | tensors(), st.sampled_from([8, 64, 2**22]), METADATA)
def test_any_tensors_come_back_to_the_bit_with_their_metadata_and_with_any_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor] | None, piece: int, metadata: dict[str, str] | None,
) -> None:  # fmt: skip
    """Tensors of the base are the same, the same but for some, others of that name, or not there."""
    monkeypatch.setattr(layout, "PIECE", piece)
    for number, (name, tensor) in enumerate(given.items() if other is not None else ()):
        if number % 3 and tensor.dtype != torch.bool:
            other[name] = tensor.clone()
        if number % 3 == 2 and tensor.numel() and tensor.dtype != torch.bool:
            other[name].view(-1)[:: 1 + tensor.numel() // 3] = 0
    save_file(other or {}, tmp_path / "base.safetensors")
    save_file(given, tmp_path / "model.safetensors", metadata)
    base = None if other is None else base_of(tmp_path / "base.safetensors")
    found = round_trip(tmp_path / "model.safetensors", base=base)
    stored = {name: tensor.numel() * tensor.element_size() for name, tensor in given.items()}
    assert {tensor.name: tensor.bytes for tensor in found.sizes()} == stored
    assert found.base == ("its name" if any(tensor.differs for tensor in found.sizes()) else None)
    assert {tensor.name for tensor in found.sizes() if tensor.differs} <= {*given} & {*(other or ())}


def test_a_tensor_that_its_difference_would_make_larger_is_packed_by_itself(tmp_path: Path) -> None:
    """Zeros that pruning made are none in a difference from dense weights; of another model everything differs."""
    dense = torch.randn(256, 256).bfloat16()
    mask = torch.rand(256, 256) < 0.5
    given = {"pruned": some_changed(dense, 1) * mask, "another": torch.randn(256, 256).bfloat16(), "same": dense}
    save_file({name: dense.clone() for name in given}, tmp_path / "base.safetensors")
    save_file(given, tmp_path / "model.safetensors")
    found = round_trip(tmp_path / "model.safetensors", base=base_of(tmp_path / "base.safetensors"))
    assert {tensor.name: tensor.differs for tensor in found.sizes()} == {
        "pruned": False,
        "another": False,
        "same": True,
    }


@pytest.mark.parametrize(
    "of_base", [torch.float16, torch.float32, torch.int16, torch.Size([4096]), torch.Size([4, 1024])], ids=str
)
def test_a_tensor_of_the_base_with_another_dtype_or_shape_is_not_used(of_base: Any, tmp_path: Path) -> None:
    weight = torch.randn(64, 64).bfloat16()
    other = weight.to(of_base) if of_base in (torch.float16, torch.float32) else weight.view(of_base)  # the same bits
    save_file({"weight": other}, tmp_path / "base.safetensors")
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    (found,) = round_trip(tmp_path / "model.safetensors", base=base_of(tmp_path / "base.safetensors")).sizes()
    assert not found.differs


def test_a_tensor_of_which_only_the_beginning_is_that_of_the_base_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The beginning decides; then nothing of the difference can be left out or compressed."""
    monkeypatch.setattr(packed, "_FIRST", 8)
    noise = torch.randint(-(2**15), 2**15, (2, 4096), dtype=torch.int16)
    noise[1, :8] = noise[0, :8]
    for name, tensor in zip(("base", "model"), noise, strict=True):
        save_file({"noise": tensor.clone()}, tmp_path / f"{name}.safetensors")
    (found,) = round_trip(tmp_path / "model.safetensors", base=base_of(tmp_path / "base.safetensors")).sizes()
    assert (found.differs, found.packed_bytes) == (True, found.bytes)


def test_a_base_with_one_other_bit_is_found_and_nothing_is_written(tmp_path: Path) -> None:
    given = {"a": torch.randn(64, 64), "b": torch.randn(64, 64)}
    save_file(given, tmp_path / "base.safetensors")
    save_file({n: some_changed(tensor, 0.1) for n, tensor in given.items()}, tmp_path / "model.safetensors")
    base = base_of(tmp_path / "base.safetensors")
    found = round_trip(tmp_path / "model.safetensors", base=base)
    (again := tmp_path / "again.safetensors").unlink()
    data = bytearray((path := tmp_path / "base.safetensors").read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        ArtifactError, match=r"base\.safetensors: b is not that of the base that .*packed\.safetensors was packed agai"
        r"nst; give the same weights, to the bit, of its name$",
    ):  # fmt: skip
        found.unpack(again, base=base)
    assert not again.exists()


def test_the_name_of_a_base_is_escaped_and_short(tmp_path: Path) -> None:
    save_file({"a": torch.ones(64)}, tmp_path / "model.safetensors")
    base = dataclasses.replace(base_of(tmp_path / "model.safetensors"), name="x\n\u202e" + "y" * 500)
    name = round_trip(tmp_path / "model.safetensors", base=base).base
    assert name is not None
    assert name.startswith(r"x\n\u202ey")
    assert len(name) == 200


@pytest.mark.parametrize("name", ["half", "full", "noise"])
def test_a_changed_byte_of_a_tensor_is_found_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    """Half zero, without zeros, and not compressible."""
    given = {"half": half_zero(64, 64), "full": torch.randn(64, 64), "noise": torch.randint(0, 256, (64, 64)).byte()}
    save_file(given, tmp_path / "model.safetensors")
    pack_file(tmp_path / "model.safetensors", packed_file := tmp_path / "model.packed.safetensors")
    data, found = bytearray(packed_file.read_bytes()), layout_of(packed_file)
    begin, end = found.tensors[name].data_offsets
    for place in (begin, (begin + end) // 2, end - 1):
        changed = bytearray(data)
        changed[found.start + place] ^= 0x10
        packed_file.write_bytes(changed)
        with pytest.raises(ArtifactError, match=rf"model\.packed\.safetensors is damaged: {name} "):
            PackedFile(packed_file).unpack(packed_file.with_name("again.safetensors"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.packed.safetensors", "model.safetensors"]


def test_a_full_disk_is_named_and_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(64)}, tmp_path / "model.safetensors")
    (packed_file := tmp_path / "model.packed.safetensors").write_text("before")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packed, "encode", full)
    with pytest.raises(
        ArtifactError, match=r"cannot write .*model\.packed\.safetensors: No space left .*free some space"
    ):
        pack_file(tmp_path / "model.safetensors", packed_file)
    assert packed_file.read_text() == "before"
