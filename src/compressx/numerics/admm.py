"""Pruning by operator splitting: ALPS (arXiv 2406.07831), as pure functions.

Of all weights W with the zeros that a pattern asks for, find some with a small ||X W^T - X W0^T||^2, damped. ADMM with
a rising penalty chooses the support (Algorithm 1), then a conjugate gradient finds the best weights on it (Algorithm 2,
`least_squares.py`). Linears that compete for their zeros take the steps of ADMM side by side, and the errors of outputs
can be weighted: that multiplies the least-squares problem of a row, so only the choice of the support sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx.api.patterns import FixedMask, Pattern, check_scores, keep_masks
from compressx.numerics.least_squares import Metric, solve
from compressx.numerics.masked import zeroed
from compressx.numerics.obs import NotPositiveDefiniteError, cholesky_

CHECK = 3
"""Steps of ADMM between looks at how much the support has changed, as published."""

_RISES = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
"""Factors by which the penalty rises when more than this fraction of the support has changed, as published."""

_SETTLED = 3e-4
"""Fraction of the support whose change no longer counts, as in the paper's programs."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A linear to prune.

    Attributes:
        dense: W0 [out_features, in_features]; not changed.
        metric: of its inputs.
        pattern: what to keep. With a fixed mask only weights are solved for.
        rows: [out_features, 1], what the error of each output counts; 1 when absent. All linears that compete have one
            scale.
    """

    dense: Tensor
    metric: Metric
    pattern: Pattern
    rows: Tensor | None = None

    def target(self) -> Tensor:
        """Return the dense weights in the metric's variables."""
        return self.metric.scaled(self.dense)

    def costs(self, scaled: Tensor) -> Tensor:
        """Return what dropping each of these scaled weights alone costs; features that never fired go first."""
        costs = scaled.square().masked_fill_(self.metric.dead, 0.0)
        return costs if self.rows is None else costs.mul_(self.rows)


@dataclass(frozen=True, eq=False)
class MaskedSolution:
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
    problems: Mapping[str, Problem], *, penalty: float = 0.1, steps: int = 300, solver_steps: int = 100
) -> dict[str, MaskedSolution]:  # fmt: skip
    """Prune linears that compete for their zeros, or one.

    The damped error is never above that of dropping what is cheapest to drop, the start of ADMM: with nearly
    independent inputs that is hard to beat, and where ADMM ends above it, its support is taken.

    Args:
        problems: by name of the linear; all have fixed masks, or none.
        penalty: ADMM's first, against the unit diagonal.
        steps: of ADMM at most.
        solver_steps: of the conjugate gradient at most, for each linear.

    Raises:
        NotPositiveDefiniteError: a damped Hessian is indefinite by more than the penalty; the linear is named.
        ValueError: in_features not divisible by an N:M pattern's M, or weights that are not finite.
    """
    targets = {name: x.target() for name, x in problems.items()}

    def solved(keep: Mapping[str, Tensor], near: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int, float]]:
        return {
            n: solve(targets[n], x.metric, keep[n], near.get(n), steps=solver_steps) for n, x in problems.items()
        }  # fmt: skip

    keep = {n: x.pattern.keep for n, x in problems.items() if isinstance(x.pattern, FixedMask)}
    taken = 0
    if not (keep or steps):  # else ADMM looks
        for name, target in targets.items():
            check_scores(target, name)
    if keep:
        solutions = solved(keep, {})
    else:
        keep, near, taken = select(problems, targets, penalty=penalty, steps=steps)
        solutions = solved(keep, near)
        start = _choose(problems, targets)
        losses = [
            torch.stack([x.metric.loss(changes[n], x.rows) for n, x in problems.items()]).sum()
            for changes in (
                {n: result - targets[n] for n, (result, _, _) in solutions.items()},
                {n: zeroed(targets[n], ~kept) for n, kept in start.items()},
            )
        ]
        reached, at_start = torch.stack(losses).tolist()
        if reached > at_start:
            keep = start
            solutions = solved(keep, {})
    found = {}
    for name, x in problems.items():
        result, needed, residual = solutions.pop(name)
        change = result - targets[name]
        (_, lost), (_, whole) = x.metric.squares(change, targets[name])
        weight = zeroed(x.dense + change / x.metric.scale, keep[name])
        found[name] = MaskedSolution(keep[name], weight, lost / whole if whole else 0.0, taken, needed, residual)
    return found


