"""What a pruner is checked on: the first block of a tiny model, and what a run would know of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any, TypeAlias

import torch
from pydantic import BaseModel
from torch import Tensor

from compressx.api.patterns import NM, UNIT_KINDS, RulePattern, Structured, UnitKind, Unstructured
from compressx.api.pruner import AnyPruner, Block, PruneResult, PrunerSpec
from compressx.blocks.fisher import fisher_diagonal
from compressx.blocks.select import PreparedValues, Stats, decide, gather
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import capture, each_block, passes
from compressx.models.units import find_units
from compressx.planning.plan import PlannedRule
from compressx.runtime.errors import CompressxError, UnsupportedModelError
from compressx.testing.models import tiny_model, tiny_tokens


class RefusedError(Exception):
    """The plugin refuses the architecture, as it may."""


class NoSuchPromiseError(Exception):
    """There is nothing to check."""


@contextmanager
def refusals(kind: type[CompressxError], but: type[CompressxError] | tuple[()] = ()) -> Iterator[None]:
    """Take an error of a kind for a refusal of the architecture, `but` not one of a plugin's own mistakes."""
    try:
        yield
    except but:
        raise
    except kind as refusal:
        raise RefusedError(str(refusal)) from refusal


def expect(holds: bool, broken: str) -> None:
    """Raise when a promise is broken; an assert would be silent under `python -O`."""
    if not holds:
        raise AssertionError(broken)


IN_BLOCKS = tuple(unit for unit in UNIT_KINDS if unit != "blocks")
"""Units of which a block has several."""


@dataclass(frozen=True)
class Whole:
    """Units to ask a pruner for; which ones a block has is found there."""

    unit: UnitKind
    sparsity: float

    def __str__(self) -> str:
        return f"{100 * self.sparsity:.6g}% of {self.unit}"


Claim: TypeAlias = Unstructured | NM | Whole
"""What a pruner says that it can do."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A block of a model with what a run would know of it, and the pruners that a run would build once."""

    model: Any
    block: Block
    passes: Sequence[Callable[[], Any]]
    built: dict[PlannedRule, tuple[AnyPruner, ...]] = field(default_factory=dict)

    def pruners(self, rule: PlannedRule) -> tuple[AnyPruner, ...]:
        """Return a rule's pruners, the same ones each time."""
        if rule not in self.built:
            self.built[rule] = rule.build()
        return self.built[rule]


