"""The `attnprune` pruner: adapts a block to the solvers, and holds no mathematics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import (
    Block,
    CalibrationError,
    Linear,
    Pattern,
    PruneResult,
    PrunerSpec,
    SequenceSample,
    Statistic,
    hookimpl,
    keep_masks,
)
from compressx.obs import NotPositiveDefiniteError
from compressx_attnprune import layer, solver
from compressx_attnprune.geometry import Attention
from compressx_attnprune.solver import Pair


class AttnPruneOptions(BaseModel):
    """Options of attention pruning."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["gauss-newton", "mask"] = Field(
        "gauss-newton",
        description="gauss-newton: second-order scores on the attention matrix, survivors updated; mask: relaxed masks "
        "learnt by gradient descent as published (arXiv 2410.11261), survivors untouched",
    )
    sequences: int = Field(
        64,
        ge=1,
        description="calibration sequences that are used, the first so many; each is kept whole in memory",
    )
    damping: float = Field(
        0.01,
        gt=0,
        description="gauss-newton: added to each head's Hessian diagonal, as a fraction of its mean",
    )
    regularization: float | None = Field(
        None,
        ge=0,
        description="mask: lambda, the pull of all mask entries towards zero against the attention error; when absent "
        "0.1 * sparsity / (1 - sparsity), since higher sparsity wants more (our default, not a published one)",
    )
    steps: int = Field(60, ge=1, description="mask: gradient steps, each on eight sequences")
    learning_rate: float = Field(0.05, gt=0, le=1, description="mask: largest step of a mask entry, about")


class AttnPrune:
    """Prunes the query and key projection of a block together, for its attention matrix."""

    def __init__(self, options: AttnPruneOptions) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> SequenceSample:
        """Ask for whole input sequences; query and key have the same input, so the host keeps one sample."""
        return SequenceSample(block.linears[name].in_features, self.options.sequences)

    @torch.no_grad()
    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        """Choose both masks, and in gauss-newton mode the survivors' new values.

        `info` holds the relative attention error ||P~ - P||_F^2 / ||P||_F^2 on the calibration sequences (the ratio of
        the squared norms) as `attention_error`, and what it was before the update as `attention_error_mask_only`.
        """
        layer.check(block, patterns)
        pair = layer.find_projections(block)
        x = _shared_input(pair, stats)
        attention = layer.describe(block)
        layer.verify(block, attention, x)
        weights = (pair[0].weight.float(), pair[1].weight.float())
        ordered = {linear.name: patterns[linear.name] for linear in pair}
        decide = self._learn if self.options.mode == "mask" else self._solve
        keeps, new, info = decide(attention, x, weights, ordered)
        return {
            linear.name: PruneResult(keep, None if new is None else new[i], info)
            for i, (linear, keep) in enumerate(zip(pair, keeps, strict=True))
        }

    def _solve(
        self, attention: Attention, x: Tensor, weights: Pair, patterns: Mapping[str, Pattern]
    ) -> tuple[Pair, Pair | None, dict[str, float]]:
        sensitivities = solver.sensitivities(attention, x, weights)
        scored = zip(patterns, sensitivities, weights, strict=True)
        masks = keep_masks({name: solver.scores(s, x, w) for name, s, w in scored}, patterns)
        query, key = masks.values()
        if query.all() and key.all():
            return (query, key), None, {"attention_error": 0.0, "attention_error_mask_only": 0.0}
        updated: list[Tensor] = []
        dampings: list[float] = []
        for (name, pattern), sensitivity, weight in zip(patterns.items(), sensitivities, weights, strict=True):
            try:
                new, damping = solver.update(sensitivity, x, weight, masks[name], pattern, damping=self.options.damping)
            except NotPositiveDefiniteError as error:
                raise CalibrationError(f"{name}: {error}") from error
            updated.append(new)
            dampings.append(damping)
        masked = (weights[0] * query, weights[1] * key)
        info = {
            "attention_error": solver.relative_error(attention, x, weights, (updated[0], updated[1])),
            "attention_error_mask_only": solver.relative_error(attention, x, weights, masked),
            "damping": max(dampings),
        }
        return (query, key), (updated[0], updated[1]), info

    def _learn(
        self, attention: Attention, x: Tensor, weights: Pair, patterns: Mapping[str, Pattern]
    ) -> tuple[Pair, Pair | None, dict[str, float]]:
        sparsity = next(iter(patterns.values())).sparsity
        if sparsity == 0.0:
            query, key = (torch.ones_like(w, dtype=torch.bool) for w in weights)
            return (query, key), None, {"attention_error": 0.0}
        options = self.options
        regularization = options.regularization
        if regularization is None:
            regularization = solver.default_regularization(sparsity)
        relaxed = solver.learn_masks(
            attention,
            x,
            weights,
            regularization=regularization,
            steps=options.steps,
            learning_rate=options.learning_rate,
        )
        query, key = keep_masks(dict(zip(patterns, solver.ranked(relaxed, x, weights), strict=True)), patterns).values()
        error = solver.relative_error(attention, x, weights, (weights[0] * query, weights[1] * key))
        return (query, key), None, {"attention_error": error, "regularization": regularization}


def _shared_input(pair: tuple[Linear, Linear], stats: Mapping[str, Statistic]) -> Tensor:
    """Return the input sequences [sequences, tokens, in_features] of both projections, which must be the same."""
    samples: list[SequenceSample] = []
    for linear in pair:
        sample = stats.get(linear.name)
        if not isinstance(sample, SequenceSample) or not sample.batches:
            raise CalibrationError(
                f"{linear.name}: attnprune needs calibration sequences and got "
                f"{'none' if sample is None else f'an empty {type(sample).__name__}'}; add calibration to the recipe"
            )
        samples.append(sample)
    x = samples[0].sequences
    if samples[0] is not samples[1] and not torch.equal(x, other := samples[1].sequences):
        raise CalibrationError(
            f"{pair[0].name} and {pair[1].name} were handed different inputs, {tuple(x.shape)} and "
            f"{tuple(other.shape)}, and attention pruning needs queries and keys of the same sequences"
        )
    return x


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `attnprune`."""
    return [
        PrunerSpec(
            name="attnprune",
            summary="query and key pruned together for their attention matrix (after arXiv 2410.11261)",
            options=AttnPruneOptions,
            build=AttnPrune,
            groups=("joint", "layer", "row"),
            check=layer.check,
        )
    ]
