"""Recipe + plugins + a model without weights -> the frozen plan.

Every error that can be found without weights or text is raised here, with its line of the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from pydantic import BaseModel

from compressx.api.patterns import NM, RulePattern, Structured, Units, Unstructured, count_dropped
from compressx.api.pruner import Block, PrunerSpec, statistic_of
from compressx.models.architecture import Architecture, architecture_of, positions_of, text_config
from compressx.models.blockwise import check_calls
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.planning.structured import check_count, check_taken, check_units, find_depth, multiple_of, units_of_rules
from compressx.planning.targets import Assigned, match_targets, targeted_by
from compressx.plugins.kinds import PRUNER
from compressx.plugins.manager import Plugins
from compressx.recipe.rules import Reconstruction
from compressx.recipe.schema import LoadedRecipe
from compressx.recipe.validation import validate_options
from compressx.runtime.errors import CompressxError, Mistakes, UnsupportedModelError, blamed_on, did_you_mean


def make_plan(loaded: LoadedRecipe, plugins: Plugins, skeleton: torch.nn.Module) -> Plan:
    """Plan what happens to every linear. Only shapes of the model are read: it may be on the meta device."""
    architecture = architecture_of(skeleton)
    mistakes = Mistakes()
    rules = tuple(check_rules(loaded, plugins, architecture, mistakes))
    mistakes.raise_all()
    units = units_of_rules(loaded, architecture, skeleton, mistakes)
    mistakes.raise_all()
    whole_blocks = {i: architecture.linears for i, rule in enumerate(loaded.recipe.prune) if rule.pattern == "blocks"}
    assigned = match_targets(loaded, architecture, mistakes, {**units, **whole_blocks})
    mistakes.raise_all()
    taken = assigned.taken
    check_taken(loaded, units, assigned, architecture, skeleton, mistakes)
    depth = find_depth(loaded, architecture, assigned, rules, mistakes)
    mistakes.raise_all()
    if depth is not None:
        units[depth.rule.index] = dict.fromkeys(depth.pattern.units.owners, depth.pattern.units)
    patterns = _patterns(loaded, [rule.pruners[0][0] for rule in rules], taken, units)
    all_linears = {**architecture.linears, **architecture.outside}
    linears = tuple(
        PlannedLinear(
            name, architecture.block_of(name), (linear.out_features, linear.in_features), rules[index], patterns[name]
        )
        for name, linear in all_linears.items()
        if (index := taken.get(name)) is not None
    )
    for rule in rules:  # only its first mistake: its other linears often repeat it
        with mistakes.collected():
            for linear in linears:
                if linear.rule is rule:
                    _check_fits(loaded, linear, linears)
    matrices, unprunable = _matrices(architecture, skeleton)
    plan = Plan(
        linears, _skipped(architecture, assigned), rules, needs_calibration=False,
        allocation=loaded.recipe.allocation, block_training=loaded.recipe.reconstruct_block, depth=depth,
        unprunable=unprunable / max(1, matrices), matrices=matrices,
    )  # fmt: skip
    if plan.depth is not None:
        with mistakes.collected(), loaded.at("prune", plan.depth.rule.index):
            plan.depth.rule.build_depth()
    observing = _check_blocks(loaded, plan, architecture, skeleton, assigned.ignored, mistakes)
    needed = bool(observing) or bool(plan.sensitive) or plan.depth is not None
    _check_text(loaded, skeleton, mistakes, needed=needed)
    plan = replace(plan, needs_calibration=needed or plan.allocation is not None or plan.block_training is not None)
    mistakes.raise_all()
    if plan.needs_calibration:
        with loaded.at("model"):
            plan = _without_uncalled(plan, skeleton, architecture, observing)
    return plan


def _without_uncalled(
    plan: Plan, skeleton: torch.nn.Module, architecture: Architecture, observing: set[PlannedRule]
) -> Plan:
    """Skip the linears that their block does not call, so that no input of them can be seen."""
    linked, uncalled = check_calls(skeleton, architecture)
    if linked and plan.depth is not None:
        raise UnsupportedModelError(
            f"{type(skeleton).__name__}: its blocks hand on more than hidden states, so none of them can be left out; "
            "prune single weights, or neurons"
        )
    why = "its block does not call it, so that no input of it can be seen"
    skipped = {x.name: why for x in plan.linears if x.name in uncalled and x.rule in observing}
    planned = tuple(x for x in plan.linears if x.name not in skipped)
    return replace(plan, linears=planned, skipped={**plan.skipped, **skipped})


def _matrices(architecture: Architecture, skeleton: torch.nn.Module) -> tuple[int, int]:
    """Count the weights in the blocks' matrices: all, and those of matrices that cannot be pruned, not even by `*`."""
    sizes: dict[int, int] = {}  # by parameter: blocks may share some
    for name, module in skeleton.named_modules():
        if name in architecture.unprunable and any(name.startswith(f"{fqn}.") for fqn in architecture.blocks):
            sizes |= {id(p): p.numel() for p in module.parameters(recurse=False)}
    unprunable = sum(sizes.values())
    return unprunable + sum(x.out_features * x.in_features for x in architecture.linears.values()), unprunable


