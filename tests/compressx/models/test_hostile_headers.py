"""Any byte or value of a file changed: one line of refusal or the right result, never a traceback or another file.

More examples: `pytest --hypothesis-profile thorough`; both outcomes are counted by `--hypothesis-show-statistics`.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.compressx.hostile import (
    changed,
    damaged,
    masks_digest,
    masks_file,
    packed_digest,
    parts,
    resealed,
    safetensors,
    save,
)

from compressx.masks.file import read_masks
from compressx.models.checkpoint import find_local
from compressx.models.packed import PackedFile, pack_file
from compressx.models.packed_folder import base_in, pack_folder, unpack_folder
from compressx.models.shards import check_files, files_of, read_tensors
from compressx.runtime import files
from compressx.runtime.errors import CompressxError

MEMORY = 2**24
"""Bytes that reading a file of a few thousand may take."""

Change = Callable[[Random, bytes], bytes]


class Subject(NamedTuple):
    """A file, who reads it, and whether a result is right."""

    path: Path
    read: Callable[[], Any]
    right: Callable[[Any], bool]


def values(random: Random, file: bytes) -> bytes:
    """Change a value in the header of a safetensors file, or in a JSON."""
    if file.startswith(b"{"):
        return changed(random, json.loads(file)).encode()
    header, data = parts(file)
    return safetensors(changed(random, header), data)


def sealed(digest: Any) -> Change:
    """Return what changes metadata, and puts in the digest that fits."""
    return lambda random, file: resealed(file, lambda metadata: changed(random, metadata), digest)


def original_header(random: Random, file: bytes) -> bytes:
    """Change the header of the original in a packed file, and its digest; nobody can know then which is right."""

    def change(metadata: Any) -> str:
        return json.dumps({**metadata, "header": changed(random, json.loads(metadata["header"]))})

    return resealed(file, change, packed_digest)


CASES: dict[str, tuple[str, Change]] = {
    f"{subject}, {change.__name__}": (subject, change)
    for subject in ("shard", "index", "packed", "against", "base", "packed index", "masks")
    for change in ((damaged,) if subject == "base" else (damaged, values))
} | {
    "packed, metadata and digest": ("packed", sealed(packed_digest)),
    "against, metadata and digest": ("against", sealed(packed_digest)),
    "packed, the original's header and digest": ("same tensors", original_header),
    "masks, metadata and digest": ("resealed masks", sealed(masks_digest)),
}


def half_zero(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    weight.view(-1)[::2] = 0
    return weight.to(dtype)


def packed(folder: Path, *, based: bool) -> tuple[Path, bytes]:
    """Pack a file of tensors with zeros, without, wide ones and empty ones; return it, and the bytes of the original.

    Of a base in the folder `base` beside its own half of the tensors are the same but for some elements.
    """
    place = folder / f"based {based}" / "packed"
    place.mkdir(parents=True)
    tensors = {
        "half": half_zero(16, 16), "full": torch.ones(4, 5), "wide": half_zero(8, 8, dtype=torch.float64),
        "bytes": torch.arange(9).byte(), "none": torch.ones(0, 2), "zero": torch.zeros(512),
    }  # fmt: skip
    save_file(tensors, place / "original", {"format": "pt"})
    if based:
        below = {name: tensors[name].clone() for name in ("half", "wide", "bytes", "zero")}
        for tensor in below.values():
            tensor.view(-1)[1] += 1
        below["wide"] = below["wide"].float()
        place.with_name("base").mkdir()
        save_file(below, place.with_name("base") / "model.safetensors")
    path = place / "x.packed.safetensors"
    pack_file(place / "original", path, base=base_in(place.with_name("base")) if based else None)
    differing = {tensor.name for tensor in PackedFile(path).sizes() if tensor.differs}
    assert differing == ({"half", "bytes"} if based else set())
    original = (place / "original").read_bytes()
    (place / "original").unlink()
    return path, original


def unpacked_bytes(path: Path) -> bytes:
    target, beside = path.with_name("again"), path.parent.with_name("base")
    try:
        [*PackedFile(path).sizes()]
        PackedFile(path).unpack(target, base=base_in(beside) if beside.exists() else None)
        return target.read_bytes()
    finally:
        target.unlink(missing_ok=True)


def same_tensors(original: bytes, again: bytes) -> bool:
    """Return whether each tensor has the bytes of its sha256 where the header says."""
    (before, data), (after, found) = parts(original), parts(again)
    places = [(before[name]["data_offsets"], after[name]["data_offsets"]) for name in {*before} - {"__metadata__"}]
    return len(found) == len(data) and all(data[a:b] == found[c:d] for (a, b), (c, d) in places)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    folder = tmp_path_factory.mktemp("hostile")
    model = save(folder / "checkpoint" / "model", shards=2)
    save(folder / "checkpoint" / "other")
    whole, of_base = packed(folder, based=False), packed(folder, based=True)
    pack_folder(model, folder / "packed" / "model")
    (folder / "of masks").mkdir()
    masks = masks_file(folder / "of masks")

    def shards() -> dict[str, str]:
        check_files(place := find_local(model))
        listed = files_of(place)
        for file in {*listed.values()}:
            assert Path(file).name == file
            read_tensors(place / file)
        return listed

    def unpacked_folder() -> dict[str, bytes]:
        out = folder / "packed" / "out"
        try:
            unpack_folder(folder / "packed" / "model", out)
            return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
        finally:
            for path in out.parent.glob("*out*"):  # what an interrupted call left included
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def entries() -> dict[str, Any]:
        return {n: (e.keep.tolist(), e.pattern, e.pruner, e.sha256) for n, e in read_masks(masks).items()}

    def plausible(found: dict[str, Any]) -> bool:  # as many bits as there are
        return all(
            len(keep) * len(keep[0]) == 15 and (pattern + pruner).isprintable() and len(sha256) == 64
            for keep, pattern, pruner, sha256 in found.values()
        )

    def of_model(found: dict[str, bytes]) -> bool:  # a file that the index does not name any more is copied
        places = (model, folder / "packed" / "model")
        return all(x in {(at / n).read_bytes() for at in places if (at / n).exists()} for n, x in found.items())

    expected = entries()
    restored = lambda path: lambda: unpacked_bytes(path)  # noqa: E731
    found = {
        "shard": Subject(model / "model-00001-of-00002.safetensors", shards, lambda _: True),
        "index": Subject(model / "model.safetensors.index.json", shards, lambda _: True),
        "packed": Subject(whole[0], restored(whole[0]), whole[1].__eq__),
        "same tensors": Subject(whole[0], restored(whole[0]), lambda again: same_tensors(whole[1], again)),
        "against": Subject(of_base[0], restored(of_base[0]), of_base[1].__eq__),
        "base": Subject(
            of_base[0].parent.with_name("base") / "model.safetensors", restored(of_base[0]), of_base[1].__eq__
        ),
        "packed index": Subject(
            folder / "packed" / "model" / "model.packed.safetensors.index.json", unpacked_folder, of_model
        ),
        "masks": Subject(masks, entries, expected.__eq__),
        "resealed masks": Subject(masks, entries, plausible),
    }
    tracemalloc.start()
    with mock.patch.object(files, "sync"):  # which takes most of an example's time
        yield found
    tracemalloc.stop()


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=settings.default.max_examples // 2)
@given(random=st.randoms(use_true_random=False))
def test_a_changed_file_is_read_right_or_refused_in_one_line(
    name: str, subjects: dict[str, Subject], random: Random
) -> None:
    kind, change = CASES[name]
    path, read, right = subjects[kind]
    good, before = path.read_bytes(), sorted(path.parent.parent.rglob("*"))
    path.write_bytes(change(random, good))
    tracemalloc.reset_peak()
    memory, message = tracemalloc.get_traced_memory()[0], "right"
    try:
        assert right(read())
    except CompressxError as error:
        message = str(error)
    finally:
        path.write_bytes(good)
    event("right" if message == "right" else "refused")
    assert message.isprintable()
    assert 0 < len(message) < 1000
    assert tracemalloc.get_traced_memory()[1] - memory < MEMORY
    assert sorted(path.parent.parent.rglob("*")) == before
