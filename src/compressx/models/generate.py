"""Text that a model writes by itself, to calibrate with (data-free, as in LLM-QAT, arXiv 2305.17888)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compressx.models.architecture import text_config
from compressx.recipe.sources import Generate
from compressx.runtime.errors import CalibrationError


def first_token(tokenizer: Any, model: Any) -> int:
    """Return the id of the token that generated text begins with: the tokenizer's BOS token, else the config's.

    Raises:
        CalibrationError: neither has one.
    """
    for found in (tokenizer.bos_token_id, getattr(text_config(model), "bos_token_id", None)):
        if isinstance(found, int):
            return found
    raise CalibrationError(
        "generate begins with the BOS token, but neither the tokenizer nor the model's config has one; name a dataset "
        "instead"
    )


def generate(
    model: Any, first: int, settings: Generate, length: int, progress: Callable[[int, int], None] = lambda _i, _n: None
) -> Tensor:
    """Sample sequences from the model's predictions, unchanged but for the temperature.

    A sequence goes on after an end-of-text token, as packed training text does, so that all have the same length.

    Args:
        model: a transformers causal language model in evaluation mode, with all weights in memory.
        first: the first token of each sequence, from `first_token`.
        settings: number of sequences, temperature, seed and batch size.
        length: tokens in a sequence, the first included.
        progress: called with the number of sequences done and their total.

    Returns:
        int64 [samples, length], on the CPU; the global random state is unchanged.

    Raises:
        CalibrationError: probabilities that are not finite.
    """
    from transformers import GenerationConfig

    sampling = GenerationConfig(
        do_sample=True, temperature=settings.temperature, top_k=0, top_p=1.0, max_new_tokens=length - 1
    )
    own = model.generation_config
    model.generation_config = GenerationConfig()  # `generate` would fill in the model's top-k, end tokens and so on
    devices = [model.device] if model.device.type == "cuda" else []
    written: list[Tensor] = []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
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
            f"generate: the model's probabilities are not finite at temperature {settings.temperature}; raise the "
            "temperature, or check the model's weights"
        ) from error
    finally:
        model.generation_config = own
    progress(settings.samples, settings.samples)
    return torch.cat(written)
