"""Plans that drop experts: what is refused before weights are read."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.compressx.depths import planned
from tests.compressx.mixtures import mixture
from torch import nn

from compressx.runtime.errors import CompressxError
from compressx.testing import tiny_model

HALF = {"targets": ["*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}


def refusal(model: Any, **rule: Any) -> str:
    with pytest.raises(CompressxError) as caught:
        planned(model, {**HALF, **rule}, shrink=True)
    return str(caught.value)


def test_the_experts_of_each_mixture_compete_and_nothing_else_is_taken():
    plan = planned(mixture("qwen3-moe-dense-block"), HALF, shrink=True)
    assert {x.block for x in plan.linears} == {"model.layers.0", "model.layers.2"}
    assert {x.name.split(".")[-2] for x in plan.linears} == {"gate_up_proj", "down_proj"}
    assert plan.needs_calibration


def test_fewer_experts_than_the_router_chooses_are_refused():
    said = refusal(mixture("mixtral"), sparsity=0.75)
    assert re.search(
        r"prune\[0\]\.sparsity: sparsity 0\.75 keeps 1 of the 4 experts of model\.layers\.0\.mlp\.experts, but the "
        r"router chooses 2 for each token; at most 0\.5 leaves",
        said,
    )


def test_groups_of_experts_are_refused():
    said = refusal(mixture("deepseek-v3", n_group=2))
    assert re.search(r"prune\[0\]\.pattern: model\.layers\.1\.mlp\.gate chooses among 2 groups of experts", said)


def test_a_router_whose_choice_is_made_elsewhere_is_refused():
    model = mixture("mixtral")
    model.model.layers[0].mlp.gate = nn.Linear(64, 4, bias=False)
    assert re.search(r"model\.layers\.0\.mlp\.gate is a linear, and MixtralSparseMoeBlock chooses", refusal(model))


def test_a_mixture_without_a_router_beside_it_is_refused():
    model = mixture("mixtral")
    model.model.layers[0].mlp.gate = nn.Identity()
    assert re.search(r"model\.layers\.0\.mlp: expected one router with a row for each of the 4 experts", refusal(model))


def test_models_without_experts_are_refused():
    assert re.search(r"prune\[0\]\.pattern: no block has experts", refusal(tiny_model("llama")))


def test_a_pruner_of_other_units_is_refused():
    assert "wanda does not prune experts" in refusal(mixture("mixtral"), pruner="wanda")


def test_experts_have_no_plain_sparsity():
    with pytest.raises(CompressxError, match="reap prunes whole units only; give it a pattern: experts"):
        planned(mixture("mixtral"), {k: v for k, v in HALF.items() if k != "pattern"}, shrink=True)


def test_experts_that_would_stay_on_disk_are_refused():
    with pytest.raises(CompressxError, match=r"prune\[0\]\.pattern: experts go with shrink: true only"):
        planned(mixture("mixtral"), HALF)
