"""The plugins that the package brings along, and their pruners and token selectors, each by name."""

from __future__ import annotations

from typing import Any

from compressx import PrunerSpec, TokenSelectorSpec, load_plugins

_LOADED = load_plugins()
PLUGINS = {r.name: r for r in _LOADED.records if r.distribution == "compressx"}


def _own(key: str) -> dict[str, Any]:
    return {name: _LOADED.offers[key][name] for record in PLUGINS.values() for name in record.offers[key]}


BUILT_IN: dict[str, PrunerSpec] = _own("pruners")
SELECTORS: dict[str, TokenSelectorSpec] = _own("token_selectors")
