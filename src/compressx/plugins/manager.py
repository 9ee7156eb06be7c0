"""Import the plugins that are not blocked, check their hooks and collect what they offer.

A plugin that cannot be imported is recorded and skipped; if `--plugin` names it, that is an error. Invalid hooks are
always an error, because a misspelt hook would never be called.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pluggy

from compressx.api import hooks
from compressx.plugins import kinds
from compressx.plugins.discovery import GROUP, PluginRecord, PluginsFile, blocked_names, discover, read_plugins_file
from compressx.plugins.kinds import Kind, Spec, check_spec
from compressx.runtime.errors import PluginError, did_you_mean, own_frames, place_of, said_by

Offers: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Specs by `Kind.key` and name."""


@dataclass(frozen=True, eq=False)
class Plugins:
    """The loaded plugins of a run.

    Attributes:
        manager: pluggy's, with the plugins registered.
        records: every plugin that was found, in the order of loading.
        offers: specs by kind and name, such as `offers["pruners"]["wanda"]`.
    """

    manager: pluggy.PluginManager
    records: tuple[PluginRecord, ...]
    offers: Offers

    def find(self, kind: Kind[Spec], name: str) -> Spec:
        """Return the spec with a name.

        Raises:
            PluginError: there is none. The message names blocked or failed plugins that probably offer it.
        """
        if name in (offered := self.offers[kind.key]):
            found: Spec = offered[name]
            return found
        raise PluginError(self._why_none(name, [kind]))

    def named(self, name: str) -> list[Any]:
        """Return all that the plugin with a name offers, of every kind; or, when none has it, the specs with that name.

        Raises:
            PluginError: there is none, as for `find`.
        """
        plugin = next((r for r in self.records if r.name == name and r.status == "loaded"), None)
        own = {} if plugin is None else plugin.offers
        specs = [self.offers[key][offered] for key, names in own.items() for offered in names]
        specs = specs or [offered[name] for offered in self.offers.values() if name in offered]
        if not specs:
            raise PluginError(self._why_none(name, kinds.KINDS))
        return specs

    def code_of(self, kind: Kind[Any], name: str) -> str | None:
        """Return the digest of the code of the plugin that offers a spec; None if none does."""
        return next((r.code() for r in self.records if r.status == "loaded" and name in r.offers[kind.key]), None)

    def _why_none(self, name: str, wanted: Sequence[Kind[Any]]) -> str:
        """Say why no spec of these kinds has a name."""
        *first, last = (kind.name for kind in wanted)
        none = f"no {', '.join(first)}{' or ' * bool(first)}{last} {name!r}"
        absent = [r for r in self.records if r.status != "loaded"]
        if reasons := [*filter(None, (r.absence_of(name) for r in absent))]:
            return f"{none}: {'; '.join(reasons)}"
        failed = [r.name for r in absent if r.status == "failed"]
        also = f"; plugins that failed to load: {', '.join(failed)}" if failed else ""
        known = did_you_mean(name, [n for kind in wanted for n in self.offers[kind.key]]) or "none is loaded"
        return f"{none}; {known}{also}; compressx plugins lists what is installed"


def load_plugins(*, modules: Sequence[str] = (), blocked: Collection[str] = (), toml: Path | None = None) -> Plugins:
    """Load the installed plugins, then those of `plugins.toml`, then `modules`.

    Args:
        modules: `MODULE` or `path/to/file.py`, with `:OBJECT` or without, from `--plugin`; each must load.
        blocked: names of plugins not to import, from `-p no:NAME`.
        toml: the project's file; None for `plugins.toml` in the working directory, if there is one.

    Raises:
        PluginError: one of `modules` that fails, an unknown or duplicate name, an invalid hook, a name offered twice,
            or an invalid `plugins.toml`.
    """
    default = Path("plugins.toml")
    path = toml if toml is not None or not default.is_file() else default
    file = PluginsFile() if path is None else read_plugins_file(path)
    found = discover(modules, file)
    left_out = blocked_names(found, blocked, file)
    manager = pluggy.PluginManager("compressx")
    manager.add_hookspecs(hooks)
    for name in left_out:
        manager.set_blocked(name)
    records: list[PluginRecord] = []
    offers: dict[str, dict[str, Any]] = {kind.key: {} for kind in kinds.KINDS}
    for record in found.values():
        if record.name in left_out:
            records.append(replace(record, status="blocked" if record.name in blocked else "disabled"))
            continue
        loaded, specs = _load(manager, record)
        for kind in kinds.KINDS:
            for name, spec in specs.get(kind.key, {}).items():
                if name in offers[kind.key]:
                    owner = next(r for r in records if r.status == "loaded" and name in r.offers[kind.key])
                    raise PluginError(f"{kind.name} {name!r} is offered by {owner} and by {record}; block one of them")
                offers[kind.key][name] = spec
        records.append(loaded)
    return Plugins(manager, tuple(records), offers)


