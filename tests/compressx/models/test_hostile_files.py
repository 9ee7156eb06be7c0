"""What a stranger's model folder, packed folder, masks file or cache entry may attempt, and is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compressx.hostile import (
    masks_digest,
    masks_file,
    packed_digest,
    packed_file,
    parts,
    resealed,
    safetensors,
    save,
    save_packed,
    weights,
)

from compressx.masks.maskset import MaskSet
from compressx.models.checkpoint import find_checkpoint
from compressx.models.packed import PackedFile
from compressx.models.packed_folder import base_in, needs_base, pack_folder, packed_sizes, unpack_folder, unpacked
from compressx.models.shards import save_model
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import CompressxError
from compressx.testing import save_tiny_model

Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))


def tree(folder: Path) -> dict[str, bytes | str]:
    """Return all that is in a folder: the content of each file, the target of each link."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def decoyed(make: Callable[..., Path]) -> Callable[[Path], Path]:
    """Return what makes a sharded folder, another one beside it, and a file of weights below it."""

    def made(place: Path) -> Path:
        (file,) = make(place / "other", 1).glob("*.safetensors")
        folder = make(place / "model", shards=2)
        (folder / "sub").mkdir()
        shutil.copy(file, folder / "sub" / file.name)
        (place / "secret.txt").write_text("of the user")
        return folder

    return made


# --- what is changed


def index(content: Any, name: str = "model.safetensors.index.json") -> Change:
    """Return what writes an index."""
    data = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else None
    return lambda folder: (folder / name).write_bytes(data or json.dumps({"weight_map": content}).encode())


def fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        if name == "model.safetensors":
            (folder / "model.safetensors.index.json").unlink()
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def link(name: str, target: str) -> Change:
    return lambda folder: (folder / name).symlink_to(target)


def linked_weights(folder: Path) -> None:
    """Let a file of weights be a link to that of the folder beside."""
    file = next(folder.with_name("other").glob("*.safetensors"))
    own = next(folder.glob("*.safetensors"))
    own.unlink()
    own.symlink_to(file)


def metadata(change: Change, digest: Any = packed_digest) -> Change:
    """Return what changes the metadata of a file of ours, and its digest with them."""

    def apply(values: Any) -> str:
        change(values)
        return json.dumps(values)

    return lambda path: path.write_bytes(resealed(path.read_bytes(), apply, digest))


def outer(change: Change) -> Change:
    """Return what changes the header of a safetensors file."""

    def apply(path: Path) -> None:
        described, data = parts(path.read_bytes())
        change(described)
        path.write_bytes(safetensors(described, data))

    return apply


def unsealed(change: Change) -> Change:
    """Return what changes the metadata of compressx in a header, and leaves their digest."""

    def apply(described: Any) -> None:
        values = json.loads(described["__metadata__"]["compressx"])
        change(values)
        described["__metadata__"]["compressx"] = json.dumps(values)

    return apply


def header(change: Change) -> Change:
    """Return what changes the original's header in the metadata of a packed file."""

    def apply(values: Any) -> None:
        described = json.loads(values["header"])
        change(described)
        values["header"] = json.dumps(described)

    return apply


def of_a(**values: Any) -> Change:
    """Return what changes the original's description of `a`."""
    return header(lambda described: described["a"].update(values))


def piece(*numbers: float) -> Change:
    """Return what gives `a` one piece of these numbers."""
    return lambda m: m["tensors"]["a"].update(pieces=[list(numbers)])


# --- what is read


def find(folder: Path) -> Any:
    return find_checkpoint(ModelSource(path=folder))


def unpack(folder: Path) -> Any:
    return unpack_folder(folder, folder.with_name("out"))


def pack(folder: Path) -> Any:
    return pack_folder(folder, folder.with_name("out"))


class Case(NamedTuple):
    """Something good, what makes it hostile, who reads it, and the refusal."""

    make: Callable[[Path], Path]
    change: Change
    read: Change
    message: str


NAMES = [
    "../other/model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", ".safetensors",
    ".hidden.safetensors", "c:model.safetensors", "sub\\model.safetensors", "passwd", "a\nerror: b.safetensors",
    "\x1b[2Ja.safetensors", "a\0.safetensors", "x" * 300 + ".safetensors", 7, None, ["a.safetensors"],
]  # fmt: skip
"""What is no name of a file beside an index."""

