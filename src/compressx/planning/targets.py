"""Match linears to rules: each linear belongs to the first rule that targets it and does not ignore it.

A target that matches nothing, a layer that the model does not have and a glob such as `[10-12]` are `RecipeError`s.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from compressx.api.names import kind_of
from compressx.models.architecture import Architecture
from compressx.recipe.document import Step
from compressx.recipe.rules import Layers, Target
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import Mistakes, RecipeError, did_you_mean

_INTERVAL = re.compile(r"\[[^\]]*(\d\d+-|-\d\d)[^\]]*\]")


@dataclass(frozen=True)
class Assigned:
    """What the rules take and leave alone.

    Attributes:
        taken: the index of the rule in the recipe's `prune`, by linear name.
        ignored: the entry of `ignore` that hides a weight, with its place, by name; only weights that no rule takes.
        in_blocks: by index of a rule that drops whole blocks, all linears that it targets: others may take them, too,
            for the blocks that are kept, and it takes only what they leave.
    """

    taken: Mapping[str, int]
    ignored: Mapping[str, str]
    in_blocks: Mapping[int, Collection[str]]


def match_targets(
    loaded: LoadedRecipe, found: Architecture, mistakes: Mistakes, within: Mapping[int, Collection[str]] | None = None
) -> Assigned:
    """Assign each linear to the first rule that targets it and does not ignore it.

    Linears outside the blocks match only targets that spell out their last part. `within` has, by index of a rule that
    can take no others, the linears that it can take. `mistakes` receives an entry of `ignore` that matches nothing or
    has no effect, and a target without a linear that is left for its rule.
    """
    recipe = loaded.recipe
    targeted = [
        [_able(loaded, (index, i), targeted_by(loaded, ("prune", index, "targets", i), target, found), within or {})
         for i, target in enumerate(rule.targets)]
        for index, rule in enumerate(recipe.prune)
    ]  # fmt: skip
    anywhere = {name for rule in targeted for names in rule for name in names}
    hidden: dict[str, str] = {}
    for i, entry in enumerate(recipe.ignore or ()):
        with mistakes.collected():
            names = _hidden_by(loaded, ("ignore", i), entry, found, anywhere)
            hidden = dict.fromkeys(names, f"{_shown(entry)} at {loaded.where('ignore', i)}") | hidden
    taken: dict[str, int] = {}
    in_blocks: dict[int, Collection[str]] = {}
    for index, rule in sorted(enumerate(recipe.prune), key=lambda at: at[1].pattern == "blocks"):
        own = dict.fromkeys(name for names in targeted[index] for name in names)
        if rule.pattern == "blocks":
            in_blocks[index] = [name for name in own if name not in hidden]
        for position, names in enumerate(targeted[index]):
            if all(name in hidden or (name in taken and index not in in_blocks) for name in names):
                with mistakes.collected():
                    _refuse_empty(loaded, (index, position), names, taken, hidden)
        taken |= {name: index for name in own if name not in taken and name not in hidden}
    return Assigned(taken, hidden, in_blocks)


def _able(
    loaded: LoadedRecipe, at: tuple[int, int], names: list[str], within: Mapping[int, Collection[str]]
) -> list[str]:
    """Return the linears of a target that belong to the units that its rule prunes."""
    index, position = at
    able = within.get(index, names)
    if not (left := [name for name in names if name in able]):
        rule = loaded.recipe.prune[index]
        matched = f"{names[0]}{f' and {len(names) - 1} others' if len(names) > 1 else ''}"
        message = f"target {_shown(rule.targets[position])} matches {matched}, which belong to no {rule.pattern}"
        units = f'{rule.pattern} are in {", ".join(kinds(able))}; write targets: ["*"] for all of them'
        loaded.refuse(f"{message}; {units}", "prune", index, "targets", position)
    return left


def targeted_by(loaded: LoadedRecipe, place: Sequence[Step], target: Target, found: Architecture) -> list[str]:
    """Return the linears that one target matches."""
    names = _matching(loaded, place, target, found, found.linears)
    # A name that linears of the blocks have, too, is theirs: `*.q_proj` is not that of a vision tower.
    inside = {kind_of(n) for n in names}
    names += [n for n in found.outside if _names_outright(target, n) and kind_of(n) not in inside]
    if not names:
        for name, reason in found.unprunable.items():
            if _names_outright(target, name):
                loaded.refuse(f"target {_shown(target)} names {name}, which is not prunable: {reason}", *place)
        known = [*found.linears, *found.outside]
        loaded.refuse(f"target {_shown(target)} matches no linear; {_similar(target, known)}", *place)
    return names


def _hidden_by(
    loaded: LoadedRecipe, place: Sequence[Step], entry: Target, found: Architecture, targeted: Collection[str]
) -> list[str]:
    """Return the weights that one entry of `ignore` matches; raise if it has no effect."""
    every = [*found.linears, *found.outside, *found.unprunable]
    names = _matching(loaded, place, entry, found, every)
    if not names:
        loaded.refuse(f"ignore {_shown(entry)} matches no linear; {_similar(entry, every)}", *place)
    # What is never pruned unless it is named, such as lm_head, may be ignored beside `*`: people write that.
    if all(name in found.linears and name not in targeted for name in names):
        message = f"no rule targets any of the {len(names)} linears that it matches, such as {names[0]}; drop it"
        loaded.refuse(f"ignore {_shown(entry)} has no effect: {message}", *place)
    return names


def _refuse_empty(
    loaded: LoadedRecipe, at: tuple[int, int], names: Sequence[str], taken: Mapping[str, int],
    hidden: Mapping[str, str],
) -> NoReturn:  # fmt: skip
    """Refuse a target whose linears are all taken by earlier rules, or ignored."""
    index, position = at
    owners = {taken[name]: name for name in reversed(names) if name in taken}
    by = [f"{n} by prune[{owner}] at {loaded.where('prune', owner)}" for owner, n in sorted(owners.items())]
    message = f"target {_shown(loaded.recipe.prune[index].targets[position])} of prune[{index}] is"
    if all(name in taken for name in names):
        message += f" shadowed: all {len(names)} linears that it matches are already taken, {', '.join(by)}"
        remedy = "the first matching rule wins, so put the narrower rule first, or drop the target"
    else:
        ignorers = {hidden[name]: name for name in reversed(names) if name not in taken}
        by += [f"{name} is ignored by {entry}" for entry, name in ignorers.items()]
        message += f" left without linears: of the {len(names)} that it matches, {', '.join(by)}"
        remedy = "ignore less, or drop the target"
    loaded.refuse(f"{message}; {remedy}", "prune", index, "targets", position)


def _matching(
    loaded: LoadedRecipe, place: Sequence[Step], target: Target, found: Architecture, names: Iterable[str]
) -> list[str]:
    """Return which of some names a target matches; `layers` match linears of the blocks only."""
    if isinstance(target, Layers):
        blocks = [*found.blocks]
        try:
            wanted = {blocks[i] for i in target.of(len(blocks))}
        except ValueError as error:
            loaded.refuse(f"{target}: {error}", *place)
        return [name for name in names if name in found.linears and found.block_of(name) in wanted]
    with loaded.at(*place):
        _refuse_interval(target)
    return [name for name in names if fnmatchcase(name, target)]


def _names_outright(target: Target, name: str) -> bool:
    """Return whether `target` matches a name and spells out its last part, unlike a bare `*`."""
    return not isinstance(target, Layers) and fnmatchcase(name, target) and target.endswith(name.rsplit(".", 1)[-1])


def _shown(target: Target) -> str:
    return f"{{{target}}}" if isinstance(target, Layers) else repr(target)


def _similar(target: Target, names: Sequence[str]) -> str:
    """Return what could have been meant, and what names look like; every glob in it matches."""
    if target in ("Linear", "Conv1D"):
        return f"targets are names, not classes; all linears of the blocks are '*', such as {names[0]}"
    glob = str(target).removesuffix(".weight")
    hint = ""
    for meant in (glob, f"*.{glob}", f"{glob}.*", f"*.{glob}.*"):
        if similar := [name for name in names if fnmatchcase(name, meant)]:
            hint = f"did you mean {meant if len(similar) > 1 else similar[0]!r}? "
            break
    return f"{hint}{did_you_mean('' if hint else glob, kinds(names))}; whole names go from {names[0]} to {names[-1]}"


def _refuse_interval(glob: str) -> None:
    """Refuse `[10-12]`, a set of single characters (1, 0 to 1, 2) that was meant as a range of numbers."""
    if (found := _INTERVAL.search(glob)) is not None:
        raise RecipeError(
            f"{found[0]} in {glob!r} matches a single character, not a range of numbers; layers 10 to 12 are "
            "'*.1[0-2].*', or {layers: 10-12} in targets and ignore; use several patterns where one is not enough"
        )


def kinds(names: Iterable[str]) -> dict[str, None]:
    """Return a glob for each kind of linear, in order; the experts of a mixture are one kind."""
    return dict.fromkeys(_kind(name) for name in names)


def _kind(name: str) -> str:
    if "." not in name:
        return name
    kind = kind_of(name)
    stem, _, number = name.rpartition(f".{kind}")
    return f"*.{stem.rsplit('.', 1)[-1]}.{kind}.*" if number else f"*.{kind}"


def matching_planned(glob: str, planned: Sequence[str]) -> list[str]:
    """Return the pruned linears that a glob matches."""
    _refuse_interval(glob)
    if matched := [name for name in planned if fnmatchcase(name, glob)]:
        return matched
    raise RecipeError(f"{glob!r} matches no pruned linear; {_similar(glob, planned)}")
