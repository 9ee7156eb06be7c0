"""The best weights of a linear on a given support, by conjugate gradients: ALPS (arXiv 2406.07831), Algorithm 2.

Any method that has a mask and a Hessian can use it as its weight update. It works in features scaled so that the damped
Hessian has a unit diagonal: the squares of such weights are what dropping each by itself costs, and the scaling is the
conjugate gradient's diagonal preconditioner.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compressx.numerics.masked import zeroed
from compressx.numerics.obs import damp_, require_finite

_LOOK_EVERY = {"cpu": 1, "cuda": 4}
"""Steps of the conjugate gradient between looks at whether it is done; a look at a GPU waits for it."""


@dataclass(frozen=True, eq=False)
class Metric:
    """How much a change of a linear's weights changes its output.

    Attributes:
        gram: [n, n], E^-1 (X^T X + damping) E^-1 with a unit diagonal.
        scale: [n], E: weights are multiplied by it.
        damped: [n], what of the unit diagonal is damping.
        dead: bool [n], features that never fired.
    """

    gram: Tensor
    scale: Tensor
    damped: Tensor
    dead: Tensor

    @classmethod
    def of(cls, hessian: Tensor, damping: float = 0.01) -> Metric:
        """Scale a Hessian.

        Args:
            hessian: [n, n], X^T X in float32 or float64; overwritten.
            damping: fraction of the mean diagonal that is added to the diagonal.

        Raises:
            NotPositiveDefiniteError: an entry is not finite.
        """
        require_finite(hessian)
        bare = hessian.diagonal().clone()
        damp_(hessian, damping)
        scale = hessian.diagonal().sqrt()
        hessian.div_(scale[:, None]).div_(scale)
        hessian.diagonal().fill_(1.0)
        return cls(hessian, scale, 1.0 - bare / scale.square(), bare == 0)

    def scaled(self, weight: Tensor) -> Tensor:
        """Return a weight [out_features, n] in the metric's variables and dtype."""
        return weight.to(self.scale.dtype) * self.scale

    def loss(self, change: Tensor, rows: Tensor | None = None) -> Tensor:
        """Measure a change [out_features, n] of scaled weights: ||X change^T||^2, damped; a float64 number.

        `rows` [out_features, 1] is what the error of each output counts, by default 1.
        """
        products = (change @ self.gram).mul_(change)
        return (products if rows is None else products.mul_(rows)).sum(dtype=torch.float64)

    def squares(self, *changes: Tensor) -> list[tuple[float, float]]:
        """Measure changes [out_features, n] of scaled weights: of each ||X change^T||^2, damped and bare."""
        sums = []
        for change in changes:
            sums.append(self.loss(change))
            sums.append((change.square() * self.damped).sum(dtype=torch.float64))
        values = torch.stack(sums).tolist()  # one transfer
        return [
            (damped, max(0.0, damped - of_damping))
            for damped, of_damping in zip(values[::2], values[1::2], strict=True)
        ]


def solve(
    target: Tensor, metric: Metric, keep: Tensor, start: Tensor | None = None, *, steps: int = 100,
    tolerance: float = 1e-2,
) -> tuple[Tensor, int, float]:  # fmt: skip
    """Find the best weights on a support by conjugate gradients, all rows at once (Algorithm 2).

    With S the kept entries of a row and D the dropped ones, the change c of the kept weights solves
    G_SS c = G_SD target_D. Each step costs 2 * out * n^2 FLOPs, however sparse the rows.

    Args:
        target: dense scaled weights [out_features, n].
        metric: of the inputs; G is its `gram`.
        keep: bool [out_features, n], the support.
        start: scaled weights to begin at; the dense ones when absent.
        steps: at most.
        tolerance: residual of each row, relative to the right-hand side, at which it is solved.

    Returns:
        Scaled weights [out_features, n], zero where not kept; the steps; the worst row's relative residual.
    """
    wanted = (zeroed(target, ~keep) @ metric.gram).mul_(keep)
    goal = tolerance * _squares(wanted).sqrt()  # [out, 1]
    if start is None:
        change, residual = torch.zeros_like(target), wanted
    else:
        change = (start - target).mul_(keep & (goal > 0))  # rows that lose nothing keep their weights to the bit
        residual = wanted - (change @ metric.gram).mul_(keep)
    direction, power = residual, _squares(residual)
    taken = torch.zeros((), dtype=torch.float64, device=target.device)
    every = _LOOK_EVERY[target.device.type]
    for number in range(steps):
        working = (power.sqrt() > goal).any()
        if number % every == 0 and not working:
            break
        image = (direction @ metric.gram).mul_(keep)
        # From when all rows are solved until that is seen, steps change nothing.
        step = ratio(power, (direction * image).sum(dim=1, keepdim=True)) * working
        change = change.addcmul_(step, direction)
        residual = residual.addcmul(step, image, value=-1.0)
        power, before = _squares(residual), power
        direction = torch.addcmul(residual, ratio(power, before), direction)
        taken += working
    needed, left = torch.stack([taken, ratio(power.sqrt(), goal).max().double()]).tolist()
    return zeroed(change.add_(target), keep), int(needed), left * tolerance


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=1, keepdim=True)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """Divide, with 0 where there is nothing left to divide by."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)


class Correction:
    """The change of a weight that brings what it adds nearest to something else, by least squares.

    Minimises sum_t w_t^2 ||r_t - C x_t||^2 over C, damped, where r_t is what is missing at token t, x_t the weight's
    input, and w_t what an error there counts (ReplaceMe, arXiv 2505.02819, section 3.1, with the linear map merged into
    the weight from the beginning).
    """

    def __init__(self, out_features: int, in_features: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self.gram = zeros(in_features, in_features)  # sum of w^2 x x^T
        self.cross = zeros(out_features, in_features)  # sum of w^2 r x^T
        self.missing = zeros(())  # sum of w^2 ||r||^2

    def update(self, inputs: Tensor, missing: Tensor, counts: Tensor) -> None:
        """Take in tokens: x [tokens, n], r [tokens, out_features] and w [tokens]."""
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        x, r = (tensor.to(dtype) * counts.to(dtype)[:, None] for tensor in (inputs, missing))
        self.gram += x.T @ x
        self.cross += r.T @ x
        self.missing += r.square().sum(dtype=torch.float64)

    def solved(self, damping: float) -> tuple[Tensor, float]:
        """Return the change C, float64 [out_features, n], and which share of `missing` is left.

        Raises:
            NotPositiveDefiniteError: an entry is not finite.
        """
        require_finite(self.gram, self.cross)
        damped = self.gram.clone()
        damp_(damped, damping)
        change = torch.cholesky_solve(self.cross.T, torch.linalg.cholesky(damped)).T
        left = self.missing - 2 * (change * self.cross).sum() + ((change @ self.gram) * change).sum()
        return change, float(left / self.missing.clamp_min(torch.finfo(torch.float64).tiny))
