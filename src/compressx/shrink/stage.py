"""The stage that writes the smaller dense model that is left when units were pruned whole."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from compressx.api.patterns import Structured
from compressx.masks.maskset import MaskSet
from compressx.models.access import Access, InMemory
from compressx.models.architecture import text_config
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_model
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.planning.plan import Plan, PlannedDepth
from compressx.runtime.errors import Mistakes, RecipeError, UnsupportedModelError
from compressx.runtime.files import atomic_write
from compressx.shrink.cuts import Kept, Smaller, smaller
from compressx.shrink.saved import TOLERANCE, difference, save_shrunk
from compressx.stages.state import RunState, Stage

_TOKENS = 64
"""Tokens of each of two random sequences on which the models are compared."""


class Shrink(Stage):
    """Write the smaller model, in place of one of the original size with zeros."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse `shrink` where nothing goes whole, or where the config cannot describe the smaller model.

        Which go is not known yet: the first units stand for those that will stay, and of blocks the first, and the
        last, for those that will go.
        """
        if plan is None or not state.recipe.shrink:
            return
        patterns = {
            (x.pattern.unit, x.pattern.units.fqn): x.pattern for x in plan.linears if isinstance(x.pattern, Structured)
        }
        if not patterns and plan.depth is None:
            mistakes.add(RecipeError(
                f"{state.loaded.where('shrink')}: no rule drops anything whole, so no smaller dense model is left; "
                "give a rule pattern: neurons, kv-groups, experts or blocks, or remove shrink"
            ))  # fmt: skip
            return
        kept = [
            Kept(p.units, torch.arange(p.units.count) < p.units.count - p.dropped)
            for p in patterns.values()
            if p.unit != "blocks"
        ]
        with mistakes.collected(), state.loaded.at("shrink"):
            try:
                for gone in _gone(plan.depth):
                    smaller(state.skeleton, kept, gone)
            except UnsupportedModelError as error:
                others = _fitting_others(state.skeleton, patterns.values())
                raise UnsupportedModelError(f"{error}{others}") from error

    def run(self, state: RunState) -> None:
        """Write `model/`, and what stays of the original to `units.json`; the masks keep the original's shapes."""
        folder, access, plan = state.folder, state.access, state.plan
        if not state.recipe.shrink or folder is None or state.checkpoint is None:
            return
        state.report_progress("save", 0, 1)
        shutil.rmtree(folder / "model", ignore_errors=True)  # left incomplete by an interrupted run
        with state.loaded.at("shrink"):
            kept = kept_units(plan, state.store.masks())
            made = smaller(access.model, kept, plan.dropped)
            made.config.compressx = {
                **access.model.config.compressx,
                "shrunk": {name: [*numbers] for name, numbers in made.numbers.items()},
            }
            save_shrunk(access, made, state.tokenizer, folder / "model")
            place = replace(state.checkpoint.at(folder / "model"), gguf_file=None)
            saved, differs = _compare(access, made, place)
            atomic_write(folder / "units.json", (json.dumps(_units(kept, made, plan)) + "\n").encode())
            state.results["shrink"] = {
                "parameters": [_parameters(x.model) for x in (access, saved)],
                "config": {name: [*numbers] for name, numbers in made.numbers.items()},
                "difference": differs,
            }


def _gone(depth: PlannedDepth | None) -> tuple[tuple[str, ...], ...]:
    """Return which blocks to try as those that go."""
    if depth is None:
        return ((),)
    count = depth.pattern.dropped
    return depth.blocks[:count], depth.blocks[len(depth.blocks) - count :]


def _fitting_others(skeleton: Any, patterns: Iterable[Structured]) -> str:
    """Return how many heads could be left, if it is their number that the config refuses."""
    heads = [p for p in patterns if p.unit == "kv-groups"]
    asked = {(p.units.count, p.dropped) for p in heads}
    if len(asked) != 1:
        return ""
    ((count, dropped),) = asked
    able = []
    for left in range(1, count):
        with contextlib.suppress(UnsupportedModelError):
            smaller(skeleton, [Kept(p.units, torch.arange(count) < left) for p in heads])
            able.append(left)
    if not able or count - dropped in able:
        return ""
    return f"; sparsities of kv-groups that fit: {', '.join(f'{1 - n / count:.4g} ({n} left)' for n in able)}"


def kept_units(plan: Plan, masks: MaskSet) -> list[Kept]:
    """Return which units stay, of each set of units that was pruned."""
    patterns = [x.pattern for x in plan.linears if isinstance(x.pattern, Structured)]
    sets = {(p.unit, p.units.fqn): p.units for p in patterns}
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
    differs = difference(access, saved, made, tokens)
    if not differs <= TOLERANCE:
        shutil.rmtree(checkpoint.location)
        raise UnsupportedModelError(
            f"the smaller {type(access.model).__name__} does not compute what the pruned one does: on random tokens "
            f"some part differs by {differs:.2g} of its norm, expected at most {TOLERANCE:g}; leave out shrink, and "
            "please report this"
        )
    return saved, differs


def _units(kept: list[Kept], made: Smaller, plan: Plan) -> dict[str, Any]:
    """Return the content of `units.json`."""
    return {
        "blocks": {"count": len(made.blocks) + len(plan.dropped), "dropped": [*plan.dropped]},
        "units": {
            one.units.fqn: {"kind": one.units.kind, "count": one.units.count, "kept": one.index.tolist()}
            for one in kept
        },
    }
