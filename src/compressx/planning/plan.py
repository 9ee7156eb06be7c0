"""The plan of a run: each linear, its pruner, its pattern. Plain data, made by `make.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pydantic import BaseModel
from torch import Tensor
from typing_extensions import get_protocol_members

from compressx.api.patterns import RulePattern, Structured, allocated_form
from compressx.api.pruner import AnyPruner, DepthSearch, Pruner, PrunerSpec
from compressx.recipe.sections import Allocation, ReconstructBlock
from compressx.runtime.errors import PluginError, blamed_on


@dataclass(frozen=True, eq=False)
class PlannedRule:
    """A recipe's rule with its pruners found and their options validated.

    Attributes:
        index: position in the recipe's `prune`.
        pruners: each with its options: the one that selects; after it, if there is one, the reconstructor, which gives
            the kept weights new values.
    """

    index: int
    pruners: tuple[tuple[PrunerSpec, BaseModel], ...]

    @cached_property
    def separable(self) -> bool:
        """Whether its pruners decide each linear apart."""
        return all(spec.separable for spec, _ in self.pruners)

    @cached_property
    def label(self) -> str:
        """The pruner's name, and after a `+` the reconstructor's."""
        return "+".join(spec.name for spec, _ in self.pruners)

    def build(self) -> tuple[AnyPruner, ...]:
        """Make the selecting pruner and, if there is one, the reconstructing one."""
        return tuple(_built(spec, options, Pruner) for spec, options in self.pruners)

    def build_depth(self) -> DepthSearch:
        """Make the selecting pruner of a rule that prunes whole blocks."""
        pruner: DepthSearch = _built(*self.pruners[0], DepthSearch)
        return pruner


def _built(spec: PrunerSpec, options: BaseModel, protocol: type) -> Any:
    """Build a pruner, and refuse one that would only fail when it is asked, after all calibration."""
    with blamed_on(f"pruner {spec.name!r} could not be built"):
        pruner = spec.build(options)
    if lacks := [name for name in sorted(get_protocol_members(protocol)) if not hasattr(pruner, name)]:
        raise PluginError(
            f"pruner {spec.name!r}: what build returned, a {type(pruner).__name__}, has no {' and '.join(lacks)}; see "
            f"compressx.{protocol.__name__}"
        )
    return pruner


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
    pattern: RulePattern

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class PlannedDepth:
    """A rule that drops whole decoder blocks, beside the rules that prune linears of the others.

    Attributes:
        rule: the rule.
        pattern: what it asks of all linears in the blocks that may be removed.
        blocks: the names of those blocks, in the order of the pattern's units.
        scores: by name, the divergence in nats of the predictions without each that can be removed alone; empty
            until the blocks are measured.
        chosen: the names of the removed ones, in the order in which they were chosen, each with the divergence without
            it and those before it.
        solved: by name, linears of kept blocks whose weights were solved for anew [out_features, in_features],
            each with the share that is left of what was missing in their block's output.
    """

    rule: PlannedRule
    pattern: Structured
    blocks: tuple[str, ...]
    scores: Mapping[str, float] = field(default_factory=dict)
    chosen: Mapping[str, float] = field(default_factory=dict)
    solved: Mapping[str, tuple[Tensor, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return what `plan.json` says of it."""
        return {
            "pruner": self.rule.label,
            "pattern": str(self.pattern),
            "count": self.pattern.dropped,
            "dropped": [*self.chosen],
            "scores": {**self.scores},
            "divergences": {**self.chosen},
        }


