"""`plugins.toml`: which plugins a project loads. Errors have line numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, Field, StrictBool, create_model

from compressx.plugins import kinds
from compressx.plugins.record import PluginRecord
from compressx.recipe.document import Step
from compressx.recipe.validation import Strict, validated
from compressx.runtime.errors import PluginError, one_line

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"\s*([\w\"'.-]+)\s*=")


class LoadTable(Strict):
    """`[load]`: what is loaded besides the listed plugins, and what is disabled."""

    entry_points: StrictBool = Field(True, description="whether installed plugins are loaded")
    disabled: list[str] = Field(default_factory=list, description="names of plugins that are never imported")
    required: list[str] = Field(default_factory=list, description="names of plugins that must load")


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError('expected versions as pip writes them, such as ">=0.1,<0.3"') from None
    return text


MODULE = r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$"
"""`MODULE` or `MODULE:OBJECT`."""


class _PluginTable(Strict):
    name: str = Field(min_length=1, description="name for `-p no:NAME` and messages")
    module: str = Field(pattern=MODULE, description="MODULE or MODULE:OBJECT")
    requires_host: Annotated[str, AfterValidator(_specifier)] | None = Field(
        None, alias="requires-host", description="versions of compressx that it works with, such as >=0.1,<0.3"
    )
    path: str | None = Field(None, description="folder inside the project, on sys.path during the import")
    summary: str = Field("", description="one line for people")


def plugin_table() -> type[_PluginTable]:
    """Return the schema of one `[[plugin]]` table, with a key for the names of each kind."""
    names: Any = (list[str] | None, Field(None, description="exactly the names that it must register"))
    return create_model("PluginTable", __base__=_PluginTable, **{kind.key: names for kind in kinds.KINDS})


@dataclass(frozen=True)
class PluginsFile:
    """The content of a `plugins.toml`; without arguments, that of a missing one.

    Attributes:
        load: the table `[load]`.
        plugins: the `[[plugin]]` tables in order.
        places: `file:line` by location.
    """

    load: LoadTable = field(default_factory=LoadTable)
    plugins: tuple[PluginRecord, ...] = ()
    places: Mapping[tuple[Step, ...], str] = field(default_factory=lambda: {(): "plugins.toml"})

    def where(self, *loc: Step) -> str:
        """Return the place of a key or table, or of the nearest enclosing one."""
        while loc not in self.places:
            loc = loc[:-1]
        return self.places[loc]


def read_plugins_file(path: Path) -> PluginsFile:
    """Read `plugins.toml`.

    Raises:
        PluginError: a file that cannot be read, is not TOML, has unknown keys, lists a plugin twice, both requires and
            disables one, or puts a folder outside the project on sys.path. The message has the line.
    """
    name = one_line(str(path))
    text = _read(path, name)
    file = PluginsFile(places=_places(text, name))
    tables: Any = (list[plugin_table()], Field(default_factory=list))  # type: ignore[misc]
    schema = create_model("Content", __base__=Strict, load=(LoadTable, LoadTable()), plugin=tables)
    content: Any = validated(schema, _parse(text, name), file.where, error=PluginError)
    first: dict[str, int] = {}
    for i, plugin in enumerate(content.plugin):
        if first.setdefault(plugin.name, i) != i:
            earlier = file.where("plugin", first[plugin.name], "name")
            raise PluginError(
                f"{file.where('plugin', i, 'name')}: plugin {plugin.name!r} is already listed at {earlier}"
            )
    if both := sorted({*content.load.disabled} & {*content.load.required}):
        raise PluginError(f"{file.where('load', 'required')}: {both[0]!r} is both required and disabled; keep one")
    records = (_record(table, path.parent, partial(file.where, "plugin", i)) for i, table in enumerate(content.plugin))
    return replace(file, load=content.load, plugins=tuple(records))


def _record(table: Any, project: Path, where: Callable[..., str]) -> PluginRecord:
    declared = {kind.key: getattr(table, kind.key) for kind in kinds.KINDS}
    return PluginRecord(
        name=table.name,
        module=table.module,
        source="plugins.toml",
        place=where(),
        summary=table.summary,
        folder=None if table.path is None else _inside(project, table.path, where("path")),
        requires_host=table.requires_host,
        offers={key: tuple(names) for key, names in declared.items() if names is not None},
    )


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
    """Resolve a folder with its links; refuse one outside the project."""
    root = project.resolve()
    try:
        resolved = (root / folder).resolve()
        missing = not resolved.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a loop of links
        raise PluginError(f"{place}: path {folder!r} cannot be resolved: {error}") from None
    if not resolved.is_relative_to(root):
        raise PluginError(f"{place}: path {folder!r} is outside the project {root}: it resolves to {resolved}")
    if missing:
        raise PluginError(f"{place}: path {folder!r} is not a folder; looked in {root}")
    return resolved


def _places(text: str, name: str) -> dict[tuple[Step, ...], str]:
    """Find the lines of tables and keys, which tomllib does not report; multi-line strings may be mistaken for them."""
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
