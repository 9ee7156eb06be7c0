"""Algorithm 1 of Attention Weights Pruning (arXiv 2410.11261) on one fused matrix, as published.

A relaxed mask `M` in [0, 1] on the fused `W = W_Q W_K^T` preserves `P = softmax(X W X^T)` under an attention mask:

    L(M) = 1/2 ||P~ - P||_F^2 + regularization/2 ||M||_F^2,    P~ = softmax(X (M∘W) X^T)

`loss_and_gradient` is the theorem on the gradient of L, `learn_mask` minimises L, and `binarize` turns the minimiser
into a mask by its percentile. Everything is float64 and batched: the first dimension of every tensor is the problem.
The paper gives no constants (regularization, steps, step size, momentum); the defaults are ours. The pruner's
`mode: mask` is the same descent on the two factors of a real layer (`compressx_attnprune.training.learn_masks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressx import CompressxError, drop_lowest

Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps points [k, rows, columns] and their problem indices [k] to losses [k] and gradients of the points' shape."""

SUFFICIENT = 1e-4
"""Armijo's constant: the fraction of the predicted decrease that a step must achieve."""

_BACKTRACKS = 30
_SHORTEST, _LONGEST = 1e-8, 1e8  # step lengths before the line search, in units of the metric


class DivergedError(CompressxError):
    """Gradient descent with a fixed step reached a loss or point that is not finite."""


@dataclass(frozen=True, eq=False)
class FusedScores:
    """Attention with fused weights, batched over seeds.

    Attributes:
        inputs: X [seeds, tokens, width].
        weight: W [seeds, width, width], dense.
        mask: bool [tokens, tokens], True where the row's token attends to the column's; any kind, with a True in
            each row.
    """

    inputs: Tensor
    weight: Tensor
    mask: Tensor

    @cached_property
    def dense(self) -> Tensor:
        """P [seeds, tokens, tokens], the attention matrix of the dense weight."""
        return self.matrix(self.weight)

    @cached_property
    def _bias(self) -> Tensor:
        return torch.zeros(self.mask.shape, dtype=self.inputs.dtype).masked_fill_(~self.mask, -torch.inf)

    def matrix(self, weight: Tensor) -> Tensor:
        """Compute softmax(X weight X^T) under the mask, [seeds, tokens, tokens]; differentiable."""
        bias = self._bias.expand(len(weight), -1, -1)
        return torch.softmax(torch.baddbmm(bias, self.inputs @ weight, self.inputs.transpose(1, 2)), dim=-1)

    def relative_error(self, weight: Tensor) -> Tensor:
        """Compute ||P~ - P||_F^2 / ||P||_F^2 of a pruned weight, the ratio of *squared* norms, [seeds]."""
        return (self.matrix(weight) - self.dense).square().sum(dim=(1, 2)) / self.dense.square().sum(dim=(1, 2))

    def take(self, seeds: Tensor) -> FusedScores:
        """Return the attention of a subset of seeds, by index."""
        if len(seeds) == len(self.inputs):
            return self
        part = replace(self, inputs=self.inputs[seeds], weight=self.weight[seeds])
        vars(part).update(dense=self.dense[seeds], _bias=self._bias)  # reuse the cached properties
        return part


def loss_and_gradient(attention: FusedScores, relaxed: Tensor, regularization: float) -> tuple[Tensor, Tensor]:
    """Compute L(M) [seeds] and its gradient [seeds, width, width] in closed form.

    With C = P~ - P and p = P~∘C - diag((P~∘C) 1) P~: grad L = W ∘ (X^T p X) + regularization M.
    """
    pruned = attention.matrix(relaxed * attention.weight)
    p = pruned - attention.dense
    loss = 0.5 * (p.square().sum(dim=(1, 2)) + regularization * relaxed.square().sum(dim=(1, 2)))
    p.mul_(pruned)
    p.addcmul_(pruned, p.sum(dim=-1, keepdim=True), value=-1.0)  # softmax backward: each row sums to zero
    inner = attention.inputs.transpose(1, 2) @ (p @ attention.inputs)  # [seeds, width, width]
    return loss, inner.mul_(attention.weight).add_(relaxed, alpha=regularization)


def curvature(attention: FusedScores) -> Tensor:
    """Compute the diagonal of the Gauss-Newton matrix of 1/2 ||P~ - P||_F^2 in M, at the dense weight.

    Entry (a, b) is W_ab^2 sum_i X_ia^2 sum_j p_ij^2 (X_jb - m_ib)^2 with m_i = sum_j p_ij X_j, [seeds, width, width].
    """
    x, p = attention.inputs, attention.dense
    squares, means = p.square(), p @ x
    spread = squares @ x.square() - 2 * means * (squares @ x) + means.square() * squares.sum(dim=-1, keepdim=True)
    return attention.weight.square() * (x.square().transpose(1, 2) @ spread.clamp_(min=0.0))


