"""Sensitivity-weighted pruning: the error of each output counts by how strongly the model's loss reacts to it.

The Fisher matrix of a linear's weight is taken for the product of a factor for outputs, of which the diagonal `b`
[out_features] is known, and the Hessian `H = sum_i x_i x_i^T`. All weights of a linear, and all linears of a block, are
on one scale then, so they can compete. Masks and weights are found by the solvers of ALPS (arXiv 2406.07831).
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
    Unstructured,
    UnsupportedModelError,
    competing,
    hookimpl,
)
from compressx.numerics.admm import Problem
from compressx.numerics.least_squares import Metric
from compressx.pruners.alps import metric_of, results_of


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
    penalty: float = Field(
        0.3,
        gt=0,
        description="ADMM's first penalty on leaving the budget, against a Hessian of unit diagonal; lower needs more "
        "steps for somewhat better masks",
    )
    steps: int = Field(
        12, ge=0, description="of ADMM at most; it stops when the mask settles. 0: drop what is cheapest to drop alone"
    )


class SensitivityPruner:
    """Prunes each linear where the model's loss reacts least."""

    def __init__(self, options: SensitivityOptions) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> Hessian:
        """Ask for the Hessian."""
        return Hessian(block.linears[name].in_features)

    def prepare(self, block: Block, name: str, hessian: Hessian) -> Metric:
        """Damp and scale the Hessian."""
        return metric_of(block, name, hessian, self.options.damping)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],  # noqa: ARG002
        prepared: Mapping[str, Metric],
    ) -> dict[str, PruneResult]:  # fmt: skip
        """Solve the linears that compete side by side, and each other one by itself."""
        joint = competing(patterns)
        together: dict[str, Problem] = {}
        results: dict[str, PruneResult] = {}
        limits = self.options.model_dump(include={"penalty", "steps"})
        for name, metric in prepared.items():
            pattern = patterns[name]
            # Where weights compete within one output, it does not matter how much that counts.
            several = isinstance(pattern, Unstructured) and pattern.group != "row"
            rows = self._rows(block, name) if several else None
            problem = Problem(block.linears[name].weight, metric, pattern, rows)
            if name in joint:
                together[name] = problem
            else:
                results |= results_of({name: problem}, **limits)
        if together:
            results |= results_of(together, **limits)
        return results

    def _rows(self, block: Block, name: str) -> Tensor:
        """Return what the errors of outputs count, [out_features, 1]."""
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
    return [
        PrunerSpec(
            name="sensitivity",
            summary="errors weighted by how the model's loss reacts to them, masks and weights by ALPS's solvers",
            options=SensitivityOptions,
            build=SensitivityPruner,
            separable=True,
            groups=("layer", "row", "joint"),
            reads_sensitivities=True,
            check=_check,
        )
    ]
