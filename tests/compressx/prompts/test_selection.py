"""`select_tokens`: which tokens of a prompt are kept, how often blocks and heads are chosen, and what is refused."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tests.compressx.prompts.selectors import EARLY, PROTECT, Chosen, chosen, plugins_with, prompts

import compressx
from compressx.api.selector import AttentionRows, ModelFacts
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.numerics.tokens import pooled
from compressx.plugins.manager import Plugins
from compressx.prompts import selection as module
from compressx.prompts.scores import read_scores
from compressx.runtime.errors import CompressxError, PluginError, UnsupportedModelError
from compressx.testing import tiny_model


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_highest_scored_tokens_and_the_protected_ones_are_kept_in_order(architecture: str) -> None:
    model, ids = tiny_model(architecture), prompts()
    kept = compressx.select_tokens(model, ids, keep=20, **{**EARLY, "options": {"block": 1}})
    scores = read_scores(InMemory(model), architecture_of(model), ids[0], AttentionRows((1,)))[0, :, -1].sum(0)
    best = pooled(scores[2:-4], 5).topk(14).indices + 2
    assert kept.places[0].tolist() == [0, 1, *sorted(best.tolist()), 56, 57, 58, 59]
    assert torch.equal(kept.input_ids, ids[:, kept.places[0]])
    assert kept.attention_mask.tolist() == [[1] * 20]


def test_a_selector_sees_the_scores_of_tokens_that_are_not_protected() -> None:
    rows = AttentionRows((np.int64(0), 2), torch.tensor([3]), torch.tensor(5))  # type: ignore[arg-type]
    selector = Chosen(rows, lambda scores, keep: torch.tensor([0, 1, 2, 53]))
    kept = chosen(selector)
    assert kept.places[0].tolist() == [0, 1, 2, 3, 4, 55, 56, 57, 58, 59]
    assert selector.facts is not None
    assert (selector.facts.blocks, selector.facts.heads, selector.facts.global_blocks) == (3, 4, (0, 1, 2))
    model = tiny_model("llama")
    whole = read_scores(InMemory(model), architecture_of(model), prompts()[0], AttentionRows((0, 2), (3,), 5))
    assert torch.equal(selector.scores, whole[..., 2:-4])


def test_prompts_of_a_batch_are_shortened_one_by_one_whatever_side_their_padding_is_on() -> None:
    model, ids = tiny_model("llama"), prompts(3)
    lengths, padded, mask = (60, 31, 9), torch.zeros(3, 70, dtype=torch.int64), torch.zeros(3, 70, dtype=torch.int64)
    for row, (length, start) in enumerate(zip(lengths, (10, 0, 25), strict=True)):  # left, right, both
        padded[row, start : start + length] = ids[row, :length]
        mask[row, start : start + length] = 1
    found = compressx.select_tokens(model, padded, attention_mask=mask, keep=0.5, **EARLY)
    alone = [compressx.select_tokens(model, ids[row, :length], keep=0.5, **EARLY) for row, length in enumerate(lengths)]
    assert [one.input_ids.shape[1] for one in alone] == [30, 16, 6]
    for row, one in enumerate(alone):
        kept = one.input_ids.shape[1]
        assert found.input_ids[row].tolist() == [0] * (30 - kept) + one.input_ids[0].tolist()
        assert found.attention_mask[row].tolist() == [0] * (30 - kept) + [1] * kept
        assert torch.equal(padded[row, found.places[row]], one.input_ids[0])


@pytest.mark.parametrize(
    ("keep", "first", "last", "count"),
    [(0.1, 0, 0, 6), (0.1, 3, 0, 6), (0.1, 30, 30, 60), (0.1, 99, 0, 60), (0.126, 2, 4, 8), (0.001, 2, 4, 6),
     (6, 2, 4, 6), (59, 2, 4, 59)],
)  # fmt: skip
def test_protected_tokens_are_kept_and_a_fraction_is_of_the_prompt(keep, first, last, count) -> None:
    protect = {"first": first, "last": last}
    found = compressx.select_tokens(tiny_model("llama"), prompts(), selector="random", keep=keep, protect=protect)
    places = found.places[0].tolist()
    assert {*range(min(first, 60)), *range(max(0, 60 - last), 60)} <= {*places}
    assert len(places) == count
    asked = Chosen(answer=lambda scores, keep: pytest.fail("it is asked where only protected tokens are kept"))
    assert len(chosen(asked, keep=6).places[0]) == 6


@pytest.mark.parametrize(("keep", "protect"), [(60, PROTECT), (0.01, {"first": 40, "last": 40})])
def test_prompts_that_are_not_too_long_stay_whole_and_the_log_says_so_once(keep, protect, caplog) -> None:
    ids = prompts(3)
    with caplog.at_level(logging.WARNING, "compressx"):
        found = compressx.select_tokens(tiny_model("llama"), ids, **{**EARLY, "protect": protect}, keep=keep)
    assert torch.equal(found.input_ids, ids)
    [line] = caplog.messages
    assert line.startswith(f"select_tokens removes nothing from prompts of up to 60 tokens: keep is {keep}, ")
    caplog.clear()
    compressx.select_tokens(tiny_model("llama"), ids, keep=20, **EARLY)
    assert not caplog.messages


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collects how many queries each look at a model has; those of needles take a run of it."""
    looks: list[int] = []
    own = module.model_facts
    monkeypatch.setattr(module, "model_facts", lambda *given: looks.append(given[3]) or own(*given))
    return looks


