"""Which plugins there are, from three sources, before any of them is imported."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.specifiers import SpecifierSet

from compressx._version import __version__
from compressx.plugins.file import MODULE, PluginsFile
from compressx.runtime.errors import PluginError, did_you_mean

Source: TypeAlias = Literal["entry point", "plugins.toml", "--plugin"]

GROUP = "compressx"
"""The entry point group of plugins."""


@dataclass(frozen=True)
class Candidate:
    """A plugin that could be imported.

    Attributes:
        name: of the entry point, in `plugins.toml`, or the module that `--plugin` named.
        module: `module` or `module:object`.
        source: where it was named first.
        place: the same for messages: the distribution, the line of `plugins.toml`, or the argument.
        distribution: the installed distribution that has its entry point.
        version: of the distribution.
        folder: where its module has to come from, or None for anywhere.
        declared: the pruners that it has to register, or None for any.
        summary: from `plugins.toml`.
        requires_host: versions of compressx that it works with, as pip writes them, or None for any.
        required: whether it is an error when it cannot be loaded.
        asked: whether `--plugin` named it.
    """

    name: str
    module: str
    source: Source
    place: str
    distribution: str | None = None
    version: str | None = None
    folder: Path | None = None
    declared: tuple[str, ...] | None = None
    summary: str = ""
    requires_host: str | None = None
    required: bool = False
    asked: bool = False

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.place})"

    def point(self) -> EntryPoint:
        """Return the entry point that imports it."""
        return EntryPoint(self.name, self.module, GROUP)

    def why_not_this_host(self) -> str | None:
        """Say that it works with other versions of compressx, if it does."""
        if self.requires_host is None or SpecifierSet(self.requires_host).contains(__version__, prereleases=True):
            return None
        return f"it needs compressx {self.requires_host}, and this is {__version__}; update one of the two"


def discover(modules: Sequence[str], file: PluginsFile) -> Mapping[str, Candidate]:
    """Find every plugin: installed ones by name, then those of the file and of `modules` in order.

    A plugin that several sources name alike, with the same module, is one plugin.

    Raises:
        PluginError: one name for two modules, one module under two names, or a required plugin that is nowhere.
    """
    found: dict[str, Candidate] = {}
    for candidate in [*_installed(file), *_listed(file), *_asked(modules)]:
        _add(found, candidate)
    for name in file.load.required:
        if name not in found:
            hint = did_you_mean(name, found) or "none is installed or listed"
            raise PluginError(f"{file.where('load', 'required')}: required plugin {name!r} is not there; {hint}")
        found[name] = replace(found[name], required=True)
    return found


def blocked_names(found: Mapping[str, Candidate], blocked: Collection[str], file: PluginsFile) -> frozenset[str]:
    """Return the names of the plugins that must not be imported.

    `-p no:NAME` outweighs `[load] required`: who types it knows.

    Raises:
        PluginError: a name that no plugin has, or a plugin that `--plugin` asks for at the same time.
    """
    known = {*found, *(p.name for p in entry_points(group=GROUP))}
    asked_out = [(name, f"-p no:{name}") for name in blocked]
    for name, place in [*asked_out, *((name, file.where("load", "disabled")) for name in file.load.disabled)]:
        if name not in known:
            raise PluginError(f"{place}: no plugin is named {name!r}; {did_you_mean(name, known) or 'there is none'}")
        if name in found and found[name].asked:
            raise PluginError(f"{place}: {name!r} is blocked, and --plugin asks for it; leave one of the two out")
    return frozenset(blocked) | frozenset(file.load.disabled)


def _installed(file: PluginsFile) -> Iterator[Candidate]:
    points: Iterable[EntryPoint] = entry_points(group=GROUP) if file.load.entry_points else ()
    for point in sorted(points, key=lambda p: (p.name, p.value)):
        module = point.value.partition("[")[0].replace(" ", "")  # extras may follow
        name, version = (point.dist.metadata["Name"], point.dist.version) if point.dist else (None, None)
        place = f"entry point of {name} {version}" if name else f"entry point {point.value}"
        yield Candidate(point.name, module, "entry point", place, name, version)


def _listed(file: PluginsFile) -> Iterator[Candidate]:
    for i, (plugin, folder) in enumerate(zip(file.plugins, file.folders, strict=True)):
        yield Candidate(
            plugin.name,
            plugin.module,
            "plugins.toml",
            file.where("plugin", i),
            folder=folder,
            declared=None if plugin.pruners is None else tuple(plugin.pruners),
            summary=plugin.summary,
            requires_host=plugin.requires_host,
        )


def _asked(modules: Sequence[str]) -> Iterator[Candidate]:
    for module in modules:
        if not re.match(MODULE, module) or (module.endswith(".py") and Path(module).exists()):
            raise PluginError(
                f"--plugin {module!r} is no module; expected MODULE or MODULE:OBJECT, such as my_pruner for "
                "my_pruner.py in the current folder; one that lies elsewhere is listed in plugins.toml with its folder"
            )
        yield Candidate(module, module, "--plugin", f"--plugin {module}", required=True, asked=True)


def _add(found: dict[str, Candidate], new: Candidate) -> None:
    """Add a plugin, or add what `new` knows to the same plugin found before."""
    twin = next((c for c in found.values() if c.module == new.module), None)
    old = twin if twin is not None and new.asked else found.get(new.name)
    if old is None and twin is not None:
        raise PluginError(f"{new} is the same module as {twin}, {new.module}; give both the same name")
    if old is None:
        found[new.name] = new
    elif old.module != new.module:
        raise PluginError(
            f"{new} and {old} share a name, but one is {new.module} and the other {old.module}; rename one"
        )
    else:
        found[old.name] = replace(
            old,
            place=f"{old.place}, {new.place}",
            folder=old.folder or new.folder,
            declared=new.declared if old.declared is None else old.declared,
            summary=old.summary or new.summary,
            requires_host=old.requires_host or new.requires_host,
            required=old.required or new.required,
            asked=old.asked or new.asked,
        )
