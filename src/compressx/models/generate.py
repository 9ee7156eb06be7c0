"""Text that a model writes: after a prompt, or by itself, to calibrate with (as in LLM-QAT, arXiv 2305.17888)."""

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


def sample_sequences(
    model: Any, first: int, settings: Generate, length: int, progress: Callable[[int, int], None] = lambda _i, _n: None
) -> Tensor:
    """Sample sequences from the model's unchanged predictions: int64 [samples, length], on the CPU.

    A sequence begins with `first`. It goes on after an end-of-text token, as packed training text does, so that all
    have the same length. The global random state is unchanged. All weights have to be in memory; `progress` is called
    with the number of sequences done and their total.
    """
    from transformers import GenerationConfig

    sampling = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, max_new_tokens=length - 1)
    devices = [model.device] if model.device.type == "cuda" else []
    written: list[Tensor] = []
    # `generate` would fill in the model's own top-k, end tokens and so on.
    plain = patch.object(model, "generation_config", GenerationConfig())
    try:
        with plain, torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(settings.seed)
            for start in range(0, settings.samples, settings.batch_size):
                progress(start, settings.samples)
                count = min(settings.batch_size, settings.samples - start)
                begun = torch.full((count, 1), first, device=model.device)
                ids = model.generate(begun, attention_mask=torch.ones_like(begun), generation_config=sampling)
                written.append(ids.cpu())
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        raise CalibrationError(
            "generate: the model's probabilities are not finite; check the model's weights"
        ) from error
    progress(settings.samples, settings.samples)
    return torch.cat(written)


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

    own = model.generation_config
    ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    first = ends[0] if isinstance(ends, list) else ends
    config = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=ends, pad_token_id=first)
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
