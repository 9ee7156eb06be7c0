"""Rules that prune units: which a model has, whether a rule takes them whole, and which whole blocks may be removed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from compressx.api.patterns import Owners, Structured, UnitKind, Units, count_dropped
from compressx.api.pruner import Block
from compressx.models.architecture import Architecture, text_config
from compressx.models.units import find_units, router_of
from compressx.planning.plan import PlannedDepth, PlannedRule
from compressx.planning.targets import Assigned
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import Mistakes, RecipeError, UnsupportedModelError

WIDTHS = 32
"""Of which numbers of neurons are multiples, if nothing else is said: the weights that GGUF's types quantize at once.

GPUs multiply other widths more slowly, too.
"""


def units_of_rules(
    loaded: LoadedRecipe, found: Architecture, skeleton: Any, mistakes: Mistakes
) -> dict[int, dict[str, Units]]:
    """Find each linear's units, by index of the rule and by name; for whole blocks see `find_depth`."""
    units: dict[int, dict[str, Units]] = {}
    for index, rule in enumerate(loaded.recipe.prune):
        if isinstance(rule.pattern, str) and rule.pattern != "blocks":
            with mistakes.collected(), loaded.at("prune", index, "pattern"):
                units[index] = _in_model(rule.pattern, found, skeleton)
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
        instead = "without a pattern the rule prunes single weights"
        raise UnsupportedModelError(f"no block has {kind}: {refusal}; {instead}") from refusal
    return units


def check_taken(
    loaded: LoadedRecipe, units: Mapping[int, Mapping[str, Units]], assigned: Assigned, found: Architecture,
    skeleton: Any, mistakes: Mistakes,
) -> None:  # fmt: skip
    """Refuse rules that take some linears of a unit and not the others, or experts that cannot be removed."""
    for index, owned in units.items():
        with mistakes.collected():
            _check_whole(loaded, index, owned, assigned)
        if loaded.recipe.prune[index].pattern == "experts":
            with mistakes.collected():
                _check_experts(loaded, index, owned, found, skeleton)


def _check_whole(loaded: LoadedRecipe, index: int, owned: Mapping[str, Units], assigned: Assigned) -> None:
    for name, one in owned.items():
        left = next((n for n in one.owners if assigned.taken.get(n) != index), None)
        if assigned.taken.get(name) == index and left is not None:
            other = assigned.taken.get(left)
            why = "is taken by an earlier rule" if other is not None and other < index else "is not"
            why = f"is ignored by {assigned.ignored[left]}" if left in assigned.ignored else why
            message = f"{one.kind} are removed whole, but {name} is a target of prune[{index}] and {left} {why}"
            loaded.refuse(f"{message}; take all of {', '.join(one.owners)}", "prune", index, "targets")


def _check_experts(
    loaded: LoadedRecipe, index: int, owned: Mapping[str, Units], found: Architecture, skeleton: Any
) -> None:
    """Refuse to drop experts that a router cannot leave out, or so many that it has too few left to choose from."""
    config, sparsity = text_config(skeleton), loaded.recipe.prune[index].sparsity or 0.0
    if not loaded.recipe.shrink:
        message = (
            "experts go with shrink: true only, in a run that writes its output: without compressx, a router as large "
            "as before would choose them; add it, or prune neurons of the experts"
        )
        loaded.refuse(message, "prune", index, "pattern")
    for one in {id(x): x for x in owned.values()}.values():
        fqn = found.block_of(next(iter(one.owners)))
        block = Block([*found.blocks].index(fqn), fqn, found.blocks[fqn], found.linears, (), config)
        with loaded.at("prune", index, "pattern"):
            _, router = router_of(block, one)
        chosen = int(getattr(router, "top_k", getattr(config, "num_experts_per_tok", 1)))
        left = one.count - count_dropped(sparsity, one.count)
        if left < chosen:
            most = (one.count - chosen) / one.count
            message = f"sparsity {sparsity:g} keeps {left} of the {one}, but the router chooses {chosen} for each token"
            loaded.refuse(f"{message}; at most {most:.6g} leaves it enough", "prune", index, "sparsity")


