"""Build and save the smaller model, in memory or one block at a time, and compare it with the pruned one."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.models import shards
from compressx.models.access import Access, block_file
from compressx.models.export import save_model
from compressx.models.shards import OUTSIDE
from compressx.models.shrink import Smaller, build_like
from compressx.models.streaming import StreamedModel


def save_shrunk(access: Access, made: Smaller, tokenizer: Any | None, folder: Path) -> int:
    """Save the smaller model in transformers' format.

    Args:
        access: the pruned model, of the original size.
        made: what `smaller` returned.
        tokenizer: saved too, unless None.
        folder: of the new checkpoint.

    Returns:
        The number of its parameters.

    Raises:
        ArtifactError: it cannot be written.
    """
    small = build_like(access.model, made)
    small.generation_config = copy.deepcopy(access.model.generation_config)
    if isinstance(access, StreamedModel):
        _save_streamed(access, made, small, tokenizer, folder)
    else:
        small.load_state_dict(made.cuts.all(access.model.state_dict()), strict=True, assign=True)
        small.tie_weights()
        if (conversions := getattr(access.model, "_weight_conversions", None)) is not None:
            small._weight_conversions = conversions
        save_model(small, tokenizer, folder)
    return sum(p.numel() for p in small.parameters())


def _save_streamed(access: StreamedModel, made: Smaller, small: Any, tokenizer: Any | None, folder: Path) -> None:
    """Save a smaller model one block at a time, one file each."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="blocks-", dir=folder.parent) as beside:
        parts = []
        for fqn in made.blocks:
            with access.materialise(fqn):
                left = shards.checkpoint_tensors(small, made.cuts.all(access.tensors(fqn)))
                shards.write(block_file(Path(beside), fqn), left)
            parts.append(shards.of_file(block_file(Path(beside), fqn), fqn))
        with access.materialise(OUTSIDE):
            save_model(small, tokenizer, folder, made.cuts.all(access.tensors(OUTSIDE)))
        shards.join(folder, parts)


def difference(pruned: Access, smaller: Access, tokens: Tensor) -> float:
    """Return how far the logits of two models are apart, relative to those of the first.

    Args:
        pruned: of the original size.
        smaller: what is left of it.
        tokens: ids [batch, tokens].

    Returns:
        The norm of the difference over the norm of the logits; `tolerance` is what rounding explains.
    """
    with torch.no_grad():
        of = [next(iter(x.logits([tokens]))).double().cpu() for x in (pruned, smaller)]
    return float((of[1] - of[0]).norm() / of[0].norm().clamp_min(torch.finfo(torch.float64).tiny))


def tolerance(dtype: torch.dtype) -> float:
    """Return what `difference` may be at most: products of fewer numbers are added up in another order."""
    return float(torch.finfo(dtype).eps ** 0.5)
