"""What a stranger's model folder, packed folder or cache entry may attempt, and is refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from compressx.models.checkpoint import find_checkpoint
from compressx.models.packed_folder import pack_folder
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError


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


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 10**5, "RecursionError"), ("{}", "KeyError"), ("[]", "TypeError"), ('{"weight_map": 1}', "AttributeError"),
     ('{"weight_map": {}}', "lists no files"), ('{"weight_map": [["a", "b"]]}', "AttributeError"), (b"\xff", "Unicode"),
     ('{"weight_map": {"a": ' + "1" * 5000 + "}}", "ValueError")],
    ids=["deep", "key", "list", "number", "empty", "pairs", "bytes", "huge"],
)  # fmt: skip
def test_an_index_of_another_form_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    folder = listed(save(tmp_path / "model", shards=2), text)
    found = refused(find_checkpoint, ModelSource(path=folder), match=r"index\.json is damaged, or not an index")
    assert message in found
    assert len(found) < 500


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_a_fifo_in_a_models_folder_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", shards=2)
    if name == "model.safetensors":
        (folder / "model.safetensors.index.json").unlink()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(find_checkpoint, ModelSource(path=folder), match=rf"{name} is a FIFO|lists {name}, missing in")