def test_whatever_decides_the_choice_of_blocks_decides_its_key(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    class Options(BaseModel):
        seed: int = 0

    looks, code = list[Any](), ["code"]
    facts = ModelFacts(3, 4, (0, 1, 2), None)
    monkeypatch.setattr(module, "model_facts", lambda *given: looks.append(given) or facts)
    monkeypatch.setattr(Plugins, "code_of", lambda *_: code[0])
    model, offering = tiny_model("llama"), plugins_with(Chosen(), needles=2)
    offered = offering.offers["token_selectors"]
    offered["mine"] = replace(offered["mine"], options=Options)

    def looked(**options: int) -> list[bool]:
        given = {"selector": "mine", "keep": 20, "protect": PROTECT, "tokenizer": tokenizer, "plugins": offering}
        before = len(looks)
        compressx.select_tokens(model, prompts(), options=options, **given)
        first = len(looks)
        compressx.select_tokens(model, prompts(), options=options, **given)
        return [first > before, len(looks) > first]

    assert looked() == [True, False]
    assert looked(seed=1) == [True, False]
    code[0] = "other code"
    assert looked() == [True, False]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    assert looked() == [True, False]
    model.config.rms_norm_eps = 1e-3
    assert looked() == [True, False]
    model.model.layers[0].self_attn.q_proj.weight.data.mul_(-1)
    assert looked() == [True, False]
    monkeypatch.setattr(module, "code_versions", lambda: {"compressx": "another"})
    assert looked() == [True, False]


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
        with pytest.raises(PluginError, match=r"heads from 0 to 3 \(or None for all\).*heads=\(9,\)"):
            compressx.select_tokens(tiny_model("llama"), prompts(), selector="mine", keep=20, tokenizer=tokenizer,
                                    plugins=plugins_with(Chosen(AttentionRows((1,), (9,))), needles=2))  # fmt: skip
    assert facts == [2, 2]


def test_a_defect_of_a_selector_is_blamed_on_it() -> None:
    def defect(*_: Any) -> Any:
        raise KeyError("w")

    selector = Chosen(answer=defect)
    with pytest.raises(PluginError, match=r"select of token selector 'mine' failed on a prompt of 60 tokens: KeyError"):
        chosen(selector)
    selector.observe = defect  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"observe of token selector 'mine' failed on LlamaForCausalLM: KeyError"):
        chosen(selector)


