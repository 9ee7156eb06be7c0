"""ALPS (arXiv 2406.07831): the support by ADMM with a rising penalty, the weights on it by conjugate gradients.

Selects and reconstructs: given a mask of another pruner it only solves for the kept weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from compressx import Block, Hessian, Pattern, PruneResult, PrunerSpec, Statistic, competing, hookimpl
from compressx.numerics import admm
from compressx.numerics.least_squares import Metric
from compressx.numerics.obs import refused
from compressx.pruners.hessian import HessianOptions, HessianPruner, Options


class ALPS(HessianPruner[Options]):
    """Prunes linears by ADMM and conjugate gradients, each by itself or those that compete side by side."""

    def prepare(self, block: Block, name: str, hessian: Hessian) -> Metric:
        with refused(name):
            return Metric.of(hessian.assembled().to(block.linears[name].weight.device), self.options.damping)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic],  # noqa: ARG002
        prepared: Mapping[str, Metric],
    ) -> dict[str, PruneResult]:  # fmt: skip
        joint = competing(patterns)
        together: dict[str, admm.Problem] = {}
        results: dict[str, PruneResult] = {}
        for name, metric in prepared.items():
            pattern = patterns[name]
            problem = admm.Problem(block.linears[name].weight, metric, pattern, self.rows(block, name, pattern))
            if name in joint:
                together[name] = problem
            else:
                results |= self._solved({name: problem})
        return results | (self._solved(together) if together else {})

    def rows(self, _block: Block, _name: str, _pattern: Pattern) -> Tensor | None:
        """Return what the errors of a linear's outputs count, [out_features, 1]; None for all alike."""
        return None

    def _solved(self, problems: Mapping[str, admm.Problem]) -> dict[str, PruneResult]:
        results = {}
        limits = self.options.model_dump(include={"penalty", "steps"})  # which not all pruners of this kind have
        for name, solution in admm.prune(problems, **limits).items():
            info = {
                "linear_error": solution.error,
                "steps": float(solution.steps),
                "solver_steps": float(solution.solver_steps),
                "solver_residual": solution.residual,
            }
            results[name] = PruneResult(solution.keep, solution.weight.to(problems[name].dense.dtype), info)
        return results


@hookimpl
def compressx_pruners() -> list[PrunerSpec]:
    """Offer `alps`."""
    summary = "ADMM selection, conjugate gradient on the kept weights (arXiv 2406.07831)"
    return [PrunerSpec("alps", summary, HessianOptions, ALPS, ("layer", "row"), reconstructs=True, separable=True)]
