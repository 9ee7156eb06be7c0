"""SparseGPT (arXiv 2301.00774): second-order selection, the survivors updated to make up for what was dropped.

Selects and reconstructs: given a mask of another pruner it only updates the survivors.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from compressx import (
    Block,
    Hessian,
    Pattern,
    PruneResult,
    PrunerSpec,
    Statistic,
    hookimpl,
)
from compressx.numerics.obs import Factors, sweep


class SparseGPTOptions(BaseModel):
    """Options of SparseGPT."""

    model_config = ConfigDict(extra="forbid")

    damping: float = Field(
        0.01,
        gt=0,
        description="added to the Hessian's diagonal, as a fraction of its mean; more trusts the calibration less",
    )


class SparseGPT:
    """Prunes each linear by the Optimal Brain Surgeon column sweep."""

    def __init__(self, options: SparseGPTOptions) -> None:
        self.damping = options.damping

    def observe(self, block: Block, name: str) -> Hessian:
        """Ask for X^T X."""
        return Hessian(block.linears[name].in_features)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        """Sweep each linear; linears with the same input share one factorisation."""
        factors = Factors(self.damping)
        results = {}
        for name, pattern in patterns.items():
            hessian = stats[name]
            assert isinstance(hessian, Hessian)  # noqa: S101 - it is what observe asked for
            factor, damping = factors.of(name, hessian)
            dead = hessian.diagonal == 0
            weight = block.linears[name].weight
            keep, updated = sweep(weight, factor.to(weight.device), pattern, dead.to(weight.device))
            results[name] = PruneResult(keep, updated.to(weight.dtype), {"damping": damping})
        return results


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `sparsegpt`."""
    return [
        PrunerSpec(
            name="sparsegpt",
            summary="second-order selection with weight update (arXiv 2301.00774)",
            options=SparseGPTOptions,
            build=SparseGPT,
            separable=True,
            groups=("layer", "row"),
            reconstructs=True,
        )
    ]
