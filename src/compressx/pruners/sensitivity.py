"""Sensitivity-weighted pruning: the error of each output counts by how strongly the model's loss reacts to it.

The Fisher matrix of a linear's weight is taken for the product of a factor for outputs, of which the diagonal `b`
[out_features] is known, and the Hessian `H = sum_i x_i x_i^T`. All weights of a linear, and all linears of a block, are
on one scale then, so they can compete. Masks and weights are found by the solvers of ALPS (arXiv 2406.07831).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
    Windows,
    Work,
    hookimpl,
)
from compressx.numerics import work as numerics
from compressx.numerics.admm import Problem
from compressx.numerics.least_squares import Metric
from compressx.pruners.alps import metric, solved

_SOLVER_STEPS = 12
"""Of the conjugate gradient, the mean over linears; `benchmarks/estimate.py compare` prints those of a recipe."""


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
        return metric(block, name, hessian, self.options.damping)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],  # noqa: ARG002
        prepared: Mapping[str, Metric],
    ) -> dict[str, PruneResult]:  # fmt: skip
        """Solve the linears that compete side by side, and each other one by itself."""
        problems = {
            n: Problem(block.linears[n].weight, prepared[n], p, self._rows(block, n)) for n, p in patterns.items()
        }
        results: dict[str, PruneResult] = {}
        for names in _competing(patterns):
            of_group = {name: problems[name] for name in names}
            results |= solved(of_group, penalty=self.options.penalty, steps=self.options.steps)
        return results

    def _rows(self, block: Block, name: str) -> Tensor:
        """Return what the errors of outputs count, [out_features, 1]."""
        rows = block.sensitivities[name].to(block.linears[name].weight.device)
        # Between linears in full: what a norm follows may have any scale, and only so does it not matter.
        return (rows.mean().pow(1 - self.options.rows) * rows.pow(self.options.rows))[:, None]

    def work(self, block: Block, patterns: Mapping[str, Pattern], text: Windows) -> Work:  # noqa: ARG002 - the protocol
        """Count the solvers with the number of steps that they take as a rule."""
        count = partial(numerics.side_by_side, block, steps=self.options.steps, solver_steps=_SOLVER_STEPS)
        return sum((count({name: patterns[name] for name in names}) for names in _competing(patterns)), Work())

    def prepare_work(self, block: Block, name: str, text: Windows) -> Work:  # noqa: ARG002 - the protocol
        """Count the scaling of the Hessian."""
        n = block.linears[name].in_features
        return numerics.assembled(n) + numerics.metric(n)


def _competing(patterns: Mapping[str, Pattern]) -> list[list[str]]:
    """Part linears into those that compete for their zeros."""
    joint = [name for name, p in patterns.items() if isinstance(p, Unstructured) and p.group == "joint"]
    return [*([joint] if joint else []), *([name] for name in patterns if name not in joint)]


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
            reconstructs=True,
            selecting_options=("rows", "penalty", "steps"),
            reads_sensitivities=True,
            check=_check,
        )
    ]