FORMS = {
    "[" * 10**5: "RecursionError", "{}": "KeyError", "[]": "TypeError", '{"weight_map": 1}': "AttributeError",
    '{"weight_map": [["a", "b"]]}': "AttributeError", b"\xff": "Unicode",
    '{"weight_map": {"a": ' + "1" * 5000 + "}}": "ValueError",
}  # fmt: skip

ODD = [
    ("notes.txt", "/etc/passwd"), ("notes.txt", "../secret.txt"), ("notes", "/etc"), ("notes", "."),
    ("notes.txt", "notes.txt"), ("notes.txt", "nowhere"), ("zeros.bytes", "/dev/zero"),
    ("a\nerror: b.txt", "/etc/passwd"),
]  # fmt: skip
"""Links in a folder, and where they lead."""

FORGED = {
    "2^60 elements": (of_a(shape=[2**60]), r"gives a bytes 0 to 2048, expected those of F32 \[1152921504606846976\]"),
    "2^60 bytes": (of_a(shape=[2**58], data_offsets=[0, 2**60]), "gives b bytes 2048 to 2080, expected .* from 115"),
    "2^60 bytes alone": (header(lambda h: (h.pop("b"), h["a"].update(shape=[2**58], data_offsets=[0, 2**60]))),
                         "other bytes of a than there are"),
    "2^60 times zero": (of_a(shape=[2**60, 0]), "gives a bytes 0 to 2048"),
    "many dimensions": (of_a(shape=[2] * 100), "a.shape in its metadata"),
    "beyond 64 bits": (of_a(shape=[2**64]), "a.shape.0 in its metadata is '18446744073709551616'"),
    "negative": (of_a(shape=[-16, -32]), "a.shape.0 in its metadata is '-16'"),
    "negative offset": (of_a(data_offsets=[-1, 2047]), "a.data_offsets.0"),
    "another number": (of_a(shape=[16, 31]), r"gives a bytes 0 to 2048, expected those of F32 \[16, 31\]"),
    "a fraction": (of_a(shape=[16.0, 32]), "a.shape.0"), "text": (of_a(shape="16"), "a.shape in its metadata is '16'"),
    "nothing": (of_a(shape=None), "a.shape"), "no number": (of_a(shape=[float("nan")]), "a.shape.0"),
    "dtype": (of_a(dtype="F32\nerror: x"), "a.dtype"), "no dtype": (header(lambda h: h["a"].pop("dtype")), "a.dtype"),
    "another dtype": (of_a(dtype="F64"), "gives a bytes 0 to 2048, expected those of F64"),
    "wide dtype": (of_a(dtype="F99999"), "a.dtype"), "more": (of_a(more=1), "a.more"),
    "three offsets": (of_a(data_offsets=[0, 1, 2]), "a.data_offsets"),
    "a gap": (header(lambda h: h["b"].update(data_offsets=[2056, 2088])), "gives b bytes 2056 to 2088, .* from 2048"),
    "an overlap": (header(lambda h: h["b"].update(data_offsets=[2040, 2072])), "gives b bytes 2040 to 2072"),
    "missing": (header(lambda h: h.pop("b")), "it has b, which the original lacks"),
    "added": (header(lambda h: h.update(c={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})), "it lacks c"),
    "a name": (header(lambda h: h.update({"a\nerror: b": h.pop("a")})), r"it lacks a\\nerror: b"),
    "a list": (lambda m: m.update(header="[]"), "in its metadata is '.*object"),
    "deep": (lambda m: m.update(header='{"a":' * 10**4), "recursion limit"),
    "empty": (lambda m: m.update(header=""), "EOF"),
    "digits": (lambda m: m.update(header=m["header"].replace("2048", "1" * 5000)), "number out of range"),
    "no pieces": (lambda m: m["tensors"]["a"].update(pieces=[]), "other bytes of a than there are"),
    "pieces as they are": (lambda m: m["tensors"]["a"].update(pieces=None), "other bytes of a than there are"),
    "no stream": (piece(256), "tensors.a.pieces.0"), "many streams": (piece(*range(12)), "tensors.a.pieces.0"),
    "negative streams": (piece(256, -64, 1152), "tensors.a.pieces.0.1"),
    "more kept": (piece(513, 0, 0), "other bytes of a"), "a fraction kept": (piece(256.0, 1, 1), "a.pieces.0.0"),
    "2^60 kept": (piece(2**60, 0, 0), "other bytes of a"), "no tensor": (lambda m: m["tensors"].pop("a"), "it lacks a"),
    "more tensors": (lambda m: m["tensors"].update(c=m["tensors"]["b"]), "it has c, which"),
    "tensors": (lambda m: m.update(tensors=[]), "tensors in its metadata is"),
    "no header": (lambda m: m.pop("header"), "header in its metadata"),
    "sha256": (lambda m: m["tensors"]["a"].update(sha256="x"), "tensors.a.sha256"),
    "version 3": (lambda m: m.update(version=3), "version in its metadata is '3'"),
    "version 2": (lambda m: m.update(version=2), "version 2, and no other, names a base and has tensors that differ"),
}  # fmt: skip
"""Metadata of a packed file, with a digest that fits."""

