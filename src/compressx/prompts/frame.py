"""Prompts around a long text: what stands before and after it, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressx.runtime.errors import CalibrationError

_TEXT = "\u2063text\u2063"  # stands for the long text while a chat template is applied; invisible separators


def frame(tokenizer: Any, question: str, *, before: str = "") -> tuple[Tensor, Tensor]:
    """Return the token ids before and after a long text that a question is asked about, int64 [tokens] each.

    With a chat template, text and question are one message of the user. Without, the text ends with `Question: ...` and
    `Answer:`, and begins as the tokenizer begins a text.

    Args:
        tokenizer: the model's.
        question: asked after the text; may be empty.
        before: an instruction before the text.
    """
    begin = f"{before}\n\n" if before else ""
    if tokenizer.chat_template:
        asked = f"\n\n{question}" if question else ""
        return frame_of_chat(tokenizer, [{"role": "user", "content": f"{begin}{_TEXT}{asked}"}], _TEXT)
    ended = f"\n\nQuestion: {question}\nAnswer:" if question else ""
    return _ids(tokenizer, begin, special=True), _ids(tokenizer, ended)


def frame_of_chat(tokenizer: Any, messages: Sequence[Mapping[str, str]], text: str) -> tuple[Tensor, Tensor]:
    """Return the token ids of a chat before and after a text in it, which are its template's and other messages'.

    Raises:
        CalibrationError: the template changes the text, or repeats it.
    """
    written = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    if written.count(text) != 1:
        raise CalibrationError(
            f"the chat template writes the long text {written.count(text)} times, expected once; give the prompt as "
            "token ids instead"
        )
    before, _, after = written.partition(text)
    return _ids(tokenizer, before), _ids(tokenizer, after)


def text_ids(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a text, int64 [tokens], without special tokens."""
    return _ids(tokenizer, text)


def _ids(tokenizer: Any, text: str, *, special: bool = False) -> Tensor:
    ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"] if text or special else []
    return torch.tensor(ids, dtype=torch.int64)
