"""Sentences hidden in other text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.prompts import needles
from compressx.prompts.needles import CHOOSING, MEASURING, model_facts, needle_prompt
from compressx.prompts.templates import text_ids
from compressx.runtime.errors import CalibrationError
from compressx.testing import tiny_model

FACTS = [*CHOOSING, *MEASURING]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<me>"


@pytest.fixture(params=["", TEMPLATE], ids=["text", "chat"])
def either(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    """A tokenizer without and with a chat template."""
    tokenizer.chat_template = request.param or None
    return tokenizer


def hay(tokenizer: Any) -> Tensor:
    return text_ids(tokenizer, "".join(f"Number {i} is here. " for i in range(200)))


@pytest.mark.parametrize("fact", FACTS, ids=[fact.answer for fact in FACTS])
def test_the_sentence_stands_where_it_is_said_and_answers_the_question_at_the_end(fact: Any, either: Any) -> None:
    for length, depth in ((130, 0.0), (1000, 1.0), (500, 0.37)):
        prompt = needle_prompt(either, hay(either), fact, length, depth)
        assert len(prompt.ids) == len(prompt.protected) == length
    assert either.decode(prompt.ids[prompt.places]) == f" {fact.sentence}"
    assert fact.answer in fact.sentence
    assert prompt.answer == fact.answer
    frame = either.decode(prompt.ids[prompt.protected])
    assert fact.question in frame
    assert fact.sentence not in frame
    assert not prompt.protected[prompt.places].any()
    ending = f"{fact.question}</><me>" if either.chat_template else f"Question: {fact.question}\nAnswer:"
    assert either.decode(prompt.ids).endswith(ending)


def test_the_deeper_the_later_and_always_at_the_end_of_a_sentence(either: Any) -> None:
    text = hay(either)
    starts = []
    for depth in (0.0, 0.1, 0.5, 0.9):
        prompt = needle_prompt(either, text, CHOOSING[0], 1000, depth)
        starts.append(int(prompt.places[0]))
        before = either.decode(prompt.ids[: starts[-1]][~prompt.protected[: starts[-1]]])
        assert before == "" or before.endswith("."), depth
    free = (~needle_prompt(either, text, CHOOSING[0], 1000, 1.0).protected).nonzero()[:, 0]
    starts.append(int(needle_prompt(either, text, CHOOSING[0], 1000, 1.0).places[0]))
    assert starts == sorted({*starts})
    assert starts[0] == free[0]
    assert starts[-1] + len(CHOOSING[0].sentence) == free[-1]


def test_the_hay_is_the_text_from_the_start_that_is_asked_for_and_around_again() -> None:
    class Letters:
        chat_template = None

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [*map(ord, text)], "special_tokens_mask": [0] * len(text)}

        def decode(self, ids: Tensor) -> str:
            return "".join(map(chr, ids))

    text = torch.arange(1000, 1300)
    for start in (0, 7, 300, 100_000):
        prompt = needle_prompt(Letters(), text, CHOOSING[0], 200, 0.0, start=start)
        around = prompt.ids[prompt.ids >= 1000]
        first = start % (len(text) - len(around) + 1)
        assert around.tolist() == text[first : first + len(around)].tolist()


@pytest.mark.parametrize(("length", "tokens"), [(1000, 100), (5, 1000)])
def test_too_little_hay_and_too_short_prompts_are_refused(length: int, tokens: int, tokenizer: Any) -> None:
    said = rf"a prompt of {length} tokens takes -?\d+ tokens of hay, and the text has {tokens}; expected 1 to {tokens}"
    with pytest.raises(CalibrationError, match=said):
        needle_prompt(tokenizer, hay(tokenizer)[:tokens], CHOOSING[0], length, 0.5)


def test_what_is_measured_is_not_what_blocks_are_chosen_by() -> None:
    for name in ("sentence", "question", "answer"):
        values = [getattr(fact, name) for fact in FACTS]
        assert len({*values}) == len(FACTS), name
    chosen = {word.strip(".") for fact in CHOOSING for word in fact.sentence.split()}
    assert not chosen & {fact.answer for fact in MEASURING}


def test_facts_with_needles_have_the_scores_of_all_blocks_that_can_be_read_at_the_sentences_places(tokenizer) -> None:
    for architecture, blocks in (("llama", (0, 1, 2)), ("gemma3", (1,))):
        model = tiny_model(architecture)
        facts = model_facts(InMemory(model), architecture_of(model), tokenizer, 3)
        assert (facts.blocks, facts.heads, facts.global_blocks) == (3, 4, blocks)
        assert len(facts.needles) == 12
        for needle in facts.needles:
            assert needle.blocks == blocks
            assert needle.scores.shape[:3] == (len(blocks), 4, 3)
            assert needle.scores.shape[3] < 128, "protected tokens are left out"
            assert (needle.places.diff() == 1).all()
        assert {len(needle.places) for needle in facts.needles} == {len(fact.sentence) + 1 for fact in CHOOSING}
        assert model_facts(InMemory(model), architecture_of(model), None, 0).needles == ()


def test_the_places_of_a_needle_are_its_sentences_among_what_is_scored(either: Any, monkeypatch: Any) -> None:
    """Each token's score is its id, so that what lies at the places can be read."""
    monkeypatch.setattr(needles, "read_scores", lambda _access, _found, ids, _wanted: ids[None, None, None].float())
    model = tiny_model("llama")
    found = model_facts(InMemory(model), architecture_of(model), either, 1).needles
    told = [either.decode(needle.scores[0, 0, 0, needle.places].long()) for needle in found]
    assert told == [f" {fact.sentence}" for fact in CHOOSING for _ in range(3)]


def test_text_without_full_stops_keeps_the_depth(either: Any) -> None:
    for marks in ("ab!", "abc"):
        text = torch.tensor([ord(c) for c in marks * 400])
        starts = [int(needle_prompt(either, text, CHOOSING[0], 1000, depth).places[0]) for depth in (0.25, 0.5, 0.75)]
        assert abs(starts[2] - starts[1] - (starts[1] - starts[0])) <= 6
        assert starts[1] - starts[0] > 150
