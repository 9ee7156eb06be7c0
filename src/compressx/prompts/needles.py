"""Needles in hay: prompts of other text in which one sentence answers the question at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from compressx.api.selector import AttentionRows, ModelFacts, Needle
from compressx.data.documents import texts
from compressx.models.access import Access
from compressx.models.architecture import Architecture, positions_of, text_config
from compressx.prompts.scores import global_blocks, read_scores
from compressx.prompts.templates import around_text, text_ids
from compressx.recipe.sources import DatasetSource
from compressx.runtime.errors import CalibrationError


@dataclass(frozen=True)
class Sentence:
    """A sentence to hide, the question that it answers, and the answer, which the sentence ends with."""

    sentence: str
    question: str
    answer: str


CHOOSING = (
    Sentence("The password of the blue door is marigold.", "What is the password of the blue door?", "marigold"),
    Sentence("The old captain's dog is called Biscuit.", "What is the old captain's dog called?", "Biscuit"),
    Sentence("The secret ingredient of the soup is ginger.", "What is the secret ingredient of the soup?", "ginger"),
    Sentence("The locker number of the tall girl is 4182.", "What is the locker number of the tall girl?", "4182"),
)
"""For choosing blocks and heads; never for measuring."""

MEASURING = (
    Sentence("The magic word of the green castle is umbrella.", "What is the magic word of the green castle?",
             "umbrella"),
    Sentence("The best thing to drink in Lisbon is cold lemonade.", "What is the best thing to drink in Lisbon?",
             "lemonade"),
    Sentence("The number of the lost train ticket is 73914.", "What is the number of the lost train ticket?", "73914"),
    Sentence("The gardener's favourite flower is the tulip.", "What is the gardener's favourite flower?", "tulip"),
    Sentence("The treasure was buried under the wooden bridge.", "Where was the treasure buried?", "bridge"),
)  # fmt: skip


_STOPS = (".", ("!", "?", "\u3002", "\uff01", "\uff1f", "\n"))  # where there is no full stop: Chinese, Japanese, code
_SEARCHED = 100


@dataclass(frozen=True, eq=False)
class NeedlePrompt:
    """A prompt with a hidden sentence.

    Attributes:
        ids: int64 [n].
        places: positions of the sentence's tokens, int64 [k].
        protected: whether a token is no part of the long text, bool [n]: the question, and a chat's template.
        answer: that the model should give.
        depth: of the sentence that was asked for, from 0 to 1.
    """

    ids: Tensor
    places: Tensor
    protected: Tensor
    answer: str
    depth: float


def needle_prompt(
    tokenizer: Any, hay: Tensor, fact: Sentence, length: int, depth: float, *, start: int = 0
) -> NeedlePrompt:
    """Hide a sentence in hay.

    Args:
        tokenizer: the model's.
        hay: token ids of other text, int64 [tokens].
        fact: what is hidden and asked.
        length: tokens of the prompt in all.
        depth: of the sentence in the hay, 0 is its beginning and 1 its end. The sentence goes to the nearest end of a
            sentence or line before it, if there is one within 100 tokens.
        start: first token of hay to use.
    """
    before, after = around_text(tokenizer, fact.question)
    sentence = text_ids(tokenizer, f" {fact.sentence}")
    wanted = length - len(before) - len(after) - len(sentence)
    if wanted < 1 or len(hay) < wanted:
        raise CalibrationError(
            f"needle: a prompt of {length} tokens takes {wanted} tokens of hay, and the text has {len(hay)}; expected "
            f"1 to {len(hay)}; choose other lengths, or a longer dataset"
        )
    start %= len(hay) - wanted + 1
    around = hay[start : start + wanted]
    place = round(depth * wanted)
    ends = [tokenizer.decode(around[i : i + 1]).rstrip(" ") for i in range(max(place - _SEARCHED, 0), place)]
    for stops in _STOPS if place < wanted else ():
        if (back := next((i for i, end in enumerate(reversed(ends)) if end.endswith(stops)), None)) is not None:
            place -= back
            break
    ids = torch.cat([before, around[:place], sentence, around[place:], after])
    first = len(before) + place
    protected = torch.zeros(len(ids), dtype=torch.bool)
    protected[: len(before)] = protected[len(ids) - len(after) :] = True
    return NeedlePrompt(ids, torch.arange(first, first + len(sentence)), protected, fact.answer, depth)


_LENGTH = 1024
"""Tokens of a synthetic prompt; fewer for models with fewer positions."""

_DEPTHS = (0.1, 0.5, 0.9)


def model_facts(access: Access, found: Architecture, tokenizer: Any | None, queries: int) -> ModelFacts:
    """Return what a token selector may know of a model.

    Needles have as many of the last tokens as queries as `queries` says, and need the tokenizer; 0 for no needles.
    """
    config, blocks = text_config(access.model), global_blocks(access.model)
    facts = ModelFacts(len(found.blocks), getattr(config, "num_attention_heads", None) or 0, blocks, config)
    if not queries:
        return facts
    hay = text_ids(tokenizer, "\n\n".join(texts(DatasetSource(name="python-docs"), "calibration")))
    length = min(_LENGTH, positions_of(access.model))
    needles = []
    for number, (fact, depth) in enumerate(product(CHOOSING, _DEPTHS)):
        prompt = needle_prompt(tokenizer, hay, fact, length, depth, start=number * length)
        free = (~prompt.protected).nonzero()[:, 0]
        scores = read_scores(access, found, prompt.ids.to(access.device), AttentionRows(blocks, queries=queries))
        places = torch.searchsorted(free, prompt.places)
        needles.append(Needle(scores[..., free.to(scores.device)].cpu(), blocks, places))
    return replace(facts, needles=tuple(needles))


def choosing_ids(tokenizer: Any) -> list[list[int]]:
    """Return the token ids of what is hidden and asked to choose blocks and heads; they tell tokenizers apart."""
    pieces = [[*around_text(tokenizer, fact.question), text_ids(tokenizer, f" {fact.sentence}")] for fact in CHOOSING]
    return [torch.cat(piece).tolist() for piece in pieces]
