"""Pruning one linear by operator splitting: ALPS (arXiv 2406.07831), as pure functions.

Of all weights W with the zeros that a pattern asks for, find one with a small ||X W^T - X W0^T||^2, damped. ADMM with a
rising penalty chooses the support (Algorithm 1), then a conjugate gradient finds the best weights on it (Algorithm 2).
Any method that has a mask and a Hessian can use the second as its weight update.

Both work in features scaled so that the damped Hessian has a unit diagonal: the squares of such weights are what
dropping each by itself costs, and the scaling is the conjugate gradient's diagonal preconditioner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressx.api.lowest import NOT_FINITE
from compressx.api.patterns import FixedMask, Pattern, keep_mask
from compressx.numerics.masked import zeroed
from compressx.numerics.obs import NOT_FINITE_HESSIAN, NotPositiveDefiniteError, damp_
from compressx.runtime.finite import all_finite

CHECK = 3
"""Steps of ADMM between looks at how much the support has changed, as published."""

_LOOK_EVERY = {"cpu": 1, "cuda": 4}
"""Steps of the conjugate gradient between looks at whether it is done; a look at a GPU waits for it."""

_RISES = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
"""Factors by which the penalty rises when more than this fraction of the support has changed, as published."""

_SETTLED = 3e-4
"""Fraction of the support whose change no longer counts, as in the paper's programs."""


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
        if not all_finite(hessian):
            raise NotPositiveDefiniteError(NOT_FINITE_HESSIAN)
        bare = hessian.diagonal().clone()
        damp_(hessian, damping)
        scale = hessian.diagonal().sqrt()
        hessian.div_(scale[:, None]).div_(scale)
        hessian.diagonal().fill_(1.0)
        return cls(hessian, scale, 1.0 - bare / scale.square(), bare == 0)

    def scaled(self, weight: Tensor) -> Tensor:
        """Return a weight [out_features, n] in the metric's variables and dtype."""
        return weight.to(self.scale.dtype) * self.scale

    def squares(self, *changes: Tensor) -> list[tuple[float, float]]:
        """Measure changes [out_features, n] of scaled weights: of each ||X change^T||^2, damped and bare."""
        sums = []
        for change in changes:
            sums.append((change @ self.gram).mul_(change).sum(dtype=torch.float64))
            sums.append((change.square() * self.damped).sum(dtype=torch.float64))
        values = torch.stack(sums).tolist()  # one transfer
        return [
            (damped, max(0.0, damped - of_damping))
            for damped, of_damping in zip(values[::2], values[1::2], strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Solution:
    """A pruned weight.

    Attributes:
        keep: bool [out_features, in_features], True = keep.
        weight: [out_features, in_features] in float32 at least, zero where not kept.
        error: ||X W^T - X W0^T||^2 / ||X W0^T||^2, without damping.
        steps: of ADMM; 0 when the mask was given.
        solver_steps: of the conjugate gradient.
        residual: what is left of the equations that it solves, relative to the right-hand side, in the worst row.
    """

    keep: Tensor
    weight: Tensor
    error: float
    steps: int
    solver_steps: int
    residual: float


def prune(
    dense: Tensor, metric: Metric, pattern: Pattern, *, penalty: float = 0.1, steps: int = 300, solver_steps: int = 100
) -> Solution:  # fmt: skip
    """Prune one weight.

    The damped error is never above that of dropping what is cheapest to drop, the start of ADMM: with nearly
    independent inputs that is hard to beat, and where ADMM ends above it, its support is taken.

    Args:
        dense: W0 [out_features, in_features]; not changed.
        metric: of its inputs.
        pattern: what to keep; `joint` as `layer`. With a fixed mask only weights are solved for.
        penalty: ADMM's first, against the unit diagonal.
        steps: of ADMM at most.
        solver_steps: of the conjugate gradient at most.

    Raises:
        NotPositiveDefiniteError: the damped Hessian is indefinite by more than the penalty.
        ValueError: in_features not divisible by an N:M pattern's M, or weights that are not finite.
    """
    target = metric.scaled(dense)
    if isinstance(pattern, FixedMask):
        keep, taken = pattern.keep, 0
        result, solved, residual = solve(target, metric, keep, steps=solver_steps)
    else:
        keep, near, taken = select(target, metric, pattern, penalty=penalty, steps=steps)
        result, solved, residual = solve(target, metric, keep, near, steps=solver_steps)
        start = _choose(target, metric, pattern)
        (reached, _), (at_start, _) = metric.squares(result - target, zeroed(target, ~start))
        if reached > at_start:
            keep = start
            result, solved, residual = solve(target, metric, keep, steps=solver_steps)
    change = result - target
    (_, lost), (_, whole) = metric.squares(change, target)
    weight = zeroed(dense + change / metric.scale, keep)
    return Solution(keep, weight, lost / whole if whole else 0.0, taken, solved, residual)


def select(
    target: Tensor, metric: Metric, pattern: Pattern, *, penalty: float = 0.1, steps: int = 300
) -> tuple[Tensor, Tensor, int]:
    """Choose a support by ADMM (Algorithm 1), from that of the largest scaled weights on.

    A step pulls the weights from the last sparse point minus the dual towards the dense ones, and keeps the largest of
    what that gives plus the dual. The penalty rises the faster the more the support changes, until it settles. What is
    dropped becomes the dual, so one tensor holds both: it costs 2 * out * n^2 FLOPs a step, and n^3 every third for
    the penalty's inverse, by Cholesky; eigenvectors of the Hessian, which serve all penalties, would cost more.

    Args:
        target: dense scaled weights [out_features, n].
        metric: of the inputs.
        pattern: what to keep.
        penalty: the first, against the unit diagonal; lower starts further from the support of the largest.
        steps: at most.

    Returns:
        `keep` bool [out_features, n], scaled weights near the best on that support, zero elsewhere, and the steps.

    Raises:
        NotPositiveDefiniteError: the damped Hessian is indefinite by more than the penalty.
    """
    keep = seen = _choose(target, metric, pattern)
    point = target * keep  # [out, n]: the sparse point where kept, the dual in units of the penalty elsewhere
    pull, failed = _pull(metric.gram, penalty)
    taken = 0
    while taken < steps:
        point = _stepped(point, keep, target, pull)
        keep = _choose(point, metric, pattern)
        taken += 1
        if taken % CHECK and taken < steps:
            continue
        # One look at all, since it waits for the device.
        numbers = [torch.count_nonzero(keep != seen), torch.count_nonzero(keep), failed, point.sum().isfinite()]
        changed, kept, no_factor, finite = torch.stack([x.long() for x in numbers]).tolist()
        if no_factor:
            raise NotPositiveDefiniteError(
                f"the damped Hessian plus ADMM's penalty of {penalty:g} is not positive definite; use more calibration "
                "samples, or a larger damping or penalty"
            )
        if not (finite or all_finite(point)):
            raise ValueError(NOT_FINITE)
        changed /= max(1, kept)
        if changed <= _SETTLED or taken == steps:
            break
        seen = keep
        rise = next(factor for above, factor in _RISES if changed > above)
        penalty *= rise
        pull, failed = _pull(metric.gram, penalty)
        point = _with_larger_penalty(point, keep, rise)
    return keep, zeroed(point, keep), taken


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
        step = _ratio(power, (direction * image).sum(dim=1, keepdim=True)) * working
        change = change.addcmul_(step, direction)
        residual = residual.addcmul(step, image, value=-1.0)
        power, before = _squares(residual), power
        direction = torch.addcmul(residual, _ratio(power, before), direction)
        taken += working
    needed, left = torch.stack([taken, _ratio(power.sqrt(), goal).max().double()]).tolist()
    return zeroed(change.add_(target), keep), int(needed), left * tolerance


def _stepped(point: Tensor, keep: Tensor, target: Tensor, pull: Tensor) -> Tensor:
    """Return the near weights plus the dual, of the sparse point and the dual that `point` holds; overwrites it."""
    sparse = zeroed(point, keep)
    dual = point.sub_(sparse)
    return dual.add_(sparse.sub_(dual).sub_(target) @ pull).add_(target)


def _with_larger_penalty(point: Tensor, keep: Tensor, rise: float) -> Tensor:
    """Divide the dual in `point`, which is in units of the penalty, by how much that rises."""
    sparse = zeroed(point, keep)
    return point.sub_(sparse).div_(rise).add_(sparse)


def _choose(scaled: Tensor, metric: Metric, pattern: Pattern) -> Tensor:
    """Keep the largest scaled weights (equation 4), which the caller checks; features that never fired go first."""
    return keep_mask(scaled.square().masked_fill_(metric.dead, 0.0), pattern, known_finite=True)


def _pull(gram: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return penalty * (gram + penalty * I)^-1, for the first half step of ADMM, and a number, 0 if it exists."""
    matrix = gram.clone(memory_format=torch.contiguous_format)
    diagonal = matrix.diagonal().add_(penalty)
    column_major = matrix.mT  # what LAPACK works on in place; symmetric, so it is the same matrix
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(column_major, out=(column_major, failed))
    diagonal.copy_(torch.where(failed == 0, diagonal, 1.0))  # LAPACK refuses to invert a zero before anyone has looked
    return torch.cholesky_inverse(column_major).mul_(penalty), failed


def _squares(rows: Tensor) -> Tensor:
    return rows.square().sum(dim=1, keepdim=True)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Divide, with 0 where there is nothing left to divide by."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1.0), 0.0)
