"""Descent of many independent problems at once, each over a matrix of mask entries.

`minimize_in_box` is projected gradient descent on [0, 1] whose losses never rise; `minimize_with_momentum` is the plain
descent that Attention Weights Pruning (arXiv 2410.11261, Algorithm 1) names. The first dimension of every tensor is
the problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from compressx import CompressxError

Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From points [k, rows, columns] and the indices [k] of their problems to losses [k] and gradients, like the points."""

SUFFICIENT = 1e-4
"""Armijo's constant: the part of the decrease promised by the slope that a step must deliver."""

_BACKTRACKS = 30
_SHORTEST, _LONGEST = 1e-8, 1e8  # step lengths before the line search, in units of the metric


class DivergedError(CompressxError):
    """Gradient descent with a fixed step left the finite numbers."""


def residual(point: Tensor, gradient: Tensor, scale: float) -> Tensor:
    """Compute the root mean square over the entries of clip(point - gradient / scale, 0, 1) - point, [problems].

    Zero exactly at the stationary points of the box [0, 1].
    """
    return ((point - gradient / scale).clamp_(0.0, 1.0) - point).square().mean(dim=(1, 2)).sqrt()


def minimize_in_box(
    objective: Objective, start: Tensor, metric: Tensor, *, scale: float, steps: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Minimise over [0, 1] by projected gradient descent with a backtracking line search for each problem.

    A step goes towards clip(point - length * gradient / metric): since the metric is diagonal, that is the projection
    in it too. Lengths are Barzilai and Borwein's (doi 10.1093/imanum/8.1.141), four of the long and four of the short
    kind in turn, and Armijo's condition has the last word, so that no loss ever rises (the spectral projected
    gradient of doi 10.1137/S1052623497330963, kept monotone). A problem stops at the tolerance, or when its loss
    resolves no further decrease.

    Args:
        objective: what to minimise.
        start: [problems, rows, columns] within the box.
        metric: positive, of the same shape: an estimate of the curvature of each entry.
        scale: of `residual`.
        steps: largest number of steps.
        tolerance: of `residual`.

    Returns:
        The points, and the losses before the first step and after each, [steps + 1, problems]; a problem that has
        stopped keeps its last.
    """
    active = torch.arange(len(start))  # the problems still descending: other tensors of the loop hold these only
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
    """Shorten each step until Armijo's condition holds; a problem for which it never does stays where it is.

    Returns:
        The new points, their losses and their gradients.
    """
    slope = (gradient * direction).sum(dim=(1, 2))
    fraction = torch.ones_like(loss)
    moved = point + direction
    new_loss, new_gradient = objective(moved, problems)
    for attempt in range(_BACKTRACKS + 1):
        # Written so that a loss that is not a number counts as too high.
        high = (~(new_loss <= loss + SUFFICIENT * fraction * slope)).nonzero()[:, 0]
        if not len(high):
            break
        if attempt == _BACKTRACKS:
            moved[high], new_loss[high], new_gradient[high] = point[high], loss[high], gradient[high]
            break
        t, s = fraction[high], slope[high]
        # The minimum of the parabola through both losses and the slope, kept within [t / 10, t / 2].
        parabola = -s * t.square() / (2 * (new_loss[high] - loss[high] - s * t))
        fraction[high] = torch.fmax(torch.fmin(parabola, 0.5 * t), 0.1 * t)
        moved[high] = point[high] + fraction[high, None, None] * direction[high]
        new_loss[high], new_gradient[high] = objective(moved[high], problems[high])
    return moved, new_loss, new_gradient


def _barzilai_borwein(moved: Tensor, turned: Tensor, metric: Tensor, length: Tensor, *, long: bool) -> Tensor:
    """Compute each problem's next step length from how far its point moved and how its gradient turned."""
    along = (moved * turned).sum(dim=(1, 2))
    if long:
        new = (moved.square() * metric).sum(dim=(1, 2)) / along
    else:
        new = along / (turned.square() / metric).sum(dim=(1, 2))
    # Along a concave stretch there is no such length; a longer step is safe, the line search shortens it.
    return torch.where(along > 0, new, 10 * length).clamp(_SHORTEST, _LONGEST)


def minimize_with_momentum(
    objective: Objective, start: Tensor, *, step_size: float, momentum: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Take all `steps` of v <- momentum v + gradient, point <- point - step_size v; nothing keeps it in the box.

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
                f"{step} steps; take a smaller step size, or the line search, whose losses never rise"
            )
        if step < steps:
            velocity = momentum * velocity + gradient
            point = point - step_size * velocity
    return point, torch.stack(losses)
