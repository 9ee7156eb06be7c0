"""Pruning under a Kronecker-factored metric: which weights to keep, and what they become.

Minimises `sum_h tr(R_h (W_h - V_h) H_h (W_h - V_h)^T)` over weights W that a pattern allows, V being the dense ones, R
and H the row and input factors of `Curvature`. SparseGPT and ALPS solve this for R = I and one H; here rows and heads
have their own. Both solvers are matrix products over all heads at once. Weights are [heads, head_dim, in_features],
and the sides (query and key) are solved together, because one budget may run over both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compressx_attnprune.curvature import Curvature

Choose = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""From scores of each side, of the weights' shapes, to masks (True = keep) that meet the budget exactly."""

PENALTIES = (0.02, 1.5)
"""First and last penalty of `select`, in units of the normalised metric's diagonal. Ours, not published."""

RELAXATION = 1.6
"""Over-relaxation of `select`: each dense point is taken so far beyond the last sparse one, which does the work of
twice the iterations (Boyd et al. 2011, Distributed Optimization via ADMM, section 3.4.3: 1.5 to 1.8)."""


@dataclass(frozen=True, eq=False)
class _Side:
    """One side in the variables in which the metric has a unit diagonal, with its eigendecomposition.

    Attributes:
        scale: what a weight is multiplied with to get there.
        dense: the scaled dense weights.
        rows: eigenvectors of the normalised row factor, [heads, head_dim, head_dim].
        inputs: eigenvectors of the normalised input factor.
        spectrum: products of their eigenvalues, of the weights' shape.
        felt: where a weight has any curvature; damping alone is no reason to keep the others.
    """

    scale: Tensor
    dense: Tensor
    rows: Tensor
    inputs: Tensor
    spectrum: Tensor
    felt: Tensor

    def pull(self, w: Tensor, penalty: float) -> Tensor:
        """Minimise the metric's distance from the dense weights plus `penalty` times the squared one from `w`."""
        missing = self.rows.transpose(1, 2) @ (self.dense - w) @ self.inputs  # in the eigenvectors
        missing *= self.spectrum / (self.spectrum + penalty)
        return w + self.rows @ missing @ self.inputs.transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Problem:
    """Dense weights and their metric, decomposed once for any number of budgets.

    Attributes:
        dense: dense weights of each side.
        measured: the metric of each side, not damped.
        damping: fraction of each factor's mean diagonal that is added to its diagonal.
        curvatures: the damped metric.
    """

    dense: tuple[Tensor, ...]
    measured: tuple[Curvature, ...]
    damping: float
    curvatures: tuple[Curvature, ...]

    @classmethod
    def of(cls, dense: Sequence[Tensor], measured: Sequence[Curvature], damping: float) -> Problem:
        """Damp the metric.

        Args:
            dense: weights of each side, [heads, head_dim, in_features].
            measured: of `curvature.measure`.
            damping: positive.
        """
        return cls(tuple(dense), tuple(measured), damping, tuple(c.damped(damping) for c in measured))

    @cached_property
    def sides(self) -> tuple[_Side, ...]:
        """The damped metric in normalised variables and decomposed, which given masks do without."""
        sides = zip(self.dense, self.curvatures, self.measured, strict=True)
        return tuple(_side(w, c, m.scale() > 0) for w, c, m in sides)

    def damped(self, damping: float) -> Problem:
        """Return the same problem with another damping."""
        return Problem.of(self.dense, self.measured, damping)


