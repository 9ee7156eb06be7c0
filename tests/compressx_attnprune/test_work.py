"""What attention pruning counts of itself, held against what torch counts while it prunes."""

from __future__ import annotations

import pytest
import torch
from tests.compressx.flops import counter
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.pruning import HALF, OBJECTIVES, SEQUENCES, SPEC, asked, given_masks, observed
from tests.compressx_attnprune.test_groups import LLAMA, stats_of, structured
from torch.nn.attention import SDPBackend, sdpa_kernel

from compressx import NM, FixedMask, Unstructured, Windows
from compressx.api.pruner import CountedPruner
from compressx_attnprune import groups, solver, work
from compressx_attnprune.structured import asked_units

EXACT = {"gauss-newton": 0.02, "mask": 0.1, "joint": 0.15}
"""How far the count may be off. SparseGPT is swept once where it meets a budget by itself, and the learnt modes measure
the held-out error of intermediate results."""


@pytest.fixture(autouse=True)
def without_more_damping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what is done again where the curvature is inaccurate, as it often is with random weights."""
    monkeypatch.setattr(solver, "_MOST_DAMPING", 0.0)


def counts(recorded: blocks.Recorded, patterns, **options) -> tuple[float, float]:
    """Return the FLOPs of matrix products that the pruner counts, and those that torch sees."""
    pruner = SPEC.build(SPEC.options(**options))
    assert isinstance(pruner, CountedPruner)
    observe = stats_of if asked_units(patterns) else observed
    stats = observe(recorded, pruner)
    with sdpa_kernel(SDPBackend.MATH), counter() as flops_of:
        asked(pruner, recorded.block, patterns, stats)
    text = Windows(SEQUENCES, recorded.x.shape[1], 2)
    name = next(iter(patterns))
    work = pruner.work(recorded.block, patterns, text) + pruner.prepare_work(recorded.block, name, text)
    return work["float32"] + work["attention"], float(flops_of.total)


@pytest.mark.parametrize(
    "architecture", ["llama", "llama-mqa", "llama-mha", "qwen3", "gemma3", "gpt-neox", *blocks.BESIDE]
)
def test_the_products_are_those_that_torch_counts_in_every_geometry(architecture):
    recorded = blocks.record(architecture, sequences=SEQUENCES)
    counted, seen = counts(recorded, dict.fromkeys(blocks.targets(recorded.block), HALF))
    assert counted == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("mode", EXACT)
def test_the_products_are_those_that_torch_counts_in_every_mode(objective, mode):
    recorded = blocks.record("llama", sequences=SEQUENCES)
    options = {} if mode == "gauss-newton" else {"steps": 6}
    patterns = dict.fromkeys(blocks.targets(recorded.block), HALF)
    counted, seen = counts(recorded, patterns, objective=objective, mode=mode, **options)
    assert counted == pytest.approx(seen, rel=EXACT[mode])


@pytest.mark.parametrize("pattern", [NM(2, 4), Unstructured(0.5, "row")], ids=str)
def test_given_masks_are_only_reconstructed(pattern):
    recorded = blocks.record("llama", sequences=SEQUENCES)
    counted, seen = counts(recorded, given_masks(recorded.block, pattern))
    assert counted == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "olmo2", "mistral", "qwen3-next"])
@pytest.mark.parametrize("options", [{}, {"damping": 0.1}, {"refit": 3}], ids=str)
def test_the_products_of_groups_are_those_that_torch_counts(architecture, options):
    recorded = blocks.record(architecture, sequences=SEQUENCES)
    counted, seen = counts(recorded, structured(recorded), **options)
    assert counted == pytest.approx(seen, rel=0.05)


def test_sets_that_are_compared_are_counted_and_those_of_given_masks_are_not(monkeypatch):
    recorded = blocks.record(LLAMA, sequences=2)
    patterns = structured(recorded)
    every, seen = counts(recorded, patterns)
    monkeypatch.setattr(groups, "MOST_SETS", 2)
    monkeypatch.setattr(work, "MOST_SETS", 2)
    greedy, seen_greedy = counts(recorded, patterns)
    units = next(iter(patterns.values())).units
    shapes = {n: (x.out_features, x.in_features) for n, x in recorded.block.linears.items()}
    masks = units.masks(torch.tensor([True, False, True, False]), shapes)
    given, seen_given = counts(recorded, {n: FixedMask(masks[n], p) for n, p in patterns.items()})
    assert given < greedy < every
    assert greedy - given == pytest.approx(seen_greedy - seen_given)
    assert every - greedy == pytest.approx(seen - seen_greedy)


def test_nothing_to_prune_takes_no_work():
    recorded = blocks.record("llama", sequences=SEQUENCES)
    pruner = SPEC.build(SPEC.options())
    assert pruner.work(recorded.block, structured(recorded, 0.0), Windows(SEQUENCES, 32, 2)).flops == 0
