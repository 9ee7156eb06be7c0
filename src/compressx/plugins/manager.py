"""The plugin host: imports the plugins that are not blocked, checks their hooks and collects their pruners.

A plugin that cannot be imported is recorded and left out, unless the user relies on it: then it is an error. What a
plugin gets wrong about its hooks is always an error, because a misspelt one would never be called.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import pluggy

from compressx.api import hooks
from compressx.api.pruner import PrunerSpec
from compressx.plugins.discovery import Candidate, Source, blocked_names, discover
from compressx.plugins.file import PluginsFile, read_plugins_file
from compressx.plugins.specs import check_spec
from compressx.runtime.errors import PluginError, did_you_mean

Status: TypeAlias = Literal["loaded", "blocked", "failed"]


@dataclass(frozen=True)
class PluginRecord:
    """What became of one plugin.

    Attributes:
        name: of the entry point, in `plugins.toml`, or the module that `--plugin` named.
        distribution: the installed distribution that has its entry point.
        version: of the distribution.
        source: where it was named first.
        module: `module` or `module:object`.
        status: whether its hooks are called.
        error: the last line of the traceback when it failed.
        pruners: names that it registered; while it is not loaded, those that `plugins.toml` says it would.
        summary: from `plugins.toml`.
    """

    name: str
    distribution: str | None
    version: str | None
    source: Source
    module: str
    status: Status
    error: str | None = None
    pruners: tuple[str, ...] = ()
    summary: str = ""

    def code(self) -> str:
        """Return what tells its code from an earlier state of it, as `code_digest`."""
        return code_digest(self.module.partition(":")[0].partition(".")[0])

    def why_absent(self) -> str:
        """Say what keeps the plugin from being loaded."""
        if self.status == "blocked":
            return f"is blocked; drop -p no:{self.name}, or its name from [load] disabled"
        return f"failed to load: {self.error}"

    def would_offer(self, pruner: str) -> bool:
        """Whether the plugin probably has a pruner: it is declared, or one is named after the other."""
        named_after = (self.name.lower(), (self.distribution or "").lower())
        return pruner in self.pruners or any(
            name == pruner.lower() or (min(len(name), len(pruner)) > 3 and (name in pruner or pruner in name))
            for name in named_after
        )


@dataclass(frozen=True, eq=False)
class Plugins:
    """The plugins of one run, loaded.

    Attributes:
        manager: calls their hooks.
        records: every plugin that was found, in the order of loading.
        pruners: what recipes can name.
    """

    manager: pluggy.PluginManager
    records: tuple[PluginRecord, ...]
    pruners: Mapping[str, PrunerSpec]

    def pruner(self, name: str) -> PrunerSpec:
        """Find a pruner.

        Raises:
            PluginError: there is none. Says so when a blocked or failed plugin would probably have offered it.
        """
        if name in self.pruners:
            return self.pruners[name]
        absent = [r for r in self.records if r.status != "loaded"]
        if likely := [r for r in absent if r.would_offer(name)]:
            reasons = "; ".join(f"plugin {r.name!r} ({r.source}) {r.why_absent()}" for r in likely)
            raise PluginError(f"no pruner {name!r}: {reasons}")
        failed = [r.name for r in absent if r.status == "failed"]
        also = f"; plugins that failed to load: {', '.join(failed)}" if failed else ""
        known = did_you_mean(name, self.pruners) or "none is loaded"
        raise PluginError(f"no pruner {name!r}; {known}{also}; compressx plugins lists what is installed")


def load_plugins(*, modules: Sequence[str] = (), blocked: Collection[str] = (), toml: Path | None = None) -> Plugins:
    """Load the installed plugins, then those of `plugins.toml`, then `modules`.

    Args:
        modules: `MODULE` or `MODULE:OBJECT`, as `--plugin` gives them; each has to load.
        blocked: names of plugins that are not imported, as `-p no:NAME` gives them.
        toml: the project's file; when None, `plugins.toml` in the working folder if there is one.

    Returns:
        A new manager with the plugins registered, the records and the pruners.

    Raises:
        PluginError: a required plugin that fails, a name that is unknown or taken twice, a misspelt hook, a pruner
            offered twice, or a wrong `plugins.toml`.
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
    offered: dict[str, tuple[PrunerSpec, Candidate]] = {}
    for candidate in found.values():
        if candidate.name in left_out:
            records.append(_record(candidate, "blocked"))
            continue
        record, specs = _load(manager, candidate)
        records.append(record)
        for spec in specs:
            if spec.name in offered:
                owner = offered[spec.name][1]
                raise PluginError(f"pruner {spec.name!r} is offered by {owner} and by {candidate}; block one of them")
            offered[spec.name] = (spec, candidate)
    return Plugins(manager, tuple(records), {name: spec for name, (spec, _) in offered.items()})


def _record(
    candidate: Candidate, status: Status, error: str | None = None, pruners: Sequence[str] = ()
) -> PluginRecord:
    return PluginRecord(
        name=candidate.name,
        distribution=candidate.distribution,
        version=candidate.version,
        source=candidate.source,
        module=candidate.module,
        status=status,
        error=error,
        pruners=tuple(pruners if status == "loaded" else candidate.declared or ()),
        summary=candidate.summary,
    )


