"""Every selector with every reconstructor: the one's mask and the other's weights."""

from __future__ import annotations

import pytest
import torch
from tests.compressx.blocks.test_prune import batches
from tests.compressx.built_in import BUILT_IN

from compressx.api.patterns import NM, Unstructured
from compressx.blocks.fisher import fisher_diagonal
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.testing import tiny_model

RECONSTRUCTORS = [name for name, spec in BUILT_IN.items() if spec.reconstructs]
PATTERNS = [Unstructured(0.5, "layer"), Unstructured(0.5, "row"), NM(2, 4)]
SELECTORS = [name for name, spec in BUILT_IN.items() if spec.groups]
CASES = [(s, r, PATTERNS[(i + j) % 3]) for i, s in enumerate(SELECTORS) for j, r in enumerate(RECONSTRUCTORS)]
FQN = "model.layers.0"
NAMES = [f"{FQN}.self_attn.{x}_proj" for x in "qk"]


def pruned(selector, reconstructor, pattern):
    """Prune query and key of the first block; return their masks and weights."""
    model, tokens = tiny_model("llama"), batches()
    access, found = InMemory(model), architecture_of(model)
    rule = PlannedRule(0, tuple((BUILT_IN[x], BUILT_IN[x].options()) for x in (selector, reconstructor) if x))
    linears = tuple(PlannedLinear(n, FQN, tuple(found.linears[n].weight.shape), rule, pattern) for n in NAMES)
    plan = Plan(linears, {}, (rule,), needs_calibration=True)
    fisher = fisher_diagonal(access, found, plan.sensitive, tokens) if plan.sensitive else None
    (first,) = prune_model(access, plan, tokens, fisher=fisher)
    return {n: entry.keep for n, entry in first.masks.items()}, {n: found.linears[n].weight for n in NAMES}


@pytest.mark.parametrize(("selector", "reconstructor", "pattern"), CASES, ids=str)
def test_the_mask_is_the_selectors_and_the_kept_weights_the_reconstructors(selector, reconstructor, pattern):
    alone, _ = pruned(selector, None, pattern)
    masks, weights = pruned(selector, reconstructor, pattern)
    dense = architecture_of(tiny_model("llama")).linears
    for name, keep in masks.items():
        assert torch.equal(keep, alone[name])
        assert torch.equal(weights[name] != 0, keep)
        updated = not torch.equal(weights[name], dense[name].weight * keep)
        assert updated or reconstructor == "attnprune", "which keeps them where nothing is better"
