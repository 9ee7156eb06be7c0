"""Recipe + plugins + a model without weights -> the frozen plan.

Every error that can be found without weights or text is raised here, with its line of the recipe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from compressx.api.pruner import Block, PrunerSpec, statistic_of
from compressx.models.architecture import Architecture, survey, text_config
from compressx.planning.budgets import asked_patterns, check_fits
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.planning.targets import Assigned, match_targets
from compressx.planning.text import check_text
from compressx.plugins.kinds import PRUNER
from compressx.plugins.manager import Plugins
from compressx.recipe.schema import LoadedRecipe, validate_options
from compressx.runtime.errors import CompressxError, PluginError, RecipeError, blamed_on


def make_plan(loaded: LoadedRecipe, plugins: Plugins, skeleton: torch.nn.Module) -> Plan:
    """Plan what happens to every linear of the model.

    Args:
        loaded: the recipe with its places in the file.
        plugins: the available pruners.
        skeleton: the model; only shapes are read, so it may be on the meta device.

    Raises:
        RecipeError: a rule that is invalid, matches nothing or is shadowed, with file, line and column.
        PluginError: a pruner that does not exist or could not be imported.
        UnsupportedModelError: the model is not supported, or not by a pruner.
    """
    architecture = survey(skeleton)
    rules = tuple(_plan_rule(loaded, plugins, i) for i in range(len(loaded.recipe.prune)))
    assigned = match_targets(loaded, architecture)
    taken = assigned.taken
    patterns = asked_patterns(loaded, [rule.pruner for rule in rules], taken)
    everything = {**architecture.linears, **architecture.outside}
    linears = tuple(
        PlannedLinear(
            name,
            architecture.block_of(name) if name in architecture.linears else "",
            (linear.out_features, linear.in_features),
            rules[taken[name]],
            patterns[name],
        )
        for name, linear in everything.items()
        if name in taken
    )
    for linear in linears:
        check_fits(loaded, linear, linears)
    _check_reconstruction(loaded, linears)
    plan = Plan(
        linears, _skipped(architecture, assigned), rules, needs_calibration=False,
        allocation=loaded.recipe.allocation, reconstruct_block=loaded.recipe.reconstruct_block,
    )  # fmt: skip
    needed = _check_blocks(loaded, plan, architecture, skeleton, assigned.ignored) or bool(plan.sensitive)
    check_text(loaded, skeleton, needed)
    measures = plan.allocation is not None and bool(plan.allocation.measures)
    return replace(plan, needs_calibration=needed or measures or plan.reconstruct_block is not None)


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


def _check_reconstruction(loaded: LoadedRecipe, linears: Iterable[PlannedLinear]) -> None:
    """Refuse block reconstruction if no block is pruned."""
    if loaded.recipe.reconstruct_block is not None and not any(linear.block for linear in linears):
        raise RecipeError(
            f"{loaded.where('reconstruct_block')}: it has no effect: all linears that the rules match are outside the "
            "decoder blocks; leave it out"
        )


def _plan_rule(loaded: LoadedRecipe, plugins: Plugins, index: int) -> PlannedRule:
    rule = loaded.recipe.prune[index]
    spec = _find(loaded, plugins, rule.pruner, index, "pruner")
    options = validate_options(spec.options, rule.options, lambda *at: loaded.where("prune", index, "options", *at))
    reconstructor = reconstructor_options = None
    if rule.reconstruct is not None:
        reconstructor = _find(loaded, plugins, rule.reconstruct.pruner, index, "reconstruct")
        if not reconstructor.reconstructs:
            able = ", ".join(sorted(s.name for s in plugins.offers["pruners"].values() if s.reconstructs))
            raise RecipeError(
                f"{loaded.where('prune', index, 'reconstruct')}: {reconstructor.name} only selects; "
                f"pruners that reconstruct: {able}"
            )
        reconstructor_options = validate_options(
            reconstructor.options,
            rule.reconstruct.options,
            lambda *at: loaded.where("prune", index, "reconstruct", "options", *at),
        )
        for name in reconstructor.selecting_options:
            if getattr(reconstructor_options, name) != reconstructor.options.model_fields[name].default:
                where = loaded.where("prune", index, "reconstruct", "options", name)
                raise RecipeError(
                    f"{where}: {name} changes how {reconstructor.name} selects weights, and has no effect when it "
                    "reconstructs; leave it out"
                )
    return PlannedRule(index, spec, options, reconstructor, reconstructor_options)


def _find(loaded: LoadedRecipe, plugins: Plugins, name: str, index: int, key: str) -> PrunerSpec:
    try:
        return plugins.find(PRUNER, name)
    except PluginError as error:
        raise PluginError(f"{loaded.where('prune', index, key)}: {error}") from error


def _check_blocks(
    loaded: LoadedRecipe, plan: Plan, found: Architecture, skeleton: torch.nn.Module, ignored: Mapping[str, str]
) -> bool:
    """Run each pruner's check on its blocks; return whether any pruner observes calibration text."""
    observes = False
    config = text_config(skeleton)
    for index, fqn in enumerate([*found.blocks, ""]):
        linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")} if fqn else dict(found.outside)
        module = found.blocks[fqn] if fqn else skeleton
        block = Block(index, fqn, module, linears, (), config)
        for rule, patterns in plan.in_block(fqn).items():
            for key, spec in (("pruner", rule.pruner), ("reconstruct", rule.reconstructor)):
                if spec is None or spec.check is None:
                    continue
                place = ("prune", rule.index) if key == "pruner" else ("prune", rule.index, key)
                blamed = blamed_on(f"check of pruner {spec.name!r} failed on {fqn or 'the model'}")
                with loaded.at(*place), _mentioning({n: ignored[n] for n in linears if n in ignored}), blamed:
                    spec.check(block, patterns)
            if not observes:
                with loaded.at("prune", rule.index):
                    observes = _observes(rule, block, patterns)
    return observes


@contextlib.contextmanager
def _mentioning(ignored: Mapping[str, str]) -> Iterator[None]:
    """Add to a refusal which linears of the block are ignored: a pruner sees only that they are missing."""
    try:
        yield
    except CompressxError as error:
        if not ignored:
            raise
        told = ", ".join(f"{name} is ignored by {entry}" for name, entry in ignored.items())
        raise type(error)(f"{error} ({told})") from error


def _observes(rule: PlannedRule, block: Block, names: Iterable[str]) -> bool:
    with torch.device("meta"):  # the statistics are not filled here and should take no memory
        pruners = zip((rule.pruner, rule.reconstructor), rule.build(), strict=True)
        return any(
            statistic_of(spec.name, pruner, block, n) is not None
            for spec, pruner in pruners
            if spec is not None and pruner is not None
            for n in names
        )
