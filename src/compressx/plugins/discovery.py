"""Find plugins from entry points, `plugins.toml` and `--plugin`, without importing them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import Distribution, entry_points
from pathlib import Path

from compressx.plugins.file import MODULE, PluginsFile
from compressx.plugins.record import PluginRecord
from compressx.runtime.errors import PluginError, did_you_mean, nearest

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
