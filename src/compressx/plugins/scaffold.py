"""Create a new plugin package: a working pruner, its tests, and its entry point."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from compressx.runtime.errors import ArtifactError, PluginError
from compressx.runtime.files import atomic_write

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

_TEMPLATE = Path(__file__).with_name("template")
"""The package's files; `@name@` and `@module@` are replaced, in paths too."""


def check_name(name: str) -> None:
    """Refuse an invalid plugin name.

    Raises:
        PluginError: not lower-case words joined by - or _.
    """
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"invalid plugin name {name!r}; expected lower-case letters and digits, words joined by - or _, such as "
            "'my-pruner'"
        )


def new_plugin(name: str, parent: Path) -> Path:
    """Write a plugin package `compressx-NAME` with a working pruner called NAME.

    Args:
        name: of the pruner and the plugin.
        parent: the folder to create the package in.

    Returns:
        The package's folder.

    Raises:
        PluginError: an invalid name.
        ArtifactError: the folder exists already, or cannot be written.
    """
    check_name(name)
    folder = parent.expanduser() / f"compressx-{name}"
    if folder.exists():
        raise ArtifactError(f"{folder} exists already; choose another name or --folder, or remove it")

    def filled(text: str) -> str:
        return text.replace("@name@", name).replace("@module@", name.replace("-", "_"))

    try:
        for source in _TEMPLATE.rglob("*.template"):
            place = folder / filled(str(source.relative_to(_TEMPLATE).with_suffix("")))
            atomic_write(place, filled(source.read_text(encoding="utf-8")).encode())
    except ArtifactError:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete package would block the next try
        raise
    return folder
