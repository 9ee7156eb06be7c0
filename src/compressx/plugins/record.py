"""One plugin: where it was named, and what became of it."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from compressx.plugins import kinds

Source: TypeAlias = Literal["entry point", "plugins.toml", "--plugin"]
Status: TypeAlias = Literal["found", "loaded", "blocked", "failed"]


@dataclass(frozen=True)
class PluginRecord:
    """One plugin.

    Attributes:
        name: of the entry point, in `plugins.toml`, or the module that `--plugin` named.
        module: `module` or `module:object`.
        source: where it was named first.
        place: the same for messages: the distribution, the line of `plugins.toml`, or the argument.
        distribution: the installed distribution that has its entry point.
        version: of the distribution.
        summary: from `plugins.toml`.
        folder: where its module has to come from, or None for anywhere.
        requires_host: versions of compressx that it works with, as pip writes them, or None for any.
        required: whether it is an error when it cannot be loaded.
        asked: whether `--plugin` named it.
        status: `found` before it is imported; its hooks are called when it is `loaded`.
        error: the last line of the traceback when it failed.
        offers: names that it registered, by `Kind.key`; while it is not loaded, those that `plugins.toml` declares.
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
        """Return what `compressx plugins --json` prints."""
        shown = ("name", "distribution", "version", "source", "module", "status", "error", "summary")
        offers = {kind.key: self.offers.get(kind.key, ()) for kind in kinds.KINDS}
        return {**{name: getattr(self, name) for name in shown}, **offers}

    def code(self) -> str:
        """Return what tells its code from an earlier state of it, as `code_digest`."""
        return code_digest(self.module.partition(":")[0].partition(".")[0])

    def why_absent(self) -> str:
        """Say what keeps the plugin from being loaded."""
        if self.status == "blocked":
            return f"is blocked; drop -p no:{self.name}, or its name from [load] disabled"
        return f"failed to load: {self.error}"

    def would_offer(self, key: str, name: str) -> bool:
        """Whether the plugin probably offers `name`: it is declared under `key`, or one is named after the other."""
        own = (self.name.lower(), (self.distribution or "").lower())
        return name in self.offers.get(key, ()) or any(
            of == name.lower() or (min(len(of), len(name)) > 3 and (of in name or name in of)) for of in own
        )


def code_digest(package: str) -> str:
    """Hash the Python sources of a package or a single module that can be imported: sha256, its first 8 digits.

    What a version number does not tell while somebody works on a package that is installed in place.
    """
    module = importlib.import_module(package)
    files = sorted(path for place in getattr(module, "__path__", ()) for path in Path(place).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files or [Path(module.__file__ or "")]:
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
