"""The pattern of each linear, from its rule and the recipe's allocation, and whether its shape allows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compressx.api.patterns import NM, Asked, Structured, Unstructured, count_dropped, nearest
from compressx.api.pruner import PrunerSpec
from compressx.api.units import Units
from compressx.planning.plan import PlannedLinear
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import RecipeError, did_you_mean


def asked_patterns(
    loaded: LoadedRecipe, specs: Sequence[PrunerSpec], taken: Mapping[str, int],
    units: Mapping[int, Mapping[str, Units]],
) -> dict[str, Asked]:  # fmt: skip
    """Return each linear's pattern; under an allocation that is yet to be computed, the nearest to its target.

    Args:
        loaded: the recipe with its places in the file.
        specs: the selecting pruner of each rule.
        taken: the index of the rule by linear name.
        units: of each rule that prunes units, those of a linear, by name.

    Raises:
        RecipeError: a group or pattern that the pruner does not support.
    """
    allocation = loaded.recipe.allocation
    kinds = [_kind(loaded, index, spec) for index, spec in enumerate(specs)]
    if allocation is None:
        return {
            name: Structured(units[index][name].kind, kinds[index].sparsity, units[index][name])
            if index in units
            else kinds[index]
            for name, index in taken.items()
        }
    return {name: nearest(kinds[index], allocation.target) for name, index in taken.items()}


def _kind(loaded: LoadedRecipe, index: int, spec: PrunerSpec) -> Unstructured | NM:
    """Return a rule's pattern, with sparsity 0 if the rule gives none; of units only the sparsity counts."""
    rule = loaded.recipe.prune[index]
    if isinstance(rule.pattern, str):
        if rule.pattern not in spec.units:
            able = f"it prunes {', '.join(spec.units)}" if spec.units else "it prunes no units"
            raise RecipeError(
                f"{loaded.where('prune', index, 'pattern')}: {spec.name} does not prune {rule.pattern}; {able}"
            )
        return Unstructured(rule.sparsity or 0.0)
    if not spec.groups and not (spec.nm and rule.pattern is not None):
        raise RecipeError(
            f"{loaded.where('prune', index)}: {spec.name} prunes whole units only; give it a pattern: "
            f"{' or '.join(spec.units)}"
        )
    if rule.pattern is not None:
        if not spec.nm:
            raise RecipeError(
                f"{loaded.where('prune', index, 'pattern')}: {spec.name} does not prune N:M (got {rule.pattern}); "
                "give sparsity instead"
            )
        return rule.pattern
    group = rule.group or spec.groups[0]
    if group not in spec.groups:
        raise RecipeError(
            f"{loaded.where('prune', index, 'group')}: {spec.name} has no group {group!r}; "
            f"{did_you_mean(group, spec.groups)}"
        )
    return Unstructured(rule.sparsity or 0.0, group)


def check_fits(loaded: LoadedRecipe, linear: PlannedLinear, linears: Sequence[PlannedLinear]) -> None:
    """Refuse a pattern that a linear's shape does not allow.

    Raises:
        RecipeError: input features not divisible by M, or a sparsity that rounds to no zeros or to all zeros among the
            weights that compete.
    """
    pattern, (rows, columns) = linear.pattern, linear.shape
    if isinstance(pattern, NM):
        if columns % pattern.of:
            raise RecipeError(
                f"{loaded.where('prune', linear.rule.index, 'pattern')}: {linear.name} has {columns} input features, "
                f"not divisible by {pattern.of} (pattern {pattern})"
            )
        return
    allocated = loaded.recipe.allocation is not None
    place = loaded.where(*(("allocation", "target") if allocated else ("prune", linear.rule.index, "sparsity")))
    if isinstance(pattern, Structured):
        if pattern.unit != "blocks":  # those are looked at whether or not other rules take all their linears
            check_units(place, pattern)
        return
    competing, what = (columns, "each row") if pattern.group == "row" else (rows * columns, "all rows")
    if pattern.group == "joint":
        joint = [x for x in linears if (x.rule, x.block) == (linear.rule, linear.block)]
        competing, what = sum(x.weights for x in joint), "the joint group"
    if not allocated and pattern.sparsity > 0 and count_dropped(pattern.sparsity, competing) == 0:
        raise RecipeError(
            f"{place}: sparsity {pattern.sparsity:g} drops none of the {competing} weights in {what} of "
            f"{linear.name}; at least {1 / competing:.6g} drops one, and 0 leaves it dense"
        )
    if count_dropped(pattern.sparsity, competing) == competing:
        raise RecipeError(
            f"{place}: sparsity {pattern.sparsity:g} keeps none of the {competing} weights in {what} of "
            f"{linear.name}; at most {(competing - 1) / competing:.6g} keeps one"
        )


def check_units(place: str, pattern: Structured) -> None:
    """Refuse a sparsity that drops no unit, or all.

    Raises:
        RecipeError: the message begins with the place.
    """
    units, count = pattern.units, pattern.units.count
    if pattern.sparsity > 0 and pattern.dropped == 0:
        raise RecipeError(
            f"{place}: sparsity {pattern.sparsity:g} drops none of the {units}; "
            + (f"at least {1 / count:.6g} drops one" if count > 1 else "a block keeps at least one")
        )
    if pattern.dropped == count:
        raise RecipeError(
            f"{place}: sparsity {pattern.sparsity:g} keeps none of the {units}; at most "
            f"{(count - 1) / count:.6g} keeps one"
        )
