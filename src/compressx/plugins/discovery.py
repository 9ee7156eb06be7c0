"""Find plugins from entry points, `plugins.toml` and `--plugin`, without importing them. Errors have line numbers."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field, StrictBool

from compressx.plugins import kinds
from compressx.recipe.document import Step
from compressx.recipe.validation import Strict, validated
from compressx.runtime.code import code_digest
from compressx.runtime.errors import PluginError, did_you_mean, one_line, suggestion

Source: TypeAlias = Literal["entry point", "plugins.toml", "--plugin"]


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
        folder: that its module must be in, or None for anywhere.
        asked: whether it was given to `--plugin`, so that it is an error if it cannot be loaded.
        status: `found` before it is imported; its hooks are called if it is `loaded`. `-p no:NAME` makes it `blocked`,
            `plugins.toml` `disabled`.
        error: what failed, with the file and line of the plugin's.
        offers: names that it registered, by `Kind.key`.
    """

    name: str
    module: str
    source: Source
    place: str
    distribution: str | None = None
    version: str | None = None
    folder: Path | None = None
    asked: bool = False
    status: Literal["found", "loaded", "blocked", "disabled", "failed"] = "found"
    error: str | None = None
    offers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.place})"

    def as_json(self) -> dict[str, Any]:
        """Return the record as `compressx plugins --json` prints it."""
        shown = ("name", "distribution", "version", "source", "module", "status", "error")
        offers = {kind.key: self.offers.get(kind.key, ()) for kind in kinds.KINDS}
        return {name: getattr(self, name) for name in shown} | offers

    def code(self) -> str:
        """Return the `code_digest` of its package."""
        return code_digest(self.module.partition(":")[0].partition(".")[0])

    def absence_of(self, name: str) -> str:
        """Return why the plugin is not loaded if it probably offers `name`, since its own name is like that."""
        own = (self.name.lower(), (self.distribution or "").lower())
        if not any(x == name.lower() or (min(len(x), len(name)) > 3 and (x in name or name in x)) for x in own):
            return ""
        reasons = {
            "blocked": f"is blocked; drop -p no:{self.name}",
            "disabled": "is disabled; drop its name from [load] disabled in plugins.toml",
            "failed": f"failed to load: {self.error}",
        }
        return f"plugin {self.name!r} ({self.source}) {reasons[self.status]}"


_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"\s*([\w\"'.-]+)\s*=")


class LoadTable(Strict):
    """`[load]`: what is loaded besides the listed plugins, and what is disabled."""

    entry_points: StrictBool = Field(True, description="whether installed plugins are loaded")
    disabled: list[str] = Field(default_factory=list, description="names of plugins that are never imported")


MODULE = r"^[A-Za-z_][\w.]*(:[A-Za-z_][\w.]*)?$"
"""`MODULE` or `MODULE:OBJECT`."""


class PluginTable(Strict):
    """`[[plugin]]`: a plugin that is not installed."""

    name: str = Field(min_length=1, description="name for `-p no:NAME` and messages")
    module: str = Field(pattern=MODULE, description="MODULE or MODULE:OBJECT")
    path: str | None = Field(None, description="folder inside the project, on sys.path during the import")


class _Content(Strict):
    load: LoadTable = LoadTable()
    plugin: list[PluginTable] = Field(default_factory=list)


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
    """Read `plugins.toml`; a `PluginError` has the line of what is wrong in it."""
    name = one_line(str(path))
    text, data = _read(path, name)
    file = PluginsFile(places=_places(text, name))
    content = validated(_Content, data, file.where, error=PluginError)
    records = []
    for i, table in enumerate(content.plugin):
        folder = None if table.path is None else _inside(path.parent, table.path, file.where("plugin", i, "path"))
        place = file.where("plugin", i)
        records.append(PluginRecord(table.name, table.module, "plugins.toml", place, folder=folder))
    return replace(file, load=content.load, plugins=tuple(records))


def _read(path: Path, name: str) -> tuple[str, dict[str, Any]]:
    """Return a file's text, and what it says as TOML."""
    try:
        text = path.read_bytes().decode("utf-8")
        return text, tomllib.loads(text)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"{name}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
    except OSError as error:
        message = f"{name}: cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number with too many digits
        found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
        place, reason = (f"{name}:{found[2]}:{found[3]}", found[1]) if found else (name, str(error))
        message = f"{place}: not TOML: {'nested too deeply' if isinstance(error, RecursionError) else reason}"
    raise PluginError(message)


