"""Prompts around a long text: what stands before and after it, as token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressx.data.documents import checked_text
from compressx.runtime.errors import CalibrationError, one_line

_TEXT = "\u2063text\u2063"  # stands for the long text while a chat template is applied; invisible separators


def around_text(tokenizer: Any, question: str) -> tuple[Tensor, Tensor]:
    """Return the token ids before and after a long text that a question is asked about, int64 [tokens] each.

    With a chat template, text and question are one message of the user. Without, the text ends with `Question: ...` and
    `Answer:`, and begins as the tokenizer begins a text.
    """
    if not tokenizer.chat_template:
        found = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        special = [*found["special_tokens_mask"], 0]  # such as BOS; those that a text may end with are left out
        before = torch.tensor(found["input_ids"][: special.index(0)], dtype=torch.int64)
        return before, text_ids(tokenizer, f"\n\nQuestion: {question}\nAnswer:" if question else "")
    message = {"role": "user", "content": f"{_TEXT}\n\n{question}" if question else _TEXT}
    try:
        written = str(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
        wrong = f"writes the long text {written.count(_TEXT)} times, expected once" * (written.count(_TEXT) != 1)
    except Exception as error:  # noqa: BLE001 - templates are programs, and raise what they like
        wrong = f"refuses the prompt ({type(error).__name__}: {one_line(str(error))[:300]})"
    if wrong:
        raise CalibrationError(
            f"the tokenizer's chat template {wrong}; give token ids to compressx.select_tokens instead"
        )
    before_text, _, after_text = written.partition(_TEXT)
    return text_ids(tokenizer, before_text), text_ids(tokenizer, after_text)


def prompt_of(tokenizer: Any, text: str, question: str = "") -> tuple[Tensor, Tensor]:
    """Return the ids of a long text with a question, int64 [n], and which of them are not the text's, bool [n]."""
    before, after = around_text(tokenizer, question)
    ids = text_ids(tokenizer, text)
    if not len(ids):
        raise CalibrationError("the prompt is empty; expected a text")
    protected = torch.ones(len(before) + len(ids) + len(after), dtype=torch.bool)
    protected[len(before) : len(before) + len(ids)] = False
    return torch.cat([before, ids, after]), protected


def text_ids(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a text, int64 [tokens], without special tokens."""
    checked = checked_text(text, "the prompt")
    ids = tokenizer(checked, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return torch.tensor(ids, dtype=torch.int64)
