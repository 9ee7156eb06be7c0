"""SparseGPT (arXiv 2301.00774): second-order selection, the kept weights updated to make up for what was dropped.

Selects and reconstructs: given a mask of another pruner it only updates the kept weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from compressx import Block, Hessian, Pattern, PruneResult, PrunerSpec, Statistic, hookimpl
from compressx.numerics.obs import inverse_cholesky, refused, sweep
from compressx.pruners.hessian import HessianOptions, HessianPruner


class SparseGPT(HessianPruner[HessianOptions]):
    """Prunes each linear by the Optimal Brain Surgeon column sweep."""

    def prepare(self, block: Block, name: str, hessian: Hessian) -> tuple[Tensor, float]:  # noqa: ARG002 - the protocol
        with refused(name):
            return inverse_cholesky(hessian.assembled, self.options.damping)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],
        prepared: Mapping[str, tuple[Tensor, float]],
    ) -> dict[str, PruneResult]:  # fmt: skip
        results = {}
        for name, (factor, damping) in prepared.items():
            dead = cast("Hessian", stats[name]).diagonal == 0
            weight = block.linears[name].weight
            keep, updated = sweep(weight, factor.to(weight.device), patterns[name], dead.to(weight.device))
            results[name] = PruneResult(keep, updated.to(weight.dtype), {"damping": damping})
        return results


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `sparsegpt`."""
    summary = "second-order selection with weight update (arXiv 2301.00774)"
    return [
        PrunerSpec("sparsegpt", summary, HessianOptions, SparseGPT, ("layer", "row"), reconstructs=True, separable=True)
    ]