def _load(manager: pluggy.PluginManager, candidate: Candidate) -> tuple[PluginRecord, Sequence[PrunerSpec]]:
    """Import and register one plugin and ask it for its pruners."""
    if mismatch := candidate.why_not_this_host():
        return _failed(candidate, mismatch), ()
    try:
        with _on_sys_path(candidate.folder):
            plugin = candidate.point().load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a stranger's module does, the others go on
        return _failed(candidate, _told(error), error), ()
    _check_origin(candidate)
    _register(manager, candidate, plugin)
    try:
        specs = _offered_by(manager, plugin)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - likewise
        manager.unregister(plugin)
        return _failed(candidate, _told(error), error), ()
    names = [spec.name for spec in specs]
    if candidate.declared is not None and sorted(candidate.declared) != sorted(names):
        raise PluginError(
            f"{candidate} registers the pruners {', '.join(names) or 'none'}, but plugins.toml says "
            f"{', '.join(candidate.declared) or 'none'}"
        )
    return _record(candidate, "loaded", pruners=names), specs


def _failed(candidate: Candidate, reason: str, error: BaseException | None = None) -> PluginRecord:
    """Record a failure, unless the user relies on the plugin."""
    if candidate.required:
        raise PluginError(f"{candidate} is required and failed to load: {reason}{_advice(candidate, error)}") from error
    return _record(candidate, "failed", reason)


def _told(error: BaseException) -> str:
    """Return the last line of a traceback, and where the file is that cannot be read."""
    told = traceback.format_exception_only(error)[-1].strip()
    return f"{told} ({error.filename}, line {error.lineno})" if isinstance(error, SyntaxError) else told


def _advice(candidate: Candidate, error: BaseException | None) -> str:
    missing = isinstance(error, ModuleNotFoundError) and candidate.module.startswith(error.name or " ")
    return "; install it, or list it in plugins.toml with the path of its folder" if missing else ""


def _check_origin(candidate: Candidate) -> None:
    """Refuse another module of the same name where `plugins.toml` says which folder the plugin is in."""
    if candidate.folder is None:
        return
    module = sys.modules[candidate.module.partition(":")[0]]
    origin = Path(getattr(module, "__file__", None) or "/").resolve()
    if not origin.is_relative_to(candidate.folder):
        raise PluginError(
            f"{candidate}: module {module.__name__!r} came from {origin}, not from {candidate.folder}; "
            "another module has its name, so rename it"
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


def _register(manager: pluggy.PluginManager, candidate: Candidate, plugin: object) -> None:
    """Register a plugin if all of its hooks are hooks of ours and marked as such."""
    known = [name for name, _ in inspect.getmembers(hooks, inspect.isfunction) if name.startswith("compressx_")]
    implemented = list(_hooks_of(candidate, plugin, known))
    try:
        manager.register(plugin, candidate.name)
    except (pluggy.PluginValidationError, ValueError) as error:
        expected = ", ".join(_written(manager, name) for name in implemented)
        raise PluginError(f"{candidate}: {' '.join(str(error).split())}; expected {expected}") from error


def _written(manager: pluggy.PluginManager, hook: str) -> str:
    spec = getattr(manager.hook, hook).spec
    return f"{hook}({', '.join(spec.argnames)})"


def _hooks_of(candidate: Candidate, plugin: object, known: Sequence[str]) -> Iterator[str]:
    """Yield the hooks that a plugin implements; refuse what looks like a hook and would never be called."""
    for name in dir(plugin):
        found = inspect.getattr_static(plugin, name, None)
        function = getattr(found, "__func__", found)  # static and class methods
        if not inspect.isroutine(function):
            continue
        marker = getattr(function, "compressx_impl", None)
        if marker is None and not name.startswith("compressx_"):
            continue
        hook = (marker and marker["specname"]) or name
        if hook not in known:
            raise PluginError(f"{candidate}: function {name!r} is no hook; {did_you_mean(hook, known)}")
        if marker is None:
            raise PluginError(f"{candidate}: function {name!r} lacks @compressx.hookimpl and would never be called")
        yield hook


def _offered_by(manager: pluggy.PluginManager, plugin: object) -> Sequence[PrunerSpec]:
    """Ask one plugin for its pruners, through pluggy, so that a wrapper of its own works."""
    implemented = [caller.name for caller in manager.get_hookcallers(plugin) or ()]
    if not implemented:
        raise TypeError("it implements no hook; mark its functions with @compressx.hookimpl")
    if "compressx_pruners" not in implemented:
        return ()
    others = [other for other in manager.get_plugins() if other is not plugin]
    results = manager.subset_hook_caller("compressx_pruners", others)()
    if not results:
        raise TypeError("compressx_pruners returned None; return a list of PrunerSpec")
    specs = [spec for result in results for spec in result]
    for spec in specs:
        check_spec(spec)
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError(f"compressx_pruners offers a pruner twice: {', '.join(spec.name for spec in specs)}")
    return specs


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