def _skipped(architecture: Architecture, assigned: Assigned) -> dict[str, str]:
    """Return the weights that are not pruned, with the reason."""
    outside = "outside the decoder blocks; pruned only when a rule names it"
    reasons = {
        **dict.fromkeys(architecture.linears, "no rule names it"),
        **dict.fromkeys(architecture.outside, outside),
        **architecture.unprunable,
        **{name: f"ignored by {entry}" for name, entry in assigned.ignored.items()},
    }
    return {name: reason for name, reason in reasons.items() if name not in assigned.taken}


def check_rules(
    loaded: LoadedRecipe, plugins: Plugins, found: Architecture | None, mistakes: Mistakes
) -> list[PlannedRule]:
    """Check each rule by itself: its pruners, their options and, if `found` is given, its targets.

    Returns the rules without a mistake in pruners and options.
    """
    planned = []
    for index, rule in enumerate(loaded.recipe.prune):
        with mistakes.collected():
            planned.append(_plan_rule(loaded, plugins, index))
        if found is None:
            continue
        for position, target in enumerate(rule.targets):
            with mistakes.collected():
                targeted_by(loaded, ("prune", index, "targets", position), target, found)
    return planned


def _plan_rule(loaded: LoadedRecipe, plugins: Plugins, index: int) -> PlannedRule:
    rule = loaded.recipe.prune[index]
    with loaded.at("prune", index, "pruner"):
        spec = plugins.find(PRUNER, rule.pruner)
    if isinstance(rule.pattern, str) and rule.pattern not in spec.units:
        message = f"{spec.name} does not prune {rule.pattern}; it prunes {', '.join(spec.units) or 'no units'}"
        able = _pruners_that(plugins, lambda spec: rule.pattern in spec.units)
        loaded.refuse(f"{message}; pruners that do: {able}", "prune", index, "pattern")
    options = validate_options(spec.options, rule.options, partial(loaded.where, "prune", index, "options"))
    reconstructor = () if rule.reconstruct is None else (_reconstructor(loaded, plugins, index, rule.reconstruct),)
    return PlannedRule(index, ((spec, options), *reconstructor))


def _reconstructor(
    loaded: LoadedRecipe, plugins: Plugins, index: int, asked: Reconstruction
) -> tuple[PrunerSpec, BaseModel]:
    here = ("prune", index, "reconstruct")
    with loaded.at(*here):
        spec = plugins.find(PRUNER, asked.pruner)
    if not spec.reconstructs:
        others = _pruners_that(plugins, lambda spec: spec.reconstructs)
        loaded.refuse(f"{spec.name} only selects; pruners that reconstruct: {others}", *here)
    options = validate_options(spec.options, asked.options, partial(loaded.where, *here, "options"))
    for name in spec.selecting_options:
        if getattr(options, name) != spec.options.model_fields[name].default:
            message = f"{name} changes how {spec.name} selects weights, and has no effect here; leave it out"
            loaded.refuse(message, *here, "options", name)
    return spec, options