class Subject:
    """A pruner on one architecture."""

    def __init__(self, spec: PrunerSpec, options: BaseModel, architecture: str) -> None:
        self.spec = spec
        self.architecture = architecture
        self.rule = PlannedRule(0, ((spec, options),))

    @property
    def claimed(self) -> list[Claim]:
        """What the pruner claims to support, in one block."""
        return [
            *(Unstructured(sparsity, group) for group in self.spec.groups for sparsity in (0.5, 0.3)),
            *([NM(2, 4), NM(4, 8), NM(1, 4)] if self.spec.nm else []),
            *(Whole(unit, sparsity) for unit in self.spec.units if unit in IN_BLOCKS for sparsity in (0.5, 0.3)),
        ]

    @cached_property
    def patterns(self) -> list[Claim]:
        """What is claimed, but for what the pruner's `check`, or the host, refuses on this architecture.

        Raises:
            NoSuchPromiseError: nothing is claimed.
        """
        if not self.claimed:
            raise NoSuchPromiseError("it prunes whole blocks, and nothing in them")
        block = self.scene(weights=False).block
        return [claim for claim in self.claimed if self.why_not(block, claim) is None]

    @property
    def different(self) -> list[Claim]:
        """One pattern of each sort: of weights, and of every kind of units."""
        return [*{getattr(claim, "unit", ""): claim for claim in reversed(self.patterns)}.values()][::-1]

    @property
    def few(self) -> list[Claim]:
        """The first and the last pattern of each sort."""
        last = {getattr(claim, "unit", ""): claim for claim in self.patterns}
        return [*dict.fromkeys((*self.different, *last.values()))]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The linears of the first block that some pattern is asked of."""
        block = self.scene(weights=False).block
        if not self.patterns:
            raise RefusedError(self.why_not(block, self.claimed[0]) or "")
        named = {name for claim in self.patterns for name in self.by_linear(block, claim)}
        return tuple(name for name in block.linears if name in named)

    @cached_property
    def weights_of(self) -> tuple[str, ...]:
        """The linears whose weights may go one by one: all, or the largest kinds that the pruner accepts together."""
        block = self.scene(weights=False).block
        plain = next((claim for claim in self.claimed if not isinstance(claim, Whole)), None)
        if plain is None:
            return ()
        kinds: dict[str, list[str]] = {}
        for name in block.linears:
            kinds.setdefault(name.removeprefix(f"{block.fqn}.").rstrip("0123456789"), []).append(name)
        for size in range(len(kinds), 0, -1):
            for some in combinations(kinds, size):
                names = tuple(name for kind in some for name in kinds[kind])
                if self.refusal(block, dict.fromkeys(names, plain)) is None:
                    return names
        return tuple(block.linears)

    def by_linear(self, block: Block, claim: Claim) -> dict[str, RulePattern]:
        """Return what each linear of a block has to become.

        Raises:
            UnsupportedModelError: the block has no such units.
        """
        if not isinstance(claim, Whole):
            return dict.fromkeys(self.weights_of, claim)
        patterns: dict[str, RulePattern] = {}
        for units in find_units(claim.unit, block):
            patterns |= dict.fromkeys(units.owners, Structured(claim.unit, claim.sparsity, units))
        return {name: patterns[name] for name in block.linears if name in patterns}

    def why_not(self, block: Block, claim: Claim) -> str | None:
        """Return why a block is not pruned so, or None."""
        try:
            patterns = self.by_linear(block, claim)
        except UnsupportedModelError as refusal:
            return str(refusal)
        for pattern in patterns.values():
            if isinstance(pattern, Structured) and not 0 < pattern.dropped < pattern.units.count:
                return f"{claim} of {pattern.units} are none, or all"
        return self.refusal(block, patterns)

    def refusal(self, block: Block, patterns: Mapping[str, RulePattern]) -> str | None:
        """Return why the pruner's `check` refuses to prune these linears so, or None."""
        try:
            if self.spec.check is not None:
                self.spec.check(block, patterns, self.rule.pruners[0][1])
        except CompressxError as refusal:
            return str(refusal)
        return None

    def scene(
        self, *, weights: bool = True, dtype: torch.dtype = torch.float32, matmul_dtype: torch.dtype | None = None,
        batches: Sequence[int] = (4, 4), tokens: Tensor | None = None, change: Callable[[Any], None] | None = None,
        device: str = "cpu",
    ) -> Scene:  # fmt: skip
        """Make a fresh model and run it up to its first block, on batches of so many sequences."""
        model = tiny_model(self.architecture, dtype=dtype).to(device)
        if change is not None:
            with torch.no_grad():
                change(model)
        access, found = InMemory(model, matmul_dtype), architecture_of(model)
        if not weights:
            model.to("meta")
            block, _ = next(each_block(access, found, dict.fromkeys(found.blocks, ())))
            return Scene(model, block, ())
        parts = torch.split(tiny_tokens() if tokens is None else tokens, list(batches))
        states, calls = capture(access, found, parts)
        block, runs = next(each_block(access, found, calls))
        if self.spec.reads_sensitivities:
            block = replace(block, sensitivities=fisher_diagonal(access, found, self.names, parts).linears)
        return Scene(model, block, passes(runs, states))

    @torch.no_grad()
    def statistics(self, scene: Scene, rule: PlannedRule | None = None) -> Stats:
        """Return the statistics that the pruner asks for."""
        rule = rule or self.rule
        return gather(scene.block, {rule: self.names}, {rule: scene.pruners(rule)}, scene.passes)

    @torch.no_grad()
    def decided(
        self, scene: Scene, claim: Claim, stats: Stats | None = None, *,
        names: Collection[str] | None = None, rule: PlannedRule | None = None, kept: PreparedValues | None = None,
    ) -> Mapping[str, PruneResult]:  # fmt: skip
        """Ask the pruner, as the host does, for all linears of a pattern or for some; the host refuses torn units."""
        rule = rule or self.rule
        stats = self.statistics(scene, rule) if stats is None else stats
        asked = self.by_linear(scene.block, claim)
        patterns = {name: asked[name] for name in names or asked}
        results = decide(rule, scene.pruners(rule), scene.block, patterns, stats, kept)
        expect(not torch.is_grad_enabled(), "it leaves gradients switched on")
        return results
