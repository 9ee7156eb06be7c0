"""Whether the model of a recipe with `shrink: true` can become smaller, found before weights are read."""

from __future__ import annotations

from typing import Any

import torch

from compressx.api.patterns import Structured
from compressx.models.shrink import Kept, smaller
from compressx.planning.plan import Plan
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import RecipeError


def check_shrink(loaded: LoadedRecipe, plan: Plan, skeleton: Any) -> None:
    """Refuse `shrink` where nothing goes whole, or where the config cannot describe the smaller model.

    Which units go is not known yet; the first of them stand for those that will stay.

    Args:
        loaded: the recipe with its places in the file.
        plan: the plan.
        skeleton: the model; only shapes are read.

    Raises:
        RecipeError: no rule has a pattern of units.
        UnsupportedModelError: the model cannot be described, with the reason.
    """
    if not loaded.recipe.shrink:
        return
    patterns = {id(x.pattern.units): x.pattern for x in plan.linears if isinstance(x.pattern, Structured)}
    depth = plan.depth
    if not patterns and depth is None:
        raise RecipeError(
            f"{loaded.where('shrink')}: no rule drops anything whole, so no smaller dense model is left; give a rule "
            "pattern: neurons, kv-groups, experts or blocks, or remove shrink"
        )
    kept = [
        Kept(p.units, torch.arange(p.units.count) < p.units.count - p.dropped)
        for p in patterns.values()
        if p.unit != "blocks"
    ]
    with loaded.at("shrink"):
        smaller(skeleton, kept, () if depth is None else depth.blocks[: depth.pattern.dropped])
