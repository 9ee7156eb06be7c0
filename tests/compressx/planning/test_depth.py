"""Plans that drop whole blocks: which blocks may go, what other rules take, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.compressx.depths import THIRD, planned

from compressx.runtime.errors import CompressxError
from compressx.testing import tiny_model

MODEL = tiny_model("llama")
LONGER = {"dataset": {"text": "t.txt"}, "samples": 8, "sequence_length": 32, "batch_size": 4}


def refusal(*rules: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(CompressxError) as caught:
        planned(MODEL, *rules, **sections)
    return str(caught.value)


def test_all_linears_of_the_blocks_are_planned_and_calibration_is_needed():
    plan = planned(MODEL)
    assert plan.depth is not None
    assert plan.depth.blocks == tuple(f"model.layers.{i}" for i in range(3))
    assert plan.depth.pattern.dropped == 1
    assert {x.rule for x in plan.linears} == {plan.depth.rule}
    assert len(plan.linears) == 21
    assert plan.needs_calibration
    assert plan.asked("model.layers.0") == {}


@pytest.mark.parametrize("first", [True, False])
def test_other_rules_take_their_linears_whether_they_stand_before_or_after(first):
    half = {"targets": ["*.down_proj"], "pruner": "wanda", "sparsity": 0.5}
    plan = planned(MODEL, *([half, THIRD] if first else [THIRD, half]))
    taken = {x.name.split(".")[-1]: x.rule.label for x in plan.linears}
    assert {kind for kind, pruner in taken.items() if pruner == "wanda"} == {"down_proj"}
    scored = plan.scored({f"model.layers.{i}": float(i != 1) for i in range(3)})
    assert scored.dropped == ("model.layers.1",)
    downs = {x.block: x.rule.label for x in scored.linears if x.name.endswith("down_proj")}
    assert downs == {"model.layers.0": "wanda", "model.layers.1": "shortgpt", "model.layers.2": "wanda"}


def test_the_plan_as_data_says_which_blocks_go_once_they_are_scored():
    plan = planned(MODEL)
    assert plan.to_dict()["blocks"] == {
        "pruner": "shortgpt", "pattern": "34% of blocks", "count": 1, "dropped": [], "scores": {},
    }  # fmt: skip
    scores = {f"model.layers.{i}": float(i) for i in range(3)}
    told = plan.scored(scored := scores).to_dict()["blocks"]
    assert (told["dropped"], told["scores"]) == (["model.layers.0"], scored)


def test_no_text_is_run_through_blocks_that_are_scored_if_nothing_else_is_decided():
    scores = {f"model.layers.{i}": float(i) for i in range(3)}
    half = {"targets": ["*.down_proj"], "pruner": "wanda", "sparsity": 0.5}
    assert not planned(MODEL).scored(scores).needs_calibration
    assert planned(MODEL, half, THIRD).scored(scores).needs_calibration
    assert planned(MODEL, reconstruct_block={"passes": 1}, calibration=LONGER).scored(scores).needs_calibration


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            {**THIRD, "sparsity": 0.1},
            r"prune\[0\]\.sparsity: sparsity 0\.1 drops none of the 3 blocks of model",
        ),
        ({**THIRD, "sparsity": 0.9}, r"sparsity 0\.9 keeps none of the 3 blocks of model\.layers; at most 0\.666667"),
        (
            {**THIRD, "targets": ["*.q_proj", {"layers": "1-2"}]},
            r"prune\[0\]\.targets: blocks go whole, but model\.layers\.0\.self_attn\.q_proj is a target of prune\[0\] "
            r"and model\.layers\.0\.self_attn\.k_proj is not; name blocks by layers",
        ),
        ({**THIRD, "reconstruct": "sparsegpt"}, r"prune\[0\]\.reconstruct: a block that goes has no weights left"),
        ({**THIRD, "pruner": "wanda"}, r"prune\[0\]\.pattern: wanda does not prune blocks; it prunes neurons"),
        ({"targets": ["*"], "pruner": "shortgpt", "sparsity": 0.5}, r"prune\[0\].*: shortgpt prunes whole units only"),
        ({**THIRD, "targets": ["lm_head"]}, r"matches lm_head, which belong to no blocks"),
    ],
)
def test_what_cannot_be_dropped_is_refused_with_its_place(rule, said):
    assert re.search(said, refusal(rule))


def test_two_rules_that_drop_blocks_are_refused():
    rules = [{**THIRD, "targets": [{"layers": layer}]} for layer in ("0-1", 2)]
    assert re.search(r"prune\[1\]\.pattern: blocks are dropped by prune\[0\] already", refusal(*rules))


def test_calibration_text_is_asked_for():
    assert "calibration" in refusal(calibration=None)


def test_blocks_without_a_sparsity_are_refused():
    assert "blocks needs sparsity" in refusal({k: v for k, v in THIRD.items() if k != "sparsity"})
