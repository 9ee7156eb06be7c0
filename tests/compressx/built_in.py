"""The pruners that the package brings along, by name: what its entry points offer."""

from __future__ import annotations

from compressx.plugins import load_plugins

_PLUGINS = load_plugins()
_NAMES = [name for r in _PLUGINS.records if r.distribution == "compressx" for name in r.offers["pruners"]]
BUILT_IN = {name: _PLUGINS.offers["pruners"][name] for name in _NAMES}