_MUCH = 0.02
"""Of the blocks' weights. Routers are less."""


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
        block_training: how the kept weights of each block are trained; None when they are not.
        depth: which blocks may be removed; None when no rule drops blocks.
        unprunable: fraction of the blocks' weights that are in no linear, such as experts in an unknown layout.
        matrices: number of weights in the blocks' matrices, linears or not.
    """

    linears: tuple[PlannedLinear, ...]
    skipped: Mapping[str, str]
    rules: tuple[PlannedRule, ...]
    needs_calibration: bool
    allocation: Allocation | None = None
    block_training: ReconstructBlock | None = None
    depth: PlannedDepth | None = None
    unprunable: float = 0.0
    matrices: int = 0

    def in_block(self, fqn: str) -> dict[PlannedRule, dict[str, RulePattern]]:
        """Return the linears of one block by the rule that took them, each name with its pattern."""
        by_rule: dict[PlannedRule, dict[str, RulePattern]] = {}
        for linear in self.linears:
            if linear.block == fqn:
                by_rule.setdefault(linear.rule, {})[linear.name] = linear.pattern
        return by_rule

    def decided_in(self, fqn: str) -> dict[PlannedRule, dict[str, RulePattern]]:
        """Return what `in_block` does without the rule that drops whole blocks, whose pruner decides no linear."""
        return {r: patterns for r, patterns in self.in_block(fqn).items() if self.depth is None or r != self.depth.rule}

    def build(self) -> dict[PlannedRule, tuple[AnyPruner, ...]]:
        """Make the pruners of the rules whose linears they decide."""
        return {r: r.build() for r in self.rules if self.depth is None or r != self.depth.rule}

    @property
    def dropped(self) -> tuple[str, ...]:
        """The names of the removed blocks; none until they are measured."""
        return () if self.depth is None else tuple(self.depth.chosen)

    @property
    def pieces(self) -> int:
        """The number of blocks to prune; the linears outside the blocks count as one."""
        return len({x.block for x in self.linears})

    @property
    def hidden_copies(self) -> int:
        """How many hidden states of each token are held between blocks: pruned ones, and dense ones to train with."""
        return 1 if self.block_training is None else 2

    @property
    def sensitive(self) -> set[str]:
        """The names of the linears in blocks whose sensitivities a pruner reads."""
        inside = [x for x in self.linears if x.block]
        return {x.name for x in inside if any(spec.reads_sensitivities for spec, _ in x.rule.pruners)}

    @property
    def reads_gradients(self) -> bool:
        """Whether gradients of the dense model's loss are measured, for pruners or for the training of blocks."""
        return bool(self.sensitive) or self.hidden_copies > 1

    def allocated(self, patterns: Mapping[str, RulePattern]) -> Plan:
        """Return the final plan: every linear with the pattern that an allocation gave it, by name.

        Linears of units keep theirs, at the sparsity of what they were given.
        """
        given = ((x, x.pattern, patterns[x.name]) for x in self.linears)
        linears = tuple(
            replace(x, pattern=replace(was, sparsity=new.sparsity) if isinstance(was, Structured) else new)
            for x, was, new in given
        )
        return replace(self, linears=linears, allocation=None)

    def scored(self, scores: Mapping[str, float], chosen: Mapping[str, float]) -> Plan:
        """Return the plan with its blocks measured: linears in the removed ones are no longer other rules'."""
        assert self.depth is not None  # noqa: S101 - blocks are measured because a rule drops some
        depth = replace(self.depth, scores=dict(scores), chosen=dict(chosen))
        linears = tuple(
            replace(x, rule=depth.rule, pattern=depth.pattern) if x.block in depth.chosen else x for x in self.linears
        )
        # Where nothing else is decided, no hidden states are needed any more.
        asked = self.block_training is not None or any(x.rule != depth.rule for x in linears)
        return replace(self, linears=linears, depth=depth, needs_calibration=self.needs_calibration and asked)

    @property
    def targeted(self) -> float:
        """The fraction of the weights in the blocks' matrices that rules took."""
        return sum(x.weights for x in self.linears if x.block) / self.matrices if self.matrices else 1.0

    def shown_pattern(self, linear: PlannedLinear) -> str:
        """Write a linear's pattern, such as `2:4` or `50% row`; `allocated row` or `allocated N:4` while it is open."""
        return str(linear.pattern) if self.allocation is None else allocated_form(str(linear.pattern))

    @property
    def warning(self) -> str:
        """Say how much of the blocks no rule can prune, if it is more than routers have; empty otherwise."""
        if self.unprunable < _MUCH:
            return ""
        return (
            f"{self.unprunable:.0%} of the blocks' weights stay dense whatever the rules say: they are no linears that "
            "compressx knows; `compressx plan` lists them as not pruned"
        )

    def __repr__(self) -> str:
        """Return one line, for notebooks; `to_dict` has every linear."""
        taken = Counter(x.rule.label for x in self.linears)
        rules = ", ".join(f"{count} by {label}" for label, count in taken.items())
        return f"Plan({len(self.linears)} linears: {rules or 'none'}; {len(self.skipped)} left alone)"

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
        depth = {} if self.depth is None else {"blocks": self.depth.to_dict()}
        return {**allocation, **depth, "linears": linears, "skipped": skipped}
