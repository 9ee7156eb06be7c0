"""`select_tokens`: the tokens of prompts that a model should read, for the caller's own `generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compressx.models.access import InMemory
from compressx.plugins.manager import Plugins
from compressx.prompts.prepare import Selecting
from compressx.prompts.selection import Selected
from compressx.runtime.errors import CalibrationError


def select_tokens(
    model: Any,
    input_ids: Tensor,
    *,
    selector: str = "retrieval-heads",
    keep: float,
    attention_mask: Tensor | None = None,
    options: Mapping[str, Any] | None = None,
    protect: Mapping[str, int] | None = None,
    tokenizer: Any | None = None,
    plugins: Plugins | None = None,
) -> Selected:
    """Select tokens of prompts, for the caller's own `model.generate(selected.input_ids, attention_mask=...)`.

    Args:
        model: a transformers causal language model with all weights in memory.
        input_ids: int64 [batch, tokens] or [tokens], on any device.
        selector: name of a token selector.
        keep: tokens to keep of each prompt: a number, or a fraction of the prompt.
        attention_mask: of the same shape, 0 at padding, which may be on either side; no padding when absent.
        options: the selector's own.
        protect: `first` and `last`, tokens that are always kept, as in a recipe.
        tokenizer: the model's, for selectors that choose blocks or heads on synthetic prompts; when absent, the one
            saved beside the model.
        plugins: what `load_plugins` returned; discovered when absent.

    Raises:
        CompressxError: an error that the user can fix.
    """
    selecting = Selecting.given(selector, keep, options, protect, plugins)
    ids: object = input_ids
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or ids.dim() not in (1, 2):
        kind = f"{ids.dtype} {[*ids.shape]}" if isinstance(ids, Tensor) else type(ids).__name__
        raise CalibrationError(f"input_ids are {kind}; expected token ids, int64 [batch, tokens] or [tokens]")
    prepared = selecting.prepare(InMemory(model), tokenizer)
    if attention_mask is not None and attention_mask.dim() == input_ids.dim() == 1:
        attention_mask = attention_mask[None]
    return prepared.select(input_ids[None] if input_ids.dim() == 1 else input_ids, attention_mask)
