"""Sensitivity-weighted pruning: the error of each output counts by how strongly the model's loss reacts to it.

The Fisher matrix of a linear's weight is taken for the product of a factor for outputs, of which the diagonal `b`
[out_features] is known, and the Hessian `H = sum_i x_i x_i^T`. All weights of a linear, and all linears of a block, are
on one scale then, so they can compete. Masks and weights are found by the solvers of ALPS (arXiv 2406.07831).
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field
from torch import Tensor

from compressx import Block, Pattern, PrunerSpec, Unstructured, UnsupportedModelError, hookimpl
from compressx.pruners.alps import ALPS
from compressx.pruners.hessian import HessianOptions


class SensitivityOptions(HessianOptions):
    """Options of sensitivity-weighted pruning."""

    rows: float = Field(
        0.5,
        ge=0,
        le=1,
        description="power of the outputs' sensitivities within a linear; 0: all count alike, 1: in full. Between "
        "linears they always count in full",
    )
    penalty: float = Field(
        0.3,
        gt=0,
        description="ADMM's first penalty on leaving the budget, against a Hessian of unit diagonal; lower needs more "
        "steps for somewhat better masks",
    )
    steps: int = Field(
        12, ge=0, description="of ADMM at most; it stops when the mask settles. 0: drop what is cheapest to drop alone"
    )


class SensitivityPruner(ALPS[SensitivityOptions]):
    """Prunes each linear where the model's loss reacts least."""

    def rows(self, block: Block, name: str, pattern: Pattern) -> Tensor | None:
        """Return what the errors of outputs count, [out_features, 1]."""
        if not isinstance(pattern, Unstructured) or pattern.group == "row":
            return None  # where weights compete within one output, it does not matter how much that counts
        rows = block.sensitivities[name].to(block.linears[name].weight.device)
        # Between linears in full: what a norm follows may have any scale, and only so does it not matter.
        return (rows.mean().pow(1 - self.options.rows) * rows.pow(self.options.rows))[:, None]


def _check(block: Block, patterns: Mapping[str, Pattern], _options: object) -> None:
    if not block.fqn:
        raise UnsupportedModelError(
            f"{next(iter(patterns))} lies outside the decoder blocks, and sensitivities are gathered inside them; "
            "prune it with another pruner, such as sparsegpt"
        )


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `sensitivity`."""
    summary = "errors weighted by how the model's loss reacts to them, masks and weights by ALPS's solvers"
    return [
        PrunerSpec("sensitivity", summary, SensitivityOptions, SensitivityPruner, ("layer", "row", "joint"),
                   separable=True, reads_sensitivities=True, check=_check)
    ]  # fmt: skip
