"""Recipe + plugins + a model without weights -> the frozen plan: each linear, its pruner, its pattern.

Every mistake that can be found without weights or text is found here, with the line of the recipe that made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import BaseModel

from compressx.architecture import Architecture, survey, text_config
from compressx.errors import PluginError, RecipeError, UnsupportedModelError, did_you_mean
from compressx.patterns import NM, Unstructured
from compressx.plugins import Plugins
from compressx.pruner import Block, Pruner, PrunerSpec
from compressx.recipe import LoadedRecipe, Rule, validate_options


@dataclass(frozen=True, eq=False)
class PlannedRule:
    """A recipe's rule with its pruners found and its options validated.

    Attributes:
        index: position in the recipe's `prune`.
        pruner: selects.
        options: validated by the pruner's own model.
        reconstructor: gives the survivors new values, or None.
        reconstructor_options: validated likewise.
        pattern: what each of its linears has to become.
    """

    index: int
    pruner: PrunerSpec
    options: BaseModel
    reconstructor: PrunerSpec | None
    reconstructor_options: BaseModel | None
    pattern: Unstructured | NM

    @property
    def label(self) -> str:
        """The pruner's name, and after a `+` the reconstructor's."""
        return self.pruner.name + (f"+{self.reconstructor.name}" if self.reconstructor else "")

    def build(self) -> tuple[Pruner, Pruner | None]:
        """Make the selecting pruner and the reconstructing one."""
        selector = self.pruner.build(self.options)
        return selector, self.reconstructor.build(self.reconstructor_options) if self.reconstructor else None


@dataclass(frozen=True)
class PlannedLinear:
    """A linear that will be pruned: its name, its block's name (empty outside the blocks), shape and rule."""

    name: str
    block: str
    shape: tuple[int, int]
    rule: PlannedRule


@dataclass(frozen=True)
class Plan:
    """What a run will do: the linears to prune in the model's order, and what is left alone and why."""

    linears: tuple[PlannedLinear, ...]
    skipped: Mapping[str, str]
    rules: tuple[PlannedRule, ...]
    needs_calibration: bool

    def in_block(self, fqn: str) -> dict[PlannedRule, list[str]]:
        """Return the names of the linears of one block by the rule that took them."""
        by_rule: dict[PlannedRule, list[str]] = {}
        for linear in self.linears:
            if linear.block == fqn:
                by_rule.setdefault(linear.rule, []).append(linear.name)
        return by_rule

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        return {
            "linears": [
                {"name": x.name, "shape": list(x.shape), "pruner": x.rule.label, "pattern": str(x.rule.pattern)}
                for x in self.linears
            ],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped.items()],
        }


def make_plan(loaded: LoadedRecipe, plugins: Plugins, skeleton: torch.nn.Module) -> Plan:
    """Decide what happens to every linear of the model.

    Args:
        loaded: the recipe with its places in the file.
        plugins: the pruners that recipes can name.
        skeleton: the model; only shapes are read, so it may be on the meta device.

    Raises:
        RecipeError: a rule that is wrong, matches nothing or is shadowed, with file, line and column.
        PluginError: a pruner that does not exist or could not be imported.
        UnsupportedModelError: a model, or a pruner's way of pruning it, that is not supported.
    """
    architecture = survey(skeleton)
    rules = tuple(_plan_rule(loaded, plugins, i) for i in range(len(loaded.recipe.prune)))
    taken: dict[str, PlannedRule] = {}
    for rule in rules:
        _take(loaded, rule, architecture, taken)
    everything = {**architecture.linears, **architecture.outside}
    linears = tuple(
        PlannedLinear(
            name,
            architecture.block_of(name) if name in architecture.linears else "",
            (linear.out_features, linear.in_features),
            taken[name],
        )
        for name, linear in everything.items()
        if name in taken
    )
    skipped = {n: "no rule names it" for n in architecture.linears if n not in taken}
    skipped |= {
        n: "outside the decoder blocks; pruned only when a rule names it"
        for n in architecture.outside
        if n not in taken
    }
    skipped |= architecture.unprunable
    plan = Plan(linears, skipped, rules, needs_calibration=False)
    needs_calibration = _check_blocks(loaded, plan, architecture, skeleton)
    _check_calibration(loaded, skeleton, needs_calibration)
    return Plan(linears, skipped, rules, needs_calibration)


def _plan_rule(loaded: LoadedRecipe, plugins: Plugins, index: int) -> PlannedRule:
    rule = loaded.recipe.prune[index]
    spec = _find(loaded, plugins, rule.pruner, index, "pruner")
    options = validate_options(spec.options, rule.options, lambda *at: loaded.where("prune", index, "options", *at))
    reconstructor = reconstructor_options = None
    if rule.reconstruct is not None:
        reconstructor = _find(loaded, plugins, rule.reconstruct.pruner, index, "reconstruct")
        if not reconstructor.reconstructs:
            able = ", ".join(sorted(s.name for s in plugins.pruners.values() if s.reconstructs))
            raise RecipeError(
                f"{loaded.where('prune', index, 'reconstruct')}: {reconstructor.name} only selects; "
                f"pruners that reconstruct: {able}"
            )
        reconstructor_options = validate_options(
            reconstructor.options,
            rule.reconstruct.options,
            lambda *at: loaded.where("prune", index, "reconstruct", "options", *at),
        )
    return PlannedRule(index, spec, options, reconstructor, reconstructor_options, _pattern(loaded, rule, spec, index))


