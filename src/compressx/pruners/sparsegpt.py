"""SparseGPT (arXiv 2301.00774): second-order selection, the survivors updated to make up for what was dropped.

Selects and reconstructs: given a mask of another pruner it only updates the survivors.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from compressx import (
    Block,
    Hessian,
    Pattern,
    PruneResult,
    PrunerSpec,
    Statistic,
    hookimpl,
)
from compressx.numerics.obs import factored, sweep


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

    def prepare(self, block: Block, name: str, hessian: Hessian) -> tuple[Tensor, float]:  # noqa: ARG002 - the protocol
        """Factor the inverse of the Hessian."""
        return factored(name, hessian, self.damping)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],
        prepared: Mapping[str, tuple[Tensor, float]],
    ) -> dict[str, PruneResult]:  # fmt: skip
        """Sweep each linear."""
        results = {}
        for name, (factor, damping) in prepared.items():
            hessian = stats[name]
            assert isinstance(hessian, Hessian)  # noqa: S101 - it is what observe asked for
            dead = hessian.diagonal == 0
            weight = block.linears[name].weight
            keep, updated = sweep(weight, factor.to(weight.device), patterns[name], dead.to(weight.device))
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
