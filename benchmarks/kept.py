"""Checks for resuming a benchmark: existing rows were measured with the same settings and code."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from compressx.runtime.code import code_digest


def same_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Write the settings to a folder, created if needed, or exit if it has different ones.

    Args:
        folder: the folder of the rows.
        settings: everything that affects a row except its columns, in JSON types.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if changed := [name for name in {**before, **settings} if before.get(name) != settings.get(name)]:
            was = ", ".join(f"{name} {before.get(name)!r}, now {settings.get(name)!r}" for name in changed)
            sys.exit(f"{path}: existing rows were measured with other settings: {was}; name another output")
    path.write_text(json.dumps(dict(settings), indent=1), encoding="utf-8")


def unfinished(folder: Path, row: str) -> Path:
    """Return the working folder of a row; folders of the same row by other code are removed.

    Args:
        folder: the folder of the rows.
        row: the row's name, valid as a folder name.
    """
    code = [code_digest(package) for package in ("compressx", "compressx_attnprune")]
    mine = folder / "unfinished" / "-".join([row, *code])
    for other in mine.parent.glob(f"{row}-{'?' * 8}-{'?' * 8}"):
        if other != mine:
            shutil.rmtree(other)
    mine.mkdir(parents=True, exist_ok=True)
    return mine
