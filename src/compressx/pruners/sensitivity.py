"""Sensitivity-weighted pruning: the error of each token and output counts by how strongly a loss reacts to it.

The Fisher matrix of a linear's weight is taken for the product of a factor for outputs, `b` [out_features], and a
token-weighted Hessian, `H = sum_i a_i x_i x_i^T`, so that dropping a weight costs about `W_rj^2 H_jj b_r`: all weights
of a linear, and all linears of a block, are on one scale then. Survivors are updated by the sweep of SparseGPT
(arXiv 2301.00774) with that Hessian: row by row `b` is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import (
    Block,
    FixedMask,
    Hessian,
    Pattern,
    PruneResult,
    PrunerSpec,
    Statistic,
    UnsupportedModelError,
    hookimpl,
    keep_masks,
)
from compressx.numerics.obs import Factors, sweep


class SensitivityOptions(BaseModel):
    """Options of sensitivity-weighted pruning."""

    model_config = ConfigDict(extra="forbid")

    loss: Literal["model", "block"] = Field(
        "model",
        description="what reacts: the model's likelihood, by one backward pass before anything is pruned, or each "
        "block's output, by one backward pass through the block",
    )
    rows: float = Field(
        0.5,
        ge=0,
        le=1,
        description="power of the outputs' sensitivities within a linear; 0: all count alike, 1: in full. Between "
        "linears they always count in full",
    )
    tokens: float = Field(
        0.0, ge=0, le=1, description="power of the tokens' sensitivities; 0: all tokens count alike, 1: in full"
    )
    damping: float = Field(
        0.01,
        gt=0,
        description="added to the Hessian's diagonal, as a fraction of its mean; more trusts the calibration less",
    )


@dataclass
class WeightedHessian(Hessian):
    """sum_i a_i x_i x_i^T over all calibration tokens.

    Attributes:
        weights: a_i, [batch, tokens] for each batch in the order of the updates.
    """

    weights: tuple[Tensor, ...] = field(default=(), repr=False, compare=False)
    owner: str = ""  # statistics of different linears are weighted differently and are not shared
    _batch: int = field(default=0, init=False, compare=False)

    def update(self, x: Tensor) -> None:
        """Add a batch [batch, tokens, in_features] or [batch * tokens, in_features].

        Raises:
            UnsupportedModelError: a batch that is not the one that the weights are for.
        """
        weights = self.weights[self._batch] if self._batch < len(self.weights) else None
        self._batch += 1
        if weights is None or weights.numel() != x.shape[:-1].numel():
            given = None if weights is None else tuple(weights.shape)
            raise UnsupportedModelError(
                f"{self.owner}: its inputs come as {tuple(x.shape[:-1])} tokens where the sensitivities have {given}; "
                "set the pruner's option tokens: 0"
            )
        weights = weights.to(x.device).reshape(*x.shape[:-1], 1)  # OPT's MLP is handed tokens without their batch
        super().update(x.float() * weights.sqrt())  # which float16 may not hold


class SensitivityPruner:
    """Prunes each linear where its loss reacts least."""

    def __init__(self, options: SensitivityOptions) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> Hessian:
        """Ask for the Hessian, its tokens weighted when that is wanted and they have weights."""
        in_features = block.linears[name].in_features
        its = block.sensitivities.get(self.options.loss, {}).get(name)
        if its is None or not its.tokens or self.options.tokens == 0:
            return Hessian(in_features)
        mean = its.rows.mean()  # that of all processes' tokens, where `tokens` are this one's
        weights = tuple((t / mean).pow(self.options.tokens) if mean > 0 else torch.ones_like(t) for t in its.tokens)
        return WeightedHessian(in_features, weights=weights, owner=name)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        """Choose masks by cost, then sweep; linears with the same statistic share one factorisation."""
        hessians: dict[str, Hessian] = {}
        for name in patterns:
            hessian = stats[name]
            assert isinstance(hessian, Hessian)  # noqa: S101 - it is what observe asked for
            hessians[name] = hessian
        chosen = {n: p for n, p in patterns.items() if not isinstance(p, FixedMask)}
        keeps = {n: p.keep for n, p in patterns.items() if isinstance(p, FixedMask)}
        keeps |= keep_masks({n: self._costs(block, n, hessians[n]) for n in chosen}, chosen)
        factors = Factors(self.options.damping)
        results = {}
        order = [id(hessian) for hessian in hessians.values()]
        for name in sorted(hessians, key=lambda n: order.index(id(hessians[n]))):  # those that share in turn
            factor, damping = factors.of(name, hessians[name])
            weight = block.linears[name].weight
            keep = keeps[name]
            _, updated = sweep(weight, factor.to(weight.device), _fixed(keep, patterns[name]))
            results[name] = PruneResult(keep, updated.to(weight.dtype), {"damping": damping})
        return results

    def _costs(self, block: Block, name: str, hessian: Hessian) -> Tensor:
        """Return what dropping each weight costs, [out_features, in_features]."""
        weight = block.linears[name].weight
        costs = weight.float().square() * hessian.diagonal.float().to(weight.device)
        rows = block.sensitivities[self.options.loss][name].rows.to(weight.device)
        # Between linears in full: what a norm follows may have any scale, and only so does it not matter.
        return costs * (rows.mean().pow(1 - self.options.rows) * rows.pow(self.options.rows))[:, None]


def _check(block: Block, patterns: Mapping[str, Pattern]) -> None:
    if not block.fqn:
        raise UnsupportedModelError(
            f"{next(iter(patterns))} lies outside the decoder blocks, and sensitivities are gathered inside them; "
            "prune it with another pruner, such as sparsegpt"
        )


def _fixed(keep: Tensor, pattern: Pattern) -> FixedMask:
    return pattern if isinstance(pattern, FixedMask) else FixedMask(keep, pattern)


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `sensitivity`."""
    return [
        PrunerSpec(
            name="sensitivity",
            summary="errors weighted by how a loss reacts to them, with weight update",
            options=SensitivityOptions,
            build=SensitivityPruner,
            separable=True,
            groups=("layer", "row", "joint"),
            reconstructs=True,
            selecting_options=("rows",),
            sensitivity=lambda options: options.loss,
            reads_tokens=lambda options: options.tokens > 0,
            check=_check,
        )
    ]
