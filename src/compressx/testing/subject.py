"""What a pruner is checked on: the first block of a tiny model, and what a run would know of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from compressx.api.patterns import NM, Unstructured
from compressx.api.pruner import AnyPruner, Block, PruneResult, PrunerSpec
from compressx.blocks.contract import Checksums
from compressx.blocks.fisher import fisher_diagonal
from compressx.blocks.select import Kept, Stats, decide, gather
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.models.blockwise import capture, each_block, passes
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.runtime.errors import CompressxError
from compressx.testing.models import tiny_model, tiny_tokens


class RefusedError(Exception):
    """The plugin refuses the architecture, as it may."""


class NoSuchPromiseError(Exception):
    """There is nothing to check."""


def expect(kept: bool, broken: str) -> None:
    """Raise when a promise is not kept; an assert would be silent under `python -O`."""
    if not kept:
        raise AssertionError(broken)


@dataclass(frozen=True, eq=False)
class Scene:
    """A block of a model with what a run would know of it, and the pruners that a run would build once."""

    model: Any
    block: Block
    passes: Sequence[Callable[[], Any]]
    built: dict[PlannedRule, tuple[AnyPruner, AnyPruner | None]] = field(default_factory=dict)

    def pruners(self, rule: PlannedRule) -> tuple[AnyPruner, AnyPruner | None]:
        """Return a rule's pruners, the same ones each time."""
        if rule not in self.built:
            self.built[rule] = rule.build()
        return self.built[rule]


class Subject:
    """A pruner on one architecture."""

    def __init__(self, spec: PrunerSpec, options: BaseModel, architecture: str) -> None:
        self.spec = spec
        self.architecture = architecture
        self.rule = PlannedRule(0, spec, options, None, None)

    @property
    def claimed(self) -> list[Unstructured | NM]:
        """What the pruner claims to support."""
        return [
            *(Unstructured(sparsity, group) for group in self.spec.groups for sparsity in (0.5, 0.3)),
            *([NM(2, 4), NM(4, 8), NM(1, 4)] if self.spec.nm else []),
        ]

    @cached_property
    def patterns(self) -> list[Unstructured | NM]:
        """What is claimed, but for patterns that the pruner's `check` refuses on this architecture."""
        block = self.scene(weights=False).block
        return [p for p in self.claimed if self.refusal(block, dict.fromkeys(self.names, p)) is None]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The linears of the first block that the pruner takes: all, or the largest kinds that it accepts together."""
        block = self.scene(weights=False).block
        kinds: dict[str, list[str]] = {}
        for name in block.linears:
            kinds.setdefault(name.removeprefix(f"{block.fqn}.").rstrip("0123456789"), []).append(name)
        why = ""
        for size in range(len(kinds), 0, -1):
            for some in combinations(kinds, size):
                names = tuple(name for kind in some for name in kinds[kind])
                said = self.refusal(block, dict.fromkeys(names, Unstructured(0.5, self.spec.groups[0])))
                if said is None:
                    return names
                why = why or said
        raise RefusedError(why)

    def refusal(self, block: Block, patterns: Mapping[str, Unstructured | NM]) -> str | None:
        """Return why the pruner's `check` refuses to prune these linears so, or None."""
        try:
            if self.spec.check is not None:
                self.spec.check(block, patterns)
        except CompressxError as refusal:
            return str(refusal)
        return None

    def plan(self, model: Any) -> Plan:
        """Plan the first pattern for what the pruner takes in every block; a block that it refuses is left out."""
        found, (first, *_) = survey(model), self.patterns
        kinds = {name.removeprefix(f"{next(iter(found.blocks))}.") for name in self.names}
        linears: list[PlannedLinear] = []
        for block, _ in each_block(InMemory(model), found, dict.fromkeys(found.blocks, ())):
            taken = {name: x for name, x in block.linears.items() if name.removeprefix(f"{block.fqn}.") in kinds}
            if self.refusal(block, dict.fromkeys(taken, first)) is None:
                linears += [
                    PlannedLinear(name, block.fqn, (x.out_features, x.in_features), self.rule, first)
                    for name, x in taken.items()
                ]
        return Plan(tuple(linears), {}, (self.rule,), needs_calibration=True)

    def scene(
        self, *, weights: bool = True, dtype: torch.dtype = torch.float32, batches: Sequence[int] = (4, 4),
        tokens: Tensor | None = None, change: Callable[[Any], None] | None = None, device: str = "cpu",
    ) -> Scene:  # fmt: skip
        """Make a fresh model and run it up to its first block, on batches of so many sequences."""
        model = tiny_model(self.architecture, dtype=dtype).to(device)
        if change is not None:
            with torch.no_grad():
                change(model)
        access, found = InMemory(model), survey(model)
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
    def gathered(self, scene: Scene, rule: PlannedRule | None = None) -> Stats:
        """Return the statistics that the pruner asks for."""
        rule = rule or self.rule
        return gather(scene.block, {rule: self.names}, {rule: scene.pruners(rule)}, scene.passes)

    @torch.no_grad()
    def decided(
        self, scene: Scene, pattern: Unstructured | NM, stats: Stats | None = None, *,
        names: Collection[str] | None = None, rule: PlannedRule | None = None, kept: Kept | None = None,
    ) -> Mapping[str, PruneResult]:  # fmt: skip
        """Ask the pruner, as the host does."""
        rule = rule or self.rule
        stats = self.gathered(scene, rule) if stats is None else stats
        patterns = dict.fromkeys(names or self.names, pattern)
        untouched = Checksums(scene.block, [rule.label])
        results = decide(rule, scene.pruners(rule), scene.block, patterns, stats, untouched, kept)
        expect(not torch.is_grad_enabled(), "it leaves gradients switched on")
        return results
