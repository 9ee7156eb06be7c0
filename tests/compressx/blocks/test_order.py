"""True-sequential pruning: the order of a block's linears, and what each of them sees."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.compressx.blocks.test_prune import SPECS, batches, plan_all

from compressx.api.patterns import Unstructured
from compressx.blocks.order import stages
from compressx.blocks.prune import prune_model, refuse_one_stage
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.models.capture import capture_calls, replay
from compressx.runtime.errors import RecipeError
from compressx.testing import tiny_model, tiny_tokens

HALF = Unstructured(0.5)

ORDERS = {
    "llama": ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
    "opt": ["k_proj v_proj q_proj", "out_proj", "fc1", "fc2"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt-neox": ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
}


def first_block(architecture):
    model = tiny_model(architecture)
    found = survey(model)
    (state,), calls = capture_calls(model, found.blocks, [tiny_tokens()])
    fqn, module = next(iter(found.blocks.items()))
    linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
    return linears, partial(replay, module, state, calls[fqn][0])


@pytest.mark.parametrize("architecture", ORDERS)
def test_stages_are_what_a_block_calls_one_after_the_other(architecture):
    linears, run = first_block(architecture)
    found = [set(names) for names in stages(linears, run)]
    expected = [{n for n in linears if any(n.endswith(x) for x in kinds.split())} for kinds in ORDERS[architecture]]
    if architecture == "gpt-neox":  # parallel residual: both branches read the input
        assert {frozenset(s) for s in found} == {frozenset(s) for s in expected}
    else:
        assert found == expected


def test_all_experts_of_one_parameter_are_one_stage_whether_a_token_reached_them_or_not():
    linears, run = first_block("mixtral")
    *_, up, down = stages(linears, run)
    assert {n.split(".")[-2] for n in up} == {"gate_up_proj"}
    assert {n.split(".")[-2] for n in down} == {"down_proj"}
    assert len(up) == len(down) == sum("gate_up_proj" in n for n in linears)


def test_what_must_be_decided_together_is_in_the_earliest_stage_of_its_linears():
    linears, run = first_block("llama")
    names = {n.rsplit(".", 1)[1]: n for n in linears}
    merged = stages(linears, run, [[names["up_proj"], names["o_proj"]]])
    assert merged[1] == [names["o_proj"], names["up_proj"]]
    assert merged[2] == [names["gate_proj"]]


def test_each_linear_is_fitted_to_the_inputs_that_the_pruned_ones_before_it_give():
    model, by_hand = tiny_model("llama"), tiny_model("llama")
    plan = plan_all(model, SPECS["sparsegpt"], HALF)
    list(prune_model(InMemory(model), type(plan)(**{**vars(plan), "true_sequential": True}), batches()))
    # The same by hand: one linear after the other, everything before it already pruned, in calls of one linear each.
    for fqn in survey(by_hand).blocks:
        for kinds in ORDERS["llama"]:
            only = [n for n in survey(by_hand).linears if n.startswith(f"{fqn}.") and n.split(".")[-1] in kinds.split()]
            every = plan_all(by_hand, SPECS["sparsegpt"], HALF)
            part = tuple(x for x in every.linears if x.name in only)
            list(prune_model(InMemory(by_hand), type(plan)(**{**vars(every), "linears": part}), batches()))
    expected = by_hand.state_dict()
    for name, now in model.state_dict().items():
        torch.testing.assert_close(now, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "only", "told"),
    [
        (Unstructured(0.5, "joint"), "", "at once (jointly, by wanda); leave it out"),
        (HALF, "q_proj k_proj v_proj", "at once; leave it out"),
        (HALF, "", None),
        (HALF, "v_proj o_proj", None),
    ],
)
def test_one_stage_in_every_block_is_refused_since_it_would_change_nothing(pattern, only, told):
    model = tiny_model("llama")
    plan = plan_all(model, SPECS["wanda"], pattern)
    taken = tuple(x for x in plan.linears if not only or x.name.split(".")[-1] in only.split())
    asked = replace(plan, linears=taken, true_sequential=True)
    with pytest.raises(RecipeError) if told else nullcontext() as refused:
        refuse_one_stage(InMemory(model), asked, batches())
    assert told is None or told in str(refused.value)
    refuse_one_stage(InMemory(model), replace(asked, true_sequential=False), batches())


def test_one_stage_in_some_blocks_only_is_not_refused():
    model = tiny_model("llama")
    plan = plan_all(model, SPECS["wanda"], HALF)
    taken = tuple(x for x in plan.linears if ".0." not in x.name or "q_proj" in x.name)
    refuse_one_stage(InMemory(model), replace(plan, linears=taken, true_sequential=True), batches())


def test_a_rule_that_is_decided_jointly_is_pruned_at_once():
    model, at_once = tiny_model("llama"), tiny_model("llama")
    for m, sequential in ((model, True), (at_once, False)):
        plan = plan_all(m, SPECS["wanda"], Unstructured(0.5, "joint"))
        list(prune_model(InMemory(m), type(plan)(**{**vars(plan), "true_sequential": sequential}), batches()))
    expected = at_once.state_dict()
    assert all(torch.equal(now, expected[name]) for name, now in model.state_dict().items())
