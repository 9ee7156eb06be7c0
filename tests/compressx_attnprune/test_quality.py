"""What attention-aware pruning gains on really trained weights, on text that it was not calibrated on.

The text is Python's own documentation, which every installation has; the figures in docs/results.md are of other text.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.pruning import asked

from compressx import PruneResult, SequenceSample, Unstructured
from compressx.blocks.observe import SharedStatistic
from compressx_attnprune import plugin

LAYER = 3
SEQUENCES, HELD_OUT, LENGTH = 40, 8, 128
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(smollm2_short: Any) -> blocks.Recorded:
    """The last of SmolLM2's first blocks with the inputs of its query projection."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = smollm2_short.tokenizer(text, return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    block, x, _ = blocks.run_recorded(smollm2_short.model.model, LAYER, windows[order[:SEQUENCES]])
    return blocks.Recorded(block, x, torch.empty(0))


@pytest.fixture(autouse=True)
def a_fifth_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bounds were found with."""
    monkeypatch.setattr(plugin, "HELD_OUT", HELD_OUT / SEQUENCES)


def prune(recorded: blocks.Recorded, sparsity: float, **options: Any) -> list[PruneResult]:
    names = blocks.targets(recorded.block)
    sample = SequenceSample(recorded.x.shape[-1])
    sample.update(recorded.x)
    chosen = plugin.AttnPruneOptions(objective="attention-matrix", **options)
    patterns = dict.fromkeys(names, Unstructured(sparsity, "joint"))
    observed = dict.fromkeys(names, SharedStatistic(sample))
    return list(asked(plugin.AttnPrune(chosen), recorded.block, patterns, observed).values())


@pytest.mark.parametrize(("sparsity", "at_most"), [(0.5, 0.25), (0.7, 0.25), (0.9, 0.35)])
def test_the_closed_form_leaves_a_fraction_of_the_attention_error_of_wanda_and_sparsegpt(recorded, sparsity, at_most):
    results = prune(recorded, sparsity)
    info = results[0].info
    assert "fell_back" not in info
    assert info["attention_error"] <= at_most * min(info["attention_error.wanda"], info["attention_error.sparsegpt"])
    zeros = sum(int((~r.keep).sum()) for r in results)
    assert zeros == round(sparsity * sum(r.keep.numel() for r in results))
