"""Create a new plugin package: a working example of a kind, its tests, and its entry point."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from compressx.plugins.kinds import EVALUATOR, EXPORTER, PRUNER, TOKEN_SELECTOR, Kind
from compressx.runtime.errors import ArtifactError, PluginError
from compressx.runtime.files import atomic_write

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

_TEMPLATE = Path(__file__).with_name("template")
"""The files that all packages share, and for each kind its own; words such as `@name@` are replaced, in paths too."""

KINDS: dict[str, tuple[Kind[Any], str]] = {
    "pruner": (PRUNER, 'prune:\n  - {targets: ["*"], pruner: @name@, sparsity: 0.5}'),
    "selector": (TOKEN_SELECTOR, "select_tokens: {selector: @name@, keep: 0.125}"),
    "evaluator": (EVALUATOR, "evaluate:\n  @name@: {}"),
    "exporter": (EXPORTER, "export: [safetensors, @name@]"),
}
"""What it offers, and how a recipe names it."""


def new_plugin(name: str, parent: Path, kind: str = "pruner") -> Path:
    """Write a plugin package `compressx-NAME` into a folder, with a working example NAME of a kind of `KINDS`.

    Returns:
        The package's folder.
    """
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"invalid plugin name {name!r}; expected lower-case letters and digits, words joined by - or _, such as "
            "'my-pruner'"
        )
    folder = parent.expanduser() / f"compressx-{name}"
    if folder.exists():
        raise ArtifactError(f"{folder} exists already; choose another name or --folder, or remove it")

    offered, recipe = KINDS[kind]
    values = {"name": name, "module": name.replace("-", "_"), "kind": offered.name, "key": offered.key}
    values["recipe"] = recipe.replace("@name@", name)

    def written(text: str) -> str:
        return re.sub(r"@(name|module|kind|key|recipe)@", lambda found: values[found[1]], text)

    try:
        for part in (_TEMPLATE / "shared", _TEMPLATE / kind):
            for source in part.rglob("*.template"):
                place = folder / written(str(source.relative_to(part).with_suffix("")))
                atomic_write(place, written(source.read_text(encoding="utf-8")).encode())
    except ArtifactError:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete package would block the next try
        raise
    return folder
