"""What `select_tokens` refuses: input, settings, models, and what plugins ask for and return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.compressx.prompts.selectors import EARLY, PROTECT, Chosen, chosen, prompts
from torch import Tensor

import compressx
from compressx.api.selector import AttentionRows
from compressx.runtime.errors import CalibrationError, CompressxError, PluginError, RecipeError, UnsupportedModelError
from compressx.testing import tiny_model


@pytest.mark.parametrize(
    ("keep", "said"),
    [(0, "keep is 0;"), (-3, "keep is -3;"), (1.5, "keep is 1.5;"), (0.0, "keep is 0.0;"), (True, "keep is true;"),
     ("half", "keep is 'half';"), (float("nan"), "keep is nan;")],
)  # fmt: skip
def test_what_is_neither_a_number_nor_a_fraction_of_tokens_is_refused(keep: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        compressx.select_tokens(tiny_model("llama"), prompts(), keep=keep, **EARLY)


def test_a_number_below_that_of_the_protected_tokens_is_refused() -> None:
    for keep, protect in ((5, PROTECT), (50, {"first": 0, "last": 55})):
        said = f"keep is {keep}, but {sum(protect.values())} tokens of the prompt are protected: .*; raise keep, or low"
        with pytest.raises(CalibrationError, match=said):
            compressx.select_tokens(tiny_model("llama"), prompts(), **{**EARLY, "protect": protect}, keep=keep)


@pytest.mark.parametrize(
    ("ids", "mask", "said"),
    [
        (torch.ones(2, 0, dtype=torch.int64), None, "prompt 0 has no token; expected one or more"),
        (torch.ones(0, 5, dtype=torch.int64), None, "input_ids has no prompt; expected one or more"),
        (torch.ones(1, 1, 5, dtype=torch.int64), None, r"input_ids are torch.int64 \[1, 1, 5\]; expected token ids"),
        (torch.ones(1, 5), None, r"input_ids are torch.float32 \[1, 5\]; expected token ids, int64 \[batch, tokens\]"),
        ([[1, 2, 3]], None, "input_ids are list; expected token ids"),
        (prompts(), torch.ones(1, 59), r"attention_mask is \[1, 59\], expected \[1, 60\] as input_ids"),
        (prompts(2), torch.ones(60), r"attention_mask is \[60\], expected \[2, 60\]"),
        (prompts(2), torch.ones(2, 60).index_fill(1, torch.tensor([30]), 0), "prompt 0: expected ones without a gap"),
        (prompts(2), torch.tensor([[1.0], [0.0]]).expand(2, 60), "prompt 1 has no token"),
        (prompts() + 100, None, "has the token id 2[0-9]{2}, and LlamaForCausalLM knows 0 to 127; use the model"),
        (prompts() - 100, None, "the prompt has the token id -[0-9]+, and LlamaForCausalLM knows 0 to 127"),
    ],
)  # fmt: skip
def test_input_that_is_no_batch_of_prompts_is_refused(ids: Any, mask: Tensor | None, said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        compressx.select_tokens(tiny_model("llama"), ids, attention_mask=mask, keep=20, **EARLY)


def test_an_unknown_selector_option_or_key_is_refused_with_the_nearest_one() -> None:
    for given, said in (
        ({"selector": "gemfiltr", "options": {}}, "no token selector 'gemfiltr'; did you mean 'gemfilter'"),
        ({"options": {"blok": 1}}, r"unknown option 'blok'; did you mean 'block'\?"),
        ({"options": {"block": 0.5}}, "select_tokens.options.block"),
        ({"protect": {"frist": 1}}, r"unknown key 'frist' in protect; did you mean 'first'\?"),
    ):
        with pytest.raises(CompressxError, match=said):
            compressx.select_tokens(tiny_model("llama"), prompts(), keep=20, **{**EARLY, **given})


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (torch.tensor([0, 1, 1, 2]), "got 1 followed by 1"),
        (torch.tensor([0, 3, 2, 4]), "got 3 followed by 2"),
        (torch.tensor([0, 1, 2, 54]), "got 0 to 54"),
        (torch.tensor([-1, 1, 2, 3]), "got -1 to 3"),
        (torch.tensor([0, 1, 2, 3], dtype=torch.int32), r"int64 \[4\]; got torch.int32 \[4\]"),
        (torch.tensor([0.0, 1, 2, 3]), r"got torch.float32 \[4\]"),
        (torch.arange(54) < 4, r"got torch.bool \[54\]"),
        (torch.arange(3), r"got torch.int64 \[3\]"),
        (torch.arange(4)[None], r"got torch.int64 \[1, 4\]"),
        ([0, 1, 2, 3], r"got \[0, 1, 2, 3\]"),
        (None, "got None"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused_with_the_selector_named(places: Any, said: str) -> None:
    message = "token selector 'mine': expected 4 different places from 0 to 53 in ascending order.*" + said
    with pytest.raises(PluginError, match=message):
        chosen(Chosen(answer=lambda scores, keep: places))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((1,), r"must return AttentionRows, got \(1,\)"),
        (None, "must return AttentionRows, got None"),
        (AttentionRows((2, 1)), r"blocks as whole numbers in ascending order, got \(2, 1\)"),
        (AttentionRows((1, 1)), r"blocks as whole numbers in ascending order, got \(1, 1\)"),
        (AttentionRows((0.5,)), r"blocks as whole numbers in ascending order, got \(0.5,\)"),
        (AttentionRows(1), "blocks as whole numbers in ascending order, got 1"),
        (AttentionRows((1,), ()), r"heads as whole numbers, or None for all, got \(\)"),
        (AttentionRows((1,), (0, 4)), "asks for head 4; expected 0 to 3"),
        (AttentionRows((1,), (-1,)), "asks for head -1; expected 0 to 3"),
        (AttentionRows((1,), queries=0), "at least one query, got 0"),
        (AttentionRows((1,), queries=None), "at least one query, got None"),
    ],
)  # fmt: skip
def test_rows_that_a_selector_cannot_ask_for_are_refused_with_the_selector_named(rows: Any, said: str) -> None:
    with pytest.raises(PluginError, match="observe of token selector 'mine' .*" + said):
        chosen(Chosen(rows))


def test_blocks_that_the_model_does_not_have_or_cannot_read_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no block 3; expected 0 to 2"):
        chosen(Chosen(AttentionRows((1, 3))))
    with pytest.raises(UnsupportedModelError, match=r"layers\.2: .* use block 1$"):
        compressx.select_tokens(tiny_model("gemma3"), prompts(), keep=20, **{**EARLY, "options": {"block": 2}})


@pytest.mark.parametrize("selector", ["gemfilter", "snapkv", "retrieval-heads"])
def test_a_model_of_windows_alone_is_refused_before_a_tokenizer_is_looked_for(selector: str) -> None:
    with pytest.raises(UnsupportedModelError, match="no block does; use a selector that reads no attention"):
        compressx.select_tokens(tiny_model("mistral"), prompts(), selector=selector, keep=20, protect=PROTECT)
    found = compressx.select_tokens(tiny_model("mistral"), prompts(), selector="recent", keep=20, protect=PROTECT)
    assert found.places[0].tolist() == [0, 1, *range(42, 60)]


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    rows = AttentionRows((np.int64(1),), torch.tensor([0, 3]), torch.tensor(2))  # type: ignore[arg-type]
    selector = Chosen(rows)
    chosen(selector)
    assert selector.scores is not None
    assert selector.scores.shape == (1, 2, 2, 54)


def test_a_defect_of_a_selector_is_blamed_on_it() -> None:
    def defect(*_: Any) -> Any:
        raise KeyError("w")

    selector = Chosen(answer=defect)
    with pytest.raises(PluginError, match=r"select of token selector 'mine' failed on a prompt of 60 tokens: KeyError"):
        chosen(selector)
    selector.observe = defect  # type: ignore[method-assign]
    with pytest.raises(PluginError, match=r"observe of token selector 'mine' failed on LlamaForCausalLM: KeyError"):
        chosen(selector)


def others() -> dict[str, tuple[Any, str]]:
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        BertConfig,
        BertForMaskedLM,
        BertLMHeadModel,
        LlamaModel,
        T5Config,
        T5ForConditionalGeneration,
    )

    bert = BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    bart = BartConfig(vocab_size=128, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
                      decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32)  # fmt: skip
    t5 = T5Config(vocab_size=128, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    return {
        "BERT": (
            BertForMaskedLM(bert),
            "BertForMaskedLM is an encoder, which sees the tokens that follow; prom",
        ),
        "BERT with the head of a decoder": (BertLMHeadModel(bert), "BertLMHeadModel is an encoder"),
        "BART": (BartForConditionalGeneration(bart), "BartForConditionalGeneration is an encoder-decoder; prompts are"),
        "T5": (T5ForConditionalGeneration(t5), "T5ForConditionalGeneration is an encoder-decoder"),
        "a model without a head": (LlamaModel(tiny_model("llama").config), "LlamaModel cannot generate text"),
        "no model": (torch.nn.Linear(2, 2), "expected a transformers causal language model, got Linear"),
    }


@pytest.mark.parametrize("selector", ["gemfilter", "recent", "retrieval-heads"])
def test_what_is_no_decoder_is_refused_in_a_sentence(selector: str) -> None:
    for model, said in others().values():
        with pytest.raises(UnsupportedModelError, match=said):
            compressx.select_tokens(model, prompts(), selector=selector, keep=20, protect=PROTECT)


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
