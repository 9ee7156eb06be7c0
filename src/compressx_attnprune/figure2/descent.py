"""Batched gradient descent on independent problems, each over a matrix of mask entries.

`minimize_in_box` is monotone projected gradient descent on [0, 1]; `minimize_with_momentum` is the plain descent of
Attention Weights Pruning (arXiv 2410.11261, Algorithm 1). The first dimension of every tensor is the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from compressx import CompressxError

Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps points [k, rows, columns] and their problem indices [k] to losses [k] and gradients of the points' shape."""

SUFFICIENT = 1e-4
"""Armijo's constant: the fraction of the predicted decrease that a step must achieve."""

_BACKTRACKS = 30
_SHORTEST, _LONGEST = 1e-8, 1e8  # step lengths before the line search, in units of the metric


class DivergedError(CompressxError):
    """Gradient descent with a fixed step reached a loss or point that is not finite."""


def residual(point: Tensor, gradient: Tensor, scale: float) -> Tensor:
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
        scale: of `residual`.
        steps: maximum number of steps.
        tolerance: of `residual`.

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
        going = (new_loss < loss) & (residual(moved, new_gradient, scale) > tolerance)
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