HEADERS: list[tuple[Change, str]] = [
    (lambda h: h.update(a=["U8", h["a"]["shape"], h["a"]["data_offsets"]]), "a in its metadata"),
    (lambda h: h.update({"b\x1b[2J": h.pop("b")}), "it lacks b, which"),
    (lambda h: h.update(__metadata__=None), "not written by compressx pack"),
    (lambda h: h["__metadata__"].update(compressx="[" * 10**5), "recursion limit"),
    (lambda h: h["__metadata__"].update(compressx=""), "EOF"),
    (lambda h: h["b"].update(dtype="I8"), "other bytes of b than there are"),
    (unsealed(lambda m: m.pop("digest")), "digest in its metadata is .*Field required"),
    (unsealed(lambda m: m.update(header=m["header"].replace("F32", "F16"))), "metadata do not have their digest"),
    (unsealed(lambda m: m["tensors"]["a"].update(sha256="0" * 64)), "its metadata do not have their digest"),
]
"""Headers of a packed file that the library takes."""

MASKS: list[tuple[dict[str, Any], str]] = [
    ({"shape": [2**60, 2**60]}, r"stored as U8 \[2\], expected"), ({"shape": [2**64, 1]}, "masks.q.shape.0"),
    ({"shape": [15]}, "masks.q.shape"), ({"shape": [0, 5]}, "masks.q.shape.0"), ({"shape": [3.0, 5]}, "shape.0"),
    ({"shape": [3, 4]}, "bits set after its last element"), ({"pattern": "2:4\nerror: x"}, "masks.q.pattern"),
    ({"pruner": "\x1b[2J"}, "masks.q.pruner"), ({"pruner": "\u202ex"}, "masks.q.pruner"),
    ({"pattern": "x" * 9999}, "pattern"), ({"sha256": "0" * 63}, "masks.q.sha256"),
    ({"sha256": None}, "masks.q.sha256"), ({"more": 1}, "masks.q.more"),
    ({"shape": [3, 6]}, r"stored as U8 \[2\], expected U8 \[3\] for shape \[3, 6\]"), ({"shape": [-3, -5]}, "shape"),
]  # fmt: skip

OF_ALL_MASKS: list[tuple[Change, str]] = [
    (metadata(lambda m: m.update(version=2), masks_digest), "version in its metadata is '2'.*version of compressx"),
    (metadata(lambda m: m.update(format="statistics"), masks_digest), "format in its metadata is 'statistics'"),
    (metadata(lambda m: m.update(extra=1), masks_digest), "extra in its metadata"),
    (metadata(lambda m: m["masks"]["q"].pop("sha256"), masks_digest), "masks.q.sha256"),
    (outer(unsealed(lambda m: m["masks"]["q"].update(pattern="1:4"))), "its digest differs"),
    (outer(lambda h: h["q.mask"].update(dtype="BOOL")), r"mask of q is stored as BOOL \[2\], expected U8 \[2\]"),
    (outer(lambda h: h.update(__metadata__=None)), "not a masks file: its metadata has no key 'compressx'"),
]


