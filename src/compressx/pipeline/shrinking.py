"""The smaller model of a finished run, written in place of the pruned one, and compared with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compressx.api.patterns import Structured
from compressx.masks.maskset import MaskSet
from compressx.models.access import Access, InMemory
from compressx.models.architecture import text_config
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_model
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.planning.plan import Plan
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.files import atomic_write
from compressx.shrink.cuts import Kept, Smaller, smaller
from compressx.shrink.saved import TOLERANCE, difference, save_shrunk

_TOKENS = 64
"""Tokens of each of two random sequences on which the models are compared."""


def save_smaller(
    access: Access, tokenizer: Any, plan: Plan, masks: MaskSet, checkpoint: Checkpoint, folder: Path
) -> Mapping[str, Any]:
    """Write the smaller model to `folder/model`, and what stays of the original one to `folder/units.json`.

    The masks have the shapes of the original model.

    Returns:
        See `RunReport.shrink`.

    Raises:
        UnsupportedModelError: the config cannot describe the smaller model, or it computes something else.
    """
    kept = kept_units(plan, masks)
    made = smaller(access.model, kept, plan.dropped)
    made.config.compressx = {
        **access.model.config.compressx,
        "shrunk": {name: [*numbers] for name, numbers in made.numbers.items()},
    }
    save_shrunk(access, made, tokenizer, folder / "model")
    saved, apart = _compare(access, made, replace(checkpoint.at(folder / "model"), gguf_file=None))
    atomic_write(folder / "units.json", (json.dumps(_units(kept, made, plan)) + "\n").encode())
    return {
        "parameters": [_parameters(x.model) for x in (access, saved)],
        "config": {name: [*numbers] for name, numbers in made.numbers.items()},
        "difference": apart,
    }


def kept_units(plan: Plan, masks: MaskSet) -> list[Kept]:
    """Return which units stay, of each set of units that was pruned."""
    sets = {id(x.pattern.units): x.pattern.units for x in plan.linears if isinstance(x.pattern, Structured)}
    return [
        Kept(units, units.kept({name: masks[name].keep for name in units.owners}))
        for units in sets.values()
        if units.kind != "blocks"
    ]


def _parameters(model: Any) -> int:
    """Return the number of parameters; tied ones, which are not one tensor while they are on disk, count once."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return sum(p.numel() for name, p in model.named_parameters() if name not in tied)


def _compare(access: Access, made: Smaller, checkpoint: Checkpoint) -> tuple[Access, float]:
    """Load the smaller model as it was saved, and return it, and how far it is from the pruned one."""
    config = text_config(access.model)
    length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    tokens = torch.randint(0, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    saved: Access
    if isinstance(access, StreamedModel):
        saved = open_streamed(checkpoint, access.device)
    else:
        saved = InMemory(load_model(checkpoint).to(access.device))
    apart = difference(access, saved, made, tokens)
    if not apart <= TOLERANCE:
        shutil.rmtree(checkpoint.location)
        raise UnsupportedModelError(
            f"the smaller {type(access.model).__name__} does not compute what the pruned one does: on random tokens "
            f"some part differs by {apart:.2g} of its norm, expected at most {TOLERANCE:g}; leave out shrink, and "
            "please report this"
        )
    return saved, apart


def _units(kept: list[Kept], made: Smaller, plan: Plan) -> dict[str, Any]:
    """Return the content of `units.json`."""
    return {
        "blocks": {"count": len(made.blocks) + len(plan.dropped), "dropped": [*plan.dropped]},
        "units": {
            one.units.fqn: {"kind": one.units.kind, "count": one.units.count, "kept": one.index.tolist()}
            for one in kept
        },
    }
