"""Text that a model writes: answers, and text to calibrate with (as in LLM-QAT, arXiv 2305.17888)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from compressx.models.architecture import positions_of, text_config
from compressx.recipe.sources import Generate
from compressx.runtime.errors import CalibrationError, UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries


def first_token(tokenizer: Any, model: Any) -> int:
    """Return the id of the token that generated text begins with: the tokenizer's BOS token, else the config's."""
    for found in (tokenizer.bos_token_id, getattr(text_config(model), "bos_token_id", None)):
        if isinstance(found, int):
            return found
    raise CalibrationError(
        "generate begins with the BOS token, but neither the tokenizer nor the model's config has one; name a dataset "
        "instead"
    )


def sample_texts(
    model: Any, prompts: Sequence[Sequence[int]], tokens: int, needed: int, settings: Generate, *,
    ends: Sequence[int] = (), progress: Callable[[int, int], None] = lambda _i, _n: None,
) -> Tensor:  # fmt: skip
    """Sample what follows prompts from the model's unchanged predictions: int64 [tokens], prompts included, on the CPU.

    A prompt is followed by at most `tokens`, up to one of `ends`; without these, text goes on after its end, as packed
    training text does. Prompts are taken until there are `needed` tokens in all, or no more prompts. The global random
    state is unchanged. All weights have to be in memory; `progress` is called with the tokens so far and `needed`.
    """
    from transformers import GenerationConfig

    pad = next(iter(ends), 0)
    sampling = GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, max_new_tokens=tokens, eos_token_id=[*ends] or None, pad_token_id=pad
    )
    devices = [model.device] if model.device.type == "cuda" else []
    text = list[int]()
    # `generate` would fill in the model's own top-k, end tokens and so on.
    plain = patch.object(model, "generation_config", GenerationConfig())
    try:
        with plain, torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(settings.seed)
            for start in range(0, len(prompts), settings.batch_size):
                progress(len(text), needed)
                some = prompts[start : start + settings.batch_size]
                width = max(map(len, some))
                ids = torch.tensor([[pad] * (width - len(x)) + [*x] for x in some], device=model.device)
                mask = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in some], device=model.device)
                written = model.generate(ids, attention_mask=mask, generation_config=sampling)[:, width:].tolist()
                for prompt, answer in zip(some, written, strict=True):
                    ended = next((i + 1 for i, token in enumerate(answer) if token in ends), len(answer))
                    text += [*prompt, *answer[:ended]]
                if len(text) >= needed:
                    break
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise CalibrationError(
            "generate: the model's probabilities are not finite; check the model's weights"
        ) from error
    progress(len(text), needed)
    return torch.tensor(text)


def check_ids(model: Any, ids: Tensor, tokenizer: Any | None = None, what: str = "the prompt") -> None:
    """Refuse ids of tokens, int64 of any shape, for which a model's embedding has no row, with or without weights.

    A GPU would only say that an assertion failed.
    """
    known = model.get_input_embeddings().weight.shape[0]
    if bad := [token for token in map(int, ids.aminmax() if ids.numel() else ()) if not 0 <= token < known]:
        named = "" if tokenizer is None else f" ({tokenizer.convert_ids_to_tokens(bad[0])!r})"
        raise CalibrationError(
            f"{what} has the token id {bad[0]}{named}, and {type(model).__name__} knows 0 to {known - 1}; use the "
            "model's own tokenizer, or save the model after model.resize_token_embeddings(len(tokenizer))"
        )


def check_room(model: Any, prompt: int, tokens: int, said_by: str) -> None:
    """Check that a model can write `tokens` after `prompt` others; `said_by` is the recipe's key or the command."""
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{said_by}: a {type(model).__name__} cannot generate text; expected a causal language model"
        )
    if prompt + tokens > (positions := positions_of(model)):
        raise CalibrationError(
            f"{said_by}: a prompt of {prompt} tokens and {tokens} after it are more than the model's {positions} "
            "positions; write fewer tokens, or shorten the prompt"
        )


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end an answer: the generation settings', else the tokenizer's."""
    own = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if own is None else own
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def greedy(
    model: Any, tokenizer: Any, ids: Tensor, tokens: int, *, mask: Tensor | None = None,
    processors: Sequence[Callable[[Tensor, Tensor], Tensor]] = (),
) -> Tensor:  # fmt: skip
    """Write the likeliest token each time, until all prompts' texts end or `tokens` are written.

    The model's own generation settings are not used: a penalty for repetition would hide what pruning did.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its tokenizer.
        ids: of the prompts, int64 [batch, n].
        tokens: maximum to write.
        mask: int64 [batch, n], 0 at padding on the left; None for none.
        processors: called with the ids so far and the logits of the next token, before each is chosen.

    Returns:
        int64 [batch, at most tokens]; padded with the end token after it.
    """
    from transformers import GenerationConfig

    ends = end_tokens(model, tokenizer)
    pad = next(iter(ends), None)
    config = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=ends or None, pad_token_id=pad)
    device = next(model.parameters()).device
    ids = ids.to("cpu" if device.type == "meta" else device)  # an offloaded model moves its inputs
    mask = torch.ones_like(ids) if mask is None else mask.to(ids.device)
    with patch.object(model, "generation_config", config), torch.no_grad(), quiet_libraries():
        written: Tensor = model.generate(ids, attention_mask=mask, logits_processor=[*processors])[:, ids.shape[1] :]
    return written


def readable(tokenizer: Any, ids: Tensor) -> str:
    """Return the text of token ids [tokens] without special tokens and control characters, which a terminal obeys."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
