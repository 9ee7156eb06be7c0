"""The user's cache: downloads and results that are worth keeping between runs, and safe to delete at any time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import atomic_write

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder to cache in: `COMPRESSX_CACHE` if set, else the platform's cache folder of this user."""
    import platformdirs

    chosen = os.environ.get("COMPRESSX_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("compressx", appauthor=False))


def write_json(path: Path, value: object) -> None:
    """Write a JSON file so that a reader sees the old content or the new, never a part; missing folders are made.

    Raises:
        ArtifactError: when it cannot be written; the old file is untouched then.
    """
    atomic_write(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def cached(key: Mapping[str, object], compute: Callable[[], Value], folder: Path) -> Value:
    """Return what `compute` gave for the same key before, or compute and keep it.

    A file that is damaged, or holds another key, is ignored and rewritten. A folder that cannot be written costs the
    caching, never the value.

    Args:
        key: everything that the value depends on, in types that JSON keeps as they are: text, numbers, lists,
            dictionaries with text as keys.
        compute: gives the value, in such types too.
        folder: where the JSON files stand, one for each key.
    """
    canonical = json.dumps(key, sort_keys=True)
    path = folder / f"{hashlib.sha256(canonical.encode()).hexdigest()}.json"
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        if json.dumps(entry["key"], sort_keys=True) == canonical:
            value: Value = entry["value"]
            return value
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: computed anew and overwritten
    value = compute()
    try:
        write_json(path, {"key": key, "value": value})
    except ArtifactError as error:
        _log.warning("%s; the result is not cached", error)
    return value
