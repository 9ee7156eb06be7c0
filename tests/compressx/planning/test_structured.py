"""Plans of rules whose pattern is a unit, experts or whole blocks: what they take, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compressx.depths import THIRD, planned
from tests.compressx.mixtures import mixture
from torch import nn

from compressx import CompressxError, Structured, UnsupportedModelError
from compressx.testing import tiny_model


def rule(**more: Any) -> dict[str, Any]:
    return {"targets": ["*"], "pruner": "wanda", "pattern": "neurons", "sparsity": 0.25, **more}


def skeleton(architecture: str = "llama") -> Any:
    with torch.device("meta"):
        return tiny_model(architecture)


def refusal(*rules: dict[str, Any], model: Callable[[], Any] = skeleton, **sections: Any) -> str:
    with pytest.raises(CompressxError) as caught:
        planned(model(), *rules, **sections)
    return str(caught.value)


def test_rules_of_two_kinds_of_units_with_the_same_targets_take_what_is_theirs():
    plan = planned(skeleton(), rule(), rule(pruner="ziplm", pattern="kv-groups", sparsity=0.5))
    assert len(plan.linears) == 21
    for linear in plan.linears:
        pattern = linear.pattern
        assert isinstance(pattern, Structured)
        attention = "self_attn" in linear.name
        assert (pattern.unit, linear.rule.label) == (("kv-groups", "ziplm") if attention else ("neurons", "wanda"))
        assert (pattern.dropped, pattern.units.count) == (
            (1, 2) if attention else (32, 96)
        )  # of multiples of 32 the nearest
    shared = {id(x.pattern.units): x.pattern.units for x in plan.linears if isinstance(x.pattern, Structured)}
    assert sorted(units.fqn for units in shared.values()) == sorted(
        f"model.layers.{i}.{part}" for i in range(3) for part in ("mlp", "self_attn")
    )
    assert str(plan.linears[0].pattern) == "1 of 2 kv-groups"


def test_a_rule_whose_pruner_finds_no_attention_in_any_block_is_told_so_and_not_to_ignore_one():
    model = skeleton()
    for block in model.model.layers:
        for name in ("q_proj", "k_proj"):
            block.self_attn.add_module(f"my_{name[0]}", block.self_attn._modules.pop(name))
    with pytest.raises(UnsupportedModelError) as refused:
        planned(model, rule(targets=["*.my_q", "*.my_k"], pruner="attnprune", pattern=None, sparsity=0.5))
    told = str(refused.value)
    assert told.startswith("<dict>:prune[0]: model.layers.0 has 0 q_proj and 0 k_proj; ")
    assert "; its linears: model.layers.0.self_attn.v_proj, " in told
    end = "; no block that the rule takes has what its pruner needs: see docs/unsupported-models.md"
    assert told.endswith(f"; leave it to a pruner of single linears, such as sparsegpt or wanda{end}")
    assert "ignore" not in told
    assert "\n" not in told


def test_a_rule_whose_pruner_refuses_some_blocks_is_told_all_of_them_at_once():
    model = skeleton()
    for block in (model.model.layers[0], model.model.layers[2]):
        block.self_attn.weigh = block.self_attn._modules.pop("v_proj")
    asks = rule(targets=["*.q_proj", "*.k_proj"], pruner="attnprune", pattern=None, sparsity=0.5)
    with pytest.raises(UnsupportedModelError, match=r"0\.self_attn has no value projection .*wanda; put a rule of "
                       r"another pruner before this one, with targets: \[layers: \[0, 2\]\]$"):  # fmt: skip
        planned(model, asks)
    others = rule(targets=[{"layers": [0, 2]}], pruner="wanda", pattern=None, sparsity=0.5)
    plan = planned(model, others, asks)
    assert {linear.block for linear in plan.linears if linear.rule.index == 1} == {"model.layers.1"}


def test_units_of_some_layers_may_be_named_and_other_linears_pruned_by_weights():
    layers = rule(targets=[{"layers": "1-2"}])
    plan = planned(skeleton(), layers, rule(pattern=None, sparsity=0.5))
    by = {(x.block.split(".")[-1], "mlp" in x.name, isinstance(x.pattern, Structured)) for x in plan.linears}
    assert by == {("0", True, False), ("1", True, True), ("2", True, True)} | {(i, False, False) for i in "012"}


@pytest.mark.parametrize(
    ("more", "one"), [({"multiple": 1}, 1), ({}, 32), ({"multiple": 48}, 48), ({"pattern": "kv-groups"}, 1)]
)
def test_the_sparsities_that_refusals_name_as_the_least_and_the_most_are_planned(more, one):
    for sparsity, at, dropped in ((0.001, "least", one), (0.999, "most", None)):
        said = refusal(rule(**more, sparsity=sparsity))
        (told,) = re.findall(rf"at {at} (\S+)", said)
        taken = {x.pattern for x in planned(skeleton(), rule(**more, sparsity=float(told))).linears}
        assert {p.dropped for p in taken} == {dropped or taken.pop().units.count - one}


# --- experts

HALF = {"targets": ["*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}


def test_the_experts_of_each_mixture_compete_and_nothing_else_is_taken():
    plan = planned(mixture("qwen3-moe-dense-block"), HALF, shrink=True)
    assert {x.block for x in plan.linears} == {"model.layers.0", "model.layers.2"}
    assert {x.name.split(".")[-2] for x in plan.linears} == {"gate_up_proj", "down_proj"}
    assert plan.needs_calibration


def routed_by(gate: nn.Module) -> Any:
    model = mixture("mixtral")
    model.model.layers[0].mlp.gate = gate
    return model


# --- whole blocks

LONGER = {"dataset": {"text": "t.txt"}, "samples": 8, "sequence_length": 32, "batch_size": 4}


def test_all_linears_of_the_blocks_are_planned_and_calibration_is_needed():
    plan = planned(skeleton())
    assert plan.depth is not None
    assert plan.depth.blocks == tuple(f"model.layers.{i}" for i in range(3))
    assert plan.depth.pattern.dropped == 1
    assert {x.rule for x in plan.linears} == {plan.depth.rule}
    assert len(plan.linears) == 21
    assert plan.needs_calibration
    assert plan.decided_in("model.layers.0") == {}


@pytest.mark.parametrize("first", [True, False])
def test_other_rules_take_their_linears_whether_they_stand_before_or_after(first):
    half = {"targets": ["*.down_proj"], "pruner": "wanda", "sparsity": 0.5}
    plan = planned(skeleton(), *([half, THIRD] if first else [THIRD, half]))
    taken = {x.name.split(".")[-1]: x.rule.label for x in plan.linears}
    assert {kind for kind, pruner in taken.items() if pruner == "wanda"} == {"down_proj"}
    scored = plan.scored({}, {"model.layers.1": 0.5})
    assert scored.dropped == ("model.layers.1",)
    downs = {x.block: x.rule.label for x in scored.linears if x.name.endswith("down_proj")}
    assert downs == {"model.layers.0": "wanda", "model.layers.1": "depth", "model.layers.2": "wanda"}


def test_the_plan_as_data_says_which_blocks_are_removed_once_they_are_chosen():
    plan, scores = planned(skeleton()), {f"model.layers.{i}": float(i) for i in range(3)}
    said = {"pruner": "depth", "pattern": "2 of 3 blocks", "count": 1}
    assert plan.to_dict()["blocks"] == {**said, "dropped": [], "scores": {}, "divergences": {}}
    chosen = {"model.layers.2": 0.5}
    assert plan.scored(scores, chosen).to_dict()["blocks"] == {
        **said, "dropped": ["model.layers.2"], "scores": scores, "divergences": chosen
    }  # fmt: skip


def test_no_text_is_run_through_blocks_once_those_that_go_are_chosen_if_nothing_else_is_decided():
    chosen = {"model.layers.2": 0.5}
    half = {"targets": ["*.down_proj"], "pruner": "wanda", "sparsity": 0.5}
    assert not planned(skeleton()).scored({}, chosen).needs_calibration
    assert planned(skeleton(), half, THIRD).scored({}, chosen).needs_calibration
    assert planned(skeleton(), reconstruct_block={"passes": 1}, calibration=LONGER).scored({}, chosen).needs_calibration


# --- refusals

SHRINK, ATTENTION = {"shrink": True}, {"pattern": "kv-groups", "sparsity": 0.4}


def without(key: str, rule: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rule.items() if name != key}


@pytest.mark.parametrize(
    ("rules", "given", "said"),
    [(rule(targets=["*.up_proj", "*.down_proj"]), {}, "prune[0].targets: neurons are removed whole, but model.layers.0."
      "mlp.up_proj is a target of prune[0] and model.layers.0.mlp.gate_proj is not; take all of model.layers.0.mlp"),
     ([{"targets": ["*.gate_proj"], "pruner": "wanda", "sparsity": 0.5}, rule()], {},
      "model.layers.0.mlp.gate_proj is taken by an earlier rule"),
     (rule(), {"ignore": ["*.1.mlp.down_proj"]}, "model.layers.1.mlp.down_proj is ignored by"),
     (rule(multiple=64), {}, "prune[0].multiple: multiple 64 does not divide the 96 neurons of "
      "model.layers.0.mlp; 32 "),
     (rule(sparsity=0.001), {}, "0.001 drops none of the 96 neurons of model.layers.0.mlp; at least 0.333333 "
      "drops 32,"),
     (rule(sparsity=0.999), {}, "0.999 keeps none of the 96 neurons of model.layers.0.mlp; at most 0.666667 "
      "keeps 32,"),
     (rule(pruner="sparsegpt"), {}, "prune[0].pattern: sparsegpt does not prune neurons; it prunes no units; pruners "
      "that do: magnitude, wanda, ziplm"),
     (without("pattern", rule(pruner="ziplm")), {}, "prune[0]: ziplm prunes whole units only; give it a "
      "pattern: neurons or"),
     (rule(pattern="experts", pruner="reap"), {}, "prune[0].pattern: no block has experts: model.layers.0 has "
      "no experts"),
     (rule(**ATTENTION), {"model": lambda: skeleton("llama-mqa")},
      "drops none of the 1 kv-groups of model.layers.0.self_attn; a block keeps at least one"),
     *((without("sparsity", rule(pattern=kind)), {"allocation": {"method": "owl", "target": 0.5}},
        f"allocation chooses no sparsities of {kind} at <dict>:prune[0].pattern; drop allocation")
       for kind in ("experts", "blocks")),
     ({**HALF, "sparsity": 0.75}, {"model": lambda: mixture("mixtral"), **SHRINK}, "prune[0].sparsity: sparsity "
      "0.75 keeps "
      "1 of the 4 experts of model.layers.0.mlp.experts, but the router chooses 2 for each token; at most 0.5 leaves"),
     (HALF, {"model": lambda: mixture("deepseek-v3", n_group=2), **SHRINK},
      "prune[0].pattern: model.layers.1.mlp.gate chooses among 2 groups of experts"),
     (HALF, {"model": lambda: routed_by(nn.Linear(64, 4, bias=False)), **SHRINK},
      "model.layers.0.mlp.gate is a linear, and MixtralSparseMoeBlock chooses"),
     (HALF, {"model": lambda: routed_by(nn.Identity()), **SHRINK},
      "model.layers.0.mlp: expected one router with a row for each of the 4 experts"),
     (HALF, {"model": lambda: mixture("mixtral")}, "prune[0].pattern: experts go with shrink: true only"),
     ({**THIRD, "sparsity": 0.1}, {}, "prune[0].sparsity: sparsity 0.1 drops none of the 3 blocks of model"),
     ({**THIRD, "sparsity": 0.9}, {}, "sparsity 0.9 keeps none of the 3 blocks of model.layers; at most 0.666667"),
     ({**THIRD, "targets": ["*.q_proj", {"layers": "1-2"}]}, {}, "prune[0].targets: blocks are removed whole, but "
      "model.layers.0."
      "self_attn.q_proj is a target of prune[0] and model.layers.0.self_attn.k_proj is not; name blocks by layers"),
     ({**THIRD, "reconstruct": "sparsegpt"}, {}, "prune[0].reconstruct: a removed block has no weights left"),
     ({**THIRD, "targets": ["lm_head"]}, {}, "matches lm_head, which belong to no blocks"),
     (without("sparsity", THIRD), {}, "blocks needs sparsity"),
     ([{**THIRD, "targets": [{"layers": layer}]} for layer in ("0-1", 2)], {},
      "prune[1].pattern: blocks are dropped by prune[0] already"),
     ([], {"calibration": None}, "the recipe has no calibration")],
)  # fmt: skip
def test_what_cannot_be_removed_is_refused_with_its_place(rules, given, said):
    message = refusal(*(rules if isinstance(rules, list) else [rules]), **given)
    assert message.startswith("<dict>")
    assert said in message
