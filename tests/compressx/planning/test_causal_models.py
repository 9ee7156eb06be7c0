"""Of every causal language model of transformers that can be built small: what the plan accepts, a run can prune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.causal import CAUSAL, small_config
from transformers import AutoModelForCausalLM

import compressx
from compressx.planning.make import make_plan
from compressx.planning.plan import Plan
from compressx.plugins.manager import load_plugins
from compressx.recipe.schema import load_recipe
from compressx.runtime.errors import CompressxError
from compressx.testing import save_tiny_model, tiny_text, tiny_tokens

RULES = [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]
TOLD = {
    **dict.fromkeys(("gemma3n_text", "hrm_text", "xlm"), "expected one list of"),
    "deepseek_v4": "takes hidden states",
    "hy_v4": "takes hidden states",
    "reformer": "the model reads attn_output of the output of this block",
    "xlnet": "the model changes the hidden states between",
}
"""Refused by the plan, and why."""

WITHOUT_ENCODER = ("bart", "blenderbot", "marian", "mbart", "pegasus", "plbart", "prophetnet", "trocr")
"""Decoders of encoder-decoders: without an encoder their attention to it is not called."""


NEVER_SKIPPED = {
    *["bamba", "falcon_mamba", "glm_moe_dsa", "jamba", "llama", "longcat_flash", "mamba", "rwkv", "zamba2", "zaya"]
}


def built(kind: str) -> Any:
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(small_config(kind)).eval()
    except Exception as error:
        if kind in NEVER_SKIPPED:
            raise
        pytest.skip(f"no small {kind}: {error}")
    return model


def ignored_by(kind: str) -> dict[str, Any]:
    """Leave out experts that no token reaches, since a random router prefers others."""
    return {"ignore": ["*.experts.*"]} if kind in {"afmoe", "ernie4_5_moe", "longcat_flash"} else {}


def planned(kind: str, model: Any) -> Plan:
    text = {"dataset": "c4", "samples": 8, "sequence_length": 16}
    recipe = {**ignored_by(kind), "model": kind, "prune": RULES, "calibration": text, "output": "out"}
    return make_plan(load_recipe(recipe), load_plugins(), model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CAUSAL)
def test_what_the_plan_accepts_is_pruned(kind: str):
    model = built(kind)
    if kind in TOLD:
        with pytest.raises(CompressxError, match=TOLD[kind]):
            planned(kind, model.to("meta"))
        return
    plan = planned(kind, model)
    assert plan.needs_calibration
    assert len(plan.linears) > 2
    if kind in WITHOUT_ENCODER:
        assert any("not call it" in why for why in plan.skipped.values())
    report = compressx.prune(
        model, None, {"prune": RULES, **ignored_by(kind)}, calibration=tiny_tokens(sequences=48)
    ).report
    assert {x.name: round(x.sparsity, 1) for x in report.layers} == {x.name: 0.5 for x in plan.linears}


@pytest.mark.slow
def test_a_model_that_cannot_run_one_block_at_a_time_is_not_evaluated_streamed(tmp_path: Path):
    """Its weights can be pruned by magnitude, which runs nothing."""
    saved = save_tiny_model(tmp_path / "model", "llama")
    built("deepseek_v4").save_pretrained(saved)
    (text := tmp_path / "text.txt").write_text(tiny_text())
    recipe: dict[str, Any] = {
        "model": {"path": str(saved), "streaming": True},
        "prune": [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}],
        "output": str(tmp_path / "out"),
    }
    assert compressx.plan(recipe).linears
    measured = {"token_perplexity": {"dataset": {"text": str(text)}, "sequence_length": 16, "samples": 2}}
    with pytest.raises(CompressxError, match=r"evaluate: .*takes hidden states"):
        compressx.plan({**recipe, "evaluate": measured})
