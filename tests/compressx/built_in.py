"""The pruners and token selectors that the package brings along, by name: what its entry points offer."""

from __future__ import annotations

from typing import Any

from compressx import PrunerSpec, TokenSelectorSpec, load_plugins

_PLUGINS = load_plugins()


def _own(key: str) -> dict[str, Any]:
    names = [name for r in _PLUGINS.records if r.distribution == "compressx" for name in r.offers[key]]
    return {name: _PLUGINS.offers[key][name] for name in names}


BUILT_IN: dict[str, PrunerSpec] = _own("pruners")
SELECTORS: dict[str, TokenSelectorSpec] = _own("token_selectors")
