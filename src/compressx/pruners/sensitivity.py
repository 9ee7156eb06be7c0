"""Sensitivity-weighted pruning: the error of each output counts by how strongly the model's loss reacts to it.

The Fisher matrix of a linear's weight is taken for the product of a factor for outputs, of which the diagonal `b`
[out_features] is known, and the Hessian `H = sum_i x_i x_i^T`, so that dropping a weight costs about `W_rj^2 H_jj b_r`:
all weights of a linear, and all linears of a block, are on one scale then. Survivors are updated by the sweep of
SparseGPT (arXiv 2301.00774): row by row `b` is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
    Windows,
    Work,
    hookimpl,
    keep_masks,
)
from compressx.numerics import work as numerics
from compressx.numerics.obs import factored, sweep


class SensitivityOptions(BaseModel):
    """Options of sensitivity-weighted pruning."""

    model_config = ConfigDict(extra="forbid")

    rows: float = Field(
        0.5,
        ge=0,
        le=1,
        description="power of the outputs' sensitivities within a linear; 0: all count alike, 1: in full. Between "
        "linears they always count in full",
    )
    damping: float = Field(
        0.01,
        gt=0,
        description="added to the Hessian's diagonal, as a fraction of its mean; more trusts the calibration less",
    )


class SensitivityPruner:
    """Prunes each linear where the model's loss reacts least."""

    def __init__(self, options: SensitivityOptions) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> Hessian:
        """Ask for the Hessian."""
        return Hessian(block.linears[name].in_features)

    def prepare(self, block: Block, name: str, hessian: Hessian) -> tuple[Tensor, float]:  # noqa: ARG002 - the protocol
        """Factor the inverse of the Hessian."""
        return factored(name, hessian, self.options.damping)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],
        prepared: Mapping[str, tuple[Tensor, float]],
    ) -> dict[str, PruneResult]:  # fmt: skip
        """Choose masks by cost, then sweep."""
        hessians: dict[str, Hessian] = {}
        for name in patterns:
            hessian = stats[name]
            assert isinstance(hessian, Hessian)  # noqa: S101 - it is what observe asked for
            hessians[name] = hessian
        chosen = {n: p for n, p in patterns.items() if not isinstance(p, FixedMask)}
        keeps = {n: p.keep for n, p in patterns.items() if isinstance(p, FixedMask)}
        keeps |= keep_masks({n: self._costs(block, n, hessians[n]) for n in chosen}, chosen)
        results = {}
        for name, (factor, damping) in prepared.items():
            weight = block.linears[name].weight
            keep = keeps[name]
            _, updated = sweep(weight, factor.to(weight.device), _fixed(keep, patterns[name]))
            results[name] = PruneResult(keep, updated.to(weight.dtype), {"damping": damping})
        return results

    def _costs(self, block: Block, name: str, hessian: Hessian) -> Tensor:
        """Return what dropping each weight costs, [out_features, in_features]."""
        weight = block.linears[name].weight
        costs = weight.float().square() * hessian.diagonal.float().to(weight.device)
        rows = block.sensitivities[name].to(weight.device)
        # Between linears in full: what a norm follows may have any scale, and only so does it not matter.
        return costs * (rows.mean().pow(1 - self.options.rows) * rows.pow(self.options.rows))[:, None]

    def work(self, block: Block, patterns: Mapping[str, Pattern], text: Windows) -> Work:  # noqa: ARG002 - the protocol
        """Count scores, their selection, and sweeps with fixed masks."""
        chosen = numerics.of_scores(block, patterns, passes=7)
        return chosen + numerics.of_each(block, patterns, partial(numerics.sweep, chosen=True), updated=True)

    def prepare_work(self, block: Block, name: str, text: Windows) -> Work:  # noqa: ARG002 - the protocol
        """Count the factor of the inverse Hessian."""
        n = block.linears[name].in_features
        return numerics.assembled(n) + numerics.inverse_cholesky(n)


def _check(block: Block, patterns: Mapping[str, Pattern], _options: object) -> None:
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
            summary="errors weighted by how the model's loss reacts to them, with weight update",
            options=SensitivityOptions,
            build=SensitivityPruner,
            separable=True,
            groups=("layer", "row", "joint"),
            reconstructs=True,
            selecting_options=("rows",),
            reads_sensitivities=True,
            check=_check,
        )
    ]