def cases() -> Iterator[tuple[str, Case]]:
    model, packed = decoyed(save), decoyed(save_packed)
    beside = r"index\.json lists .*expected the name of a file beside it, such as model-00001-of-00002\.safetensors"
    for name in NAMES:
        yield f"index of {name!r}", Case(model, index({"a": name}), find, beside)
        of_packed = index({"a": name}, "model.packed.safetensors.index.json")
        yield f"packed index of {name!r}", Case(packed, of_packed, unpacked, beside)
    yield "index of nothing", Case(model, index('{"weight_map": {}}'), find, "lists '', expected the name of a file")
    for form, told in FORMS.items():
        message = rf"index\.json is damaged, or not an index of shards: .*{told}"
        yield f"index {form[:30]!r}", Case(model, index(form), find, message)
    for file in ("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
                 "tokenizer.json", "generation_config.json", "chat_template.jinja"):  # fmt: skip
        yield f"pipe {file}", Case(model, fifo(file), find, rf"{file} is a FIFO|lists {file}, missing in")
    for make, read in ((model, pack), (packed, unpacked), (packed, unpack)):
        kind = read.__name__
        for file, target in ODD:
            told = file.replace("\n", r"\\n").replace(".", r"\.")
            yield f"{kind}: {file!r} to {target}", Case(make, link(file, target), read, rf"{told} is a link to ")
        yield f"{kind}: a pipe", Case(make, fifo("pipe.txt"), read, r"pipe\.txt is a FIFO")
        told = r"model/.*safetensors is a link to .*other/.*safetensors, expected a file in .*model; put"
        yield f"{kind}: weights elsewhere", Case(make, linked_weights, read, told)
    for file in ("state.json", "blocks"):
        state = lambda folder, file=file: (folder / file).write_text("{}")  # noqa: E731
        yield f"packed: {file}", Case(packed, state, unpacked, f"has {file}, as the folder of an unfinished run")
    for name, (change, told) in FORGED.items():
        yield f"packed: {name}", Case(packed_file, metadata(change), PackedFile, told)
    for change, told in HEADERS:
        yield f"packed: header, {told}", Case(packed_file, outer(change), PackedFile, told)
    for values, told in MASKS:
        change = metadata(lambda m, values=values: m["masks"]["q"].update(values), masks_digest)
        yield f"masks: {str(values)[:40]}", Case(masks_file, change, MaskSet.load, told)
    for change, told in OF_ALL_MASKS:
        yield f"masks: {told[:40]}", Case(masks_file, change, MaskSet.load, told)
    for text in ("[" * 10**5, "", "[]", '{"masks": {"a\\nerror: b": 1}}', "\ud800"):
        change = outer(lambda h, text=text: h["__metadata__"].update(compressx=text))
        yield f"masks: {text[:10]!a}", Case(masks_file, change, MaskSet.load, r"m\.safetensors")
    renamed = outer(lambda h: h.update({"a\nerror: b.mask": h.pop("q.mask")}))
    yield "masks: a name", Case(masks_file, renamed, MaskSet.load, r"disagree about a\\nerror: b\.mask, q\.mask")
    pipe = lambda path: (path.unlink(), os.mkfifo(path))  # noqa: E731
    yield "masks: a pipe", Case(masks_file, pipe, MaskSet.load, r"m\.safetensors is a FIFO")


CASES = dict(cases())


def refused(call: Any, *arguments: Any, match: str) -> None:
    with pytest.raises(CompressxError, match=match) as raised:
        call(*arguments)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", CASES, ids=ascii)
def test_what_is_hostile_is_refused_in_one_line_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = case.make(tmp_path)
    case.change(path)
    before = tree(tmp_path)
    refused(case.read, path, match=case.message)
    assert tree(tmp_path) == before


def test_the_name_of_a_base_in_a_packed_file_is_never_opened(tmp_path: Path) -> None:
    base = base_in(save(tmp_path / "base"))
    pack_folder(base.folder, tmp_path / "packed", base=dataclasses.replace(base, name=str(base.folder)))
    assert needs_base(tmp_path / "packed")
    refused(unpacked, tmp_path / "packed", match=rf"\(packed against {base.folder}\); give that model's folder")


