"""What a stranger's model folder, packed folder or cache entry may attempt, and is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.compressx.hostile import masks_digest, packed_digest, parts, resealed, safetensors

from compressx.masks.file import MaskEntry, write_masks
from compressx.masks.maskset import MaskSet
from compressx.models.checkpoint import find_checkpoint
from compressx.models.packed import PackedFile, pack_file
from compressx.models.packed_folder import base_in, needs_base, pack_folder, packed_sizes, unpack_folder, unpacked
from compressx.models.shards import save_model
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError
from compressx.testing import save_tiny_model


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


def weights(seed: int = 0) -> torch.Tensor:
    """Return a weight of which half is zero."""
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    weight[:, ::2] = 0
    return weight


def save(folder: Path, seed: int = 0, *, shards: int = 1) -> Path:
    """Save what looks like a model's folder, in one file or in several with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if shards == 1:
        save_file({"a.weight": weights(seed)}, folder / "model.safetensors")
        return folder
    names = {f"{i}.weight": f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)}
    for i, (name, file) in enumerate(names.items()):
        save_file({name: weights(seed + i)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def refused(call: Any, *arguments: Any, match: str) -> str:
    """Return the one line with which a call refuses its input."""
    with pytest.raises(ArtifactError, match=match) as raised:
        call(*arguments)
    message = str(raised.value)
    assert message.isprintable()
    return message


def listed(folder: Path, text: str | bytes) -> Path:
    """Write the index of a model's folder."""
    (folder / "model.safetensors.index.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


NAMES = [
    "../other/model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "", ".safetensors",
    ".hidden.safetensors", "c:model.safetensors", "sub\\model.safetensors", "passwd", "a\nerror: b.safetensors",
    "\x1b[2Ja.safetensors", "a\0.safetensors", "x" * 300 + ".safetensors", 7, None, ["a.safetensors"],
]  # fmt: skip
"""What is no name of a file beside an index."""


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_an_index_that_names_anything_but_a_file_beside_it_is_refused(name: object, tmp_path: Path) -> None:
    save(tmp_path / "other", 1)
    folder = listed(save(tmp_path / "model", shards=2), json.dumps({"weight_map": {"a": name}}))
    (folder / "sub").mkdir()
    save_file({"a": weights()}, folder / "sub" / "model.safetensors")
    before = tree(tmp_path)
    message = r"index\.json lists .*expected the name of a file beside it, such as model-00001-of-00002\.safetensors"
    refused(find_checkpoint, ModelSource(path=folder), match=message)
    refused(pack_folder, folder, tmp_path / "packed", match=message)
    assert tree(tmp_path) == before


def test_an_index_of_no_files_is_refused(tmp_path: Path) -> None:
    folder = listed(save(tmp_path / "model", shards=2), '{"weight_map": {}}')
    refused(find_checkpoint, ModelSource(path=folder), match="lists '', expected the name of a file beside it")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 10**5, "RecursionError"), ("{}", "KeyError"), ("[]", "TypeError"), ('{"weight_map": 1}', "AttributeError"),
     ('{"weight_map": [["a", "b"]]}', "AttributeError"), (b"\xff", "Unicode"),
     ('{"weight_map": {"a": ' + "1" * 5000 + "}}", "ValueError")],
    ids=["deep", "key", "list", "number", "pairs", "bytes", "huge"],
)  # fmt: skip
def test_an_index_of_another_form_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    folder = listed(save(tmp_path / "model", shards=2), text)
    found = refused(find_checkpoint, ModelSource(path=folder), match=r"index\.json is damaged, or not an index")
    assert message in found
    assert len(found) < 500


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "tokenizer.json",
     "generation_config.json", "chat_template.jinja"],
)  # fmt: skip
def test_a_fifo_in_a_models_folder_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", shards=2)
    if name == "model.safetensors":
        (folder / "model.safetensors.index.json").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(find_checkpoint, ModelSource(path=folder), match=rf"{name} is a FIFO|lists {name}, missing in")


# --- packed folders


