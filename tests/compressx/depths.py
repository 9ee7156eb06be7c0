"""Plans that drop whole blocks, made of a recipe as a run makes them."""

from __future__ import annotations

from typing import Any

from compressx.planning.make import make_plan
from compressx.planning.plan import Plan
from compressx.plugins.manager import Plugins, load_plugins
from compressx.recipe.schema import LoadedRecipe, load_recipe

THIRD = {"targets": ["*"], "pruner": "depth", "pattern": "blocks", "sparsity": 0.34}
"""One of the three blocks of a tiny model."""


def planned(model: Any, *rules: dict[str, Any], plugins: Plugins | None = None, **sections: Any) -> Plan:
    """Plan rules for a model; by default one that drops one of three blocks."""
    return make_plan(loaded(*rules, **sections), plugins or load_plugins(), model)


def loaded(*rules: dict[str, Any], **sections: Any) -> LoadedRecipe:
    """Return a recipe of rules."""
    recipe = {
        "model": "org/model",
        "calibration": {"dataset": {"text": "t.txt"}, "samples": 8, "sequence_length": 32},
        "prune": list(rules) or [THIRD],
        "output": "out",
        **sections,
    }
    return load_recipe(recipe)