def select(problem: Problem, choose: Choose, *, iterations: int = 24) -> tuple[list[Tensor], list[Tensor]]:
    """Choose which weights to keep and give them values: ADMM with a rising penalty, as ALPS does for one linear.

    Alternates between the unconstrained minimum near the last sparse point (one product in the eigenvectors) and the
    projection onto the budget, where weights compete by what dropping each costs (ALPS, arXiv 2406.07831, eq. 4; the
    geometric rise of the penalty is ours).

    Args:
        problem: what to prune.
        choose: turns scores into masks.
        iterations: of the alternation; the penalty rises through `PENALTIES` over them.

    Returns:
        Masks (True = keep) and weights, zero where not kept, of each side.
    """
    sides = problem.sides
    sparse, keeps = _project(sides, [s.dense for s in sides], choose)
    duals = [torch.zeros_like(w) for w in sparse]
    first, last = PENALTIES
    rise = (last / first) ** (1.0 / max(1, iterations - 1))
    for step in range(iterations):
        penalty = first * rise**step
        near = [s.pull(z - u, penalty) for s, z, u in zip(sides, sparse, duals, strict=True)]
        sums = [z + RELAXATION * (w - z) + u for w, z, u in zip(near, sparse, duals, strict=True)]
        sparse, keeps = _project(sides, sums, choose)
        # The dual is in units of the penalty, which is about to rise.
        duals = [(w - z) / rise for w, z in zip(sums, sparse, strict=True)]
    start = [z / s.scale for z, s in zip(sparse, sides, strict=True)]
    return keeps, reconstruct(problem, keeps, start, iterations=10)


def reconstruct(
    problem: Problem, keeps: Sequence[Tensor], start: Sequence[Tensor] | None = None, *, iterations: int = 60
) -> list[Tensor]:
    """Give the kept weights the values that make up for the dropped ones: preconditioned conjugate gradient.

    Args:
        problem: what to prune.
        keeps: masks of each side, True = keep.
        start: weights to begin at; the kept dense ones when absent.
        iterations: products with the metric at most.

    Returns:
        Weights of each side, zero where not kept.
    """
    result = []
    for i, (dense, curvature, keep) in enumerate(zip(problem.dense, problem.curvatures, keeps, strict=True)):
        begin = dense if start is None else start[i]
        result.append(_conjugate_gradient(dense, curvature, keep, begin, iterations))
    return result


def _conjugate_gradient(dense: Tensor, curvature: Curvature, keep: Tensor, start: Tensor, iterations: int) -> Tensor:
    """Solve one side, all its heads at once, each with its own step sizes, in the metric's unit-diagonal variables."""
    inverse = keep / curvature.scale().square()
    w = start * keep
    residual = (curvature.rows @ (dense - w) @ curvature.inputs).mul_(keep)
    direction = z = residual * inverse
    power = _dot(residual, z)
    first = power.clone()
    for _ in range(iterations):
        if (power <= 1e-12 * first).all():
            break
        image = (curvature.rows @ direction @ curvature.inputs).mul_(keep)
        step = _ratio(power, _dot(direction, image))
        w = w + step * direction
        residual = residual - step * image
        z = residual * inverse
        power, before = _dot(residual, z), power
        direction = z + _ratio(power, before) * direction
    return w


def _side(dense: Tensor, curvature: Curvature, felt: Tensor) -> _Side:
    scale = curvature.scale()
    (values_r, rows), (values_i, inputs) = (_eigen(f) for f in (curvature.rows, curvature.inputs))
    return _Side(scale, dense * scale, rows, inputs, values_r[:, :, None] * values_i[:, None, :], felt)


def _eigen(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose the factor scaled to a unit diagonal; rounding may leave eigenvalues a little below zero."""
    unit = factor.diagonal(dim1=1, dim2=2).sqrt()
    values, vectors = torch.linalg.eigh(factor / (unit[:, :, None] * unit[:, None, :]))
    return values.clamp_min(0.0), vectors


def _project(sides: Sequence[_Side], scaled: Sequence[Tensor], choose: Choose) -> tuple[list[Tensor], list[Tensor]]:
    keeps = list(choose([w.square() * s.felt for w, s in zip(scaled, sides, strict=True)]))
    return [w * k for w, k in zip(scaled, keeps, strict=True)], keeps


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(1, 2), keepdim=True)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Divide, with 0 where a head is already solved."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)
