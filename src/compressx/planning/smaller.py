"""Whether the model of a recipe with `shrink: true` can become smaller, found before weights are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from compressx.api.patterns import Structured
from compressx.planning.plan import Plan, PlannedDepth
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import RecipeError, UnsupportedModelError
from compressx.shrink.cuts import Kept, smaller


def check_shrink(loaded: LoadedRecipe, plan: Plan, skeleton: Any) -> None:
    """Refuse `shrink` where nothing goes whole, or where the config cannot describe the smaller model.

    Which go is not known yet: the first units stand for those that will stay, and of blocks the first, and the last,
    for those that will go.

    Raises:
        RecipeError: no rule has a pattern of units.
        UnsupportedModelError: the model cannot be described, with the reason.
    """
    if not loaded.recipe.shrink:
        return
    patterns = {id(x.pattern.units): x.pattern for x in plan.linears if isinstance(x.pattern, Structured)}
    if not patterns and plan.depth is None:
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
        try:
            for gone in _gone(plan.depth):
                smaller(skeleton, kept, gone)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}{_told_others(skeleton, patterns.values())}") from error


def _gone(depth: PlannedDepth | None) -> tuple[tuple[str, ...], ...]:
    """Return which blocks to try as those that go."""
    if depth is None:
        return ((),)
    count = depth.pattern.dropped
    return depth.blocks[:count], depth.blocks[len(depth.blocks) - count :]


def _told_others(skeleton: Any, patterns: Iterable[Structured]) -> str:
    """Return how many heads could be left, if it is their number that the config refuses."""
    heads = [p for p in patterns if p.unit == "kv-groups"]
    asked = {(p.units.count, p.dropped) for p in heads}
    if len(asked) != 1:
        return ""
    ((count, dropped),) = asked
    able = []
    for left in range(1, count):
        with contextlib.suppress(UnsupportedModelError):
            smaller(skeleton, [Kept(p.units, torch.arange(count) < left) for p in heads])
            able.append(left)
    if not able or count - dropped in able:
        return ""
    return f"; sparsities of kv-groups that fit: {', '.join(f'{1 - n / count:.4g} ({n} left)' for n in able)}"
