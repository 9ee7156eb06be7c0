"""The pruner inside the host's block loop: what it observes, returns and what the host then writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.compressx.built_in import BUILT_IN
from tests.compressx_attnprune.pruning import OF_MODE
from tests.pairs import pairs

from compressx import NM, Pattern, PrunerSpec, Unstructured
from compressx.blocks.prune import PrunedBlock, prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.testing import tiny_model, tiny_tokens
from compressx_attnprune import plugin

SPEC = plugin.compressx_pruners()[0]
WANDA, MAGNITUDE = BUILT_IN["wanda"], BUILT_IN["magnitude"]
TARGETS = ("q_proj", "k_proj", "c_attn", "query_key_value", "qkv_proj")
BATCHES = tiny_tokens(sequences=16).split(4)
ENOUGH = tiny_tokens(sequences=64).split(4)
"""By these the curvature is known well enough to beat masked weights on others; with 16 sequences chance decides."""


def plan(
    model: Any,
    pattern: Pattern,
    *,
    selector: PrunerSpec = SPEC,
    reconstructor: PrunerSpec | None = None,
    **options: Any,
) -> Plan:
    """Plan one rule over all query and key projections; the options are attnprune's, in whichever role it has."""
    found = architecture_of(model)
    chosen = SPEC.options(**options)
    specs = (selector, reconstructor) if reconstructor else (selector,)
    rule = PlannedRule(0, tuple((spec, chosen if spec is SPEC else spec.options()) for spec in specs))
    linears = tuple(
        PlannedLinear(n, found.block_of(n), tuple(x.weight.shape), rule, pattern)
        for n, x in found.linears.items()
        if n.endswith(TARGETS)
    )
    return Plan(linears, {}, (rule,), needs_calibration=True)


def pruned_weights(
    model: Any, planned: Plan, batches: Sequence[torch.Tensor] = BATCHES
) -> tuple[list[PrunedBlock], dict[str, torch.Tensor]]:
    """Prune a model and return what was reported, and the weights that were planned, as they are now."""
    pruned = list(prune_model(InMemory(model), planned, batches))
    linears = architecture_of(model).linears
    return pruned, {x.name: linears[x.name].weight.clone() for x in planned.linears}


def test_what_query_and_key_have_in_common_is_told_once():
    model = tiny_model("llama")
    for block in prune_model(InMemory(model), plan(model, Unstructured(0.5, "joint"), **OF_MODE["mask"]), BATCHES):
        query, key = block.report.layers
        assert query.group == key.group == query.name
        assert (query.info, query.history) == (key.info, key.history)
        assert len(query.history["mask"]) == 5
        assert len(block.images[query.name]) == 2
        own = query.info["attention_error"]
        assert 0 < own <= min(query.info["attention_error.wanda"], query.info["attention_error.sparsegpt"])


@pytest.mark.parametrize(
    ("architecture", "selector", "pattern"),
    pairs(["llama", "gpt2"], [WANDA, MAGNITUDE], [Unstructured(0.5, "row"), NM(2, 4)]),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_selection_of_another_pruner_is_kept_and_reconstructed(architecture, selector, pattern):
    model, alone = (tiny_model(architecture) for _ in range(2))
    pruned, rebuilt = pruned_weights(model, plan(model, pattern, selector=selector, reconstructor=SPEC), ENOUGH)
    _, selected = pruned_weights(alone, plan(alone, pattern, selector=selector), ENOUGH)
    first = {x.name for x in pruned[0].report.layers}
    for name in first:  # later blocks see other inputs, and Wanda selects by them
        assert torch.equal(rebuilt[name] != 0, selected[name] != 0)
        assert not torch.equal(rebuilt[name], selected[name])
    for block in pruned:
        layer = block.report.layers[0]
        assert layer.pruner == f"{selector.name}+attnprune"
        assert layer.info["output_error"] <= layer.info["output_error.wanda"]  # the same mask with its dense values
    assert pruned[0].report.layers[0].info["output_error"] < pruned[0].report.layers[0].info["output_error.wanda"]
