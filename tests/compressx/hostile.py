"""Files as a stranger may have made or damaged them: headers with other values and a digest that fits, other bytes."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file

from compressx.masks.file import MaskEntry, write_masks
from compressx.models.packed import pack_file
from compressx.models.packed_folder import pack_folder

WORDS = [
    "", "x", "x" * 300, "../x", "/etc/passwd", "a/b.safetensors", "../other/model.safetensors", "a\nerror: b",
    "\x1b[2J", "\u202e", "\0", "U8", "F64", "0" * 64,
]  # fmt: skip
VALUES: list[Any] = [
    *WORDS, -1, 0, 1, 2, 7, 2**31, 2**53, 2**60, 2**63, 2**64, 10**30, 10**4000, 0.5, 1e300, float("nan"), float("inf"),
    True, None, [], {}, [[]], [1], [2**60], [0, 2**60], {"": {}}, ["a"] * 50,
]  # fmt: skip
"""What a JSON may have in place of the right value."""


def safetensors(header: str | dict[str, Any], data: bytes = b"") -> bytes:
    """Return a file with this header."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + data


def parts(file: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, and what follows."""
    end = 8 + int.from_bytes(file[:8], "little")
    return json.loads(file[8:end]), file[end:]


def resealed(file: bytes, change: Callable[[Any], str], digest: Callable[[Any, bytes], bytes]) -> bytes:
    """Change the metadata of a packed or masks file, and put in the digest of what they are then.

    Args:
        file: as it was written.
        change: returns other metadata as text.
        digest: returns the bytes of which the digest is, from metadata and the data of the file.
    """
    header, data = parts(file)
    text = change(json.loads(header["__metadata__"]["compressx"]))
    try:
        metadata = json.loads(text)
        text = json.dumps({**metadata, "digest": hashlib.sha256(digest(metadata, data)).hexdigest()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # so far from metadata that they have no digest
    header["__metadata__"]["compressx"] = text
    return safetensors(header, data)


def packed_digest(metadata: Any, _: bytes) -> bytes:
    """Return of what the digest of a packed file is."""
    return json.dumps([metadata["header"], metadata["tensors"]]).encode()


def masks_digest(metadata: Any, data: bytes) -> bytes:
    """Return of what the digest of a masks file is."""
    return json.dumps([*map(list, metadata["masks"].items())]).encode() + data


def changed(random: Random, value: Any) -> str:
    """Change one place of a JSON value, and return it as text."""
    found = [*_places(value)]
    where, key = random.choice(found)
    kind, inside = random.randrange(8), ""
    if kind < 4:
        where[key] = copy.deepcopy(random.choice(VALUES))
    elif kind == 4:
        del where[key]
    elif kind == 5:
        other, there = random.choice(found)
        where[key], other[there] = copy.deepcopy((other[there], where[key]))
    elif kind == 6 and isinstance(where, dict):
        where[random.choice(WORDS)] = where.pop(key)
    else:
        deep = random.choice([10, 150, 3000])
        where[key] = "HERE"
        inside = random.choice(["[" * deep + "]" * deep, '{"a":' * deep + "1" + "}" * deep, '{"a": 1, "a": 2}'])
    text = json.dumps(value)
    return text.replace('"HERE"', inside) if inside else text


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list and dict in a JSON value with each place in it."""
    if isinstance(value, dict | list):
        for key in [*value] if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def damaged(random: Random, file: bytes) -> bytes:
    """Flip, remove, add or exchange bytes, half of the time near the beginning, or cut the file."""
    data, kind = bytearray(file), random.randrange(6)
    at = random.randrange(min(len(data), random.choice([400, len(data)])))
    few = random.randrange(1, 9)
    if kind < 2:
        data[at] ^= random.randrange(1, 256)
    elif kind == 2:
        del data[at:]
    else:
        other = bytes(random.randrange(256) for _ in range(few))
        data[at : at + (0 if kind == 3 else few)] = b"" if kind == 4 else other
    return bytes(data)


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


def save_packed(folder: Path, seed: int = 0, *, shards: int = 1) -> Path:
    """Save what looks like a packed model."""
    plain = save(folder.with_name(f"{folder.name}-plain"), seed, shards=shards)
    pack_folder(plain, folder)
    shutil.rmtree(plain)
    return folder


def packed_file(place: Path) -> Path:
    """Write a packed file of a weight with zeros, `a`, and a vector without, `b`."""
    save_file({"a": weights(), "b": torch.ones(8)}, place / "original")
    pack_file(place / "original", place / "x.packed.safetensors")
    (place / "original").unlink()
    return place / "x.packed.safetensors"


def masks_file(place: Path) -> Path:
    keep = torch.ones(3, 5, dtype=torch.bool)
    write_masks(place / "m.safetensors", {"q": MaskEntry(keep, "2:4", "wanda", "0" * 64)})
    return place / "m.safetensors"
