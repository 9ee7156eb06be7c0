"""Which rule takes which linear: the first one whose targets match it."""

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
    """Give each rule the linears that it matches and no earlier rule took.

    Args:
        loaded: the recipe with its places in the file.
        found: the model's linears; those outside the blocks are matched only by targets that spell their last part.

    Returns:
        By linear name, the position of its rule in the recipe's `prune`. Linears that no rule names are absent.

    Raises:
        RecipeError: a target that matches nothing, or only what earlier rules took, with its place.
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
    """Return the linears that one target of a rule matches, at least one."""
    where = loaded.where("prune", index, "targets", position)
    _refuse_interval(where, target)
    names = [n for n in found.linears if fnmatchcase(n, target)]
    names += [n for n in found.outside if _names_outright(target, n)]
    if not names:
        raise _no_match(where, target, {**found.linears, **found.outside}, found.unprunable)
    return names


def _names_outright(target: str, name: str) -> bool:
    """Whether `target` matches a name and spells its last part, as a bare `*` does not."""
    return fnmatchcase(name, target) and target.endswith(name.rsplit(".", 1)[-1])


def _no_match(where: str, target: str, linears: Mapping[str, Any], unprunable: Mapping[str, str]) -> RecipeError:
    for name, reason in unprunable.items():
        if _names_outright(target, name):
            return RecipeError(f"{where}: target {target!r} names {name}, which is not prunable: {reason}")
    meant = [n for n in linears if n == target.removesuffix(".weight") or fnmatchcase(n, f"*.{target}")]
    hint = f"did you mean {meant[0]!r}? " if meant else ""
    first, last = next(iter(linears)), [*linears][-1]
    return RecipeError(
        f"{where}: target {target!r} matches no linear; {hint}{did_you_mean(target, _kinds(linears))}; "
        f"whole names go from {first} to {last}"
    )


def _refuse_interval(where: str, glob: str) -> None:
    """Refuse `[10-12]`, which is one character of 1, 0 to 1 and 2 where numbers are meant."""
    if (found := _INTERVAL.search(glob)) is not None:
        raise RecipeError(
            f"{where}: {found[0]} in {glob!r} is one character of a set, no interval of numbers; layers 10 to 12 are "
            "'*.1[0-2].*', and what a single pattern cannot say is several targets"
        )


def _kinds(names: Iterable[str]) -> set[str]:
    """Return globs that would match the linears of each kind."""
    return {f"*.{n.rsplit('.', 1)[-1]}" if "." in n else n for n in names}


def match_sparsities(loaded: LoadedRecipe, globs: Iterable[str], planned: Sequence[str]) -> dict[str, str]:
    """Find the glob of `allocation.sparsities` that takes each planned linear: the first that matches.

    Args:
        loaded: the recipe with its places in the file.
        globs: in the recipe's order.
        planned: names of the linears that rules took.

    Raises:
        RecipeError: a glob that matches nothing or is shadowed, or a linear that none matches, with its place.
    """
    taken: dict[str, str] = {}
    for glob in globs:
        where = loaded.where("allocation", "sparsities", glob)
        _refuse_interval(where, glob)
        matched = [name for name in planned if fnmatchcase(name, glob)]
        if not matched:
            raise RecipeError(
                f"{where}: {glob!r} matches no linear that a rule took; {did_you_mean(glob, _kinds(planned))}"
            )
        fresh = [name for name in matched if name not in taken]
        if not fresh:
            earlier = taken[matched[0]]
            raise RecipeError(
                f"{where}: {glob!r} is shadowed: all {len(matched)} linears that it matches are already taken, "
                f"{matched[0]} by {earlier!r} at {loaded.where('allocation', 'sparsities', earlier)}; the first that "
                "matches wins, so put the narrower one first"
            )
        taken |= dict.fromkeys(fresh, glob)
    if missing := [name for name in planned if name not in taken]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise RecipeError(
            f'{loaded.where("allocation", "sparsities")}: none of them matches {missing[0]}{more}; end with "*" and a '
            "sparsity for the rest"
        )
    return {name: taken[name] for name in planned}


def first_matching(globs: Iterable[str], name: str) -> str:
    """Return the first glob that matches a name; `match_sparsities` sees to it that there is one."""
    return next(glob for glob in globs if fnmatchcase(name, glob))
