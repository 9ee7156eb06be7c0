"""The smaller model of a finished run: built, compared with the pruned one, and written in its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from compressx.api.patterns import Structured
from compressx.masks.maskset import MaskSet
from compressx.models.architecture import text_config
from compressx.models.export import save_model
from compressx.models.shrink import Kept, difference, shrunk, smaller, tolerance
from compressx.planning.plan import Plan
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.files import atomic_write

_TOKENS = 64
"""Tokens of each of two random sequences on which the models are compared."""


def kept_units(plan: Plan, masks: MaskSet) -> list[Kept]:
    """Return which units stay, of each set of units that was pruned."""
    sets = {id(x.pattern.units): x.pattern.units for x in plan.linears if isinstance(x.pattern, Structured)}
    return [
        Kept(units, units.kept({name: masks[name].keep for name in units.owners}))
        for units in sets.values()
        if units.kind != "blocks"
    ]


def save_smaller(model: Any, tokenizer: Any, plan: Plan, masks: MaskSet, folder: Path) -> Mapping[str, Any]:
    """Write the smaller model to `folder/model`, and what stays of the original one to `folder/units.json`.

    Args:
        model: the pruned model, of the original size.
        tokenizer: its tokenizer.
        plan: what was done.
        masks: in the shapes of the original model.
        folder: the run's output folder.

    Returns:
        See `RunReport.shrink`.

    Raises:
        UnsupportedModelError: the smaller model computes something else; nothing is written then.
    """
    kept = kept_units(plan, masks)
    made = smaller(model, kept, plan.dropped)
    small = shrunk(model, made)
    config = text_config(model)
    length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    apart, most = difference(model, small, tokens), tolerance(model.dtype)
    if not apart <= most:
        raise UnsupportedModelError(
            f"the smaller {type(model).__name__} does not compute what the pruned one does: on random tokens its "
            f"logits differ by {apart:.2g} of their norm, expected at most {most:.2g}; leave out shrink, and please "
            "report this"
        )
    record = {
        "blocks": {"count": len(made.blocks) + len(plan.dropped), "dropped": [*plan.dropped]},
        "units": {
            one.units.fqn: {
                "kind": one.units.kind,
                "count": one.units.count,
                "kept": one.keep.nonzero().flatten().tolist(),
            }
            for one in kept
        },
    }
    atomic_write(folder / "units.json", (json.dumps(record) + "\n").encode())
    save_model(small, tokenizer, folder / "model")
    return {
        "parameters": [sum(p.numel() for p in x.parameters()) for x in (model, small)],
        "config": {name: [*numbers] for name, numbers in made.numbers.items()},
        "difference": apart,
    }
