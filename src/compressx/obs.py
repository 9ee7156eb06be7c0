"""The Optimal Brain Surgeon column sweep of SparseGPT (arXiv 2301.00774, Algorithm 1), as pure functions.

Two steps: the upper Cholesky factor of the inverse Hessian, then a sweep over the columns of a weight, left to right,
that zeroes what the mask drops and pushes each column's error onto the columns still to come. Any method that has a
mask and a Hessian can use the sweep as its weight update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compressx.patterns import NM, FixedMask, Pattern, drop_lowest

BLOCK_COLUMNS = 128
"""Columns whose updates are gathered into one matrix product, as published."""

_RAISES = 5


class NotPositiveDefiniteError(ValueError):
    """The Hessian has no Cholesky factor even after the damping was raised."""


def inverse_cholesky(hessian: Tensor, damping: float = 0.01) -> tuple[Tensor, float]:
    """Factor the inverse of a damped Hessian.

    Args:
        hessian: [n, n], symmetric, X^T X or any positive semi-definite weighting of it.
        damping: fraction of the mean diagonal that is added to the diagonal. Raised tenfold, at most five times,
            while the factorisation fails.

    Returns:
        `U` [n, n], upper triangular with U^T U = (H + damping * mean(diag H) * I)^-1, in float32 at least, and the
        damping that was used. Features that never fired (zero diagonal) count as independent with unit variance.

    Raises:
        NotPositiveDefiniteError: when the last damping fails too, or an entry is not finite.
    """
    if not torch.isfinite(hessian).all():
        raise NotPositiveDefiniteError("the Hessian has NaN or infinite entries: the calibration activations do too")
    base = hessian.to(torch.promote_types(hessian.dtype, torch.float32), copy=True)
    diagonal = base.diagonal()
    dead = diagonal == 0
    # The mean runs over live features only: dead ones would water the damping down.
    mean = diagonal[~dead].mean() if not dead.all() else torch.ones((), dtype=base.dtype, device=base.device)
    diagonal[dead] = mean
    for attempt in range(_RAISES + 1):
        used = damping * 10**attempt
        damped = base.clone()
        damped.diagonal().add_(used * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed and torch.isfinite(upper).all():
                return upper, used
    raise NotPositiveDefiniteError(
        f"the Hessian is not positive definite even with damping {used:g} of its mean diagonal; use more calibration "
        "samples or a larger damping"
    )


def sweep(weight: Tensor, factor: Tensor, pattern: Pattern, dead: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Prune the columns of a weight left to right and update those that are still to come.

    Without a fixed mask each weight's score is w^2 / U_jj^2 at the time its column block is reached, so the selection
    sees all earlier updates. Budgets are exact: those of column blocks add up to that of the whole weight.

    Args:
        weight: [out_features, in_features]; not changed.
        factor: `U` of `inverse_cholesky`.
        pattern: what to keep; `layer` and `row` groups are filled column block by column block, `joint` as `layer`.
        dead: bool [in_features], features whose weights have no effect and are dropped first.

    Returns:
        `keep` bool [out_features, in_features], and the new weight in float32 at least, zero where not kept.

    Raises:
        ValueError: in_features not divisible by an N:M pattern's M.
    """
    rows, columns = weight.shape
    span = BLOCK_COLUMNS
    if isinstance(pattern, NM):
        if columns % pattern.of:
            raise ValueError(f"in_features {columns} is not divisible by {pattern.of} (pattern {pattern})")
        span = max(pattern.of, span // pattern.of * pattern.of)
    w = weight.to(factor.dtype, copy=True)
    keep = torch.ones(rows, columns, dtype=torch.bool, device=weight.device)
    for start in range(0, columns, span):
        stop = min(start + span, columns)
        block = w[:, start:stop].clone()  # [rows, span]
        u = factor[start:stop, start:stop]
        block_dead = None if dead is None else dead[start:stop]
        block_keep = keep[:, start:stop]
        if not isinstance(pattern, NM):
            block_keep.copy_(_choose(block, u.diagonal(), pattern, start, stop, rows, block_dead))
        errors = torch.zeros_like(block)
        for j in range(stop - start):
            if isinstance(pattern, NM) and j % pattern.of == 0:
                part = slice(j, j + pattern.of)
                scores = _scores(block[:, part], u.diagonal()[part], None if block_dead is None else block_dead[part])
                block_keep[:, part] = drop_lowest(scores, pattern.of - pattern.keep)
            column = block[:, j]
            error = torch.where(block_keep[:, j], 0.0, column) / u[j, j]  # [rows]
            block[:, j + 1 :].addr_(error, u[j, j + 1 :], alpha=-1.0)
            errors[:, j] = error
        w[:, start:stop] = torch.where(block_keep, block, 0.0)
        w[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1.0)
    return keep, w


def _scores(block: Tensor, u_diagonal: Tensor, dead: Tensor | None) -> Tensor:
    scores = (block / u_diagonal).square()
    return scores if dead is None else scores.masked_fill(dead, 0.0)


def _choose(
    block: Tensor, u_diagonal: Tensor, pattern: Pattern, start: int, stop: int, rows: int, dead: Tensor | None
) -> Tensor:  # fmt: skip
    """Mask one column block; rounding is cumulative, so that the blocks' counts add up to the whole's."""
    if isinstance(pattern, FixedMask):
        return pattern.keep[:, start:stop]
    if isinstance(pattern, NM):
        raise TypeError("N:M is chosen group by group during the sweep")
    scores = _scores(block, u_diagonal, dead)
    unit = 1 if pattern.group == "row" else rows
    count = round(pattern.sparsity * stop * unit) - round(pattern.sparsity * start * unit)
    shaped = scores if pattern.group == "row" else scores.reshape(1, -1)
    return drop_lowest(shaped, count).view(scores.shape)
