"""Find plugins from entry points, `plugins.toml` and `--plugin`, without importing them. Errors have line numbers."""

from __future__ import annotations

import ast
import contextlib
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import Distribution, entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, Field, StrictBool, create_model

from compressx.plugins import kinds
from compressx.recipe.document import Step
from compressx.recipe.validation import Strict, validated
from compressx.runtime.code import code_digest
from compressx.runtime.errors import PluginError, did_you_mean, nearest, one_line

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


GROUP = "compressx"
"""The entry point group of plugins."""


def discover(modules: Sequence[str], file: PluginsFile) -> Mapping[str, PluginRecord]:
    """Find every plugin: installed ones sorted by name, then those of the file and of `modules` in order.

    The same name with the same module in several sources is one plugin.

    Raises:
        PluginError: one name for two modules, one module under two names, or a missing required plugin.
    """
    found: dict[str, PluginRecord] = {}
    for record in [*_installed(file), *file.plugins, *_requested(modules)]:
        _add(found, record)
    for name in file.load.required:
        if name not in found:
            hint = did_you_mean(name, found) or "none is installed or listed"
            raise PluginError(f"{file.where('load', 'required')}: required plugin {name!r} is missing; {hint}")
        found[name] = replace(found[name], required=True)
    return found


def blocked_names(found: Mapping[str, PluginRecord], blocked: Collection[str], file: PluginsFile) -> frozenset[str]:
    """Return the names of the plugins that must not be imported.

    `-p no:NAME` takes precedence over `[load] required`.

    Raises:
        PluginError: an unknown name, or a plugin that `--plugin` requests at the same time.
    """
    known = {*found, *(p.name for p in entry_points(group=GROUP))}
    places = [(name, f"-p no:{name}") for name in blocked]
    for name, place in [*places, *((name, file.where("load", "disabled")) for name in file.load.disabled)]:
        if name not in known:
            raise PluginError(f"{place}: no plugin is named {name!r}; {did_you_mean(name, known) or 'none is known'}")
        if name in found and found[name].asked:
            raise PluginError(f"{place}: {name!r} is blocked, but --plugin requests it; leave one of the two out")
    return frozenset(blocked) | frozenset(file.load.disabled)


def _installed(file: PluginsFile) -> Iterator[PluginRecord]:
    if not file.load.entry_points:
        return
    described: dict[Distribution | None, tuple[str | None, str | None]] = {None: (None, None)}
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        module = point.value.partition("[")[0].replace(" ", "")  # extras may follow
        if point.dist and point.dist not in described:  # which parses its whole description each time
            metadata = point.dist.metadata
            described[point.dist] = metadata["Name"], metadata["Version"]
        name, version = described[point.dist]
        place = f"entry point of {name} {version}" if name else f"entry point {point.value}"
        yield PluginRecord(point.name, module, "entry point", place, name, version)


def _requested(modules: Sequence[str]) -> Iterator[PluginRecord]:
    for given in modules:
        module, folder = given, None
        if found := re.fullmatch(r"(.+\.py)(:[A-Za-z_][\w.]*)?", given):
            file = Path(found[1]).expanduser().absolute()
            if not file.is_file():
                beside = nearest(file.name, [path.name for path in file.parent.glob("*.py")])
                raise PluginError(f"--plugin {given}: no such file; {beside}looked in {file.parent}")
            module, folder = f"{file.stem}{found[2] or ''}", file.resolve().parent
        if not re.match(MODULE, module):
            raise PluginError(
                f"--plugin {given!r} is not a module; expected MODULE, such as my_pruner for my_pruner.py in the "
                f"working directory, {Path.cwd()}, or the path of such a file, with :OBJECT or without"
            )
        yield PluginRecord(module, module, "--plugin", f"--plugin {given}", folder=folder, required=True, asked=True)


def _add(found: dict[str, PluginRecord], new: PluginRecord) -> None:
    """Add a plugin, or merge it into the record of the same plugin from an earlier source."""
    twin = next((r for r in found.values() if r.module == new.module), None)
    old = twin if twin is not None and new.asked else found.get(new.name)
    if old is None and twin is not None:
        raise PluginError(f"{new} is the same module as {twin}, {new.module}; give both the same name")
    if old is None:
        found[new.name] = new
    elif old.module != new.module:
        raise PluginError(
            f"{new} and {old} share a name, but one is {new.module} and the other {old.module}; rename one"
        )
    elif old.folder is not None and new.folder is not None and old.folder != new.folder:
        raise PluginError(
            f"{new} and {old} are two modules of one name, {new.module}, in {new.folder} and in {old.folder}; rename "
            "one of them"
        )
    else:
        either = ("folder", "summary", "requires_host", "offers", "required", "asked")
        merged = {name: getattr(old, name) or getattr(new, name) for name in either}
        found[old.name] = replace(old, place=f"{old.place}, {new.place}", **merged)