def multiple_of(loaded: LoadedRecipe, index: int, units: Units) -> int:
    """Return of what the number of kept units is a multiple: what the rule says, of neurons 32 where it divides."""
    asked, count = loaded.recipe.prune[index].multiple, units.count
    if asked is None:
        return WIDTHS if units.kind == "neurons" and count % WIDTHS == 0 else 1
    if count % asked:
        fits = math.gcd(asked, count)
        loaded.refuse(f"multiple {asked} does not divide the {units}; {fits} does", "prune", index, "multiple")
    return asked


def check_count(sparsity: float, dropped: int, count: int, what: str, step: int = 1) -> None:
    """Refuse a sparsity that drops none of `count` weights or units, or all."""
    one = f"{step}, of which the number of kept ones is a multiple" if step > 1 else "one"
    if sparsity > 0 and dropped == 0:
        least = f"at least {step / count:.6g} drops {one}" if count > step else f"a block keeps at least {one}"
        raise RecipeError(f"sparsity {sparsity:g} drops none of the {what}; {least}")
    if dropped == count:
        most = f"at most {(count - step) / count:.6g} keeps {one}"
        raise RecipeError(f"sparsity {sparsity:g} keeps none of the {what}; {most}")


def check_units(pattern: Structured) -> None:
    """Refuse a sparsity that drops no unit, or all."""
    count = pattern.units.count
    check_count(pattern.sparsity, pattern.dropped, count, str(pattern.units), pattern.multiple)


def find_depth(
    loaded: LoadedRecipe, found: Architecture, assigned: Assigned, rules: Sequence[PlannedRule], mistakes: Mistakes
) -> PlannedDepth | None:
    """Return which blocks may be removed; None when no rule drops blocks.

    `mistakes` receives a block of which some linears are targets and others are not, a sparsity that drops no block or
    all, a second such rule, and a reconstructor, which has nothing to do.
    """
    index, targeted = next(iter(assigned.in_blocks.items()), (None, ()))
    if index is None:
        return None
    rule = loaded.recipe.prune[index]
    for other in [i for i in assigned.in_blocks if i != index]:
        with mistakes.collected():
            message = f"blocks are dropped by prune[{index}] already; put the targets of both in one rule"
            loaded.refuse(f"{message}, so that all blocks compete", "prune", other, "pattern")
    if rule.reconstruct is not None:
        with mistakes.collected():
            message = "a removed block has no weights left to update; drop it, and train the blocks that are kept"
            loaded.refuse(message, "prune", index, "reconstruct")
    names = set(targeted)
    inside = {fqn: linears for fqn in found.blocks if names & {*(linears := [*found.inside(fqn)])}}
    with mistakes.collected():
        _check_whole_blocks(loaded, index, inside.values(), names, assigned)
    home = next(iter(found.blocks)).rpartition(".")[0]
    owners = {
        n: Owners(0, torch.full((found.linears[n].out_features,), i))
        for i, linears in enumerate(inside.values())
        for n in linears
    }
    pattern = Structured("blocks", rule.sparsity or 0.0, Units("blocks", home, len(inside), owners))
    with mistakes.collected(), loaded.at("prune", index, "sparsity"):
        check_units(pattern)
    return PlannedDepth(rules[index], pattern, tuple(inside))


def _check_whole_blocks(
    loaded: LoadedRecipe, index: int, blocks: Iterable[Sequence[str]], names: Collection[str], assigned: Assigned
) -> None:
    for linears in blocks:
        if left := next((n for n in linears if n not in names), None):
            some = next(n for n in linears if n in names)
            why = f"is ignored by {assigned.ignored[left]}" if left in assigned.ignored else "is not"
            message = f"blocks are removed whole, but {some} is a target of prune[{index}] and {left} {why}"
            loaded.refuse(f"{message}; name blocks by layers, such as {{layers: 1-28}}", "prune", index, "targets")