def select(
    problems: Mapping[str, Problem], targets: Mapping[str, Tensor], *, penalty: float = 0.1, steps: int = 300
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Choose supports by ADMM (Algorithm 1), from those of the largest scaled weights on.

    A step pulls the weights from the last sparse point minus the dual towards the dense ones, and keeps the largest of
    what that gives plus the dual. The penalty rises the faster the more the support changes, until it settles. What is
    dropped becomes the dual, so one tensor holds both: it costs 2 * out * n^2 FLOPs a step, and n^3 every third for
    the penalty's inverse, by Cholesky; eigenvectors of the Hessian, which serve all penalties, would cost more.

    Args:
        problems: by name of the linear.
        targets: of each its dense scaled weights [out_features, n].
        penalty: the first, against the unit diagonal; lower starts further from the support of the largest.
        steps: at most.

    Returns:
        `keep` bool [out_features, n], scaled weights near the best on that support, zero elsewhere, and the steps.
    """
    keep = seen = _choose(problems, targets)
    # Of each [out, n]: the sparse point where kept, the dual in units of the penalty elsewhere.
    points = {name: target * keep[name] for name, target in targets.items()}
    of = {name: id(x.metric) for name, x in problems.items()}  # linears with the same inputs share what is made of them
    metrics = {of[name]: x.metric for name, x in problems.items()}
    pulls = {key: _pull(metric.gram, penalty) for key, metric in metrics.items()} if steps else {}
    taken = 0
    while taken < steps:
        points = {name: _stepped(points[name], keep[name], targets[name], pulls[of[name]][0]) for name in problems}
        keep = _choose(problems, points)
        taken += 1
        if taken % CHECK and taken < steps:
            continue
        changed = _changed(points, keep, seen, {name: pulls[of[name]][1] for name in problems}, penalty)
        if changed <= _SETTLED or taken == steps:
            break
        seen = keep
        rise = next(factor for above, factor in _RISES if changed > above)
        penalty *= rise
        for key, metric in metrics.items():
            pulls[key] = _pull(metric.gram, penalty)
        for name, point in points.items():
            points[name] = _with_larger_penalty(point, keep[name], rise)
    return keep, {name: zeroed(point, keep[name]) for name, point in points.items()}, taken


def _changed(
    points: Mapping[str, Tensor], keep: Mapping[str, Tensor], seen: Mapping[str, Tensor],
    failed: Mapping[str, Tensor], penalty: float,
) -> float:  # fmt: skip
    """Return the fraction of the support that has changed, after a look at whether all went well."""
    numbers = [
        (torch.count_nonzero(kept != seen[n]), torch.count_nonzero(kept), failed[n], points[n].sum().isfinite())
        for n, kept in keep.items()
    ]
    looked = torch.stack([x.long() for of_one in numbers for x in of_one]).tolist()  # one look, it waits for the device
    changed, kept, no_factor, finite = (looked[i::4] for i in range(4))
    for name, its_factor, is_finite in zip(keep, no_factor, finite, strict=True):
        if its_factor:
            raise NotPositiveDefiniteError(
                f"{name}: the damped Hessian plus ADMM's penalty of {penalty:g} is not positive definite; use more "
                "calibration samples, or a larger damping or penalty"
            )
        if not is_finite:  # the sum, which may overflow
            check_scores(points[name], name)
    return float(sum(changed) / max(1, sum(kept)))


def _choose(problems: Mapping[str, Problem], scaled: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep the largest scaled weights (equation 4), without a look for NaN, which `_changed` takes."""
    costs = {name: x.costs(scaled[name]) for name, x in problems.items()}
    return keep_masks(costs, {name: x.pattern for name, x in problems.items()}, known_finite=True)


def _stepped(point: Tensor, keep: Tensor, target: Tensor, pull: Tensor) -> Tensor:
    """Return the near weights plus the dual, of the sparse point and the dual that `point` holds; overwrites it."""
    sparse = zeroed(point, keep)
    dual = point.sub_(sparse)
    return dual.add_(sparse.sub_(dual).sub_(target) @ pull).add_(target)


def _with_larger_penalty(point: Tensor, keep: Tensor, rise: float) -> Tensor:
    """Divide the dual in `point`, which is in units of the penalty, by how much that rises."""
    sparse = zeroed(point, keep)
    return point.sub_(sparse).div_(rise).add_(sparse)


def _pull(gram: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Return penalty * (gram + penalty * I)^-1, for the first half step of ADMM, and a number, 0 if it exists."""
    matrix = gram.clone(memory_format=torch.contiguous_format)
    diagonal = matrix.diagonal().add_(penalty)
    factor, failed = cholesky_(matrix)
    diagonal.copy_(torch.where(failed == 0, diagonal, 1.0))  # LAPACK refuses to invert a zero before anyone has looked
    return torch.cholesky_inverse(factor).mul_(penalty), failed