def unpack(folder: Path) -> Any:
    """Unpack a folder beside it."""
    return unpack_folder(folder, folder.with_name("out"))


def pack(folder: Path) -> Any:
    """Pack a folder beside it."""
    return pack_folder(folder, folder.with_name("out"))


READ = pytest.mark.parametrize("read", [unpack, unpacked, packed_sizes])


def renamed(folder: Path, name: object) -> Path:
    """Let the index of a packed folder name another file."""
    (folder / "model.packed.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    return folder


@READ
@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_packed_folder_names_files_in_it(read: Callable[[Path], Any], name: object, tmp_path: Path) -> None:
    save_packed(tmp_path / "other", 1)
    folder = renamed(save_packed(tmp_path / "packed", shards=2), name)
    (folder / "sub").mkdir()
    shutil.copy(tmp_path / "other" / "model.packed.safetensors", folder / "sub")
    before = tree(tmp_path)
    refused(read, folder, match=r"index\.json lists .*expected the name of a file beside it")
    assert tree(tmp_path) == before


def save_packed(folder: Path, seed: int = 0, *, shards: int = 1) -> Path:
    """Save what looks like a packed model."""
    plain = save(folder.with_name(f"{folder.name}-plain"), seed, shards=shards)
    pack_folder(plain, folder)
    shutil.rmtree(plain)
    return folder


def test_the_name_of_a_base_in_a_packed_file_is_never_opened(tmp_path: Path) -> None:
    base = base_in(save(tmp_path / "base"))
    pack_folder(base.folder, tmp_path / "packed", base=dataclasses.replace(base, name=str(base.folder)))
    assert needs_base(tmp_path / "packed")
    for read in (unpack, unpacked):
        refused(read, tmp_path / "packed", match=rf"\(packed against {base.folder}\); give that model's folder")


def test_a_packed_folder_cannot_replace_another_model_in_the_cache(tmp_path: Path) -> None:
    good = unpacked(save_packed(tmp_path / "good"))
    # Beside the hostile folder lies one with the name that the good model has in the cache.
    save_packed(tmp_path / "repository" / good.name, 1)
    hostile = save_packed(tmp_path / "repository" / "model", shards=2)
    for up in (f"../{good.name}", f"../../{good.name}", str(good)):
        renamed(hostile, f"{up}/model.safetensors")
        before = tree(tmp_path)
        refused(unpacked, hostile, match="expected the name of a file beside it")
        refused(unpack, hostile, match="expected the name of a file beside it")
        assert tree(tmp_path) == before
    assert torch.equal(load_file(good / "model.safetensors")["a.weight"], weights())


class Odd(NamedTuple):
    """Something that a folder must not have."""

    name: str
    make: Callable[[Path, Path], Any]
    message: str


def link_to(target: str) -> Callable[[Path, Path], Any]:
    """Return what makes a link."""
    return lambda path, _: path.symlink_to(target)


ODD = [
    Odd("notes.txt", link_to("/etc/passwd"), "notes.txt is a link to /etc/passwd"),
    Odd("notes.txt", link_to("../secret.txt"), r"notes\.txt is a link to .*secret\.txt"),
    Odd("notes", link_to("/etc"), "notes is a link to /etc"),
    Odd("notes", link_to("."), "notes is a link to"),
    Odd("notes.txt", link_to("notes.txt"), "notes.txt is a link to"),
    Odd("notes.txt", link_to("nowhere"), r"notes\.txt is a link to .*nowhere"),
    Odd("zeros.bytes", link_to("/dev/zero"), r"zeros\.bytes is a link to /dev/zero"),
    Odd("pipe.txt", lambda path, _: os.mkfifo(path), r"pipe\.txt is a FIFO"),
    Odd("a\nerror: b.txt", link_to("/etc/passwd"), r"a\\nerror: b\.txt is a link to /etc/passwd"),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: f"{odd.name!r}: {odd.message}")
@pytest.mark.parametrize("call", [pack, unpack, unpacked])
def test_what_leaves_a_folder_or_is_no_file_is_named_and_not_copied(
    call: Callable[[Path], Any], odd: Odd, tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("of the user")
    folder = (save if call is pack else save_packed)(tmp_path / "model")
    odd.make(folder / odd.name, tmp_path / "secret.txt")
    before = tree(tmp_path)
    refused(call, folder, match=odd.message)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("call", [pack, unpack, unpacked])
def test_weights_and_a_model_that_are_links_to_another_folder_are_refused(
    call: Callable[[Path], Any], tmp_path: Path
) -> None:
    make = save if call is pack else save_packed
    (weight,) = make(tmp_path / "other", 1).glob("*.safetensors")
    folder = make(tmp_path / "model")
    (folder / weight.name).unlink()
    (folder / weight.name).symlink_to(weight)
    refused(
        call, folder, match=rf"model/{weight.name} is a link to .*other/{weight.name}, expected a file in .*model; put"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path / "other")
    if call is not unpacked:
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
    copies = (unpack_folder(packed, tmp_path / "out").folder, tmp_path / "out", unpacked(packed))
    for copy in copies[1:]:
        assert {p.name: p.read_bytes() for p in copy.iterdir()} == {p.name: p.read_bytes() for p in plain.iterdir()}


@pytest.mark.parametrize("to", ["../../../models--x--b/blobs/secret", "../../blobs/sub/secret", "../../blobs"])
def test_other_links_in_the_hubs_cache_are_refused(to: str, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    packed = linked(save_packed(tmp_path / "a"), hub / "models--x--a")
    for folder in (hub / "models--x--b" / "blobs", hub / "models--x--a" / "blobs" / "sub"):
        folder.mkdir(parents=True)
        (folder / "secret").write_text("of another model")
    (packed / "notes.txt").symlink_to(to)
    for read in (lambda path: unpack_folder(path, tmp_path / "out"), unpacked):
        refused(read, packed, match=r"notes\.txt is a link to ")


def test_blobs_that_are_a_link_themselves_are_not_the_hubs(tmp_path: Path) -> None:
    packed = linked(save_packed(tmp_path / "a"), tmp_path / "models--x--a")
    (tmp_path / "models--x--a" / "blobs").rename(tmp_path / "elsewhere")
    (tmp_path / "models--x--a" / "blobs").symlink_to(tmp_path / "elsewhere")
    refused(unpacked, packed, match=r"is a link to .*elsewhere")


@pytest.mark.parametrize("read", [unpack, unpacked])
@pytest.mark.parametrize("name", ["state.json", "blocks"])
def test_a_packed_folder_with_the_state_of_a_run_is_refused(
    read: Callable[[Path], Any], name: str, tmp_path: Path
) -> None:
    """The state would be taken for that of the unpacking, which it would end or change."""
    folder = save_packed(tmp_path / "packed")
    (folder / name).write_text("{}")
    before = tree(tmp_path)
    refused(read, folder, match=f"has {name}, as the folder of an unfinished run")
    assert tree(tmp_path) == before


def test_a_plain_weight_file_beside_the_packed_one_does_not_take_its_place(tmp_path: Path) -> None:
    folder = save_packed(tmp_path / "packed")
    save_file({"a.weight": weights(1)}, folder / "model.safetensors")
    for copy in (unpacked(folder), unpacked(folder)):
        assert torch.equal(load_file(copy / "model.safetensors")["a.weight"], weights())


# --- cached copies


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
@pytest.mark.parametrize(
    "change", [changed_byte, replaced_by_link, lambda path: path.with_suffix(".py").write_text("")]
)
def test_a_cached_copy_is_verified_by_its_content_each_time(
    change: Callable[[Path], Any], name: str, tmp_path: Path
) -> None:
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


# --- headers of packed files


def packed_file(folder: Path) -> Path:
    """Write a packed file of a weight with zeros, `a`, and a vector without, `b`."""
    save_file({"a": weights(), "b": torch.ones(8)}, folder / "original")
    pack_file(folder / "original", folder / "x.packed.safetensors")
    (folder / "original").unlink()
    return folder / "x.packed.safetensors"


def piece(*numbers: float) -> Callable[[Any], Any]:
    """Return what gives `a` one piece of these numbers."""
    return lambda m: m["tensors"]["a"].update(pieces=[list(numbers)])


def header(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what changes the original's header in the metadata."""

    def apply(metadata: Any) -> None:
        described = json.loads(metadata["header"])
        change(described)
        metadata["header"] = json.dumps(described)

    return apply


def of_a(**values: Any) -> Callable[[Any], Any]:
    """Return what changes the original's description of `a`."""
    return header(lambda described: described["a"].update(values))


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
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_metadata_of_a_packed_file_that_say_what_cannot_be_are_refused_before_anything_is_written(
    case: str, tmp_path: Path
) -> None:
    change, message = FORGED[case]
    path = packed_file(tmp_path)

    def apply(metadata: Any) -> str:
        change(metadata)
        return json.dumps(metadata)

    path.write_bytes(resealed(path.read_bytes(), apply, packed_digest))
    refused(PackedFile, path, match=message)
    refused(lambda path: PackedFile(path).unpack(tmp_path / "out"), path, match=message)
    assert [*tree(tmp_path)] == [path.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda h: h.update(a=["U8", h["a"]["shape"], h["a"]["data_offsets"]]), "a in its metadata"),
     (lambda h: h.update({"b\x1b[2J": h.pop("b")}), "it lacks b, which"),
     (lambda h: h.update(__metadata__=None), "was not written by compressx pack"),
     (lambda h: h["__metadata__"].update(compressx="[" * 10**5), "recursion limit"),
     (lambda h: h["__metadata__"].update(compressx=""), "EOF"),
     (lambda h: h["b"].update(dtype="I8"), "other bytes of b than there are")],
    ids=["list", "name", "none", "deep", "empty", "dtype"],
)  # fmt: skip
def test_headers_that_the_library_takes_are_read_strictly(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    path = packed_file(tmp_path)
    described, data = parts(path.read_bytes())
    change(described)
    path.write_bytes(safetensors(described, data))
    with safe_open(path, "pt") as file:
        assert len([*file.keys()]) == 2
    refused(PackedFile, path, match=message)


def all_zero(path: Path, pieces: int, mask: int) -> Path:
    """Write a packed file that says of float64 zeros that they are so many pieces, with masks of so many bytes."""
    size = 8 * 2**22 * pieces
    inner = {"a": {"dtype": "F64", "shape": [size // 8], "data_offsets": [0, size]}}
    stored = {"a": {"sha256": "0" * 64, "pieces": [[0, mask, 0]] * pieces}}
    metadata = {"format": "packed", "version": 1, "digest": "", "header": json.dumps(inner), "tensors": stored}
    outer = {"a": {"dtype": "U8", "shape": [mask * pieces], "data_offsets": [0, mask * pieces]}}
    described = {**outer, "__metadata__": {"compressx": json.dumps(metadata)}}
    data = bytes(mask * pieces)
    path.write_bytes(resealed(safetensors(described, data), json.dumps, packed_digest))
    return path


def test_a_megabyte_that_says_it_is_67_gigabytes_needs_streams_that_can_become_them(tmp_path: Path) -> None:
    path = all_zero(tmp_path / "x.packed.safetensors", 2000, 100)
    refused(PackedFile, path, match="other bytes of a than there are")


@READ
def test_a_megabyte_that_is_67_gigabytes_of_zeros_is_refused_where_the_disk_has_less(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros are cheap, so the file may be right; it takes 32 MB of memory at a time."""
    folder = save_packed(tmp_path / "packed")
    path = all_zero(folder / "model.packed.safetensors", 2000, 600)
    assert path.stat().st_size < 1_300_000
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**11, 10**11 - 10**10, 10**10))
    before = tree(tmp_path)
    if read is packed_sizes:
        assert packed_sizes(folder).bytes > 67 * 10**9
    else:
        refused(read, folder, match=r"packed unpacked takes 671\d{8} bytes, .* can have 10000000000; free some space")
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "metadata",
    [{"tensors": {"a": {"sha256": "0" * 64, "pieces": [[-1, -1]] * 50_000}}},
     {"tensors": dict.fromkeys(map(str, range(50_000)), 0)},
     {"header": json.dumps(dict.fromkeys(map(str, range(50_000)), 0)), "tensors": {}}],
    ids=["pieces", "tensors", "header"],
)  # fmt: skip
def test_a_header_that_is_wrong_in_many_places_takes_no_more_memory_than_one(
    metadata: dict[str, Any], tmp_path: Path
) -> None:
    path = packed_file(tmp_path)
    path.write_bytes(resealed(path.read_bytes(), lambda was: json.dumps({**was, **metadata}), packed_digest))
    tracemalloc.start()
    refused(PackedFile, path, match="in its metadata is ")
    assert tracemalloc.get_traced_memory()[1] < 30 * path.stat().st_size
    tracemalloc.stop()


# --- masks


def masks_file(folder: Path) -> Path:
    """Write a masks file."""
    write_masks(
        folder / "m.safetensors", {"q": MaskEntry(torch.ones(3, 5, dtype=torch.bool), "2:4", "wanda", "0" * 64)}
    )
    return folder / "m.safetensors"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"shape": [2**60, 2**60]}, r"stored as U8 \[2\], expected"), ({"shape": [2**64, 1]}, "masks.q.shape.0"),
     ({"shape": [15]}, "masks.q.shape"), ({"shape": [0, 5]}, "masks.q.shape.0"), ({"shape": [3.0, 5]}, "shape.0"),
     ({"shape": [3, 4]}, "bits set after its last element"), ({"pattern": "2:4\nerror: x"}, "masks.q.pattern"),
     ({"pruner": "\x1b[2J"}, "masks.q.pruner"), ({"pruner": "\u202ex"}, "masks.q.pruner"),
     ({"pattern": "x" * 9999}, "pattern"),
     ({"sha256": "0" * 63}, "masks.q.sha256"), ({"sha256": None}, "masks.q.sha256"), ({"more": 1}, "masks.q.more")],
    ids=str,
)  # fmt: skip
def test_masks_with_a_digest_that_fits_and_values_that_do_not_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = masks_file(tmp_path)

    def change(metadata: Any) -> str:
        metadata["masks"]["q"].update(values)
        return json.dumps(metadata)

    path.write_bytes(resealed(path.read_bytes(), change, masks_digest))
    refused(MaskSet.load, path, match=message)


@pytest.mark.parametrize("text", ["[" * 10**5, "", "[]", '{"masks": {"a\\nerror: b": 1}}', "\ud800"], ids=range(5))
def test_metadata_that_are_no_masks_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = masks_file(tmp_path)
    described, data = parts(path.read_bytes())
    described["__metadata__"]["compressx"] = text
    path.write_bytes(safetensors(described, data))
    refused(MaskSet.load, path, match=r"m\.safetensors")


def test_names_of_masks_stay_on_one_line_and_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = masks_file(tmp_path)
    described, data = parts(path.read_bytes())
    described["a\nerror: b.mask"] = described.pop("q.mask")
    path.write_bytes(safetensors(described, data))
    refused(MaskSet.load, path, match=r"disagree about a\\nerror: b\.mask, q\.mask")
    path.unlink()
    os.mkfifo(path)
    refused(MaskSet.load, path, match=r"m\.safetensors is a FIFO")


# --- what else names a file


@pytest.mark.parametrize("name", ["../../precious", "TMP/precious", "sub/precious"])
def test_a_chat_template_with_the_name_of_another_place_is_not_written_there(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_tiny_model(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = {
        "default": "{{ messages }}",
        name.replace("TMP", str(tmp_path)): "x",
    }
    before = tree(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    refused(save_model, model, tokenizer, tmp_path / "runs" / "out", match="cannot save the tokenizer to .*out")
    assert {path for path in tree(tmp_path) if not path.startswith("runs/out/")} == {*before}
