"""Rows of attention scores, read from the first blocks of a model while it runs on a prompt.

Queries and keys are taken where transformers hands them to its attention function (`AttentionInterface`), so norms,
rotary embeddings, grouped queries, scaling and capping are the model's own. Only the rows asked for are computed,
[heads, queries, n]: never n x n scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from compressx.api.selector import AttentionRows
from compressx.models.access import Access
from compressx.models.architecture import Architecture, text_config
from compressx.models.blockwise import BlockRun, advance, capture, each_block, evaluation_mode
from compressx.models.generate import check_ids
from compressx.runtime.errors import UnsupportedModelError

_NAME = "compressx_scores"
_queries: ContextVar[int] = ContextVar("queries")


class _Read(Exception):  # noqa: N818 - stops a block after its scores are read; no error
    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores


def read_scores(access: Access, found: Architecture, ids: Tensor, wanted: AttentionRows) -> Tensor:
    """Run a prompt through a model's first blocks, and return the scores of its last queries.

    Args:
        access: a transformers causal language model; its training mode is restored afterwards.
        found: its blocks.
        ids: int64 [n], without padding.
        wanted: which blocks, heads and queries. Blocks after the last are not called.

    Returns:
        float32 [blocks, heads, queries, n], see `TokenSelector.select`; [0, 0, queries, n] without blocks.
    """
    check_ids(access.model, ids)
    if not wanted.blocks:
        return torch.empty(0, 0, min(wanted.queries, len(ids)), len(ids), device=access.device)
    check_global(access.model, found, wanted.blocks)
    read: list[Tensor] = []
    with torch.no_grad(), evaluation_mode(access.model):
        with torch.compiler.set_stance("force_eager"):  # a compiled model would be compiled again for every prompt
            states, calls = capture(access, found, [ids[None]])
        for block, (run,) in each_block(access, found, calls, [*found.blocks][: wanted.blocks[-1] + 1]):
            if block.index in wanted.blocks:
                scores = _scores(block.fqn, block.module, run, states[0], wanted.queries)
                _check_scores(scores, block.fqn, len(ids))
                read.append(scores if wanted.heads is None else scores[list(wanted.heads)])
            if block.index < wanted.blocks[-1]:
                advance(block.fqn, [run], states)
    return torch.stack(read)


def global_blocks(model: Any) -> tuple[int, ...]:
    """Return the indices of the blocks whose queries see every key before them, by the model's config."""
    config = text_config(model)
    if not getattr(config, "num_attention_heads", None):
        return ()
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        return () if getattr(config, "sliding_window", None) else tuple(range(config.num_hidden_layers))
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")


def check_global(model: Any, found: Architecture, blocks: Sequence[int]) -> None:
    """Check that blocks exist and see the whole prompt."""
    names, whole = list(found.blocks), global_blocks(model)
    for index in blocks:
        wrong = f"{type(model).__name__} has no block {index}; expected 0 to {len(names) - 1}"
        if 0 <= index < len(names):
            near = min(whole, key=lambda i: abs(i - index), default=None)
            other = "no block does; use a selector that reads no attention, such as recent"
            wrong = (
                f"{names[index]}: its attention does not see the whole prompt (a sliding window, or no "
                "num_attention_heads in its config), so it cannot say which tokens matter; "
                f"{other if near is None else f'use block {near}'}"
            )
        if index not in whole:
            raise UnsupportedModelError(wrong)


def check_decoder(model: Any) -> None:
    """Check that a model is a decoder that writes text, and no encoder, whose tokens see those that follow."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config, reason = getattr(model, "config", None), ""
    if config is None or not hasattr(model, "can_generate"):
        reason = "is no transformers causal language model"
    elif config.is_encoder_decoder:
        reason = "is an encoder-decoder"
    elif config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
        reason = "" if decodes else "is an encoder, which sees the tokens that follow"
    if not (reason or model.can_generate()):
        reason = "cannot generate text"
    if reason:
        raise UnsupportedModelError(
            f"{type(model).__name__} {reason}; prompts are shortened for decoder-only language models, such as Llama, "
            "Gemma or GPT-2"
        )


def _check_scores(scores: Tensor, fqn: str, n: int) -> None:
    if scores.shape[-1] != n:
        raise UnsupportedModelError(
            f"{fqn}: its attention has {scores.shape[-1]} keys for a prompt of {n} tokens, so they are not the "
            "prompt's tokens alone; take virtual tokens (prompt or prefix tuning) off the model"
        )
    if bool(scores.isnan().any()):
        raise UnsupportedModelError(f"{fqn}: its attention scores are NaN; check the model's weights and dtype")


def _scores(fqn: str, module: nn.Module, run: BlockRun, state: Tensor, queries: int) -> Tensor:
    """Return a block's scores [heads, queries, n]."""
    with _reading(module, queries), torch.compiler.set_stance("force_eager"):
        try:
            run(state)
        except _Read as found:
            return found.scores
    kind = type(module).__name__
    raise UnsupportedModelError(
        f"{fqn}: the attention of {kind} does not go through transformers' AttentionInterface, so its scores cannot be "
        "read; use a selector that reads no attention, such as recent"
    )


@contextmanager
def _reading(module: nn.Module, queries: int) -> Iterator[None]:
    """Have the attention of a module call `_read`, within a `with`."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _read)
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    token = _queries.set(queries)
    try:
        with ExitStack() as stack:
            for config in configs.values():
                # The public setter would change the configs inside it too, and not restore them.
                stack.enter_context(patch.object(config, "_attn_implementation_internal", _NAME))
            yield
    finally:
        _queries.reset(token)


def _read(
    _module: nn.Module, query: Tensor, key: Tensor, _value: Tensor, attention_mask: object = None, *,
    scaling: float | None = None, softcap: float | None = None, **_: Any,
) -> None:  # fmt: skip
    """Stand in for an attention function: compute the scores of the last queries, and stop.

    Args:
        query: [1, heads, n, head_dim].
        key: [1, key heads, n, head_dim].
        attention_mask: [1, 1 or heads, n, n], bool or added to the scores. Otherwise attention is causal: without a
            mask, and where flash or flex attention have one of their own, since nothing is padded.
        scaling: of the products; head_dim^-0.5 if None.
        softcap: scores are `softcap * tanh(score / softcap)`.
    """
    count = min(_queries.get(), query.shape[2])
    n = key.shape[2]
    last = query[0, :, -count:].float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    grouped = last.reshape(key.shape[1], -1, query.shape[-1])  # [key heads, queries of its group, head_dim]
    scores = (grouped @ key[0].float().mT).view(query.shape[1], count, n)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 4:
        seen = torch.arange(n, device=scores.device) <= torch.arange(n - count, n, device=scores.device)[:, None]
        scores = scores.masked_fill(~seen, -torch.inf)
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask[0, :, -count:, :n], -torch.inf)
    else:
        added = attention_mask[0, :, -count:, :n].float()
        scores = (scores + added).masked_fill(added <= torch.finfo(attention_mask.dtype).min / 2, -torch.inf)
    raise _Read(scores)
