"""Pruning what fine-tuning changed: the base model that `base` names, and what becomes of weights outside the linears.

With W = W_0 + tau, a pruner of single linears prunes tau as it would prune W, because the error of an output,
||X (tau~ - tau)^T||, is the same. What it drops is the base's weight W_0, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from compressx.api.patterns import Structured
from compressx.models.access import weights_fingerprint
from compressx.models.architecture import architecture_of, find_blocks
from compressx.models.checkpoint import Checkpoint, find_checkpoint, local_folder
from compressx.models.export import refuse_overwriting
from compressx.models.loading import dtype_of, load_skeleton
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import open_base
from compressx.planning.plan import Plan
from compressx.report.section import Section
from compressx.runtime.errors import ArtifactError, Mistakes, RecipeError, UnsupportedModelError, did_you_mean
from compressx.stages.state import RunState, Stage


class OpenBase(Stage):
    """Open the base, and check that the model can be a fine-tune of it."""

    everywhere = True

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse a base that is no base of the model, and rules that do not prune single linears."""
        recipe, loaded = state.recipe, state.loaded
        if recipe.base is None:
            return
        with mistakes.collected(), loaded.at("base"):
            if state.checkpoint is not None:  # a model in memory has no output
                refuse_overwriting(recipe.output, "base", recipe.base.path)
            checkpoint = find_checkpoint(recipe.base)
            if state.skeleton is not None:
                _check_base(state, checkpoint)
        for x in {linear.rule: linear for linear in (plan.linears if plan else ())}.values():
            unit = x.pattern.unit if isinstance(x.pattern, Structured) else ""
            if unit != "blocks" and (unit or not x.rule.separable):
                what = f"pattern: {unit} takes units out" if unit else "it reads whole weights of a block"
                mistakes.add(RecipeError(
                    f"{loaded.where('prune', x.rule.index, 'pruner')}: {x.rule.label} prunes no difference from base "
                    f"at {loaded.where('base')}: {what}; take a pruner of single linears, such as sparsegpt, or "
                    "pattern: blocks, or remove base"
                ))  # fmt: skip
        for i, glob in enumerate(recipe.base_keeps or ()):
            with mistakes.collected(), loaded.at("base_keeps", i):
                if state.skeleton is not None and plan is not None:
                    _kept(state.skeleton, plan, glob)

    def run(self, state: RunState) -> None:
        """Open it."""
        if state.recipe.base is not None:
            with state.loaded.at("base"):
                state.base = open_base(state.recipe.base, state.device)


class TakeFromBase(Stage):
    """Give the model those weights of the base that `base_keeps` names."""

    everywhere = True

    def run(self, state: RunState) -> None:
        """Copy them, and refuse a base that has the model's own weights."""
        if state.base is None:
            return
        with state.loaded.at("base"):
            own = state.inputs.get("model") or weights_fingerprint(state.access)
            if own == (state.inputs.get("base") or weights_fingerprint(state.base)):
                raise ArtifactError("it has the model's own weights, so that there is no difference to prune")
        source, model = state.recipe.base, state.access.model
        state.results["base"] = str(source and (source.id or source.path or source.package))
        left = {name for glob in state.recipe.base_keeps or () for name in _kept(model, state.plan, glob)}
        for fqn in (OUTSIDE, *find_blocks(model)) if left else ():
            with state.base.materialise(fqn):
                for name, x in state.base.model.state_dict().items():
                    if name in left and not x.is_meta:
                        model.get_parameter(name).data.copy_(x)

    def sections(self, report: Any) -> Iterator[Section]:
        """Say the same in the report."""
        yield from (Section(note=line) for line in self.sentences(report))

    def sentences(self, report: Any) -> Iterator[str]:
        """Say from what the difference was pruned."""
        if report.base:
            yield f"What was pruned is the difference from `{report.base}`: dropped weights are those of that model."


def inputs_of(state: RunState) -> dict[str, Any]:
    """Return what decides the pruned blocks beside the inputs of every run."""
    base = None if state.base is None else weights_fingerprint(state.base)
    return {"base": base, "base_keeps": state.recipe.base_keeps}


def in_config(state: RunState) -> dict[str, str]:
    """Return what the pruned model's config says of the base, if there is one."""
    return {} if state.base is None else {"base": state.results["base"]}


def weights_folder(state: RunState) -> Path | None:
    """Return the folder with the base's safetensors, for exporters; None without a base, or of a GGUF file."""
    base = None if state.recipe.base is None else find_checkpoint(state.recipe.base)
    return None if base is None or base.file is not None else local_folder(base)


def _check_base(state: RunState, checkpoint: Checkpoint) -> None:
    """Refuse a base of another architecture, dtype or vocabulary, or the model itself."""
    where, base = checkpoint.location, load_skeleton(checkpoint)
    if state.checkpoint is not None and checkpoint == replace(state.checkpoint, dtype=checkpoint.dtype):
        raise ArtifactError(f"{where} is the model itself; name the model that it was fine-tuned from")
    ours, theirs = (
        {"it": type(x).__name__, **{n: str([*p.shape]) for n, p in x.named_parameters()}, "its dtype": str(dtype)}
        for x, dtype in ((state.skeleton, state.dtype), (base, dtype_of(checkpoint, base.config)))
    )
    if odd := next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None):
        raise UnsupportedModelError(
            f"{where}: {odd} is {theirs.get(odd, 'not there')}, and {ours.get(odd, 'not there')} in the model; name "
            "the model that it was fine-tuned from, of the same vocabulary, and load both in one dtype"
        )


def _kept(model: torch.nn.Module, plan: Plan, glob: str) -> list[str]:
    """Return the names of the parameters, none of them pruned, that a glob of `base_keeps` names."""
    pruned = {f"{x.name}.weight" for x in plan.linears}
    every = [name for name, _ in model.named_parameters()]
    names = [name for name in every if fnmatchcase(name, glob)]
    experts = {n for n, x in architecture_of(model).linears.items() if x.expert is not None}
    taken = [name for name in names if name in pruned or any(n.startswith(f"{name}.") for n in experts)]
    if taken or not names:
        raise RecipeError(
            f"{taken[0]} is pruned by a rule; name embeddings, norms or biases, such as '*norm*'"
            if taken
            else f"no parameter is called {glob!r}; {did_you_mean(glob, every)}"
        )
    return names
