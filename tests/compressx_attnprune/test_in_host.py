"""The pruner inside the host's block loop: what it observes, returns and what the host then writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks

from compressx import NM, Pattern, Unstructured
from compressx.architecture import survey
from compressx.planning import Plan, PlannedLinear, PlannedRule
from compressx.testing import tiny_model, tiny_tokens
from compressx.walk import prune_model
from compressx_attnprune import plugin

SPEC = plugin.compressx_pruners()[0]


def plan(model: Any, pattern: Pattern, **options: Any) -> Plan:
    """Plan one rule over all query and key projections."""
    found = survey(model)
    rule = PlannedRule(0, SPEC, SPEC.options(**options), None, None, pattern)
    linears = tuple(
        PlannedLinear(n, found.block_of(n), tuple(x.weight.shape), rule)
        for n, x in found.linears.items()
        if n.endswith(("q_proj", "k_proj"))
    )
    return Plan(linears, {}, (rule,), needs_calibration=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", [*blocks.SEPARATE, "llama-tied", "mixtral"])
@pytest.mark.parametrize(
    ("mode", "pattern"),
    [("gauss-newton", Unstructured(0.6, "joint")), ("gauss-newton", NM(2, 4)), ("mask", Unstructured(0.6, "joint"))],
    ids=str,
)
def test_every_block_reaches_its_budget(architecture: str, dtype: torch.dtype, mode: str, pattern: Pattern):
    model = tiny_model(architecture, dtype=dtype)
    pruned = list(prune_model(model, plan(model, pattern, mode=mode, steps=2), tiny_tokens().split(4)))
    assert len(pruned) == 3
    linears = survey(model).linears
    for block in pruned:
        weights = [linears[layer.name].weight for layer in block.report.layers]
        assert {w.dtype for w in weights} == {dtype}
        zeros, total = sum(int((w == 0).sum()) for w in weights), sum(w.numel() for w in weights)
        assert zeros == round(pattern.sparsity * total)


@pytest.mark.parametrize("mode", ["gauss-newton", "mask"])
def test_zero_sparsity_leaves_the_model_bit_for_bit(mode: str):
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    list(prune_model(model, plan(model, Unstructured(0.0, "joint"), mode=mode), tiny_tokens().split(4)))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
