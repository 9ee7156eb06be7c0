"""Recipe + plugins + a model without weights -> the frozen plan: each linear, its pruner, its pattern.

Every mistake that can be found without weights or text is found here, with the line of the recipe that made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from pydantic import BaseModel

from compressx.architecture import Architecture, survey, text_config
from compressx.errors import PluginError, RecipeError, blamed_on
from compressx.patterns import NM, Unstructured, allocated_form
from compressx.planning.budgets import asked_patterns, check_fits
from compressx.planning.targets import match_targets
from compressx.planning.text import check_text
from compressx.plugins.manager import Plugins
from compressx.pruner import Block, Loss, Pruner, PrunerSpec, statistic_of
from compressx.recipe.methods import Allocation
from compressx.recipe.schema import LoadedRecipe, ReconstructBlock, validate_options


@dataclass(frozen=True, eq=False)
class PlannedRule:
    """A recipe's rule with its pruners found and its options validated.

    Attributes:
        index: position in the recipe's `prune`.
        pruner: selects.
        options: validated by the pruner's own model.
        reconstructor: gives the survivors new values, or None.
        reconstructor_options: validated likewise.
    """

    index: int
    pruner: PrunerSpec
    options: BaseModel
    reconstructor: PrunerSpec | None
    reconstructor_options: BaseModel | None

    @property
    def separable(self) -> bool:
        """Whether its pruners decide each linear apart."""
        return all(spec.separable for spec in (self.pruner, self.reconstructor) if spec is not None)

    @property
    def label(self) -> str:
        """The pruner's name, and after a `+` the reconstructor's."""
        return self.pruner.name + (f"+{self.reconstructor.name}" if self.reconstructor else "")

    @property
    def losses(self) -> set[Loss]:
        """The losses whose sensitivities its pruners read."""
        asked = {spec.sensitivity(options) for spec, options in self._sensitive() if spec.sensitivity is not None}
        return {loss for loss in asked if loss is not None}

    def reads_tokens(self, loss: Loss) -> bool:
        """Whether its pruners read the sensitivities of single tokens to a loss."""
        return any(
            spec.reads_tokens is None or spec.reads_tokens(options)
            for spec, options in self._sensitive()
            if spec.sensitivity is not None and spec.sensitivity(options) == loss
        )

    def _sensitive(self) -> Iterator[tuple[PrunerSpec, BaseModel | None]]:
        pairs = ((self.pruner, self.options), (self.reconstructor, self.reconstructor_options))
        return ((spec, options) for spec, options in pairs if spec is not None and spec.sensitivity is not None)

    def build(self) -> tuple[Pruner, Pruner | None]:
        """Make the selecting pruner and the reconstructing one."""
        selector = _built(self.pruner, self.options)
        return selector, _built(self.reconstructor, self.reconstructor_options) if self.reconstructor else None


def _built(spec: PrunerSpec, options: BaseModel | None) -> Pruner:
    with blamed_on(f"pruner {spec.name!r} could not be built"):
        return spec.build(options)


@dataclass(frozen=True)
class PlannedLinear:
    """A linear that will be pruned.

    Attributes:
        name: fully qualified name.
        block: its block's name, empty outside the blocks.
        shape: [out_features, in_features].
        rule: the rule that took it.
        pattern: what it has to become.
    """

    name: str
    block: str
    shape: tuple[int, int]
    rule: PlannedRule
    pattern: Unstructured | NM

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        linears: what will be pruned, in the model's order.
        skipped: what is left alone, with the reason.
        rules: the recipe's rules.
        needs_calibration: whether calibration text is read.
        allocation: how sparsities are chosen, once there are weights if that needs measuring; each linear's pattern is
            what is nearest to the target until then. None when the patterns are final.
        true_sequential: whether a linear is observed after those before it in its block were pruned.
        reconstruct_block: how the survivors of each block are trained; None when they are not.
    """

    linears: tuple[PlannedLinear, ...]
    skipped: Mapping[str, str]
    rules: tuple[PlannedRule, ...]
    needs_calibration: bool
    allocation: Allocation | None = None
    true_sequential: bool = False
    reconstruct_block: ReconstructBlock | None = None

    def in_block(self, fqn: str) -> dict[PlannedRule, dict[str, Unstructured | NM]]:
        """Return the linears of one block by the rule that took them, each name with its pattern."""
        by_rule: dict[PlannedRule, dict[str, Unstructured | NM]] = {}
        for linear in self.linears:
            if linear.block == fqn:
                by_rule.setdefault(linear.rule, {})[linear.name] = linear.pattern
        return by_rule

    def sensitive_to(self, loss: Loss) -> set[str]:
        """Return the names of the linears in blocks whose pruners read the sensitivities of a loss."""
        return {x.name for x in self.linears if x.block and loss in x.rule.losses}

    def allocated(self, patterns: Mapping[str, Unstructured | NM]) -> Plan:
        """Return the final plan: every linear with the pattern that an allocation gave it, by name."""
        linears = tuple(replace(x, pattern=patterns[x.name]) for x in self.linears)
        return replace(self, linears=linears, allocation=None)

    def shown_pattern(self, linear: PlannedLinear) -> str:
        """Write a linear's pattern, such as `2:4` or `50% row`; `allocated row` or `allocated N:4` while it is open."""
        return str(linear.pattern) if self.allocation is None else allocated_form(str(linear.pattern))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        linears = [
            {
                "name": x.name,
                "shape": list(x.shape),
                "pruner": x.rule.label,
                "pattern": self.shown_pattern(x),
                "sparsity": x.pattern.sparsity if self.allocation is None else None,
            }
            for x in self.linears
        ]
        allocation = {} if self.allocation is None else {"allocation": self.allocation.model_dump(mode="json")}
        skipped = [{"name": name, "reason": reason} for name, reason in self.skipped.items()]
        return {**allocation, "linears": linears, "skipped": skipped}


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
    taken = match_targets(loaded, architecture)
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
    skipped = {n: "no rule names it" for n in architecture.linears if n not in taken}
    skipped |= {
        n: "outside the decoder blocks; pruned only when a rule names it"
        for n in architecture.outside
        if n not in taken
    }
    skipped |= architecture.unprunable
    allocation = loaded.recipe.allocation
    reconstruct = loaded.recipe.reconstruct_block
    if reconstruct is not None and not any(linear.block for linear in linears):
        raise RecipeError(
            f"{loaded.where('reconstruct_block')}: it would change nothing: all that the rules take lies outside "
            "the decoder blocks; leave it out"
        )
    plan = Plan(
        linears, skipped, rules,
        needs_calibration=(allocation is not None and bool(allocation.measures)) or reconstruct is not None,
        allocation=allocation, true_sequential=loaded.recipe.true_sequential, reconstruct_block=reconstruct,
    )  # fmt: skip
    observes = _check_blocks(loaded, plan, architecture, skeleton)
    sensitive = any(plan.sensitive_to(loss) for loss in get_args(Loss))
    check_text(loaded, skeleton, observes, sensitive)
    return replace(plan, needs_calibration=plan.needs_calibration or observes or sensitive)


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
        for name in reconstructor.selecting_options:
            if getattr(reconstructor_options, name) != reconstructor.options.model_fields[name].default:
                where = loaded.where("prune", index, "reconstruct", "options", name)
                raise RecipeError(
                    f"{where}: {name} changes how {reconstructor.name} selects, and does nothing to a mask that it is "
                    "given; leave it out"
                )
    return PlannedRule(index, spec, options, reconstructor, reconstructor_options)


def _find(loaded: LoadedRecipe, plugins: Plugins, name: str, index: int, key: str) -> PrunerSpec:
    try:
        return plugins.pruner(name)
    except PluginError as error:
        raise PluginError(f"{loaded.where('prune', index, key)}: {error}") from error


def _check_blocks(loaded: LoadedRecipe, plan: Plan, found: Architecture, skeleton: torch.nn.Module) -> bool:
    """Let each pruner refuse blocks that it cannot prune, and hear whether any observes text."""
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
                with loaded.at(*place), blamed_on(f"check of pruner {spec.name!r} failed on {fqn or 'the model'}"):
                    spec.check(block, patterns)
            if not observes:
                with loaded.at("prune", rule.index):
                    observes = _observes(rule, block, patterns)
    return observes


def _observes(rule: PlannedRule, block: Block, names: Iterable[str]) -> bool:
    with torch.device("meta"):  # a Hessian that nobody fills should take no memory
        pruners = zip((rule.pruner, rule.reconstructor), rule.build(), strict=True)
        return any(
            statistic_of(spec.name, pruner, block, n) is not None
            for spec, pruner in pruners
            if spec is not None and pruner is not None
            for n in names
        )