def _patterns(
    loaded: LoadedRecipe, specs: Sequence[PrunerSpec], taken: Mapping[str, int],
    units: Mapping[int, Mapping[str, Units]],
) -> dict[str, RulePattern]:  # fmt: skip
    """Return each linear's pattern; under an allocation that is yet to be computed, the nearest to its target."""
    allocation = loaded.recipe.allocation
    kinds = [_pattern_of(loaded, index, spec) for index, spec in enumerate(specs)]
    patterns: dict[str, RulePattern] = {
        name: Structured(one.kind, kinds[index].sparsity, one, multiple_of(loaded, index, one))
        if (one := units.get(index, {}).get(name)) is not None
        else kinds[index]
        for name, index in taken.items()
    }
    return patterns if allocation is None else {n: p.at(allocation.fraction) for n, p in patterns.items()}


def _pattern_of(loaded: LoadedRecipe, index: int, spec: PrunerSpec) -> Unstructured | NM:
    """Return a rule's pattern, with sparsity 0 if the rule gives none; of units only the sparsity counts."""
    rule = loaded.recipe.prune[index]
    if isinstance(rule.pattern, str):
        return Unstructured(rule.sparsity or 0.0)
    group = rule.group or next(iter(spec.groups), None)
    if group is None and not (spec.nm and rule.pattern is not None):
        message = f"{spec.name} prunes whole units only; give it a pattern: {' or '.join(spec.units)}"
        loaded.refuse(message, "prune", index)
    if rule.pattern is not None and not spec.nm:
        message = f"{spec.name} does not prune N:M (got {rule.pattern}); give sparsity instead"
        loaded.refuse(message, "prune", index, "pattern")
    if rule.pattern is not None or group is None:
        return rule.pattern  # type: ignore[return-value]  # units were returned above
    if group not in spec.groups:
        message = f"{spec.name} has no group {group!r}; {did_you_mean(group, spec.groups)}"
        loaded.refuse(message, "prune", index, "group")
    return Unstructured(rule.sparsity or 0.0, group)


def _pruners_that(plugins: Plugins, support: Callable[[PrunerSpec], bool]) -> str:
    return ", ".join(sorted(spec.name for spec in plugins.offers["pruners"].values() if support(spec))) or "none"


def _check_fits(loaded: LoadedRecipe, linear: PlannedLinear, linears: Sequence[PlannedLinear]) -> None:
    """Refuse an M that does not divide a linear's inputs, and a sparsity that drops none or all competing weights."""
    pattern, (rows, columns) = linear.pattern, linear.shape
    if isinstance(pattern, NM):
        if columns % pattern.of:
            message = f"{linear.name} has {columns} input features, not divisible by {pattern.of} (pattern {pattern})"
            loaded.refuse(message, "prune", linear.rule.index, "pattern")
        return
    allocated = loaded.recipe.allocation is not None
    place = ("allocation", "target") if allocated else ("prune", linear.rule.index, "sparsity")
    if isinstance(pattern, Structured):
        if pattern.unit != "blocks":  # `find_depth` checks those, even if other rules take all their linears
            with loaded.at(*place):
                check_units(pattern)
        return
    competing, what = (columns, "each row") if pattern.group == "row" else (rows * columns, "all rows")
    if pattern.group == "joint":
        joint = [x for x in linears if (x.rule, x.block) == (linear.rule, linear.block)]
        competing, what = sum(x.weights for x in joint), "the joint group"
    dropped = count_dropped(pattern.sparsity, competing)
    if (dropped or not allocated) and (dropped < competing or not loaded.recipe.of_difference):
        with loaded.at(*place):
            check_count(pattern.sparsity, dropped, competing, f"{competing} weights in {what} of {linear.name}")