def test_a_packed_folder_cannot_replace_another_model_in_the_cache(tmp_path: Path) -> None:
    good = unpacked(save_packed(tmp_path / "good"))
    # Beside the hostile folder lies one with the name that the good model has in the cache.
    save_packed(tmp_path / "repository" / good.name, 1)
    hostile = save_packed(tmp_path / "repository" / "model", shards=2)
    for up in (f"../{good.name}", f"../../{good.name}", str(good)):
        index({"a": f"{up}/model.safetensors"}, "model.packed.safetensors.index.json")(hostile)
        before = tree(tmp_path)
        refused(unpacked, hostile, match="expected the name of a file beside it")
        assert tree(tmp_path) == before


@pytest.mark.parametrize("call", [pack, unpack])
def test_a_model_in_an_output_folder_that_is_a_link_is_refused(call: Callable[[Path], Any], tmp_path: Path) -> None:
    (save if call is pack else save_packed)(tmp_path / "other", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path / "other")
    refused(call, tmp_path / "run", match="run/model is a link to .*other")
    assert not (tmp_path / "out").exists()


def linked(folder: Path, repository: Path) -> Path:
    """Move a folder into the layout of the hub's cache, where files are links to blobs."""
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir(exist_ok=True)
    for i, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    folder.rmdir()
    return snapshot


def test_the_links_of_the_hubs_cache_are_followed_to_the_blobs_of_the_same_model(tmp_path: Path) -> None:
    plain = linked(save(tmp_path / "a", shards=2), tmp_path / "hub" / "models--x--a")
    pack_folder(plain, tmp_path / "packed")
    assert not any(path.is_symlink() for path in (tmp_path / "packed").iterdir())
    packed = linked(tmp_path / "packed", tmp_path / "hub" / "models--x--packed")
    unpack_folder(packed, tmp_path / "out")
    for copy in (tmp_path / "out", unpacked(packed)):
        assert {p.name: p.read_bytes() for p in copy.iterdir()} == {p.name: p.read_bytes() for p in plain.iterdir()}


