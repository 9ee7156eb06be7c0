"""A text that a model writes after a prompt, to read the dense and the pruned model's side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressx.data.chat import rendered_one
from compressx.models.generate import check_ids, check_room, greedy, readable
from compressx.recipe.measuring import Sample
from compressx.runtime.errors import CalibrationError


def prompt_ids(settings: Sample, tokenizer: Any) -> Tensor:
    """Return the prompt's token ids, int64 [1, tokens], as the tokenizer begins a text or a chat.

    Raises:
        CalibrationError: a tokenizer without a chat template if one is asked for, or no token at all.
    """
    if settings.apply_chat_template:
        if not tokenizer.chat_template:
            raise CalibrationError(
                "evaluate.sample: apply_chat_template is true, and the tokenizer has no chat template; set it to false"
            )
        said = [{"role": "user", "content": settings.prompt}]
        text = rendered_one(said, tokenizer, "evaluate.sample", answered=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(settings.prompt)["input_ids"]
    if not ids:
        raise CalibrationError(f"evaluate.sample: the prompt {settings.prompt!r} has no token; give another")
    return torch.tensor([ids])


def check_sample(settings: Sample, tokenizer: Any, model: Any) -> None:
    """Check that a model has room for the prompt and what is written after it; needs no weights.

    Raises:
        UnsupportedModelError: a model that cannot generate.
        CalibrationError: as `prompt_ids`, tokens that the model does not know, or more than it has positions.
    """
    ids = prompt_ids(settings, tokenizer)
    check_ids(model, ids, tokenizer, "evaluate.sample: the prompt")
    check_room(model, ids.shape[1], settings.tokens, "evaluate.sample")


def continuation(model: Any, tokenizer: Any, ids: Tensor, tokens: int) -> str:
    """Return what a model writes after a prompt [1, tokens], the likeliest token each time, `tokens` at most.

    Raises:
        UnsupportedModelError: a model that cannot generate.
        CalibrationError: more tokens than the model has positions.
    """
    check_room(model, ids.shape[1], tokens, "evaluate.sample")
    return readable(tokenizer, greedy(model, tokenizer, ids, tokens)[0])
