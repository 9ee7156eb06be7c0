"""The record of a plugin: its source and its status."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, TypeAlias

from compressx.plugins import kinds
from compressx.runtime.code import code_digest

Source: TypeAlias = Literal["entry point", "plugins.toml", "--plugin"]
Status: TypeAlias = Literal["found", "loaded", "blocked", "disabled", "failed"]


@dataclass(frozen=True)
class PluginRecord:
    """One plugin.

    Attributes:
        name: of the entry point, in `plugins.toml`, or the module given to `--plugin`.
        module: `module` or `module:object`.
        source: its first source.
        place: its sources for messages: the distribution, the line of `plugins.toml`, or the argument.
        distribution: the installed distribution with its entry point.
        version: of the distribution.
        summary: from `plugins.toml`.
        folder: that its module must be in, or None for anywhere.
        requires_host: versions of compressx that it works with, as pip writes them, or None for any.
        required: whether it is an error if it cannot be loaded.
        asked: whether it was given to `--plugin`.
        status: `found` before it is imported; its hooks are called if it is `loaded`. `-p no:NAME` makes it `blocked`,
            `plugins.toml` `disabled`.
        error: the last line of the traceback if it failed.
        offers: names that it registered, by `Kind.key`; before loading, those that `plugins.toml` declares.
    """

    name: str
    module: str
    source: Source
    place: str
    distribution: str | None = None
    version: str | None = None
    summary: str = ""
    folder: Path | None = None
    requires_host: str | None = None
    required: bool = False
    asked: bool = False
    status: Status = "found"
    error: str | None = None
    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.place})"

    def as_json(self) -> dict[str, Any]:
        """Return the record as `compressx plugins --json` prints it."""
        shown = ("name", "distribution", "version", "source", "module", "status", "error")
        offers = {kind.key: self.offers.get(kind.key, ()) for kind in kinds.KINDS}
        return {**{name: getattr(self, name) for name in shown}, "summary": self.described(), **offers}

    def described(self) -> str:
        """Return its summary, or else the first line of its module's docstring, which is read without an import."""
        places = None if self.folder is None else [str(self.folder)]
        name, spec = "", None
        for part in self.module.partition(":")[0].split("."):
            name = f"{name}.{part}".removeprefix(".")
            spec = PathFinder.find_spec(name, places)
            places = [] if spec is None else spec.submodule_search_locations
        if self.summary or spec is None or spec.origin is None:
            return self.summary
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return (ast.get_docstring(ast.parse(Path(spec.origin).read_bytes())) or "").partition("\n")[0]
        return ""

    def code(self) -> str:
        """Return the `code_digest` of its package."""
        return code_digest(self.module.partition(":")[0].partition(".")[0])

    def why_absent(self) -> str:
        """Return why the plugin is not loaded, as a clause."""
        if self.status == "blocked":
            return f"is blocked; drop -p no:{self.name}"
        if self.status == "disabled":
            return "is disabled; drop its name from [load] disabled in plugins.toml"
        return f"failed to load: {self.error}"

    def would_offer(self, key: str, name: str) -> bool:
        """Return whether the plugin probably offers `name`: declared under `key`, or part of the plugin's name."""
        own = (self.name.lower(), (self.distribution or "").lower())
        return name in self.offers.get(key, ()) or any(
            of == name.lower() or (min(len(of), len(name)) > 3 and (of in name or name in of)) for of in own
        )
