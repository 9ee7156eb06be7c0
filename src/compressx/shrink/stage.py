"""The stage that saves the smaller dense model that is left when units were pruned whole, and compares it."""

from __future__ import annotations

import copy
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressx.api.patterns import Structured
from compressx.api.pruner import Block
from compressx.masks.maskset import MaskSet
from compressx.models import shards
from compressx.models.access import Access, InMemory, block_file
from compressx.models.architecture import Architecture, architecture_of, count_parameters, text_config
from compressx.models.blockwise import capture, each_block, replay, run_around
from compressx.models.checkpoint import Checkpoint
from compressx.models.loading import load_model
from compressx.models.shards import OUTSIDE, save_model
from compressx.models.streaming import StreamedModel, open_streamed
from compressx.planning.plan import Plan
from compressx.runtime.errors import Mistakes, RecipeError, UnsupportedModelError
from compressx.runtime.files import BLOCKS, atomic_write, json_text
from compressx.shrink.cuts import RemainingUnits, Smaller, build_like, remaining_tensors, smaller
from compressx.stages.state import RunState, Stage

_TOKENS = 64
"""Tokens of each of two random sequences on which the models are compared."""

TOLERANCE = 1e-3
"""Of `largest_difference`. In float32 rounding gives about 1e-5, a unit in a wrong place about 1."""


class Shrink(Stage):
    """Write the smaller model, in place of one of the original size with zeros."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse `shrink` where no whole unit is removed, or where the config cannot describe the smaller model.

        Which are removed is not known yet: the first units stand for those that will be kept, and of blocks the first,
        and the last, for those that will be removed.
        """
        if plan is None or not state.recipe.shrink:
            return
        with mistakes.collected(), state.loaded.at("shrink"):
            wrong = ""
            if plan.depth is None and not any(isinstance(x.pattern, Structured) for x in plan.linears):
                wrong = (
                    "no rule drops anything whole, so no smaller dense model is left; give a rule pattern: neurons, "
                    "kv-groups, experts or blocks, or remove shrink"
                )
            elif state.recipe.own_widths:
                wrong = (
                    "a config of transformers has one width for all blocks, but allocation at "
                    f"{state.loaded.where('allocation')} gives each its own; drop shrink, and export a format with a "
                    "width for each block, or drop allocation, and give the rules their sparsity"
                )
            if wrong:
                raise RecipeError(wrong)
            kept = expected_units(plan)
            count, names = (plan.depth.pattern.dropped, plan.depth.blocks) if plan.depth else (0, ())
            for gone in dict.fromkeys((names[:count], names[len(names) - count :])):
                smaller(state.skeleton, kept, gone)

    def run(self, state: RunState) -> None:
        """Write `model/`, and what is kept of the original to `units.json`; the masks keep the original's shapes."""
        folder, access, plan = state.folder, state.access, state.plan
        if state.recipe.own_widths:
            tensors = remaining_tensors(access.model, remaining_units(plan, state.store.masks()))
            counts = count_parameters(access.model), count_parameters(access.model, tensors)
            state.results["allocation"] = replace(state.results["allocation"], parameters=counts)
        if not state.recipe.shrink or folder is None or state.checkpoint is None:
            return
        state.report_progress("save", 0, 1)
        shutil.rmtree(folder / "model", ignore_errors=True)  # left incomplete by an interrupted run
        with state.loaded.at("shrink"):
            kept = remaining_units(plan, state.store.masks())
            made = smaller(access.model, kept, plan.dropped)
            made.config.compressx = {
                **access.model.config.compressx,
                "shrunk": {name: [*numbers] for name, numbers in made.numbers.items()},
            }
            save_shrunk(access, made, state.tokenizer, folder / "model")
            place = state.checkpoint.at(folder / "model")
            saved, differs = _compare(access, made, place)
            left = {
                "blocks": {"count": len(made.blocks) + len(plan.dropped), "dropped": [*plan.dropped]},
                "units": {
                    x.units.fqn: {"kind": x.units.kind, "count": x.units.count, "kept": x.index.tolist()} for x in kept
                },
            }
            atomic_write(folder / "units.json", (json_text(left) + "\n").encode())
            state.results["shrink"] = {
                "parameters": [count_parameters(x.model) for x in (access, saved)],
                "config": {name: [*numbers] for name, numbers in made.numbers.items()},
                "difference": differs,
            }


def _sets(plan: Plan) -> list[Structured]:
    """Return the pattern of each set of units inside blocks that a plan prunes."""
    patterns = [x.pattern for x in plan.linears if isinstance(x.pattern, Structured) and x.pattern.unit != "blocks"]
    return [*{(p.unit, p.units.fqn): p for p in patterns}.values()]


def expected_units(plan: Plan) -> list[RemainingUnits]:
    """Return as many units as a plan keeps of each set, the first ones; none where an allocation is yet to choose."""
    some = plan.allocation is None
    return [
        RemainingUnits(p.units, torch.arange(p.units.count) < some * (p.units.count - p.dropped)) for p in _sets(plan)
    ]


def remaining_units(plan: Plan, masks: MaskSet) -> list[RemainingUnits]:
    """Return which units are kept, of each set of units that was pruned."""
    sets = [p.units for p in _sets(plan)]
    return [RemainingUnits(x, x.kept({name: masks[name].keep for name in x.owners})) for x in sets]


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
    differs = largest_difference(access, saved, made, tokens)
    if not differs <= TOLERANCE:
        shutil.rmtree(checkpoint.location)
        raise UnsupportedModelError(
            f"the smaller {type(access.model).__name__} does not compute what the pruned one does: on random tokens "
            f"some part differs by {differs:.2g} of its norm, expected at most {TOLERANCE:g}; leave out shrink, and "
            "please report this"
        )
    return saved, differs


def save_shrunk(access: Access, made: Smaller, tokenizer: Any | None, folder: Path) -> None:
    """Save the smaller model in transformers' format."""
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
                left = shards.checkpoint_tensors(
                    small, made.cuts.all(shards.own_tensors(access.model, access.blocks, fqn))
                )
                shards.write_tensors(block_file(Path(beside), fqn), left)
            parts.append(shards.of_file(block_file(Path(beside), fqn), fqn))
        with access.materialise(OUTSIDE):
            save_model(
                small, tokenizer, folder, made.cuts.all(shards.own_tensors(access.model, access.blocks, OUTSIDE))
            )
        shards.join(folder, parts)


@torch.no_grad()
def largest_difference(pruned: Access, smaller: Access, made: Smaller, tokens: Tensor) -> float:
    """Return how far two models are apart, each part of them computing on the same input.

    Whole models of 16 bits cannot be compared: products of fewer numbers are added up in another order, and the last
    bits of one block's output are magnified by the next ones. So each block is compared alone, in float32, or in
    float64 if that is what the model has.

    Returns:
        The largest of the differences of the embeddings, of what each block adds to the hidden states, and of the
        logits on tokens [batch, tokens]; each a norm, relative to that of the larger model.
    """
    both = (pruned, smaller)
    found = [architecture_of(access.model) for access in both]
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
