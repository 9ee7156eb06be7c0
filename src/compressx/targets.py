"""Which rule takes which linear: the first one whose targets match it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from compressx.architecture import Architecture
from compressx.errors import RecipeError, did_you_mean
from compressx.recipe import LoadedRecipe


def match_targets(loaded: LoadedRecipe, found: Architecture) -> dict[str, int]:
    """Give each rule the linears that it matches and no earlier rule took.

    Args:
        loaded: the recipe with its places in the file.
        found: the model's linears; those outside the blocks are matched only by targets that spell their last part.

    Returns:
        By linear name, the position of its rule in the recipe's `prune`. Linears that no rule names are absent.

    Raises:
        RecipeError: a target that matches nothing, or a rule whose linears are all taken, with its place.
    """
    taken: dict[str, int] = {}
    for index, rule in enumerate(loaded.recipe.prune):
        matched = [n for i, target in enumerate(rule.targets) for n in _matching(loaded, index, i, target, found)]
        fresh = [n for n in dict.fromkeys(matched) if n not in taken]
        if not fresh:
            earlier = taken[matched[0]]
            raise RecipeError(
                f"{loaded.where('prune', index)}: prune[{index}] is shadowed: all {len(set(matched))} linears that it "
                f"matches are already taken, {matched[0]} by prune[{earlier}] at {loaded.where('prune', earlier)}; the "
                "first matching rule wins, so put the narrower rule first"
            )
        taken |= dict.fromkeys(fresh, index)
    return taken


def _matching(loaded: LoadedRecipe, index: int, position: int, target: str, found: Architecture) -> list[str]:
    """Return the linears that one target of a rule matches, at least one."""
    names = [n for n in found.linears if fnmatchcase(n, target)]
    names += [n for n in found.outside if _names_outright(target, n)]
    if not names:
        where = loaded.where("prune", index, "targets", position)
        raise _no_match(where, target, {**found.linears, **found.outside}, found.unprunable)
    return names


def _names_outright(target: str, name: str) -> bool:
    """Whether `target` matches a name and spells its last part, as a bare `*` does not."""
    return fnmatchcase(name, target) and target.endswith(name.rsplit(".", 1)[-1])


def _no_match(where: str, target: str, linears: Mapping[str, Any], unprunable: Mapping[str, str]) -> RecipeError:
    for name, reason in unprunable.items():
        if _names_outright(target, name):
            return RecipeError(f"{where}: target {target!r} names {name}, which is not prunable: {reason}")
    kinds = sorted({f"*.{n.rsplit('.', 1)[-1]}" if "." in n else n for n in linears})
    return RecipeError(f"{where}: target {target!r} matches no linear; {did_you_mean(target, kinds)}")
