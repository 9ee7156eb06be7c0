"""Import the plugins that are not blocked, check their hooks and collect what they offer.

A plugin that cannot be imported is recorded and skipped; if it is required, that is an error. Invalid hooks are always
an error, because a misspelt hook would never be called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import itertools
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, TypeAlias

import pluggy
from packaging.specifiers import SpecifierSet

from compressx.api import hooks
from compressx.plugins import kinds
from compressx.plugins.discovery import GROUP, PluginRecord, PluginsFile, blocked_names, discover, read_plugins_file
from compressx.plugins.kinds import Kind, Spec, check_spec
from compressx.runtime.code import __version__
from compressx.runtime.errors import CompressxError, PluginError, did_you_mean

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
        if likely := [r for r in absent if any(r.would_offer(kind.key, name) for kind in wanted)]:
            reasons = "; ".join(f"plugin {r.name!r} ({r.source}) {r.why_absent()}" for r in likely)
            return f"{none}: {reasons}"
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
        PluginError: a required plugin that fails, an unknown or duplicate name, an invalid hook, a name offered twice,
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
    needed = record.requires_host
    if needed is not None and not SpecifierSet(needed).contains(__version__, prereleases=True):
        return _failed(record, f"it needs compressx {needed}, but this is {__version__}; update one of the two"), {}
    try:
        with (
            _on_sys_path(record.folder or (Path.cwd() if record.asked else None)),
            contextlib.redirect_stdout(sys.stderr),  # where results of commands go, it must not print
        ):
            plugin = EntryPoint(record.name, record.module, GROUP).load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken plugin must not stop the others
        return _failed(record, _message(error) + _where_looked(record, error), error), {}
    _check_origin(record)
    _register(manager, record, plugin)
    try:
        specs = _offered_by(manager, plugin)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - likewise
        manager.unregister(plugin)
        return _failed(record, _message(error), error), {}
    offers = {key: tuple(named) for key, named in specs.items()}
    for key, declared in record.offers.items():
        if sorted(declared) != sorted(offers[key]):
            raise PluginError(
                f"{record} registers the {key} {', '.join(offers[key]) or 'none'}, but plugins.toml declares "
                f"{', '.join(declared) or 'none'}"
            )
    return replace(record, status="loaded", offers=offers), specs


def _failed(record: PluginRecord, reason: str, error: BaseException | None = None) -> PluginRecord:
    """Record a failure; raise it if the plugin is required."""
    if record.required:
        raise PluginError(f"{record} is required and failed to load: {reason}") from error
    return replace(record, status="failed", error=reason)


_NOT_THEIRS = {Path(str(module.__file__)).parent for module in (importlib, importlib.metadata, pluggy)}
"""Folders of the code between the host and a plugin's."""


def _message(error: BaseException) -> str:
    """Return the last line of a traceback, with the file and line of the plugin's that it comes from."""
    message = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, SyntaxError):
        return f"{message} ({error.filename}, line {error.lineno})"
    passed = {*_NOT_THEIRS, Path(__file__).parent}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent not in passed]
    frames = [f for f in frames if not f.filename.startswith("<")]  # "<frozen importlib._bootstrap>"
    own = [f for f in frames if Path(f.filename).is_relative_to(Path(frames[0].filename).parent)]
    told = not own or isinstance(error, CompressxError)  # these say themselves what to do
    return message if told else f"{message} ({own[-1].filename}, line {own[-1].lineno})"


def _where_looked(record: PluginRecord, error: BaseException) -> str:
    """Say where the plugin's own module was looked for, if it is what is missing."""
    if not isinstance(error, ModuleNotFoundError) or not record.module.startswith(error.name or " "):
        return ""
    place = record.folder or (f"the working directory {Path.cwd()}" if record.asked else None)
    return (
        f"; looked in {f'{place} and in ' if place else ''}installed packages; install it, or give the path of its "
        "file to --plugin, or that of its folder in plugins.toml"
    )


def _check_origin(record: PluginRecord) -> None:
    """Refuse a module from another folder than the one in `plugins.toml`."""
    if record.folder is None:
        return
    module = sys.modules[record.module.partition(":")[0]]
    origin = Path(getattr(module, "__file__", None) or "/").resolve()
    if not origin.is_relative_to(record.folder):
        raise PluginError(
            f"{record}: module {module.__name__!r} was imported from {origin}, not from {record.folder}; "
            "another module has the same name, so rename it"
        )


@contextlib.contextmanager
def _on_sys_path(folder: Path | None) -> Iterator[None]:
    if folder is None:
        yield
        return
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


def _register(manager: pluggy.PluginManager, record: PluginRecord, plugin: object) -> None:
    """Register a plugin if all of its hooks exist and are marked as implementations."""
    implemented = list(_hooks_of(record, plugin, vars(manager.hook)))
    try:
        manager.register(plugin, record.name)
    except (pluggy.PluginValidationError, ValueError) as error:
        expected = ", ".join(f"{hook}({', '.join(getattr(manager.hook, hook).spec.argnames)})" for hook in implemented)
        raise PluginError(f"{record}: {' '.join(str(error).split())}; expected {expected}") from error


def _hooks_of(record: PluginRecord, plugin: object, known: Collection[str]) -> Iterator[str]:
    """Yield the hooks that a plugin implements; refuse functions that look like hooks but would never be called."""
    for name in dir(plugin):
        found = inspect.getattr_static(plugin, name, None)
        function = getattr(found, "__func__", found)  # static and class methods
        marker = getattr(function, "compressx_impl", None)
        if not inspect.isroutine(function) or (marker is None and not name.startswith("compressx_")):
            continue
        hook = (marker and marker["specname"]) or name
        if hook not in known:
            raise PluginError(f"{record}: function {name!r} is not a hook; {did_you_mean(hook, known)}")
        if marker is None:
            raise PluginError(f"{record}: function {name!r} lacks @compressx.hookimpl and would never be called")
        yield hook


def _offered_by(manager: pluggy.PluginManager, plugin: object) -> Offers:
    """Return the specs of one plugin. Its hooks are called through pluggy, so that hook wrappers work."""
    implemented = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    if not implemented:
        raise TypeError("it implements no hook; mark its functions with @compressx.hookimpl")
    others = [other for other in manager.get_plugins() if other is not plugin]
    offers: dict[str, dict[str, Any]] = {kind.key: {} for kind in kinds.KINDS}
    for kind in kinds.KINDS:
        results = manager.subset_hook_caller(kind.hook, others)() if kind.hook in implemented else [()]
        if not results:
            raise TypeError(f"{kind.hook} returned None; return a list of {kind.spec.__name__}")
        if other := [type(found).__name__ for found in results if not isinstance(found, Iterable)]:
            raise TypeError(f"{kind.hook} returned {other[0]}; return a list of {kind.spec.__name__}")
        for spec in itertools.chain.from_iterable(results):
            check_spec(kind, spec)
            if spec.name in offers[kind.key]:
                raise ValueError(f"{kind.hook} offers the {kind.name} {spec.name!r} twice")
            offers[kind.key][spec.name] = spec
    return offers
