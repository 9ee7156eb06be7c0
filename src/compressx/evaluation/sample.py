"""A text that a model writes after a prompt, to read the dense and the pruned model's side by side."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from compressx.models.architecture import text_config
from compressx.recipe.measuring import Sample
from compressx.runtime.errors import CalibrationError, UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries


def prompt_ids(settings: Sample, tokenizer: Any) -> Tensor:
    """Return the prompt's token ids, int64 [1, tokens], as the tokenizer begins a text or a chat.

    Args:
        settings: the recipe's `evaluate.sample`.
        tokenizer: the model's.

    Raises:
        CalibrationError: a tokenizer without a chat template if one is asked for, or no token at all.
    """
    if settings.apply_chat_template:
        if not tokenizer.chat_template:
            raise CalibrationError(
                "evaluate.sample: apply_chat_template is true, and the tokenizer has no chat template; set it to false"
            )
        said = [{"role": "user", "content": settings.prompt}]
        ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenizer(settings.prompt)["input_ids"]
    if not ids:
        raise CalibrationError(f"evaluate.sample: the prompt {settings.prompt!r} has no token; give another")
    return torch.tensor([ids])


def continuation(model: Any, tokenizer: Any, ids: Tensor, tokens: int) -> str:
    """Return what a model writes after a prompt, the likeliest token each time, until it ends or `tokens` are written.

    The model's own generation settings, such as a penalty for repetition, are not used, since they would hide what
    pruning did.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its tokenizer.
        ids: of the prompt, int64 [1, tokens].
        tokens: maximum to write.

    Raises:
        UnsupportedModelError: a model that cannot generate.
        CalibrationError: more tokens than the model has positions.
    """
    from transformers import GenerationConfig

    if not model.can_generate():
        raise UnsupportedModelError(
            f"evaluate.sample: a {type(model).__name__} cannot generate text; remove sample from evaluate"
        )
    positions = getattr(text_config(model), "max_position_embeddings", None)
    if positions is not None and ids.shape[1] + tokens > positions:
        raise CalibrationError(
            f"evaluate.sample: a prompt of {ids.shape[1]} tokens and {tokens} after it are more than the model's "
            f"{positions} positions; lower tokens, or shorten the prompt"
        )
    own = model.generation_config
    ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    greedy = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=ends, pad_token_id=first)
    device = next(model.parameters()).device
    ids = ids.to("cpu" if device.type == "meta" else device)  # an offloaded model moves its inputs
    with patch.object(model, "generation_config", greedy), torch.no_grad(), quiet_libraries():
        written = model.generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :]
    text = tokenizer.decode(written, skip_special_tokens=True)
    return "".join(c for c in text if c.isprintable() or c in "\n\t")  # a terminal would obey control characters
