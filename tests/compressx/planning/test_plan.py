"""The plan: which rule takes which linear, and every mistake that shows before weights are loaded."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compressx.allocation.stage import Allocate
from compressx.api.patterns import Unstructured
from compressx.api.pruner import Linear
from compressx.models.architecture import architecture_of
from compressx.planning.make import make_plan
from compressx.planning.plan import Plan
from compressx.planning.targets import targeted_by
from compressx.plugins.kinds import PRUNER
from compressx.plugins.manager import Plugins, load_plugins
from compressx.recipe.schema import load_recipe
from compressx.runtime.errors import CompressxError, Mistakes, PluginError, RecipeError, UnsupportedModelError
from compressx.stages.state import RunState
from compressx.testing import tiny_model
from compressx.training.stage import BlockReconstruction, FineTuning

CALIBRATION = "calibration: {dataset: {text: calibration.txt}, samples: 4, sequence_length: 32}"
PER_BLOCK = 7  # linears in a block of the tiny llama


@pytest.fixture(autouse=True)
def _in_tmp(project: Path) -> None:
    """Work in an empty folder, so that no plugins.toml is found."""


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture
def planned(plugins: Plugins) -> Any:
    def plan(*rules: str, model: str = "llama", calibration: str = CALIBRATION) -> Plan:
        lines = ["model: org/model", calibration, "prune:", *(f"  - {{{r}}}" for r in rules), "output: out", ""]
        Path("r.yaml").write_text("\n".join(lines))
        with torch.device("meta"):
            skeleton = tiny_model(model)
        state = RunState(load_recipe(Path("r.yaml")), plugins, skeleton=skeleton, measured=False)
        made, mistakes = make_plan(state.loaded, plugins, skeleton), Mistakes()
        for stage in (Allocate(), BlockReconstruction(), FineTuning()):
            stage.check(state, made, mistakes)
        mistakes.raise_all()
        return made

    return plan


@pytest.fixture
def refusal(planned: Any) -> Any:
    def plan(kind: type[CompressxError], *rules: str, **where: str) -> str:
        with pytest.raises(kind) as caught:
            planned(*rules, **where)
        return str(caught.value)

    return plan


# --- which rule takes what


def test_the_first_rule_that_matches_takes_a_linear_and_linears_come_in_the_models_order(planned: Any) -> None:
    plan = planned(
        'targets: ["*.layers.1.*"], pruner: magnitude, sparsity: 0.25',
        'targets: ["*.q_proj", "*.k_proj"], pruner: wanda, sparsity: 0.5',
        'targets: ["*"], pruner: sparsegpt, pattern: "2:4"',
    )
    assert [x.block for x in plan.linears] == [f"model.layers.{i}" for i in range(3) for _ in range(PER_BLOCK)]
    labels = {x.name: x.rule.label for x in plan.linears}
    assert labels["model.layers.1.self_attn.q_proj"] == "magnitude"
    assert labels["model.layers.0.self_attn.q_proj"] == "wanda"
    assert Counter(labels.values()) == {"magnitude": PER_BLOCK, "wanda": 4, "sparsegpt": 10}
    first, second, *_ = plan.linears
    assert (first.name, first.shape) == ("model.layers.0.self_attn.q_proj", (64, 64))
    assert second.shape == (32, 64)  # two of four key heads
    by_rule = plan.in_block("model.layers.2")
    assert [len(names) for names in by_rule.values()] == [2, 5]
    assert {n for names in by_rule.values() for n in names} == {x.name for x in plan.linears[2 * PER_BLOCK :]}


def test_the_head_is_pruned_only_when_a_rule_names_it_and_what_is_skipped_has_its_reason(planned: Any) -> None:
    rule = 'targets: ["{}"], pruner: magnitude, sparsity: 0.5'
    plan = planned(rule.format("*"))
    assert len(plan.linears) == 3 * PER_BLOCK
    assert plan.skipped == {
        "lm_head": "outside the decoder blocks; pruned only when a rule names it",
        "model.embed_tokens": "an embedding, not a linear",
    }
    for target in ("lm_head", "*lm_head"):
        plan = planned(rule.format(target))
        assert [(x.name, x.block) for x in plan.linears] == [("lm_head", "")]
        assert [*plan.skipped.values()].count("no rule names it") == 3 * PER_BLOCK


def test_a_name_that_linears_of_the_blocks_have_is_not_that_of_a_linear_outside_unless_spelt_out() -> None:
    """As `q_proj` is in the vision tower of a multimodal model."""
    found = architecture_of(tiny_model("llama"))
    tower = "model.vision_tower.layers.0.self_attn.q_proj"
    found = replace(found, outside={**found.outside, tower: Linear(tower, torch.nn.Linear(4, 4))})
    loaded = load_recipe({
        "model": "m", "output": "o", "prune": [{"targets": ["*.q_proj"], "pruner": "magnitude", "sparsity": 0.5}]
    })  # fmt: skip
    place = ("prune", 0, "targets", 0)
    assert tower not in targeted_by(loaded, place, "*.q_proj", found)
    assert targeted_by(loaded, place, "*.vision_tower.*.q_proj", found) == [tower]


def test_weights_of_the_blocks_that_no_rule_can_prune_are_warned_of(planned, monkeypatch) -> None:
    rule = 'targets: ["*"], pruner: magnitude, sparsity: 0.5'
    assert not planned(rule, model="mixtral").warning, "its routers are less than a hundredth"
    monkeypatch.setattr("compressx.models.architecture._fused_experts", lambda module: None)
    plan = planned(rule, model="mixtral")
    attention, experts = 64 * (64 + 32 + 32 + 64), 4 * 3 * 64 * 96
    assert plan.unprunable == pytest.approx((experts + 4 * 64) / (experts + 4 * 64 + attention))
    assert plan.warning.startswith("86% of the blocks' weights stay dense whatever the rules say")


def test_a_plan_becomes_json(planned: Any) -> None:
    plan = planned(
        'targets: ["*.q_proj"], pruner: wanda, sparsity: 0.5, reconstruct: {pruner: alps, options: {damping: 0.2}}',
        'targets: ["*.mlp.*"], pruner: magnitude, pattern: "2:4"',
    )
    assert [options.damping for _, options in plan.rules[0].pruners[1:]] == [0.2]
    assert len(plan.rules[0].build()) == 2
    written = json.loads(json.dumps(plan.to_dict()))
    assert written["linears"][0] == {
        "name": "model.layers.0.self_attn.q_proj", "shape": [64, 64], "pruner": "wanda+alps",
        "pattern": "50% row", "sparsity": 0.5,
    }  # fmt: skip
    assert {x["pattern"] for x in written["linears"][1:4]} == {"2:4"}
    assert {"name": "lm_head", "reason": plan.skipped["lm_head"]} in written["skipped"]


def test_fused_experts_are_planned_one_by_one(planned: Any) -> None:
    plan = planned('targets: ["*.experts.*"], pruner: wanda, sparsity: 0.5', model="mixtral")
    assert len(plan.linears) == 3 * 4 * 2
    assert plan.linears[0].shape == (192, 64)


# --- groups and patterns


def test_the_group_is_the_pruners_own_or_the_one_that_is_asked_for(planned: Any) -> None:
    own = {"magnitude": "layer", "wanda": "row", "sparsegpt": "layer", "alps": "layer", "attnprune": "joint"}
    for pruner, group in own.items():
        for asked, taken in (("", group), (", group: layer", "layer")):
            plan = planned(f'targets: ["*.q_proj", "*.k_proj"], pruner: {pruner}, sparsity: 0.5{asked}')
            assert {x.pattern for x in plan.linears} == {Unstructured(0.5, taken)}  # type: ignore[arg-type]


def test_a_plan_with_allocation_fixes_m_and_leaves_n_open(planned: Any) -> None:
    rules = ('targets: ["*.mlp.*"], pruner: wanda, pattern: "2:4"', 'targets: ["*"], pruner: wanda, pattern: "4:8"')
    plan = planned(*rules, calibration=f"{CALIBRATION}\nallocation: {{method: divergence, target: 0.72}}")
    assert {plan.shown_pattern(x) for x in plan.linears} == {"allocated N:4", "allocated N:8"}
    assert {str(x.pattern) for x in plan.linears} == {"1:4", "2:8"}


# --- ignore

Q, MAGNITUDE = "model.layers.{}.self_attn.q_proj", "pruner: magnitude, sparsity: 0.5"


def ignoring(entries: str) -> dict[str, str]:
    """Put `ignore` at the top of a recipe, on its third line."""
    return {"calibration": f"{CALIBRATION}\nignore: [{entries}]"}


@pytest.mark.parametrize(
    ("entry", "left"),
    [('"*.q_proj"', {Q.format(i) for i in range(3)}),
     ("layers: 1-2", {Q.format(1), Q.format(2)}), ("layers: 1", {Q.format(1)}),
     ("{layers: [0, -1]}", {Q.format(0), Q.format(2)})],
)  # fmt: skip
def test_what_is_ignored_is_left_alone_and_says_by_which_line(entry, left, planned):
    plan = planned(f'targets: ["*"], {MAGNITUDE}', **ignoring(entry))
    names = {x.name for x in plan.linears if x.name.endswith("q_proj")}
    assert names == {Q.format(i) for i in range(3)} - left
    for name in left:
        assert plan.skipped[name].startswith("ignored by ")
        assert " at r.yaml:3:10" in plan.skipped[name]


def test_the_head_and_routers_may_be_ignored_though_no_star_takes_them(planned: Any) -> None:
    for model, entry, name in (
        ("llama", "lm_head", "lm_head"), ("llama-tied", "lm_head", "lm_head"),
        ("mixtral", '"*.mlp.gate"', "model.layers.2.mlp.gate"),
    ):  # fmt: skip
        plan = planned(f'targets: ["*"], {MAGNITUDE}', model=model, **ignoring(entry))
        shown = entry.replace('"', "")
        assert plan.skipped[name] == f"ignored by '{shown}' at r.yaml:3:10"


def test_the_targets_that_a_message_offers_for_a_mixture_of_experts_match(planned: Any, refusal: Any) -> None:
    for target, meant in (("*.w1", ""), ("*.experts.*.down_proj", "*.experts.down_proj.*")):
        message = refusal(RecipeError, f'targets: ["{target}"], {MAGNITUDE}', model="mixtral")
        assert f"did you mean {meant!r}?" in message or not meant, message
        offered = message.partition("valid: ")[2].partition(";")[0].split(", ")
        assert len(offered) == 7
        for glob in offered:
            assert planned(f'targets: ["{glob}"], {MAGNITUDE}', model="mixtral").linears


# --- rules that cannot be right

_TO_WRITE = '.*targets: \\["\\*.q_proj", "\\*.k_proj"\\]'
ALLOCATION = "allocation: {method: attention-aware, target: 0.5}"
ALLOCATED = {"calibration": f"{CALIBRATION}\n{ALLOCATION}"}


@pytest.mark.parametrize(
    ("rule", "more", "complaint"),
    [("pruner: sparsegpt, sparsity: 0.5, group: joint", {}, "sparsegpt has no group 'joint'; valid: layer, row"),
     ('pruner: wanda, pattern: "3:7"', ALLOCATED,
      r"model\.layers\.0\.self_attn\.q_proj has 64 input features, not divisible by 7 \(pattern 3:7\)"),
     ("pruner: wandas, sparsity: 0.5", {"kind": PluginError}, "no pruner 'wandas'; did you mean 'wanda'?"),
     ("pruner: sparsegpt, sparsity: 0.5, options: {dampening: 0.1}", {},
      "unknown option 'dampening'; did you mean 'damping'?"),
     ("pruner: wanda, sparsity: 0.5, reconstruct: {pruner: sparsegpt, options: {damping: -1}}", {}, "damping is -1"),
     ("pruner: sparsegpt, sparsity: 0.5, reconstruct: wanda", {},
      "wanda only selects; pruners that reconstruct: .*sparsegpt"),
     ("pruner: magnitude, sparsity: 0.5, reconstruct: sparsegpt", {"calibration": ""}, "has no calibration"),
     ('targets: ["lm_head"], pruner: magnitude, sparsity: 0.5', {"model": "llama-tied"},
      r"lm_head, which is not prunable: its weight is tied to model\.embed_tokens\.weight"),
     ('targets: ["*embed_tokens"], pruner: magnitude, sparsity: 0.5', {},
      r"model\.embed_tokens, which is not prunable: an embedding, not a linear"),
     ('targets: ["lm_head"], pruner: sensitivity, sparsity: 0.5', {"kind": UnsupportedModelError},
      "lm_head lies outside the decoder blocks"),
     ('targets: ["*.q_proj"], pruner: attnprune, sparsity: 0.5', {},
      rf"this rule does not target model\.layers\.0\.self_attn\.k_proj{_TO_WRITE}"),
     ('targets: ["*.self_attn.*"], pruner: attnprune, sparsity: 0.5', {},
      rf"this rule also targets model\.layers\.0\.self_attn\.v_proj{_TO_WRITE}"),
     ('targets: ["lm_head"], pruner: attnprune, sparsity: 0.5', {}, f"outside the decoder blocks{_TO_WRITE}"),
     ("pruner: wanda, reconstruct: attnprune, sparsity: 0.5", {}, f"this rule also targets{_TO_WRITE}"),
     ('targets: ["*.query_key_value"], pruner: attnprune, sparsity: 0.5',
      {"model": "bloom", "kind": UnsupportedModelError},
      r"h\.0\.self_attention \(BloomAttention\) adds ALiBi to its scores.*sparsegpt or wanda"),
     (("pruner: magnitude, sparsity: 0.5", 'targets: ["*.o_proj", "*.q_prj"], pruner: wanda, sparsity: 0.5'), {},
      r"target '\*\.q_prj' matches no linear; did you mean '\*\.q_proj'\?"),
     ('targets: ["Linear"], pruner: magnitude, sparsity: 0.5', {},
      r"target 'Linear' matches no linear; targets are names, not classes; all linears of the blocks are '\*'"),
     *((f'targets: ["{glob}"], pruner: magnitude, sparsity: 0.5', {},
        r"matches a single character, not a range of numbers; layers 10 to 12 are '\*\.1\[0-2\]\.\*'")
       for glob in ("*.[10-12].*", "*.layers.[!2-10].*", "*.[01-2].*")),
     ('targets: ["*.q_proj"], pruner: wanda, sparsity: 0.005', {},
      r"sparsity 0\.005 drops none of the 64 weights in each row of model\.layers\.0\.self_attn\.q_proj; at least "
      "0.015625 drops one"),
     (('targets: ["*.self_attn.*"], pruner: magnitude, sparsity: 0.5',
       'targets: ["*.layers.0.*.up_proj"], pruner: magnitude, sparsity: 0.4',
       'targets: ["*.mlp.*", "*.layers.0.*.[qu]*_proj"], pruner: wanda, sparsity: 0.5'), {},
      r"of prune\[2\] is shadowed: all 2 linears that it matches are already taken, model\.layers\.0\.self_attn\.q_pro"
      r"j by prune\[0\] at r\.yaml:4:5, model\.layers\.0\.mlp\.up_proj by prune\[1\] at r\.yaml:5:5; the first match"),
     ("pruner: magnitude, sparsity: 0.5, reconstruct: {pruner: attnprune, options: {mode: mask, objective: "
      "attention-matrix}}", {},
      "mode changes how attnprune selects weights, and has no effect here; leave it out"),
     ("pruner: wanda, sparsity: 0.5", {"calibration": "calibration: {dataset: {text: c.txt}, sequence_length: 129}"},
      "sequence_length 129 is longer than the model's 128 positions"),
     ("pruner: magnitude", {"calibration": "allocation: {method: owl, target: 0.5}"},
      "owl measures outliers on calibration text"),
     ("pruner: magnitude, sparsity: 0.5", {"calibration": "reconstruct_block: {passes: 2}"},
      "blocks are trained on calibration text, but the recipe has no calibration"),
     ('targets: ["lm_head"], pruner: magnitude, sparsity: 0.5',
      {"calibration": f"{CALIBRATION}\nreconstruct_block: {{}}"},
      "it has no effect: all linears that the rules match are outside the decoder"),
     ("pruner: wanda, sparsity: 0.5", {"calibration": f"{CALIBRATION}\nreconstruct_block: {{batch_size: 6}}"},
      "a step of 6 sequences is no whole number of calibration batches.*expected a multiple of 4"),
     *(('targets: ["*.q_proj", "*.o_proj"], pruner: magnitude, sparsity: 0.5',
        {"calibration": f"{CALIBRATION}\nignore: [{entry}]"}, complaint) for entry, complaint in
       (('"*.q_prj"', r"ignore '\*\.q_prj' matches no linear; did you mean '\*\.q_proj'\?"),
        ("layers: 1-3", "layers: 1-3: the model has no layer 3; its layers are 0-2"),
        ('"*.k_proj"', r"ignore '\*\.k_proj' has no effect: no rule targets any of the 3 linears"),
        ('"*"', r"target '\*\.q_proj' of prune\[0\] is left without linears: of the 3 that it matches, model\.layers\.0"
         r"\.self_attn\.q_proj is ignored by '\*' at r\.yaml:3:10; ignore less, or drop the target"))),
     *(("pruner: wanda, sparsity: 0.5",
        {"model": model, "calibration": f'{CALIBRATION}\nfinetune: {{lora: {{targets: ["{target}"]}}}}'}, complaint)
       for target, model, complaint in
       (("*.q_prj", "llama", r"'\*\.q_prj' matches no pruned linear; did you mean '\*\.q_proj'\?"),
        ("*.layers.[10-12].*", "llama", "matches a single character"),
        ("*", "mixtral", "one of several experts in one parameter, which cannot have an adapter")))],
)  # fmt: skip
def test_a_rule_that_cannot_be_right_is_refused_with_its_line(rule, more, complaint, refusal):
    rules = [
        x if x.startswith("targets") else f'targets: ["*"], {x}' for x in ([rule] if isinstance(rule, str) else rule)
    ]
    message = refusal(more.get("kind", RecipeError), *rules, **{k: v for k, v in more.items() if k != "kind"})
    assert re.search(rf"^r\.yaml:\d+:.*{complaint}", message, re.DOTALL), message


@pytest.mark.parametrize(
    ("target", "meant"),
    [("layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
     ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj"),
     ("layers.2.*", "*.layers.2.*"), ("model.layers.1", "model.layers.1.*")],
)  # fmt: skip
def test_a_target_that_is_nearly_a_whole_name_is_told_what_names_look_like(refusal, target, meant):
    message = refusal(RecipeError, f'targets: ["{target}"], pruner: magnitude, sparsity: 0.5')
    assert f"matches no linear; did you mean {meant!r}? valid: " in message, "said once"
    assert message.endswith("whole names go from model.layers.0.self_attn.q_proj to lm_head")


def test_what_is_nearly_refused_is_planned(planned: Any) -> None:
    assert planned('targets: ["*.[0-1].*", "*.layers.[!0-1].*"], pruner: magnitude, sparsity: 0.5').linears
    for fine in ("sparsity: 0", "sparsity: 0.005, group: layer"):
        assert planned(f'targets: ["*.q_proj"], pruner: wanda, {fine}').linears


# --- reconstruction and calibration


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [({"build": lambda _: 1 / 0}, r"pruner 'wanda' could not be built: ZeroDivisionError: .* \(.*test_plan.py, line"),
     ({"build": lambda _: SimpleNamespace(observe=max)}, "what build returned, a SimpleNamespace, has no prune; see"),
     ({"build": lambda _: SimpleNamespace(observe=lambda *_: 1 / 0, prune=max)},
      r"observe of pruner 'wanda' failed on model\.layers\.0\.self_attn\.q_proj: Zero"),
     ({"build": lambda _: SimpleNamespace(observe=lambda *_: 5, prune=max)},
      r"must return a statistic, such as .*; got 5$"),
     ({"check": lambda _: None}, r"check of pruner 'wanda' failed on model\.layers\.0: TypeError: .*3 were given")],
)  # fmt: skip
def test_what_a_pruner_raises_while_planning_names_rule_and_pruner(broken, complaint, plugins, refusal, monkeypatch):
    monkeypatch.setitem(plugins.offers["pruners"], "wanda", replace(plugins.find(PRUNER, "wanda"), **broken))
    message = refusal(PluginError, 'targets: ["*"], pruner: wanda, sparsity: 0.5')
    assert re.search(r"^r\.yaml:4:\d+: .*" + complaint, message), message


def test_calibration_is_needed_when_something_is_measured_on_it(planned: Any) -> None:
    rule = 'targets: ["*"], pruner: magnitude'
    assert not planned(f"{rule}, sparsity: 0.5", calibration="").needs_calibration
    assert planned('targets: ["*"], pruner: wanda, sparsity: 0.5').needs_calibration
    assert planned(rule, calibration=f"{CALIBRATION}\n{ALLOCATION}").needs_calibration
    trained = f"{CALIBRATION.replace('samples: 4', 'samples: 8')}\nreconstruct_block: {{passes: 2}}"
    assert planned(f"{rule}, sparsity: 0.5", calibration=trained).needs_calibration


# --- allocation

MIXED = ('targets: ["*.q_proj", "*.k_proj"], pruner: attnprune', 'targets: ["*"], pruner: wanda, group: layer')


def test_a_plan_with_allocation_leaves_sparsities_open_keeps_groups_and_becomes_final(planned: Any) -> None:
    plan = planned(*MIXED, **ALLOCATED)
    assert {plan.shown_pattern(x) for x in plan.linears} == {"allocated joint", "allocated layer"}
    written = json.loads(json.dumps(plan.to_dict()))
    assert written["allocation"]["target"] == 0.5
    assert {x["sparsity"] for x in written["linears"]} == {None}
    patterns = {x.name: Unstructured(i / 100, "layer") for i, x in enumerate(plan.linears)}
    final = plan.allocated(patterns)
    assert final.allocation is None
    assert {x.name: x.pattern for x in final.linears} == patterns
    written = final.to_dict()["linears"][7]
    assert (written["pattern"], written["sparsity"]) == ("7% layer", 0.07)
    assert list(final.in_block("model.layers.1")) == list(plan.rules)


# --- what a plugin's own check refuses


@pytest.mark.parametrize(
    ("model", "fused", "shape"),
    [("gpt2", "c_attn", (192, 64)), ("gpt-neox", "query_key_value", (192, 64)), ("phi3", "qkv_proj", (128, 64))],
)
def test_attnprune_takes_a_weight_that_fuses_query_key_and_value(planned, refusal, model, fused, shape):
    plan = planned(f'targets: ["*.{fused}"], pruner: attnprune, sparsity: 0.5', model=model)
    assert {(x.name.rpartition(".")[2], x.shape) for x in plan.linears} == {(fused, shape)}
    assert len(plan.linears) == 3
    message = refusal(RecipeError, 'targets: ["*"], pruner: attnprune, sparsity: 0.5', model=model)
    assert message.startswith("r.yaml:4:")
    assert f'write targets: ["*.{fused}"]' in message