def _load(manager: pluggy.PluginManager, record: PluginRecord) -> tuple[PluginRecord, Offers]:
    """Import and register one plugin, and collect its specs."""
    folder = record.folder or (Path.cwd() if record.asked else None)
    importlib.invalidate_caches()
    try:
        with (
            patch.object(sys, "path", sys.path if folder is None else [str(folder), *sys.path]),
            contextlib.redirect_stdout(sys.stderr),  # where results of commands go, it must not print
        ):
            plugin = EntryPoint(record.name, record.module, GROUP).load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken plugin must not stop the others
        return _failed(record, error), {}
    module = sys.modules[record.module.partition(":")[0]]
    origin = Path(getattr(module, "__file__", None) or "/").resolve()
    if record.folder is not None and not origin.is_relative_to(record.folder):
        raise PluginError(
            f"{record}: module {module.__name__!r} was imported from {origin}, not from {record.folder}; "
            "another module has the same name, so rename it"
        )
    _register(manager, record, plugin)
    try:
        specs = _offered_by(manager, plugin)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - likewise
        manager.unregister(plugin)
        return _failed(record, error), {}
    return replace(record, status="loaded", offers={key: tuple(named) for key, named in specs.items()}), specs


def _failed(record: PluginRecord, error: BaseException) -> PluginRecord:
    """Record a failure with the file and line of the plugin's that it comes from; raise it if it was asked for."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != Path(__file__).parent]
    reason = said_by(error) + place_of(own_frames(frames)) + _where_looked(record, error)
    if record.asked:
        raise PluginError(f"{record} failed to load: {reason}") from error
    return replace(record, status="failed", error=reason)


def _where_looked(record: PluginRecord, error: BaseException) -> str:
    """Say where the plugin's own module was looked for, if it is what is missing."""
    if not isinstance(error, ModuleNotFoundError) or not record.module.startswith(error.name or " "):
        return ""
    place = record.folder or (f"the working directory {Path.cwd()}" if record.asked else None)
    return (
        f"; looked in {f'{place} and in ' if place else ''}installed packages; install it, or give the path of its "
        "file to --plugin, or that of its folder in plugins.toml"
    )


def _register(manager: pluggy.PluginManager, record: PluginRecord, plugin: object) -> None:
    """Register a plugin; refuse functions that look like hooks but would never be called, and wrong arguments."""
    known, expected = vars(manager.hook), []
    for name in dir(plugin):
        marker = manager.parse_hookimpl_opts(plugin, name)
        if marker is None and not (name.startswith("compressx_") and inspect.isroutine(getattr(plugin, name))):
            continue
        hook = (marker and marker["specname"]) or name
        if hook not in known:
            raise PluginError(f"{record}: function {name!r} is not a hook; {did_you_mean(hook, known)}")
        if marker is None:
            raise PluginError(f"{record}: function {name!r} lacks @compressx.hookimpl and would never be called")
        expected.append(f"{hook}({', '.join(known[hook].spec.argnames)})")
    try:
        manager.register(plugin, record.name)
    except (pluggy.PluginValidationError, ValueError) as error:
        said = " ".join(str(error).split())
        raise PluginError(f"{record}: {said}; expected {', '.join(expected)}") from error


def _offered_by(manager: pluggy.PluginManager, plugin: object) -> Offers:
    """Return the specs of one plugin. Its hooks are called through pluggy, so that hook wrappers work."""
    implemented = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    if not implemented:
        raise TypeError("it implements no hook; mark its functions with @compressx.hookimpl")
    others = [other for other in manager.get_plugins() if other is not plugin]
    offers: dict[str, dict[str, Any]] = {kind.key: {} for kind in kinds.KINDS}
    for kind in kinds.KINDS:
        results = manager.subset_hook_caller(kind.hook, others)() if kind.hook in implemented else [()]
        if wrong := ["None"] * (not results) + [type(x).__name__ for x in results if not isinstance(x, Iterable)]:
            raise TypeError(f"{kind.hook} returned {wrong[0]}; return a list of {kind.spec.__name__}")
        for spec in itertools.chain.from_iterable(results):
            check_spec(kind, spec)
            if spec.name in offers[kind.key]:
                raise ValueError(f"{kind.hook} offers the {kind.name} {spec.name!r} twice")
            offers[kind.key][spec.name] = spec
    return offers