@dataclass(frozen=True, eq=False)
class Learned:
    """The result of `learn_mask`.

    Attributes:
        relaxed: M [seeds, width, width].
        losses: L(M) before the first step and after each, [steps + 1, seeds]; stopped seeds repeat the last.
        residual: root mean square over the entries of clip(M - grad / regularization, 0, 1) - M, [seeds]: 1 at the
            dense start, 0 at a stationary point in the box.
        converged: bool [seeds], residual at or below the tolerance.
    """

    relaxed: Tensor
    losses: Tensor
    residual: Tensor
    converged: Tensor


def learn_mask(
    attention: FusedScores,
    regularization: float,
    *,
    optimizer: Literal["line-search", "momentum"] = "line-search",
    steps: int = 2000,
    tolerance: float = 1e-3,
    step_size: float = 0.5,
    momentum: float = 0.9,
) -> Learned:
    """Minimise L(M) from M = 1 (Algorithm 1 before it binarises).

    `line-search` is monotone projected gradient descent on [0, 1], scaled by the diagonal of `curvature` plus the
    regularization (`minimize_in_box`). `momentum` is the published descent: a fixed step without projection,
    always all steps; it diverges if the step is too long.

    Args:
        attention: the attention to preserve.
        regularization: lambda, positive.
        optimizer: as above.
        steps: maximum number of steps.
        tolerance: of `Learned.residual`.
        step_size: of `momentum` only.
        momentum: of `momentum` only, in [0, 1).

    Raises:
        ValueError: a regularization that is not positive and finite.
        DivergedError: `momentum` diverged.
    """
    if not 0.0 < regularization < float("inf"):
        raise ValueError(f"regularization must be positive and finite, got {regularization}")
    dense = torch.ones_like(attention.weight)

    def objective(relaxed: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        return loss_and_gradient(attention.take(seeds), relaxed, regularization)

    with torch.no_grad(), _flushed_denormals():
        if optimizer == "momentum":
            relaxed, losses = minimize_with_momentum(
                objective, dense, step_size=step_size, momentum=momentum, steps=steps
            )
        else:
            metric = curvature(attention).add_(regularization)
            relaxed, losses = minimize_in_box(
                objective, dense, metric, scale=regularization, steps=steps, tolerance=tolerance
            )
        _, gradient = loss_and_gradient(attention, relaxed, regularization)
        residual = box_residual(relaxed, gradient, regularization)
    return Learned(relaxed, losses, residual, residual <= tolerance)


def binarize(relaxed: Tensor, weight: Tensor, sparsity: float) -> Tensor:
    """Keep the largest entries of M, dropping exactly round(sparsity * n) for each seed.

    Projection leaves many entries at exactly 0 and 1; of equal ones the smallest |W| is dropped first (ours).

    Args:
        relaxed: [seeds, width, width].
        weight: W, of the same shape.
        sparsity: fraction of zeros.

    Returns:
        bool, of the same shape, True = keep.
    """
    by_weight = weight.abs().flatten(1).argsort(dim=1, stable=True)
    order = by_weight.gather(1, relaxed.flatten(1).gather(1, by_weight).argsort(dim=1, stable=True))
    ranks = torch.arange(order.shape[1], dtype=weight.dtype).expand(order.shape)
    scores = torch.empty_like(ranks).scatter_(1, order, ranks)  # [seeds, width * width]
    return drop_lowest(scores, round(sparsity * scores.shape[1])).view(relaxed.shape)


def box_residual(point: Tensor, gradient: Tensor, scale: float) -> Tensor:
    """Compute the root mean square over the entries of clip(point - gradient / scale, 0, 1) - point, [problems].

    Zero exactly at the stationary points of the box [0, 1].
    """
    return ((point - gradient / scale).clamp_(0.0, 1.0) - point).square().mean(dim=(1, 2)).sqrt()


def minimize_in_box(
    objective: Objective, start: Tensor, metric: Tensor, *, scale: float, steps: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Minimise over [0, 1] by projected gradient descent with a backtracking line search for each problem.

    A step goes towards clip(point - length * gradient / metric), which is the projection in the diagonal metric. Step
    lengths are Barzilai and Borwein's (doi 10.1093/imanum/8.1.141), alternating between four long and four short ones.
    Steps must satisfy Armijo's condition, so losses never rise (a monotone version of the spectral projected gradient,
    doi 10.1137/S1052623497330963). A problem stops at the tolerance, or when its loss no longer decreases.

    Args:
        objective: the function to minimise.
        start: [problems, rows, columns] within the box.
        metric: positive curvature estimate of each entry, in the same shape.
        scale: of `box_residual`.
        steps: maximum number of steps.
        tolerance: of `box_residual`.

    Returns:
        The points, and the losses before the first step and after each, [steps + 1, problems]; stopped problems repeat
        their last loss.
    """
    active = torch.arange(len(start))  # active problems; other tensors in the loop hold only these
    point, (loss, gradient) = start, objective(start, active)
    length = torch.ones_like(loss)
    result, losses = start.clone(), [loss]
    for step in range(steps):
        direction = (point - length[:, None, None] * gradient / metric).clamp_(0.0, 1.0).sub_(point)
        moved, new_loss, new_gradient = _backtrack(objective, active, point, loss, gradient, direction)
        length = _barzilai_borwein(moved - point, new_gradient - gradient, metric, length, long=step % 8 < 4)
        going = (new_loss < loss) & (box_residual(moved, new_gradient, scale) > tolerance)
        point, loss, gradient = moved, new_loss, new_gradient
        result[active] = point
        losses.append(losses[-1].index_copy(0, active, loss))
        if not going.all():
            active, point, loss, gradient, metric, length = (
                t[going] for t in (active, point, loss, gradient, metric, length)
            )
            if not len(active):
                break
    return result, torch.stack(losses)


def _backtrack(
    objective: Objective, problems: Tensor, point: Tensor, loss: Tensor, gradient: Tensor, direction: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Shorten each step until Armijo's condition holds; problems for which it never does keep their point.

    Returns:
        The new points, their losses and their gradients.
    """
    slope = (gradient * direction).sum(dim=(1, 2))
    fraction = torch.ones_like(loss)
    moved = point + direction
    new_loss, new_gradient = objective(moved, problems)
    for attempt in range(_BACKTRACKS + 1):
        # A NaN loss counts as too high.
        high = (~(new_loss <= loss + SUFFICIENT * fraction * slope)).nonzero()[:, 0]
        if not len(high):
            break
        if attempt == _BACKTRACKS:
            moved[high], new_loss[high], new_gradient[high] = point[high], loss[high], gradient[high]
            break
        t, s = fraction[high], slope[high]
        # Minimum of the parabola through both losses and the slope, clipped to [t / 10, t / 2].
        parabola = -s * t.square() / (2 * (new_loss[high] - loss[high] - s * t))
        fraction[high] = torch.fmax(torch.fmin(parabola, 0.5 * t), 0.1 * t)
        moved[high] = point[high] + fraction[high, None, None] * direction[high]
        new_loss[high], new_gradient[high] = objective(moved[high], problems[high])
    return moved, new_loss, new_gradient


def _barzilai_borwein(moved: Tensor, turned: Tensor, metric: Tensor, length: Tensor, *, long: bool) -> Tensor:
    """Compute each problem's next step length from the changes of its point and its gradient."""
    along = (moved * turned).sum(dim=(1, 2))
    if long:
        new = (moved.square() * metric).sum(dim=(1, 2)) / along
    else:
        new = along / (turned.square() / metric).sum(dim=(1, 2))
    # Undefined for negative curvature: lengthen the step, which the line search can shorten.
    return torch.where(along > 0, new, 10 * length).clamp(_SHORTEST, _LONGEST)


def minimize_with_momentum(
    objective: Objective, start: Tensor, *, step_size: float, momentum: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Take all `steps` of v <- momentum v + gradient, point <- point - step_size v, without projection.

    Returns:
        The points, and the losses before the first step and after each, [steps + 1, problems].

    Raises:
        DivergedError: a loss or a point that is not finite.
    """
    point, velocity = start, torch.zeros_like(start)
    problems = torch.arange(len(start))
    losses = []
    for step in range(steps + 1):
        loss, gradient = objective(point, problems)
        losses.append(loss)
        if not (torch.isfinite(loss).all() and torch.isfinite(gradient).all()):
            raise DivergedError(
                f"gradient descent with momentum {momentum:g} and the fixed step size {step_size:g} diverged within "
                f"{step} steps; use a smaller step size, or the monotone line search"
            )
        if step < steps:
            velocity = momentum * velocity + gradient
            point = point - step_size * velocity
    return point, torch.stack(losses)


@contextmanager
def _flushed_denormals() -> Iterator[None]:
    """Flush denormals to zero: a saturated softmax produces many, and each costs microseconds."""
    # torch cannot query the mode: test whether half of the smallest normal number is zero.
    before = not torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64).div(2).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
