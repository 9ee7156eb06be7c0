"""ALPS (arXiv 2406.07831): the support by ADMM with a rising penalty, the weights on it by conjugate gradients.

Selects and reconstructs: given a mask of another pruner it only solves for the survivors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from compressx import (
    Block,
    Hessian,
    Pattern,
    PruneResult,
    PrunerSpec,
    Statistic,
    UnsupportedModelError,
    hookimpl,
)
from compressx.numerics.admm import Problem, prune
from compressx.numerics.least_squares import Metric
from compressx.numerics.obs import NotPositiveDefiniteError, refused


class ALPSOptions(BaseModel):
    """Options of ALPS."""

    model_config = ConfigDict(extra="forbid")

    damping: float = Field(
        0.01,
        gt=0,
        description="added to the Hessian's diagonal, as a fraction of its mean; more trusts the calibration less",
    )


def metric_of(block: Block, name: str, hessian: Hessian, damping: float) -> Metric:
    """Damp and scale a linear's Hessian.

    Raises:
        UnsupportedModelError: an entry that is not finite.
    """
    with refused(name):
        return Metric.of(hessian.assembled().to(block.linears[name].weight.device), damping)


def results_of(problems: Mapping[str, Problem], **limits: Any) -> dict[str, PruneResult]:
    """Prune linears that compete for their zeros, or one.

    Args:
        problems: by name of the linear.
        limits: `penalty`, `steps` and `solver_steps` of `admm.prune`.

    Raises:
        UnsupportedModelError: a damped Hessian that is not positive definite.
    """
    try:
        solutions = prune(problems, **limits)
    except NotPositiveDefiniteError as error:
        raise UnsupportedModelError(str(error)) from error
    results = {}
    for name, solution in solutions.items():
        info = {
            "linear_error": solution.error,
            "steps": float(solution.steps),
            "solver_steps": float(solution.solver_steps),
            "solver_residual": solution.residual,
        }
        results[name] = PruneResult(solution.keep, solution.weight.to(problems[name].dense.dtype), info)
    return results


class ALPS:
    """Prunes each linear by ADMM and conjugate gradients."""

    def __init__(self, options: ALPSOptions) -> None:
        self.options = options

    def observe(self, block: Block, name: str) -> Hessian:
        """Ask for X^T X."""
        return Hessian(block.linears[name].in_features)

    def prepare(self, block: Block, name: str, hessian: Hessian) -> Metric:
        """Damp and scale the Hessian."""
        return metric_of(block, name, hessian, self.options.damping)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],  # noqa: ARG002
        prepared: Mapping[str, Metric],
    ) -> dict[str, PruneResult]:  # fmt: skip
        """Solve each linear."""
        results: dict[str, PruneResult] = {}
        for name, metric in prepared.items():
            results |= results_of({name: Problem(block.linears[name].weight, metric, patterns[name])})
        return results


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `alps`."""
    return [
        PrunerSpec(
            name="alps",
            summary="ADMM selection, conjugate gradient on the survivors (arXiv 2406.07831)",
            options=ALPSOptions,
            build=ALPS,
            separable=True,
            groups=("layer", "row"),
            reconstructs=True,
        )
    ]
