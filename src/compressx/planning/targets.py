"""Match linears to rules: each linear belongs to the first rule with a matching target."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from compressx.models.architecture import Architecture
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import RecipeError, did_you_mean

_INTERVAL = re.compile(r"\[[^\]]*(\d\d+-|-\d\d)[^\]]*\]")


def match_targets(loaded: LoadedRecipe, found: Architecture) -> dict[str, int]:
    """Assign each linear to the first rule that matches it.

    Args:
        loaded: the recipe with its places in the file.
        found: the model's linears; those outside the blocks match only targets that spell out their last part.

    Returns:
        The index of the rule in the recipe's `prune`, by linear name; unmatched linears are absent.

    Raises:
        RecipeError: a target that matches nothing, or only linears of earlier rules, with its place.
    """
    taken: dict[str, int] = {}
    for index, rule in enumerate(loaded.recipe.prune):
        matched = [_matching(loaded, index, i, target, found) for i, target in enumerate(rule.targets)]
        for position, names in enumerate(matched):
            if all(name in taken for name in names):
                raise _shadowed(loaded, index, position, names, taken)
        taken |= {name: index for names in matched for name in names if name not in taken}
    return taken


def _shadowed(
    loaded: LoadedRecipe, index: int, position: int, names: Sequence[str], taken: Mapping[str, int]
) -> RecipeError:
    owners = {taken[name]: name for name in reversed(names)}
    by = ", ".join(f"{n} by prune[{owner}] at {loaded.where('prune', owner)}" for owner, n in sorted(owners.items()))
    return RecipeError(
        f"{loaded.where('prune', index, 'targets', position)}: target {loaded.recipe.prune[index].targets[position]!r} "
        f"of prune[{index}] is shadowed: all {len(names)} linears that it matches are already taken, {by}; the first "
        "matching rule wins, so put the narrower rule first, or drop the target"
    )


def _matching(loaded: LoadedRecipe, index: int, position: int, target: str, found: Architecture) -> list[str]:
    """Return the linears that one target matches; raise if there is none."""
    where = loaded.where("prune", index, "targets", position)
    _refuse_interval(where, target)
    names = [n for n in found.linears if fnmatchcase(n, target)]
    names += [n for n in found.outside if _names_outright(target, n)]
    if not names:
        raise _no_match(where, target, {**found.linears, **found.outside}, found.unprunable)
    return names


def _names_outright(target: str, name: str) -> bool:
    """Return whether `target` matches a name and spells out its last part, unlike a bare `*`."""
    return fnmatchcase(name, target) and target.endswith(name.rsplit(".", 1)[-1])


def _no_match(where: str, target: str, linears: Mapping[str, Any], unprunable: Mapping[str, str]) -> RecipeError:
    for name, reason in unprunable.items():
        if _names_outright(target, name):
            return RecipeError(f"{where}: target {target!r} names {name}, which is not prunable: {reason}")
    similar = [n for n in linears if n == target.removesuffix(".weight") or fnmatchcase(n, f"*.{target}")]
    hint = f"did you mean {similar[0]!r}? " if similar else ""
    first, last = next(iter(linears)), [*linears][-1]
    return RecipeError(
        f"{where}: target {target!r} matches no linear; {hint}{did_you_mean(target, _kinds(linears))}; "
        f"whole names go from {first} to {last}"
    )


def _refuse_interval(where: str, glob: str) -> None:
    """Refuse `[10-12]`, a set of single characters (1, 0 to 1, 2) that was meant as a range of numbers."""
    if (found := _INTERVAL.search(glob)) is not None:
        raise RecipeError(
            f"{where}: {found[0]} in {glob!r} matches a single character, not a range of numbers; layers 10 to 12 are "
            "'*.1[0-2].*'; use several patterns where one is not enough"
        )


def _kinds(names: Iterable[str]) -> set[str]:
    """Return a glob for each kind of linear."""
    return {f"*.{n.rsplit('.', 1)[-1]}" if "." in n else n for n in names}


def match_sparsities(loaded: LoadedRecipe, globs: Iterable[str], planned: Sequence[str]) -> dict[str, str]:
    """Return the first matching glob of `allocation.sparsities` for each planned linear.

    Args:
        loaded: the recipe with its places in the file.
        globs: in the recipe's order.
        planned: names of the linears that rules match.

    Raises:
        RecipeError: a glob that matches nothing or is shadowed, or a linear that none matches, with its place.
    """
    taken: dict[str, str] = {}
    for glob in globs:
        where = loaded.where("allocation", "sparsities", glob)
        _refuse_interval(where, glob)
        matched = [name for name in planned if fnmatchcase(name, glob)]
        if not matched:
            raise RecipeError(f"{where}: {glob!r} matches no planned linear; {did_you_mean(glob, _kinds(planned))}")
        fresh = [name for name in matched if name not in taken]
        if not fresh:
            earlier = taken[matched[0]]
            raise RecipeError(
                f"{where}: {glob!r} is shadowed: all {len(matched)} linears that it matches are already taken, "
                f"{matched[0]} by {earlier!r} at {loaded.where('allocation', 'sparsities', earlier)}; the first match "
                "wins, so put the narrower one first"
            )
        taken |= dict.fromkeys(fresh, glob)
    if missing := [name for name in planned if name not in taken]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RecipeError(
            f'{loaded.where("allocation", "sparsities")}: no glob matches {missing[0]}{more}; end with "*" and a '
            "sparsity for the rest"
        )
    return {name: taken[name] for name in planned}


def check_adapters(loaded: LoadedRecipe, found: Architecture, planned: Sequence[str]) -> None:
    """Check that each of `finetune.lora.targets` matches pruned linears, and none in fused experts.

    Raises:
        RecipeError: a glob that matches nothing, or an expert, with its place.
    """
    settings = loaded.recipe.finetune
    for index, target in enumerate(settings.lora.targets if settings is not None and settings.lora is not None else ()):
        where = loaded.where("finetune", "lora", "targets", index)
        _refuse_interval(where, target)
        matched = [name for name in planned if fnmatchcase(name, target)]
        if not matched:
            raise RecipeError(f"{where}: {target!r} matches no pruned linear; {did_you_mean(target, _kinds(planned))}")
        for name in matched:
            if name in found.linears and found.linears[name].expert is not None:
                raise RecipeError(
                    f"{where}: {target!r} matches {name}, one of several experts in one parameter, which cannot have "
                    'an adapter; expected targets without experts, such as "*.q_proj", or no lora'
                )


def first_matching(globs: Iterable[str], name: str) -> str:
    """Return the first glob that matches a name; `match_sparsities` ensures that there is one."""
    return next(glob for glob in globs if fnmatchcase(name, glob))