def _inside(project: Path, folder: str, place: str) -> Path:
    """Resolve a folder with its links; refuse one outside the project."""
    root, fault = project.resolve(), ""
    try:
        resolved = (root / folder).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:  # missing, too long, a NUL, a loop of links
        fault = getattr(error, "strerror", None) or str(error)
    else:
        if not (resolved.is_dir() and resolved.is_relative_to(root)):
            fault = f"it resolves to {resolved}"
    if fault:
        raise PluginError(f"{place}: path {folder!r} is no folder inside the project {root}: {fault}")
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


GROUP = "compressx"
"""The entry point group of plugins."""


def discover(modules: Sequence[str], file: PluginsFile) -> Mapping[str, PluginRecord]:
    """Find every plugin: installed ones sorted by name, then those of the file and of `modules` in order.

    The same name with the same module in several sources is one plugin.
    """
    found: dict[str, PluginRecord] = {}
    for record in [*_installed(file), *file.plugins, *_requested(modules)]:
        _add(found, record)
    return found


def blocked_names(found: Mapping[str, PluginRecord], blocked: Collection[str], file: PluginsFile) -> frozenset[str]:
    """Return the names of the plugins that must not be imported."""
    known = {*found, *(p.name for p in entry_points(group=GROUP))}
    places = [(name, f"-p no:{name}") for name in blocked]
    for name, place in [*places, *((name, file.where("load", "disabled")) for name in file.load.disabled)]:
        if name not in known:
            raise PluginError(f"{place}: no plugin is named {name!r}; {did_you_mean(name, known) or 'none is known'}")
        if name in found and found[name].asked:
            raise PluginError(f"{place}: {name!r} is blocked, but --plugin requests it; leave one of the two out")
    return frozenset(blocked) | frozenset(file.load.disabled)


@cache  # its metadata are parsed anew each time
def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    return distribution.name, distribution.version


def _installed(file: PluginsFile) -> Iterator[PluginRecord]:
    points = entry_points(group=GROUP) if file.load.entry_points else ()
    for point in sorted(points, key=lambda p: (p.name, p.value)):
        module = point.value.partition("[")[0].replace(" ", "")  # extras may follow
        name, version = _name_and_version(point.dist)
        yield PluginRecord(point.name, module, "entry point", f"entry point of {name} {version}", name, version)


def _requested(modules: Sequence[str]) -> Iterator[PluginRecord]:
    for given in modules:
        module, folder = given, None
        if found := re.fullmatch(r"(.+\.py)(:[A-Za-z_][\w.]*)?", given):
            file = Path(found[1]).expanduser().absolute()
            if not file.is_file():
                beside = suggestion(file.name, [path.name for path in file.parent.glob("*.py")])
                raise PluginError(f"--plugin {given}: no such file; {beside}looked in {file.parent}")
            module, folder = f"{file.stem}{found[2] or ''}", file.resolve().parent
        if not re.match(MODULE, module):
            raise PluginError(
                f"--plugin {given!r} is not a module; expected MODULE, such as my_pruner for my_pruner.py in the "
                f"working directory, {Path.cwd()}, or the path of such a file, with :OBJECT or without"
            )
        yield PluginRecord(module, module, "--plugin", f"--plugin {given}", folder=folder, asked=True)


def _add(found: dict[str, PluginRecord], new: PluginRecord) -> None:
    """Add a plugin, or merge it into the record of the same plugin from an earlier source."""
    twin = next((r for r in found.values() if r.module == new.module), None)
    old = twin if twin is not None and new.asked else found.get(new.name, twin)
    if old is None:
        found[new.name] = new
        return
    for what in ("module", "folder") if new.asked else ("name", "module", "folder"):
        mine, other = getattr(new, what), getattr(old, what)
        if mine != other and None not in (mine, other):
            raise PluginError(
                f"{new} and {old} share a name or a module, but not the {what}: {mine} and {other}; rename one of them"
            )
    merged = {name: getattr(old, name) or getattr(new, name) for name in ("folder", "asked")}
    found[old.name] = replace(old, place=f"{old.place}, {new.place}", **merged)