def _check_text(loaded: LoadedRecipe, skeleton: torch.nn.Module, mistakes: Mistakes, *, needed: bool) -> None:
    """Refuse a recipe without the calibration that its pruners need, and sequences longer than the model reads."""
    calibration = loaded.recipe.calibration
    positions = positions_of(skeleton)
    with mistakes.collected():
        if calibration is None and needed:
            message = "the recipe has no calibration, but its pruners need one; add one, such as "
            loaded.refuse(f"{message}calibration: {{dataset: wikitext, samples: 128}}")
        if calibration is not None and (length := calibration.sequence_length) > positions:
            message = f"sequence_length {length} is longer than the model's {positions} positions"
            loaded.refuse(f"{message}; set it to {positions} or less", "calibration", "sequence_length")


def _check_blocks(
    loaded: LoadedRecipe, plan: Plan, found: Architecture, skeleton: torch.nn.Module, ignored: Mapping[str, str],
    mistakes: Mistakes,
) -> set[PlannedRule]:  # fmt: skip
    """Run each pruner's check on its blocks; return the rules whose pruners observe calibration text."""
    observing: set[PlannedRule] = set()
    config = text_config(skeleton)
    failed: set[PlannedRule] = set()
    blocks = [Block(i, n, block, found.inside(n), (), config) for i, (n, block) in enumerate(found.blocks.items())]
    for block in (*blocks, Block(len(blocks), "", skeleton, dict(found.outside), (), config)):
        decided = plan.decided_in(block.fqn)
        for rule, patterns in plan.in_block(block.fqn).items():
            if rule in failed:  # the other blocks would repeat the mistake
                continue
            failed.add(rule)
            with mistakes.collected():
                try:
                    _check_block(loaded, rule, block, patterns)
                except CompressxError as error:
                    message = ", ".join(f"{n} is ignored by {ignored[n]}" for n in block.linears if n in ignored)
                    alone = not block.fqn or not isinstance(error, UnsupportedModelError)
                    more = "" if alone else _advice_on_blocks(loaded, plan, rule, blocks)
                    raise type(error)(f"{error}{more}{message and f' ({message})'}") from error
                if rule not in observing and rule in decided:
                    with loaded.at("prune", rule.index):
                        observing |= {rule} if _observes(rule, block, patterns) else set()
                failed.remove(rule)
    return observing


def _check_block(loaded: LoadedRecipe, rule: PlannedRule, block: Block, patterns: Mapping[str, RulePattern]) -> None:
    for place, (spec, options) in zip(((), ("reconstruct",)), rule.pruners, strict=False):
        if spec.check is not None:
            where = block.fqn or "the model"
            with loaded.at("prune", rule.index, *place), blamed_on(f"check of pruner {spec.name!r} failed on {where}"):
                spec.check(block, patterns, options)


def _advice_on_blocks(loaded: LoadedRecipe, plan: Plan, rule: PlannedRule, blocks: Iterable[Block]) -> str:
    """Advise on a block that a rule's pruner does not support, by whether it supports the rule's other blocks."""
    targeted = {x: found[rule] for x in blocks if rule in (found := plan.in_block(x.fqn))}
    refused = []
    for block, patterns in targeted.items():
        try:
            _check_block(loaded, rule, block, patterns)
        except UnsupportedModelError:
            refused.append(block.index)
    if len(refused) < len(targeted):
        return f"; put a rule of another pruner before this one, with targets: [layers: {refused}]"
    return "; no block that the rule takes has what its pruner needs: see docs/unsupported-models.md"


def _observes(rule: PlannedRule, block: Block, names: Iterable[str]) -> bool:
    with torch.device("meta"):  # the statistics are not filled here and should take no memory
        return any(
            statistic_of(spec.name, pruner, block, n) is not None
            for (spec, _), pruner in zip(rule.pruners, rule.build(), strict=True)
            for n in names
        )
