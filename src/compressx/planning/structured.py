"""Rules that prune units: which units a model has, and whether a rule takes them whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressx.api.patterns import count_dropped
from compressx.api.pruner import Block
from compressx.api.units import UnitKind, Units
from compressx.models.architecture import Architecture, text_config
from compressx.models.units import find_units, router_of
from compressx.planning.targets import Assigned
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import Mistakes, RecipeError, UnsupportedModelError


def units_of_rules(
    loaded: LoadedRecipe, found: Architecture, skeleton: Any, mistakes: Mistakes
) -> dict[int, dict[str, Units]]:
    """Find the units that rules with a pattern of units can take; whole blocks are not in blocks: see `depth`.

    Returns:
        By index of the rule, each linear's units, by its name.
    """
    known: dict[UnitKind, dict[str, Units]] = {}
    units: dict[int, dict[str, Units]] = {}
    for index, rule in enumerate(loaded.recipe.prune):
        if not isinstance(rule.pattern, str) or rule.pattern == "blocks":
            continue
        with mistakes.collected():
            try:
                if rule.pattern not in known:
                    known[rule.pattern] = _in_model(rule.pattern, found, skeleton)
                units[index] = known[rule.pattern]
            except UnsupportedModelError as error:
                place = loaded.where("prune", index, "pattern")
                instead = "without a pattern the rule prunes single weights"
                raise UnsupportedModelError(f"{place}: no block has {rule.pattern}: {error}; {instead}") from error
    return units


def _in_model(kind: UnitKind, found: Architecture, skeleton: Any) -> dict[str, Units]:
    """Return the units of every linear that belongs to some; blocks without are passed over if others have them."""
    units: dict[str, Units] = {}
    refusal: UnsupportedModelError | None = None
    for index, (fqn, module) in enumerate(found.blocks.items()):
        linears = found.inside(fqn)
        try:
            for one in find_units(kind, Block(index, fqn, module, linears, (), text_config(skeleton))):
                units |= dict.fromkeys(one.owners, one)
        except UnsupportedModelError as error:
            refusal = refusal or error
    if not units and refusal is not None:
        raise refusal
    return units


def check_experts(
    loaded: LoadedRecipe, units: Mapping[int, Mapping[str, Units]], found: Architecture, skeleton: Any,
    mistakes: Mistakes,
) -> None:  # fmt: skip
    """Refuse to drop experts that a router cannot leave out, or so many that it has too few left to choose from."""
    config = text_config(skeleton)
    for index, rule in enumerate(loaded.recipe.prune):
        if rule.pattern != "experts":
            continue
        place = loaded.where("prune", index, "pattern")
        if not loaded.recipe.shrink:
            mistakes.add(
                RecipeError(
                    f"{place}: experts go with shrink: true only, in a run that writes its output: without "
                    "compressx, a router as large as before would choose them; add it, or prune neurons of the experts"
                )
            )
            return
        for one in {id(x): x for x in units[index].values()}.values():
            fqn = found.block_of(next(iter(one.owners)))
            block = Block([*found.blocks].index(fqn), fqn, found.blocks[fqn], found.linears, (), config)
            try:
                _, router = router_of(block, one)
            except UnsupportedModelError as error:
                mistakes.add(UnsupportedModelError(f"{place}: {error}"))
                return
            chosen = int(getattr(router, "top_k", getattr(config, "num_experts_per_tok", 1)))
            left = one.count - count_dropped(rule.sparsity or 0.0, one.count)
            if left < chosen:
                mistakes.add(
                    RecipeError(
                        f"{loaded.where('prune', index, 'sparsity')}: sparsity {rule.sparsity:g} keeps {left} of the "
                        f"{one}, but the router chooses {chosen} for each token; at most "
                        f"{(one.count - chosen) / one.count:.6g} leaves it enough"
                    )
                )
                return


def check_whole(
    loaded: LoadedRecipe, units: Mapping[int, Mapping[str, Units]], assigned: Assigned, mistakes: Mistakes
) -> None:
    """Refuse rules that take some linears of a unit and not the others; of each rule the first is told."""
    for index, owned in units.items():
        for name, one in owned.items():
            if assigned.taken.get(name) != index:
                continue
            left = next((n for n in one.owners if assigned.taken.get(n) != index), None)
            if left is not None:
                other = assigned.taken.get(left)
                why = "is taken by an earlier rule" if other is not None and other < index else "is not"
                why = f"is ignored by {assigned.ignored[left]}" if left in assigned.ignored else why
                mistakes.add(
                    RecipeError(
                        f"{loaded.where('prune', index, 'targets')}: {one.kind} go whole, but {name} is a target of "
                        f"prune[{index}] and {left} {why}; take all of {', '.join(one.owners)}"
                    )
                )
                break