def _find(loaded: LoadedRecipe, plugins: Plugins, name: str, index: int, key: str) -> PrunerSpec:
    try:
        return plugins.pruner(name)
    except PluginError as error:
        raise PluginError(f"{loaded.where('prune', index, key)}: {error}") from error


def _pattern(loaded: LoadedRecipe, rule: Rule, spec: PrunerSpec, index: int) -> Unstructured | NM:
    if rule.pattern is not None:
        if not spec.nm:
            raise RecipeError(
                f"{loaded.where('prune', index, 'pattern')}: {spec.name} does not prune N:M (got {rule.pattern}); "
                "give sparsity instead"
            )
        return rule.pattern
    assert rule.sparsity is not None  # noqa: S101 - the schema requires sparsity or pattern
    group = rule.group or spec.groups[0]
    if group not in spec.groups:
        raise RecipeError(
            f"{loaded.where('prune', index, 'group')}: {spec.name} has no group {group!r}; "
            f"{did_you_mean(group, spec.groups)}"
        )
    return Unstructured(rule.sparsity, group)


def _take(loaded: LoadedRecipe, rule: PlannedRule, found: Architecture, taken: dict[str, PlannedRule]) -> None:
    """Give a rule the linears that it matches and no earlier rule took."""
    everything = {**found.linears, **found.outside}
    matched: list[str] = []
    for i, target in enumerate(loaded.recipe.prune[rule.index].targets):
        names = [n for n in found.linears if fnmatchcase(n, target)]
        names += [n for n in found.outside if _names_outright(target, n)]
        if not names:
            where = loaded.where("prune", rule.index, "targets", i)
            raise _no_match(where, target, everything, found.unprunable)
        matched += names
    fresh = [n for n in dict.fromkeys(matched) if n not in taken]
    if not fresh:
        earlier = taken[matched[0]]
        raise RecipeError(
            f"{loaded.where('prune', rule.index)}: prune[{rule.index}] is shadowed: all {len(set(matched))} linears "
            f"that it matches are already taken, {matched[0]} by prune[{earlier.index}] at "
            f"{loaded.where('prune', earlier.index)}; the first matching rule wins, so put the narrower rule first"
        )
    for name in fresh:
        linear = everything[name]
        if isinstance(rule.pattern, NM) and linear.in_features % rule.pattern.of:
            raise RecipeError(
                f"{loaded.where('prune', rule.index, 'pattern')}: {name} has {linear.in_features} input features, "
                f"not divisible by {rule.pattern.of} (pattern {rule.pattern})"
            )
        taken[name] = rule


def _names_outright(target: str, name: str) -> bool:
    """Whether `target` matches a name and spells its last part, as a bare `*` does not."""
    return fnmatchcase(name, target) and target.endswith(name.rsplit(".", 1)[-1])


def _no_match(where: str, target: str, linears: Mapping[str, Any], unprunable: Mapping[str, str]) -> RecipeError:
    for name, reason in unprunable.items():
        if _names_outright(target, name):
            return RecipeError(f"{where}: target {target!r} names {name}, which is not prunable: {reason}")
    kinds = sorted({f"*.{n.rsplit('.', 1)[-1]}" if "." in n else n for n in linears})
    return RecipeError(f"{where}: target {target!r} matches no linear; {did_you_mean(target, kinds)}")


def _check_blocks(loaded: LoadedRecipe, plan: Plan, found: Architecture, skeleton: torch.nn.Module) -> bool:
    """Let each pruner refuse blocks that it cannot prune, and hear whether any needs calibration."""
    needs_calibration = False
    config = text_config(skeleton)
    for index, fqn in enumerate([*found.blocks, ""]):
        linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")} if fqn else dict(found.outside)
        module = found.blocks[fqn] if fqn else skeleton
        block = Block(index, fqn, module, linears, (), config)
        for rule, names in plan.in_block(fqn).items():
            if rule.pruner.check is not None:
                try:
                    rule.pruner.check(block, dict.fromkeys(names, rule.pattern))
                except (RecipeError, UnsupportedModelError) as error:
                    raise type(error)(f"{loaded.where('prune', rule.index)}: {error}") from error
            if not needs_calibration:
                needs_calibration = _observes(rule, block, names)
    return needs_calibration


def _observes(rule: PlannedRule, block: Block, names: list[str]) -> bool:
    with torch.device("meta"):  # a Hessian that nobody fills should take no memory
        return any(p.observe(block, n) is not None for p in rule.build() if p is not None for n in names)


def _check_calibration(loaded: LoadedRecipe, skeleton: torch.nn.Module, needed: bool) -> None:
    """Refuse a recipe without the calibration that it needs, and windows longer than the model's positions."""
    recipe = loaded.recipe
    if recipe.calibration is None and needed:
        raise RecipeError(f"{loaded.where()}: the recipe has no calibration, and its pruners need one")
    positions = getattr(text_config(skeleton), "max_position_embeddings", None)
    perplexity = recipe.evaluate.token_perplexity if recipe.evaluate is not None else None
    windows = {("calibration",): recipe.calibration, ("evaluate", "token_perplexity"): perplexity}
    for place, settings in windows.items():
        if settings is not None and positions is not None and settings.sequence_length > positions:
            raise RecipeError(
                f"{loaded.where(*place, 'sequence_length')}: sequence_length {settings.sequence_length} is longer than "
                f"the model's {positions} positions"
            )
