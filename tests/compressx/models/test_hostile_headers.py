"""Headers with any byte or value changed: one line of refusal or the right result, never a traceback or another file.

How many examples of each kind were refused and how many were read is printed with `pytest -s`. More of them are tried
with `pytest --hypothesis-profile thorough`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.compressx.hostile import changed, damaged, masks_digest, packed_digest, parts, resealed, safetensors

from compressx.masks.file import MaskEntry, read_masks, write_masks
from compressx.models.checkpoint import find_local
from compressx.models.packed import PackedFile, pack_file
from compressx.models.packed_folder import base_in, pack_folder, unpack_folder, unpacked
from compressx.models.shards import check_files, files_of, read_tensors
from compressx.runtime import files
from compressx.runtime.errors import CompressxError

COUNTS: Counter[tuple[str, str]] = Counter()
MEMORY = 2**24
"""Bytes that reading a file of a few thousand may take."""

RANDOM = st.randoms(use_true_random=False)
MANY = settings.default.max_examples
fuzzed, slowly = settings(max_examples=MANY // 2), settings(max_examples=MANY // 10)


@pytest.fixture(scope="module", autouse=True)
def _told() -> Iterator[None]:
    """Print the counts; write nothing through to the disk, which takes most of an example's time."""
    tracemalloc.start()
    with mock.patch.object(files, "sync"):
        yield
    tracemalloc.stop()
    for kind in sorted({kind for kind, _ in COUNTS}):
        sys.stdout.write(f"\n{kind}: {COUNTS[kind, 'refused']} refused, {COUNTS[kind, 'right']} right")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def attempt(kind: str, call: Callable[[], Any]) -> Any:
    """Return the result of a call, or None if it refuses its input in one line; count which."""
    tracemalloc.reset_peak()
    before, result, message = tracemalloc.get_traced_memory()[0], None, "-"
    try:
        result = call()
    except CompressxError as error:
        message = str(error)
    assert message.isprintable()
    assert 0 < len(message) < 1000
    outcome = "refused" if result is None else "right"
    COUNTS[kind, outcome] += 1
    event(outcome)
    assert tracemalloc.get_traced_memory()[1] - before < MEMORY
    return result


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def half_zero(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    weight.view(-1)[::2] = 0
    return weight.to(dtype)


# --- checkpoints


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    """A model's folder with two shards and an index."""
    model = folder / "checkpoint" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    save_file({"a.weight": half_zero(8, 8), "a.bias": half_zero(8)}, model / "model-1.safetensors", {"format": "pt"})
    save_file({"b.weight": half_zero(8, 8)}, model / "model-2.safetensors", {"format": "pt"})
    index = {"a.weight": "model-1.safetensors", "a.bias": "model-1.safetensors", "b.weight": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (model.parent / "other").mkdir()
    save_file({"a.weight": half_zero(8, 8)}, model.parent / "other" / "model.safetensors")
    return model


@contextlib.contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Give a file another content for a while."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["model-1.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("how", ["bytes", "values"])
@fuzzed
@given(random=RANDOM)
def test_a_changed_header_or_index_of_a_checkpoint(name: str, how: str, checkpoint: Path, random: Random) -> None:
    path = checkpoint / name
    content = path.read_bytes()
    if how == "bytes":
        content = damaged(random, content)
    elif name.endswith(".json"):
        content = changed(random, json.loads(content)).encode()
    else:
        header, data = parts(content)
        content = safetensors(changed(random, header), data)

    def found() -> dict[str, str]:
        place = find_local(checkpoint)
        check_files(place)
        return files_of(place)

    before = names_in(checkpoint.parent)
    with replaced(path, content):
        listed = attempt(f"checkpoint, {how} of {name}", found)
        for file in {*(listed or {}).values()}:
            assert Path(file).name == file
            attempt(f"checkpoint, {how} of {name}, read", lambda file=file: read_tensors(checkpoint / file))
    assert names_in(checkpoint.parent) == before


# --- packed files and folders


@pytest.fixture(scope="module", params=["alone", "against a base"])
def packed(folder: Path, request: pytest.FixtureRequest) -> tuple[Path, bytes, bytes]:
    """A packed file of tensors with zeros, without, wide ones and empty ones; its bytes, and those of the original.

    Of a base in the folder `base` beside its own half of the tensors are the same but for some elements.
    """
    place = folder / request.param / "packed"
    place.mkdir(parents=True)
    tensors = {
        "half": half_zero(16, 16), "full": torch.ones(4, 5), "wide": half_zero(8, 8, dtype=torch.float64),
        "bytes": torch.arange(9).byte(), "none": torch.ones(0, 2), "zero": torch.zeros(512),
    }  # fmt: skip
    save_file(tensors, place / "original", {"format": "pt"})
    base = None
    if request.param != "alone":
        below = {name: tensors[name].clone() for name in ("half", "wide", "bytes", "zero")}
        for tensor in below.values():
            tensor.view(-1)[1] += 1
        below["wide"] = below["wide"].float()
        place.with_name("base").mkdir()
        save_file(below, place.with_name("base") / "model.safetensors")
        base = base_in(place.with_name("base"))
    pack_file(place / "original", place / "x.packed.safetensors", base=base)
    differing = {tensor.name for tensor in PackedFile(place / "x.packed.safetensors").sizes() if tensor.differs}
    assert differing == (set() if base is None else {"half", "bytes"})
    original = (place / "original").read_bytes()
    (place / "original").unlink()
    return place / "x.packed.safetensors", (place / "x.packed.safetensors").read_bytes(), original


def unpacked_bytes(path: Path) -> bytes:
    target = path.with_name("again")
    beside = path.parent.with_name("base")
    try:
        [*PackedFile(path).sizes()]
        PackedFile(path).unpack(target, base=base_in(beside) if beside.exists() else None)
        return target.read_bytes()
    finally:
        target.unlink(missing_ok=True)


@fuzzed
@given(random=RANDOM)
def test_a_packed_file_with_changed_bytes(packed: tuple[Path, bytes, bytes], random: Random) -> None:
    path, good, original = packed
    path.write_bytes(damaged(random, good))
    assert attempt("packed file, bytes", lambda: unpacked_bytes(path)) in (None, original)
    assert names_in(path.parent) == [path.name]


@fuzzed
@given(random=RANDOM)
def test_a_packed_file_with_a_changed_header(packed: tuple[Path, bytes, bytes], random: Random) -> None:
    path, good, original = packed
    header, data = parts(good)
    path.write_bytes(safetensors(changed(random, header), data))
    assert attempt("packed file, header", lambda: unpacked_bytes(path)) in (None, original)
    assert names_in(path.parent) == [path.name]


@fuzzed
@given(random=RANDOM)
def test_a_packed_file_with_changed_metadata_and_their_digest(
    packed: tuple[Path, bytes, bytes], random: Random
) -> None:  # fmt: skip
    path, good, original = packed
    path.write_bytes(resealed(good, lambda metadata: changed(random, metadata), packed_digest))
    assert attempt("packed file, metadata and digest", lambda: unpacked_bytes(path)) in (None, original)
    assert names_in(path.parent) == [path.name]


@fuzzed
@given(random=RANDOM)
def test_a_packed_file_with_another_header_of_the_original_and_its_digest(
    packed: tuple[Path, bytes, bytes], random: Random
) -> None:
    """Nobody can know then which header is right, but each tensor has the bytes of its sha256 where the header says."""
    path, good, original = packed

    def change(metadata: Any) -> str:
        return json.dumps({**metadata, "header": changed(random, json.loads(metadata["header"]))})

    path.write_bytes(resealed(good, change, packed_digest))
    again = attempt("packed file, the original's header and digest", lambda: unpacked_bytes(path))
    if again is not None:
        (before, data), (after, found) = parts(original), parts(again)
        assert len(found) == len(data)
        for name in {*before} - {"__metadata__"}:
            (a, b), (c, d) = before[name]["data_offsets"], after[name]["data_offsets"]
            assert data[a:b] == found[c:d]
    assert names_in(path.parent) == [path.name]


@fuzzed
@given(random=RANDOM)
def test_a_base_with_changed_bytes(packed: tuple[Path, bytes, bytes], random: Random) -> None:
    path, good, original = packed
    path.write_bytes(good)
    base = path.parent.with_name("base") / "model.safetensors"
    if base.exists():
        with replaced(base, damaged(random, base.read_bytes())):
            assert attempt("base, bytes", lambda: unpacked_bytes(path)) in (None, original)
    assert names_in(path.parent) == [path.name]


@pytest.fixture(scope="module")
def packed_model(checkpoint: Path) -> Path:
    pack_folder(checkpoint, checkpoint.with_name("packed"))
    return checkpoint.with_name("packed")


@slowly
@given(random=RANDOM)
def test_a_packed_folder_with_a_changed_index(checkpoint: Path, packed_model: Path, random: Random) -> None:
    index = packed_model / "model.packed.safetensors.index.json"
    content = index.read_bytes()
    content = damaged(random, content) if random.randrange(2) else changed(random, json.loads(content)).encode()
    out, before = packed_model.with_name("out"), names_in(packed_model.parent)
    with replaced(index, content):
        attempt("packed folder, index", lambda: unpack_folder(packed_model, out))
        for path in out.glob("*.safetensors"):  # a file that the index does not name any more is copied
            assert path.read_bytes() in {
                x.read_bytes() for x in (checkpoint / path.name, packed_model / path.name) if x.exists()
            }
    for path in packed_model.parent.glob("*out*"):  # what an interrupted call left included
        shutil.rmtree(path)
    assert names_in(packed_model.parent) == before


@slowly
@given(random=RANDOM)
def test_a_changed_copy_in_the_cache(checkpoint: Path, packed_model: Path, random: Random) -> None:
    with mock.patch.dict(os.environ, {"COMPRESSX_CACHE": str(checkpoint.parent.parent / "cache")}):
        copy = unpacked(packed_model)
        victim = random.choice(sorted(copy.iterdir()))
        victim.write_bytes(damaged(random, victim.read_bytes()))
        assert attempt("cached copy, bytes", lambda: unpacked(packed_model)) == copy
    assert names_in(copy) == names_in(checkpoint)
    assert all((copy / name).read_bytes() == (checkpoint / name).read_bytes() for name in names_in(copy))


# --- masks


@pytest.fixture(scope="module")
def masks(folder: Path) -> tuple[Path, bytes]:
    place = folder / "masks"
    place.mkdir()
    keep = {"a": half_zero(5, 7) != 0, "b.c": half_zero(4, 8) != 0}
    write_masks(place / "m", {name: MaskEntry(k, "2:4", "wanda", "0" * 64) for name, k in keep.items()})
    return place / "m", (place / "m").read_bytes()


def masks_of(path: Path) -> dict[str, tuple[list[Any], str, str, str]]:
    return {n: (e.keep.tolist(), e.pattern, e.pruner, e.sha256) for n, e in read_masks(path).items()}


@pytest.mark.parametrize("how", ["bytes", "header"])
@fuzzed
@given(random=RANDOM)
def test_a_masks_file_with_changed_bytes_or_another_header(how: str, masks: tuple[Path, bytes], random: Random) -> None:
    path, good = masks
    path.write_bytes(good)
    expected = masks_of(path)
    header, data = parts(good)
    path.write_bytes(damaged(random, good) if how == "bytes" else safetensors(changed(random, header), data))
    assert attempt(f"masks, {how}", lambda: masks_of(path)) in (None, expected)


@fuzzed
@given(random=RANDOM)
def test_a_masks_file_with_changed_metadata_and_their_digest(masks: tuple[Path, bytes], random: Random) -> None:
    path, good = masks
    path.write_bytes(resealed(good, lambda metadata: changed(random, metadata), masks_digest))
    for keep, pattern, pruner, sha256 in (attempt("masks, metadata and digest", lambda: masks_of(path)) or {}).values():
        assert len(keep) * len(keep[0]) in (35, 32)  # as many bits as there are
        assert (pattern + pruner).isprintable()
        assert len(sha256) == 64
