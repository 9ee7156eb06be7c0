"""Which tokens of a prompt are kept."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.compressx.prompts.selectors import EARLY, PROTECT, Chosen, chosen, plugins_with, prompts

import compressx
from compressx.api.selector import AttentionRows
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.numerics.tokens import pooled
from compressx.prompts.scores import read_scores
from compressx.runtime.errors import CalibrationError
from compressx.testing import TINY_CONFIGS, tiny_model


@pytest.mark.parametrize("architecture", [n for n in TINY_CONFIGS if n not in ("mistral", "falcon", "bloom", "gptj")])
def test_the_highest_scored_tokens_and_the_protected_ones_are_kept_in_order(architecture: str) -> None:
    model, ids = tiny_model(architecture), prompts()
    kept = compressx.select_tokens(model, ids, keep=20, **{**EARLY, "options": {"block": 1}})
    scores = read_scores(InMemory(model), survey(model), ids[0], AttentionRows((1,)))[0, :, -1].sum(0)
    best = pooled(scores[2:-4], 5).topk(14).indices + 2
    assert kept.places[0].tolist() == [0, 1, *sorted(best.tolist()), 56, 57, 58, 59]
    assert torch.equal(kept.input_ids, ids[:, kept.places[0]])
    assert kept.attention_mask.tolist() == [[1] * 20]


def test_a_selector_sees_the_scores_of_tokens_that_are_not_protected() -> None:
    selector = Chosen(AttentionRows((0, 2), (3,), 5), lambda scores, keep: torch.tensor([0, 1, 2, 53]))
    kept = chosen(selector)
    assert kept.places[0].tolist() == [0, 1, 2, 3, 4, 55, 56, 57, 58, 59]
    assert selector.facts is not None
    assert (selector.facts.blocks, selector.facts.heads, selector.facts.global_blocks) == (3, 4, (0, 1, 2))
    model = tiny_model("llama")
    whole = read_scores(InMemory(model), survey(model), prompts()[0], AttentionRows((0, 2), (3,), 5))
    assert torch.equal(selector.scores, whole[..., 2:-4])


@pytest.mark.parametrize("heads", [8, 2])
def test_the_number_of_heads_is_the_configs_under_whatever_name(heads: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    selector = Chosen(AttentionRows((1,)))
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=heads, n_positions=64)
    compressx.select_tokens(GPT2LMHeadModel(config), prompts(), selector="mine", keep=10, protect=PROTECT,
                            plugins=plugins_with(selector))  # fmt: skip
    assert selector.facts is not None
    assert selector.facts.heads == heads


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


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int32])
def test_a_mask_may_be_of_any_dtype_and_comes_back_as_int64(kind: torch.dtype) -> None:
    mask = torch.ones(60, dtype=kind)
    mask[:7] = 0
    found = compressx.select_tokens(tiny_model("llama"), prompts()[0], attention_mask=mask, keep=20, **EARLY)
    assert found.attention_mask.dtype == torch.int64
    assert found.places[0][:2].tolist() == [7, 8]
    assert found.input_ids.shape == found.attention_mask.shape == (1, 20)


def test_ids_of_32_bits_stay_so() -> None:
    ids = prompts().int()
    found = compressx.select_tokens(tiny_model("llama"), ids, keep=20, **EARLY)
    assert found.input_ids.dtype == torch.int32
    assert torch.equal(found.input_ids, ids[:, found.places[0]])


@pytest.mark.parametrize(("first", "last"), [(0, 0), (3, 0), (0, 3), (30, 30), (99, 0), (0, 99)])
def test_the_first_and_the_last_tokens_are_kept(first: int, last: int) -> None:
    found = compressx.select_tokens(
        tiny_model("llama"), prompts(), selector="random", keep=0.1, protect={"first": first, "last": last}
    )
    places = found.places[0].tolist()
    assert {*range(min(first, 60)), *range(max(0, 60 - last), 60)} <= {*places}
    assert len(places) == max(6, min(60, first + last))


@pytest.mark.parametrize(("keep", "count"), [(0.5, 30), (0.126, 8), (0.001, 6), (6, 6), (59, 59), (30.0, 30)])
def test_a_fraction_is_of_the_prompt_and_never_fewer_than_are_protected(keep: float, count: int) -> None:
    found = compressx.select_tokens(tiny_model("llama"), prompts(), keep=keep, **EARLY)
    assert len(found.places[0]) == count


def test_when_nothing_but_protected_tokens_is_kept_the_selector_is_not_asked() -> None:
    selector = Chosen(answer=lambda scores, keep: pytest.fail("it is asked"))
    assert chosen(selector, keep=6).places[0].tolist() == [0, 1, 56, 57, 58, 59]


@pytest.mark.parametrize(("keep", "protect"), [(60, PROTECT), (1000, PROTECT), (0.01, {"first": 40, "last": 40})])
def test_prompts_that_are_not_too_long_stay_whole_and_the_log_says_so_once(keep, protect, caplog) -> None:
    ids = prompts(3)
    with caplog.at_level(logging.WARNING, "compressx"):
        found = compressx.select_tokens(tiny_model("llama"), ids, **{**EARLY, "protect": protect}, keep=keep)
    assert torch.equal(found.input_ids, ids)
    [line] = caplog.messages
    assert line.startswith(f"select_tokens leaves nothing out of prompts of up to 60 tokens: keep is {keep}, ")
    caplog.clear()
    compressx.select_tokens(tiny_model("llama"), ids, keep=20, **EARLY)
    assert not caplog.messages


def test_a_prompt_beyond_the_models_positions_is_for_selectors_that_read_no_attention() -> None:
    model, ids = tiny_model("llama"), prompts(length=200)
    message = "has 200 tokens, and the model 128 positions, .* to read it for 'gemfilter'.* such as recent"
    with pytest.raises(CalibrationError, match=message):
        compressx.select_tokens(model, ids, keep=20, **EARLY)
    found = compressx.select_tokens(model, ids, selector="recent", keep=20, protect={"first": 4, "last": 0})
    assert found.places[0].tolist() == [0, 1, 2, 3, *range(184, 200)]


def test_a_model_in_training_selects_the_same() -> None:
    model = tiny_model("gpt2")
    expected = compressx.select_tokens(model, prompts(2), keep=20, **EARLY)
    model.train()
    found = compressx.select_tokens(model, prompts(2), keep=20, **EARLY)
    assert torch.equal(found.input_ids, expected.input_ids)
    assert model.training
