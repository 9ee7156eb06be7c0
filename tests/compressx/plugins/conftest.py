"""Plugins and installed distributions that a test writes itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compressx.plugins.discovery
from compressx.runtime.errors import PluginError

OFFERS = """
from pydantic import BaseModel
import compressx

class Options(BaseModel):
    pass

@compressx.hookimpl
def compressx_pruners():
    return [compressx.PrunerSpec(name, "a test", Options, lambda options: None) for name in {names!r}]
"""


class Site:
    """A folder on sys.path with modules and distributions in it, the only ones whose entry points are seen."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: set[str] = set()

    def module(self, name: str, body: str, folder: str = ".") -> None:
        path = self.folder / folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(body)
        self.modules.add(name)
        importlib.invalidate_caches()

    def offers(self, module: str, *pruners: str, folder: str = ".") -> None:
        self.module(module, OFFERS.format(names=pruners), folder)

    def install(self, distribution: str, **points: str) -> None:
        info = self.folder / f"{distribution}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        lines = [f"{name.replace('_', '-')} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[compressx]", *lines]))

    def toml(self, text: str) -> None:
        (self.folder / "plugins.toml").write_text(text)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    site = Site(tmp_path)

    def installed_here(**wanted: str) -> importlib.metadata.EntryPoints:
        found = importlib.metadata.distributions(path=[str(tmp_path)])
        points = [point for distribution in found for point in distribution.entry_points]
        return importlib.metadata.EntryPoints(points).select(**wanted)

    monkeypatch.setattr(compressx.plugins.discovery, "entry_points", installed_here)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield site
    for name in site.modules:
        sys.modules.pop(name, None)


def listed(name: str, module: str, **keys: Any) -> str:
    """Return the table of a plugin in plugins.toml, a line for each key."""
    keys = {"name": name, "module": module} | keys
    return "\n".join(["[[plugin]]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""])


def refusal(load: Callable[[], object]) -> str:
    with pytest.raises(PluginError) as caught:
        load()
    return str(caught.value)
