"""How often blocks and heads are chosen on synthetic prompts, and with which tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.compressx.prompts.selectors import PROTECT, Chosen, plugins_with, prompts

import compressx
from compressx.api.selector import AttentionRows
from compressx.prompts import prepare as module
from compressx.runtime.errors import CalibrationError, PluginError
from compressx.testing import save_tiny_model, tiny_model


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects how many queries each look at a model has; those of needles take a run of it."""
    looks: list[int] = []
    own = module.model_facts
    monkeypatch.setattr(module, "model_facts", lambda *given: looks.append(given[3]) or own(*given))
    return looks


@pytest.mark.slow
def test_a_choice_of_blocks_is_made_once_for_the_same_weights_options_and_tokenizer(facts, tokenizer) -> None:
    model, given = tiny_model("llama"), {"keep": 20, "protect": PROTECT, "tokenizer": tokenizer}
    first = compressx.select_tokens(model, prompts(), **given)
    again = compressx.select_tokens(model, prompts(), **given)
    assert facts == [16]
    assert again.places[0].tolist() == first.places[0].tolist()
    assert again.reason == first.reason
    assert "of the hidden sentences of 12 synthetic prompts" in first.reason

    compressx.select_tokens(model, prompts(), **given, options={"block": 1})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    compressx.select_tokens(model, prompts(), **given)
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(-1)
    compressx.select_tokens(model, prompts(), **given)
    assert facts == [16] * 4


def test_a_named_block_takes_no_needles_unless_heads_are_chosen(facts, tokenizer) -> None:
    for selector in ("gemfilter", "snapkv", "recent", "random"):
        options = {"block": 1} if selector in ("gemfilter", "snapkv") else {}
        compressx.select_tokens(tiny_model("llama"), prompts(), selector=selector, options=options, keep=20,
                                protect=PROTECT)  # fmt: skip
    assert facts == [0] * 4
    found = compressx.select_tokens(tiny_model("llama"), prompts(), options={"block": 2}, keep=20, protect=PROTECT,
                                    tokenizer=tokenizer)  # fmt: skip
    assert facts == [0, 0, 0, 0, 16]
    assert ": block 2 of 3 keeps" in found.reason


def test_an_answer_that_breaks_the_contract_is_not_cached(facts, tokenizer) -> None:
    for _ in range(2):
        with pytest.raises(PluginError, match="asks for head 9"):
            compressx.select_tokens(tiny_model("llama"), prompts(), selector="mine", keep=20, tokenizer=tokenizer,
                                    plugins=plugins_with(Chosen(AttentionRows((1,), (9,))), needles=2))  # fmt: skip
    assert facts == [2, 2]


@pytest.mark.slow
def test_the_tokenizer_is_the_one_beside_the_model_or_has_to_be_given(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    saved = save_tiny_model(tmp_path / "model", "llama")
    given = {"keep": 20, "protect": PROTECT}
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert compressx.select_tokens(loaded, prompts(), **given).reason
    tiny_model("llama").save_pretrained(tmp_path / "bare")
    for model, place in (
        (AutoModelForCausalLM.from_pretrained(tmp_path / "bare"), str(tmp_path / "bare")),
        (tiny_model("llama"), "which is not from a folder"),
    ):
        with pytest.raises(CalibrationError, match=rf"none beside the model \({place}\); pass tokenizer=\.\.\.$"):
            compressx.select_tokens(model, prompts(), **given)
        assert compressx.select_tokens(model, prompts(), **given, tokenizer=tokenizer).reason