ONES = partial(torch.ones, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"keep": x}, rf"keep is {x};") for x in (0, 1.5, 0.0)),
    ({"keep": "half"}, "keep is 'half'; expected a whole number or a number: tokens of a prompt"),
    ({"keep": 1.0}, "keep is 1.0; expected a number of tokens, 1 or more, or a fr"),
    ({"keep": 5}, "keep is 5, but 6 tokens of the prompt are protected: .*; raise keep, or lower protect"),
    ({"ids": ONES(2, 0)}, "prompt 0: expected a token or more, and an attention_mask with zeros only before or after"),
    ({"ids": ONES(0, 5)}, r"input_ids are \[0, 5\], and attention_mask is .*; expected one prompt or more"),
    ({"ids": ONES(1, 1, 5)}, r"input_ids are torch.int64 \[1, 1, 5\]; expected token ids"),
    ({"ids": torch.ones(1, 5)}, r"input_ids are torch.float32 \[1, 5\]; expected token ids, int64 \[batch, tokens\]"),
    ({"ids": [[1, 2, 3]]}, "input_ids are list; expected token ids"),
    ({"ids": prompts() + 100}, "has the token id 2[0-9]{2}, and LlamaForCausalLM knows 0 to 127; use the model"),
    ({"ids": prompts(length=200)}, "has 200 tokens, and the model 128 positions, .* for 'gemfilter'.* such as recent"),
    ({"attention_mask": torch.ones(1, 59)}, r"input_ids are \[1, 60\], and attention_mask is \[1, 59\]; exp"),
    ({"attention_mask": torch.ones(1, 60).index_fill(1, torch.tensor([30]), 0)}, "prompt 0: expected a token or more"),
    ({"selector": "gemfiltr", "options": {}}, "no token selector 'gemfiltr'; did you mean 'gemfilter'"),
    ({"selector": "retrieval-heads", "options": {}}, r"need the model's tokenizer; pass tokenizer=\.\.\."),
    ({"options": {"blok": 1}}, r"unknown option 'blok'; did you mean 'block'\?"),
    ({"options": {"block": 0.5}}, "select_tokens.options.block"),
    ({"options": {"block": 3}}, "LlamaForCausalLM has no block 3; expected 0 to 2"),
    ({"protect": {"frist": 1}}, r"unknown key 'frist' in protect; did you mean 'first'\?"),
    ({"model": "gemma3", "options": {"block": 2}}, r"layers\.2: .* use block 1$"),
    (
        {"model": "mistral", "selector": "snapkv", "options": {}},
        "no block does; use a selector that reads no attention",
    ),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_tokens_cannot_be_selected_from_is_refused(given: dict[str, Any], said: str) -> None:
    asked = {"model": "llama", "ids": prompts(), "keep": 20, **EARLY, **given}
    with pytest.raises(CompressxError, match=said):
        compressx.select_tokens(tiny_model(asked.pop("model")), asked.pop("ids"), **asked)


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        *((Chosen(answer=lambda scores, keep, x=x: x), "expected 4 different positions from 0 to 53 in asc.*" + told)
          for x, told in (
            (torch.tensor([0, 1, 1, 2]), r"got \[0, 1, 1, 2\]"), (torch.tensor([0, 3, 2, 4]), r"got \[0, 3, 2, 4\]"),
            (torch.tensor([0, 1, 2, 54]), "got"), (torch.tensor([-1, 1, 2, 3]), "got"),
            (torch.tensor([0.0, 1, 2, 3]), r"int64 \[4\]; got torch.float32 \[4\]"),
            (torch.arange(3), r"got torch.int64 \[3\]"), ([0, 1, 2, 3], r"got \[0, 1, 2, 3\]"), (None, "got None"))),
        *((Chosen(rows), r"must return AttentionRows of ascending blocks, .*; got " + re.escape(repr(rows)[:30]))
          for rows in (
            (1,), AttentionRows((2, 1)), AttentionRows((0.5,)), AttentionRows((1,), ()), AttentionRows((1,), (0, 4)),
            AttentionRows((1,), (-1,)), AttentionRows((1,), queries=0))),
    ],
)  # fmt: skip
def test_an_answer_that_breaks_the_contract_is_refused_with_the_selector_named(selector: Chosen, said: str) -> None:
    with pytest.raises(PluginError, match="token selector 'mine'.*" + said):
        chosen(selector)


def others() -> dict[str, Any]:
    from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM, LlamaModel

    bert = BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    bart = BartConfig(vocab_size=128, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
                      decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)  # fmt: skip
    return {
        "BertForMaskedLM is an encoder, which sees the tokens that follow; prom": BertForMaskedLM(bert),
        "BartForConditionalGeneration is an encoder-decoder; prompts are": BartForConditionalGeneration(bart),
        "LlamaModel cannot generate text": LlamaModel(tiny_model("llama").config),
        "Linear is no transformers causal language model": torch.nn.Linear(2, 2),
    }


def test_what_is_no_decoder_is_refused_in_a_sentence() -> None:
    for said, model in others().items():
        with pytest.raises(UnsupportedModelError, match=said):
            compressx.select_tokens(model, prompts(), selector="recent", keep=20, protect=PROTECT)


def test_an_encoder_that_is_set_to_decode_is_a_decoder() -> None:
    from transformers import BertConfig, BertLMHeadModel

    bert = BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                      is_decoder=True)  # fmt: skip
    found = compressx.select_tokens(BertLMHeadModel(bert).eval(), prompts(), keep=20, **EARLY)
    assert len(found.places[0]) == 20


def test_without_attention_selectors_that_read_none_still_work() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4)).eval()
    found = compressx.select_tokens(model, prompts(), selector="recent", keep=10, protect=PROTECT)
    assert found.places[0].tolist() == [0, 1, *range(52, 60)]
    with pytest.raises(UnsupportedModelError, match="or no num_attention_heads in its config"):
        compressx.select_tokens(model, prompts(), keep=20, **EARLY)
