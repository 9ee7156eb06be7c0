"""The user's cache of downloads and results. It can be deleted at any time."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import atomic_write

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the cache folder: `COMPRESSX_CACHE` if set, else the platform's cache folder for the user."""
    import platformdirs

    try:
        chosen = os.environ.get("COMPRESSX_CACHE") or platformdirs.user_cache_dir("compressx", appauthor=False)
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise ArtifactError("there is no home folder for the cache; set HOME, or COMPRESSX_CACHE") from error


def cached(key: Mapping[str, object], compute: Callable[[], Value], folder: Path | str, kind: Any) -> Value:
    """Return the cached value for a key, or compute and cache it.

    A damaged file, or one with another key or a value of another type, is recomputed and overwritten. If the folder
    cannot be written, the value is returned uncached, with a warning.

    Args:
        key: everything the value depends on, in types that survive JSON: text, numbers, lists, dicts with text keys.
        compute: returns the value, in the same types.
        folder: holds one JSON file per key; in the cache folder unless it is absolute.
        kind: the type of the value, as pydantic takes it; what is returned are JSON's types nevertheless.
    """
    canonical = json.dumps(key, sort_keys=True)
    name = f"{hashlib.sha256(canonical.encode()).hexdigest()}.json"
    with suppress(ArtifactError, OSError, ValueError, KeyError, TypeError, RecursionError):  # missing or damaged
        entry = json.loads((cache_folder() / folder / name).read_text(encoding="utf-8"))
        if json.dumps(entry["key"], sort_keys=True) == canonical:
            found: Value = entry["value"]
            TypeAdapter(kind).validate_json(json.dumps(found), strict=True)
            return found
    value = compute()
    try:
        text = json.dumps({"key": key, "value": value}, indent=1, allow_nan=False)
        atomic_write(cache_folder() / folder / name, f"{text}\n".encode())
    except (ArtifactError, ValueError) as error:  # the second: NaN
        _log.warning("%s; the result is not cached", error)
    return value
