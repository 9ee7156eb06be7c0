from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.accelerator import pretended_accelerator

from compressx.api.pruner import Linear
from compressx.masks.file import MaskEntry, WeightHashes, join_masks, read_masks, weight_sha256, write_masks
from compressx.runtime.errors import ArtifactError

_SHA = "0123456789abcdef" * 4


def _entry(rows: int, columns: int, seed: int = 0, pattern: str = "50% row") -> MaskEntry:
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(rows, columns, generator=generator) < 0.5
    return MaskEntry(keep, pattern, "wanda", _SHA)


def _same(one: Mapping[str, MaskEntry], other: Mapping[str, MaskEntry]) -> bool:
    return [*one] == [*other] and all(
        torch.equal(a.keep, b.keep) and (a.pattern, a.pruner, a.sha256) == (b.pattern, b.pruner, b.sha256)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


@st.composite
def _entries(draw: st.DrawFn) -> dict[str, MaskEntry]:
    side = st.integers(1, 17)
    words = st.text("2:4 50% röw'\"\\é", max_size=12)
    return {
        name: MaskEntry(
            _entry(draw(side), draw(side), draw(st.integers(0, 99))).keep, draw(words), draw(words),
            draw(st.binary(min_size=32, max_size=32)).hex(),
        )
        for name in draw(st.lists(st.text(max_size=12), max_size=4, unique=True))
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("masks")


@settings(max_examples=20)
@given(entries=_entries())
def test_masks_of_any_name_and_shape_come_back_as_they_were_and_in_order(entries, folder):
    path = folder / "round-trip.safetensors"
    write_masks(path, entries)
    assert _same(read_masks(path), entries)


@settings(max_examples=15)
@given(entries=_entries(), parts=st.integers(1, 4))
def test_masks_joined_from_several_files_are_the_bytes_of_one_and_safetensors_reads_them(entries, parts, folder):
    names = list(entries)
    size = -(-len(names) // parts) or 1
    for i in range(parts):
        part = {name: entries[name] for name in names[i * size : (i + 1) * size]}
        write_masks(folder / f"part{i}.safetensors", part)
    join_masks(folder / "joined.safetensors", [folder / f"part{i}.safetensors" for i in range(parts)])
    write_masks(folder / "one.safetensors", entries)
    assert (folder / "joined.safetensors").read_bytes() == (folder / "one.safetensors").read_bytes()
    assert set(load_file(folder / "joined.safetensors")) == {f"{name}.mask" for name in names}


def test_a_damaged_part_is_named_and_nothing_is_joined(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_masks(tmp_path / f"{name}.safetensors", {name: _entry(3, 5)})
    whole = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=r"b\.safetensors is not a safetensors file, or it is truncated"):
        join_masks(tmp_path / "joined.safetensors", [tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    assert not (tmp_path / "joined.safetensors").exists()


def test_the_least_significant_bit_is_the_first_element_and_the_last_byte_ends_with_zeros(tmp_path: Path) -> None:
    keep = torch.zeros(2, 5, dtype=torch.bool)
    keep[0, 0] = keep[0, 3] = keep[1, 4] = True  # elements 0, 3 and 9
    write_masks(tmp_path / "m.safetensors", {"q": MaskEntry(keep, "x", "y", _SHA)})
    assert load_file(tmp_path / "m.safetensors")["q.mask"].tolist() == [0b00001001, 0b00000010]


def test_a_missing_file_and_a_folder_are_errors_that_name_the_path(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(ArtifactError, match=str(path)):
            read_masks(path)


def test_what_is_no_bool_matrix_or_no_sha256_is_refused_before_a_file_is_touched(tmp_path: Path) -> None:
    ones = torch.ones(2, 2, dtype=torch.bool)
    for keep in (ones.float(), ones[0], ones[:0]):
        with pytest.raises(ValueError, match=r"expected a bool mask \[out_features, in_features\]"):
            MaskEntry(keep, "2:4", "wanda", _SHA)
    with pytest.raises(ValueError, match="sha256"):
        write_masks(tmp_path / "m.safetensors", {"q": MaskEntry(ones, "2:4", "w", "-")})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weights_sha256_is_that_of_its_row_major_bytes(dtype: torch.dtype) -> None:
    weight = torch.arange(6.0).reshape(2, 3).to(dtype)
    raw = b"".join(struct.pack("<f", v)[0 if dtype == torch.float32 else 2 :] for v in range(6))
    assert weight_sha256(weight) == hashlib.sha256(raw).hexdigest()
    assert weight_sha256(weight.T.contiguous().T) == weight_sha256(weight)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_weights_are_hashed_as_they_were_when_they_were_added(name: str) -> None:
    weights = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    expected = [weight_sha256(weight) for weight in weights]
    with pretended_accelerator(), WeightHashes() as hashes:
        for i, weight in enumerate(weights):
            linear = torch.nn.Linear(16, 8)
            linear.weight = torch.nn.Parameter(weight.to(name, copy=True))
            hashes.add(Linear(str(i), linear))
            linear.weight.data.zero_()
        assert [hashes[str(i)] for i in range(5)] == [(x, None) for x in expected]
