"""Asking the pruner for a recorded block, and what the host checks of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tests.compressx_attnprune import blocks

from compressx import NM, FixedMask, Pattern, PruneResult, Unstructured
from compressx.api.patterns import keep_mask
from compressx.api.pruner import Block
from compressx.blocks.contract import answer_of, check_answer
from compressx.blocks.observe import SharedStatistic
from compressx_attnprune import plugin

SPEC = plugin.compressx_pruners()[0]
MODES = ("gauss-newton", "mask")
OF_MODE: dict[str, dict[str, Any]] = {"gauss-newton": {}, "mask": {"mode": "mask", "objective": "attention-matrix"}}
"""The options of a mode."""
OBJECTIVES = {"attention-matrix": "attention_error", "attention-output": "output_error"}
PATTERNS: list[Pattern] = [
    Unstructured(0.637, "joint"), Unstructured(0.637, "layer"), Unstructured(0.637, "row"), NM(2, 4)
]  # fmt: skip
HALF = Unstructured(0.5, "joint")
SEQUENCES = 16
HELD_OUT = 2
"""How many of them are held out: an eighth."""


def observed(recorded: blocks.Recorded, pruner: Any) -> dict[str, SharedStatistic]:
    """Fill what the pruner asks for, one sample shared by both projections as the host does."""
    names = blocks.targets(recorded.block)
    sample = pruner.observe(recorded.block, names[0])
    assert sample == pruner.observe(recorded.block, names[-1])  # equal when fresh, so the host shares it
    for batch in recorded.x.split(2):
        sample.update(batch)
    return dict.fromkeys(names, SharedStatistic(sample))


def asked(
    pruner: Any, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, SharedStatistic], kept: Any = None
) -> dict[str, PruneResult]:
    return dict(answer_of(SPEC.name, pruner, block, patterns, stats, kept))


def prune(
    recorded: blocks.Recorded, pattern: Pattern | Mapping[str, Pattern], **options: Any
) -> dict[str, PruneResult]:
    pruner = SPEC.build(SPEC.options(**options))
    patterns = pattern if isinstance(pattern, Mapping) else dict.fromkeys(blocks.targets(recorded.block), pattern)
    return asked(pruner, recorded.block, patterns, observed(recorded, pruner))


def given_masks(block: Block, chosen_as: Unstructured | NM) -> dict[str, Pattern]:
    """Give every target the mask that magnitude chooses, as a recipe's `reconstruct` does."""
    scores = {n: block.linears[n].weight.float().abs() for n in blocks.targets(block)}
    return {n: FixedMask(keep_mask(s, chosen_as), chosen_as) for n, s in scores.items()}


def assert_as_asked(block: Block, patterns: Mapping[str, Pattern], results: Mapping[str, PruneResult]) -> None:
    """Hold results against what the host checks: counts, exact to the weight, and given masks untouched."""
    assert set(results) == set(patterns)
    check_answer(SPEC.name, block, patterns, results)
    for result in results.values():
        assert result.weight.dtype == torch.float32
        assert torch.equal(result.weight != 0, result.keep)
