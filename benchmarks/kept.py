"""What a benchmark that goes on where it stopped has to be sure of: what is there was measured as the rest would be."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from compressx.plugins.record import code_digest


def same_settings(folder: Path, settings: Mapping[str, object]) -> None:
    """Write the settings into a folder, which is made, or end the program where others are there.

    Args:
        folder: of the rows.
        settings: all that decides a row but what the row itself says, in JSON's types.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "settings.json"
    if told.exists():
        before = json.loads(told.read_text(encoding="utf-8"))
        if changed := [name for name in {**before, **settings} if before.get(name) != settings.get(name)]:
            was = ", ".join(f"{name} {before.get(name)!r}, now {settings.get(name)!r}" for name in changed)
            sys.exit(f"{told} says that the rows there were measured otherwise: {was}; name another output")
    told.write_text(json.dumps(dict(settings), indent=1), encoding="utf-8")


def unfinished(folder: Path, row: str) -> Path:
    """Return the folder to work on a row in; what other code has left of the same row is removed.

    Args:
        folder: of the rows.
        row: its name, fit for a folder.
    """
    code = [code_digest(package) for package in ("compressx", "compressx_attnprune")]
    mine = folder / "unfinished" / "-".join([row, *code])
    for other in mine.parent.glob(f"{row}-{'?' * 8}-{'?' * 8}"):
        if other != mine:
            shutil.rmtree(other)
    mine.mkdir(parents=True, exist_ok=True)
    return mine
