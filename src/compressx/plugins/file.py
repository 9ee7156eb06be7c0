"""`plugins.toml`: which plugins a project loads, with line numbers for its mistakes.

[load]
entry_points = true            # also what is installed
disabled = ["demo"]            # never imported
required = ["wanda"]           # an error when it cannot be loaded

[[plugin]]
name = "mine"
module = "mine.plugin"
path = "src"                   # put first on sys.path while the module is imported
requires-host = ">=0.1,<0.3"   # versions of compressx that it works with
pruners = ["mine"]             # what it has to register
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from compressx.recipe.document import Step, one_line
from compressx.recipe.validation import validated
from compressx.runtime.errors import PluginError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"\s*([\w\"'.-]+)\s*=")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LoadTable(_Strict):
    """`[load]`: what is loaded besides the plugins listed, and what is not."""

    entry_points: StrictBool = Field(True, description="whether installed plugins are loaded")
    disabled: list[str] = Field(default_factory=list, description="names of plugins that are never imported")
    required: list[str] = Field(default_factory=list, description="names of plugins without which nothing runs")


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError('versions are written as pip does, such as ">=0.1,<0.3"') from None
    return text


MODULE = r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$"
"""How a plugin's module is written, an object in it after a colon."""


class PluginTable(_Strict):
    """One `[[plugin]]`."""

    name: str = Field(min_length=1, description="what `-p no:NAME` and messages call it")
    module: str = Field(pattern=MODULE, description="MODULE or MODULE:OBJECT")
    requires_host: Annotated[str, AfterValidator(_specifier)] | None = Field(
        None, alias="requires-host", description="versions of compressx that it works with, such as >=0.1,<0.3"
    )
    path: str | None = Field(None, description="folder inside the project, on sys.path during the import")
    pruners: list[str] | None = Field(None, description="names that it has to register, no more and no fewer")
    summary: str = Field("", description="one line for people")


class _Content(_Strict):
    load: LoadTable = Field(default_factory=LoadTable)
    plugin: list[PluginTable] = Field(default_factory=list)


@dataclass(frozen=True)
class PluginsFile:
    """What a `plugins.toml` says; without arguments, what an absent one does.

    Attributes:
        load: the table `[load]`.
        plugins: the `[[plugin]]` tables in order.
        folders: of each of them, its `path` resolved, or None.
        places: `file:line` by location.
    """

    load: LoadTable = field(default_factory=LoadTable)
    plugins: tuple[PluginTable, ...] = ()
    folders: tuple[Path | None, ...] = ()
    places: Mapping[tuple[Step, ...], str] = field(default_factory=lambda: {(): "plugins.toml"})

    def where(self, *loc: Step) -> str:
        """Return the place of a key or table, or of the nearest one around it."""
        return _nearest(self.places, loc)


def read_plugins_file(path: Path) -> PluginsFile:
    """Read `plugins.toml`.

    Raises:
        PluginError: a file that cannot be read, is not TOML, has unknown keys, names a plugin twice, both requires and
            disables one, or puts a folder outside the project on sys.path. Each mistake has its line.
    """
    name = one_line(str(path))
    text = _read(path, name)
    places = _places(text, name)
    content = validated(_Content, _parse(text, name), lambda *loc: _nearest(places, loc), error=PluginError)
    folders = tuple(
        None if p.path is None else _inside(path.parent, p.path, _nearest(places, ("plugin", i, "path")))
        for i, p in enumerate(content.plugin)
    )
    file = PluginsFile(content.load, tuple(content.plugin), folders, places)
    first: dict[str, int] = {}
    for i, plugin in enumerate(content.plugin):
        if first.setdefault(plugin.name, i) != i:
            earlier = file.where("plugin", first[plugin.name], "name")
            raise PluginError(f"{file.where('plugin', i, 'name')}: plugin {plugin.name!r} also stands at {earlier}")
    if both := sorted({*content.load.disabled} & {*content.load.required}):
        raise PluginError(f"{file.where('load', 'required')}: {both[0]!r} is both required and disabled; keep one")
    return file


def _read(path: Path, name: str) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise PluginError(f"{name}:{line}: byte 0x{byte:02x} is not UTF-8; save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        raise PluginError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parse(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number with too many digits
        found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
        place, reason = (f"{name}:{found[2]}:{found[3]}", found[1]) if found else (name, str(error))
        raise PluginError(f"{place}: not TOML: {reason}") from None
    except RecursionError:
        raise PluginError(f"{name}: not TOML: nested too deeply") from None


def _inside(project: Path, folder: str, place: str) -> Path:
    """Resolve a folder, links too, and refuse one outside the project."""
    root = project.resolve()
    try:
        resolved = (root / folder).resolve()
        missing = not resolved.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a loop of links
        raise PluginError(f"{place}: path {folder!r} cannot be followed: {error}") from None
    if not resolved.is_relative_to(root):
        raise PluginError(f"{place}: path {folder!r} leads out of the project {root}, to {resolved}")
    if missing:
        raise PluginError(f"{place}: path {folder!r} is no folder; looked in {root}")
    return resolved


def _places(text: str, name: str) -> dict[tuple[Step, ...], str]:
    """Find the lines of tables and keys. tomllib does not tell; a table within a multi-line string would mislead."""
    places: dict[tuple[Step, ...], str] = {(): f"{name}:1"}
    tables: dict[tuple[Step, ...], int] = {}
    table: tuple[Step, ...] = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            table = _keys(header[2])
            if header[1] == "[[":
                tables[table] = tables.get(table, -1) + 1
                table = (*table, tables[table])
            places.setdefault(table, f"{name}:{number}")
        elif key := _KEY.match(line):
            places.setdefault((*table, *_keys(key[1])), f"{name}:{number}")
    return places


def _keys(dotted: str) -> tuple[Step, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _nearest(places: Mapping[tuple[Step, ...], str], loc: tuple[Step, ...]) -> str:
    while loc not in places:
        loc = loc[:-1]
    return places[loc]
