"""Build and save the smaller model, in memory or one block at a time, and compare it with the pruned one."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.api.pruner import Block
from compressx.models import shards
from compressx.models.access import Access, block_file
from compressx.models.architecture import Architecture, survey
from compressx.models.blockwise import capture, each_block, replay, run_around
from compressx.models.shards import OUTSIDE, save_model
from compressx.models.streaming import StreamedModel
from compressx.runtime.files import BLOCKS
from compressx.shrink.cuts import Smaller, build_like

TOLERANCE = 1e-3
"""What `difference` may be at most. In float32 rounding gives about 1e-5; a unit in a wrong place gives about 1."""


def save_shrunk(access: Access, made: Smaller, tokenizer: Any | None, folder: Path) -> None:
    """Save the smaller model in transformers' format.

    Raises:
        ArtifactError: it cannot be written.
    """
    small = build_like(access.model, made)
    small.generation_config = copy.deepcopy(access.model.generation_config)
    if isinstance(access, StreamedModel):
        _save_streamed(access, made, small, tokenizer, folder)
    else:
        small.load_state_dict(made.cuts.all(access.model.state_dict()), strict=True, assign=True)
        if (conversions := getattr(access.model, "_weight_conversions", None)) is not None:
            small._weight_conversions = conversions
        save_model(small, tokenizer, folder)


def _save_streamed(access: StreamedModel, made: Smaller, small: Any, tokenizer: Any | None, folder: Path) -> None:
    """Save a smaller model one block at a time, one file each."""
    where = folder.parent / BLOCKS  # which an output folder loses at its end, whatever a killed process leaves there
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="smaller-", dir=where) as beside:
        parts = []
        for fqn in made.blocks:
            with access.materialise(fqn):
                left = shards.checkpoint_tensors(small, made.cuts.all(access.tensors(fqn)))
                shards.write(block_file(Path(beside), fqn), left)
            parts.append(shards.of_file(block_file(Path(beside), fqn), fqn))
        with access.materialise(OUTSIDE):
            save_model(small, tokenizer, folder, made.cuts.all(access.tensors(OUTSIDE)))
        shards.join(folder, parts)


@torch.no_grad()
def difference(pruned: Access, smaller: Access, made: Smaller, tokens: Tensor) -> float:
    """Return how far two models are apart, each part of them computing on the same input.

    Whole models of 16 bits cannot be compared: products of fewer numbers are added up in another order, and the last
    bits of one block's output are magnified by the next ones. So each block is compared alone, in float32, or in
    float64 if that is what the model has.

    Args:
        pruned: of the original size.
        smaller: what is left of it.
        made: how it was made.
        tokens: ids [batch, tokens].

    Returns:
        The largest of the differences of the embeddings, of what each block adds to the hidden states, and of the
        logits; each a norm, relative to that of the larger model. `TOLERANCE` is more than rounding explains.
    """
    both = (pruned, smaller)
    found = [survey(access.model) for access in both]
    (states, calls), (theirs, their_calls) = (capture(x, at, [tokens]) for x, at in zip(both, found, strict=True))
    apart = [_relative(theirs[0] - states[0], states[0])]
    state = states[0].to(torch.promote_types(states[0].dtype, torch.float32))
    left = each_block(smaller, found[1], their_calls)
    for block, _ in each_block(pruned, found[0], calls):
        added = _added(block, state)
        if block.fqn in made.blocks:
            apart.append(_relative(_added(next(left)[0], state) - added, added))
        else:  # it has to add nothing
            apart.append(_relative(added, state))
        state = state + added
    logits = [_logits(x, at, tokens, state) for x, at in zip(both, found, strict=True)]
    apart.append(_relative(logits[1] - logits[0], logits[0]))
    return float(torch.tensor(apart, dtype=torch.float64).max())  # NaN if one is, which Python's own would pass over


def _added(block: Block, state: Tensor) -> Tensor:
    """Return what a block adds to hidden states [batch, tokens, width], in their dtype."""
    return replay(copy.deepcopy(block.module).to(state.dtype), state, block.calls[0]) - state


def _logits(access: Access, found: Architecture, tokens: Tensor, state: Tensor) -> Tensor:
    with access.materialise(OUTSIDE):
        ids, last = tokens.to(access.device), state.to(access.model.dtype)
        logits: Tensor = run_around(access.model, found.blocks, ids, last).logits
        return logits


def _relative(difference: Tensor, to: Tensor) -> float:
    tiny = torch.finfo(torch.float64).tiny
    return float(difference.double().norm() / to.double().norm().clamp_min(tiny))
