"""A rule that drops whole decoder blocks: which blocks may go, and how many do."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compressx.api.patterns import Structured
from compressx.api.units import Owners, Units
from compressx.models.architecture import Architecture
from compressx.planning.budgets import check_units
from compressx.planning.plan import PlannedDepth, PlannedRule
from compressx.planning.targets import Assigned
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import Mistakes, RecipeError


def find_depth(
    loaded: LoadedRecipe, found: Architecture, assigned: Assigned, rules: Sequence[PlannedRule], mistakes: Mistakes
) -> PlannedDepth | None:
    """Return which blocks may go; None when no rule drops blocks.

    Args:
        loaded: the recipe with its places in the file.
        found: the model's blocks and linears.
        assigned: what the rules target.
        rules: the recipe's rules.
        mistakes: receives a block of which some linears are targets and others are not, a sparsity that drops no
            block or all, a second such rule, and a reconstructor, which has nothing to do.
    """
    index, targeted = next(iter(assigned.in_blocks.items()), (None, ()))
    if index is None:
        return None
    rule = loaded.recipe.prune[index]
    for other in [i for i in assigned.in_blocks if i != index]:
        mistakes.add(
            RecipeError(
                f"{loaded.where('prune', other, 'pattern')}: blocks are dropped by prune[{index}] already; put the "
                "targets of both in one rule, so that all blocks compete"
            )
        )
    if rule.reconstruct is not None:
        mistakes.add(
            RecipeError(
                f"{loaded.where('prune', index, 'reconstruct')}: a block that goes has no weights left to update; drop "
                "it, and use reconstruct_block or finetune"
            )
        )
    inside = {fqn: [*found.inside(fqn)] for fqn in found.blocks}
    names = set(targeted)
    inside = {fqn: linears for fqn, linears in inside.items() if names & {*linears}}
    for linears in inside.values():
        if left := next((n for n in linears if n not in names), None):
            some = next(n for n in linears if n in names)
            why = f"is ignored by {assigned.ignored[left]}" if left in assigned.ignored else "is not"
            mistakes.add(
                RecipeError(
                    f"{loaded.where('prune', index, 'targets')}: blocks go whole, but {some} is a target of "
                    f"prune[{index}] and {left} {why}; name blocks by layers, such as {{layers: 1-28}}"
                )
            )
            break
    home = next(iter(found.blocks)).rpartition(".")[0]
    owners = {
        n: Owners(0, torch.full((found.linears[n].out_features,), i))
        for i, linears in enumerate(inside.values())
        for n in linears
    }
    pattern = Structured("blocks", rule.sparsity or 0.0, Units("blocks", home, len(inside), owners))
    with mistakes.collected():
        check_units(loaded.where("prune", index, "sparsity"), pattern)
    return PlannedDepth(rules[index], pattern, tuple(inside))