@pytest.mark.parametrize("to", ["../../../models--x--b/blobs/secret", "../../blobs/sub/secret", "../../blobs", None])
def test_other_links_in_the_hubs_cache_are_refused(to: str | None, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    packed = linked(save_packed(tmp_path / "a"), hub / "models--x--a")
    for folder in (hub / "models--x--b" / "blobs", hub / "models--x--a" / "blobs" / "sub"):
        folder.mkdir(parents=True)
        (folder / "secret").write_text("of another model")
    if to is None:  # the folder of blobs is a link itself
        (hub / "models--x--a" / "blobs").rename(tmp_path / "elsewhere")
        (hub / "models--x--a" / "blobs").symlink_to(tmp_path / "elsewhere")
    else:
        (packed / "notes.txt").symlink_to(to)
    refused(unpacked, packed, match="is a link to .*elsewhere" if to is None else r"notes\.txt is a link to ")


def test_a_plain_weight_file_beside_the_packed_one_does_not_take_its_place(tmp_path: Path) -> None:
    folder = save_packed(tmp_path / "packed")
    save_file({"a.weight": weights(1)}, folder / "model.safetensors")
    for copy in (unpacked(folder), unpacked(folder)):
        assert torch.equal(load_file(copy / "model.safetensors")["a.weight"], weights())


def changed_byte(path: Path) -> None:
    """Change the last byte of a file, and neither its size nor its time."""
    status, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replaced_by_link(path: Path) -> None:
    """Put a link to the same content in the place of a file."""
    path.rename(path.parents[2] / "moved")
    path.symlink_to(path.parents[2] / "moved")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("change", [changed_byte, replaced_by_link, lambda p: p.with_suffix(".py").write_text("")])
def test_a_cached_copy_is_verified_by_its_content_each_time(change: Change, name: str, tmp_path: Path) -> None:
    folder = save_packed(tmp_path / "packed", shards=2)
    copy = unpacked(folder)
    before = tree(copy)
    change(copy / name)
    assert tree(copy) != before
    assert unpacked(folder) == copy
    assert tree(copy) == before


def test_a_link_to_another_model_in_the_place_of_a_cached_copy_is_replaced(tmp_path: Path) -> None:
    other = unpacked(save_packed(tmp_path / "other", 1))
    copy = unpacked(folder := save_packed(tmp_path / "packed"))
    before, expected = tree(other), tree(copy)
    shutil.rmtree(copy)
    copy.symlink_to(other)
    assert tree(unpacked(folder)) == expected
    assert not copy.is_symlink()
    assert tree(other) == before


def claimed(path: Path, dtype: str, size: int, pieces: list[list[int]]) -> Path:
    """Write a packed file that says that a tensor of `size` bytes is such pieces, with streams of zero bytes."""
    count, length = size // (8 if dtype == "F64" else 1), sum(sum(lengths) for _, *lengths in pieces)
    inner = {"a": {"dtype": dtype, "shape": [count], "data_offsets": [0, size]}}
    stored = {"a": {"sha256": "0" * 64, "pieces": pieces}}
    described = {"format": "packed", "version": 1, "digest": "", "header": json.dumps(inner), "tensors": stored}
    outside = {"a": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}
    whole = {**outside, "__metadata__": {"compressx": json.dumps(described)}}
    path.write_bytes(resealed(safetensors(whole, bytes(length)), json.dumps, packed_digest))
    return path


PIECE = 2**22


@pytest.mark.parametrize(
    ("dtype", "size", "pieces"),
    [
        ("F64", 8 * PIECE * 2000, [[0, 100, 0]] * 2000),  # 67 GB of a megabyte
        ("U8", PIECE, [[PIECE, 2000]]),  # more than DEFLATE makes of so many bytes
        ("U8", PIECE, [[PIECE - 1, PIECE // 8, 2000]]),  # so do the values behind a mask
        ("U8", 8, [[9, 9]]),
        ("U8", 2**60, [[2**60, 2000]]),
    ],
)
def test_a_file_that_claims_more_than_its_bytes_can_hold_is_refused_when_it_is_opened(
    dtype: str, size: int, pieces: list[list[int]], tmp_path: Path
) -> None:
    path = claimed(tmp_path / "x.packed.safetensors", dtype, size, pieces)
    refused(PackedFile, path, match="its metadata describes other bytes of a than there are")


@pytest.mark.parametrize("read", [unpack, unpacked, packed_sizes])
def test_a_megabyte_that_is_67_gigabytes_of_zeros_is_refused_where_the_disk_has_less(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros are cheap, so the file may be right; it takes 32 MB of memory at a time."""
    folder = save_packed(tmp_path / "packed")
    path = claimed(folder / "model.packed.safetensors", "F64", 8 * PIECE * 2000, [[0, 600, 0]] * 2000)
    assert path.stat().st_size < 1_300_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**11, 10**11 - 10**10, 10**10))
    before = tree(tmp_path)
    if read is packed_sizes:
        assert packed_sizes(folder).bytes > 67 * 10**9
    else:
        refused(read, folder, match=r"packed unpacked takes 671\d{8} bytes, .* can have 10000000000; free some space")
    assert tree(tmp_path) == before


MANY = dict.fromkeys(map(str, range(50_000)), 0)


@pytest.mark.parametrize(
    "values",
    [{"tensors": {"a": {"sha256": "0" * 64, "pieces": [[-1, -1]] * 50_000}}}, {"tensors": MANY},
     {"header": json.dumps(MANY), "tensors": {}}],
    ids=["pieces", "tensors", "header"],
)  # fmt: skip
def test_a_header_that_is_wrong_in_many_places_takes_no_more_memory_than_one(
    values: dict[str, Any], tmp_path: Path
) -> None:
    path = packed_file(tmp_path)
    metadata(lambda m: m.update(values))(path)
    tracemalloc.start()
    refused(PackedFile, path, match="in its metadata is ")
    assert tracemalloc.get_traced_memory()[1] < 30 * path.stat().st_size
    tracemalloc.stop()


@pytest.mark.parametrize("name", ["../../precious", "TMP/precious", "sub/precious"])
def test_a_chat_template_with_the_name_of_another_place_is_not_written_there(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_tiny_model(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = {"default": "{{ messages }}", name.replace("TMP", str(tmp_path)): "x"}
    before = tree(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    refused(save_model, model, tokenizer, tmp_path / "runs" / "out", match="cannot save the tokenizer to .*out")
    assert {path for path in tree(tmp_path) if not path.startswith("runs/out/")} == {*before}
