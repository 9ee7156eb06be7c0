"""Prompts around a long text: what stands before and after it, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressx.data.documents import document, sound
from compressx.runtime.errors import CalibrationError, one_line

_TEXT = "\u2063text\u2063"  # stands for the long text while a chat template is applied; invisible separators


def frame(tokenizer: Any, question: str) -> tuple[Tensor, Tensor]:
    """Return the token ids before and after a long text that a question is asked about, int64 [tokens] each.

    With a chat template, text and question are one message of the user. Without, the text ends with `Question: ...` and
    `Answer:`, and begins as the tokenizer begins a text.

    Raises:
        CalibrationError: a chat template that refuses the message.
    """
    if tokenizer.chat_template:
        asked = f"\n\n{question}" if question else ""
        return _around(tokenizer, [{"role": "user", "content": f"{_TEXT}{asked}"}])
    ended = f"\n\nQuestion: {question}\nAnswer:" if question else ""
    return _beginning(tokenizer), text_ids(tokenizer, ended)


def frame_of_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[Tensor, str, Tensor]:
    """Return the text of a chat's longest message, and the token ids before and after it, int64 [tokens] each.

    These are the template's and the other messages'. White space around the text goes with them, since some templates
    remove it.

    Raises:
        CalibrationError: no template, no message, a message without text, or messages that the template refuses.
    """
    chat: Any = document({"messages": list(messages)}, "messages", "the prompt")
    if not chat:
        raise CalibrationError("the prompt has no message; expected one or more")
    if not tokenizer.chat_template:
        raise CalibrationError("the prompt is a chat, and the tokenizer has no chat template; give a text")
    texts = [message.get("content") or "" for message in chat]
    longest = max(range(len(texts)), key=lambda i: len(texts[i].strip()))
    whole = texts[longest]
    text = whole.strip()
    begin, _, end = whole.partition(text) if text else (whole, "", "")
    around = [*chat]
    around[longest] = {**chat[longest], "content": f"{begin}{_TEXT}{end}"}
    before, after = _around(tokenizer, around)
    return before, text, after


def text_ids(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a text, int64 [tokens], without special tokens."""
    ids = tokenizer(sound(text, "the prompt"), add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return torch.tensor(ids, dtype=torch.int64)


def _around(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> tuple[Tensor, Tensor]:
    """Return the token ids of a chat before and after `_TEXT`."""
    try:
        written = str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    except Exception as error:  # templates are programs, and raise what they like
        roles = ", ".join(message["role"] for message in messages)
        raise CalibrationError(
            f"the tokenizer's chat template refuses the prompt (roles {roles}; {type(error).__name__}: "
            f"{one_line(str(error))[:300]}); change the messages"
        ) from error
    if written.count(_TEXT) != 1:
        raise CalibrationError(
            f"the tokenizer's chat template writes the long text {written.count(_TEXT)} times, expected once; give "
            "token ids to compressx.select_tokens instead"
        )
    before, _, after = written.partition(_TEXT)
    return text_ids(tokenizer, before), text_ids(tokenizer, after)


def _beginning(tokenizer: Any) -> Tensor:
    """Return the special tokens that a text begins with, such as BOS; not those that one may end with."""
    found = tokenizer("a", return_special_tokens_mask=True, verbose=False)
    special = [*found["special_tokens_mask"], 0]
    return torch.tensor(found["input_ids"][: special.index(0)], dtype=torch.int64)
