"""The Optimal Brain Surgeon column sweep of SparseGPT (arXiv 2301.00774, Algorithm 1), as pure functions.

Two steps: the upper Cholesky factor of the inverse Hessian, then a sweep over the columns of a weight, left to right,
that zeroes what the mask drops and pushes each column's error onto the columns still to come. Any method that has a
mask and a Hessian can use the sweep as its weight update. Wanda's score is that of a diagonal Hessian, without a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from compressx.api.patterns import NM, FixedMask, Pattern, Structured, check_scores, count_dropped, drop_lowest
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.finite import all_finite

BLOCK_COLUMNS = 128
"""Columns whose updates are gathered into one matrix product, as published."""

STEP = 32
"""Columns whose errors reach one another one by one; those before them in the block come as one matrix product."""

PANEL = 256
"""Rows of a triangle that are inverted at once."""

CHUNK = 1 << 20
"""Numbers that are moved at once."""

_RAISES = 5


class NotPositiveDefiniteError(UnsupportedModelError):
    """The Hessian has no Cholesky factor even after the damping was raised."""


def inverse_cholesky(hessian: Tensor | Callable[[], Tensor], damping: float = 0.01) -> tuple[Tensor, float]:
    """Factor the inverse of a damped Hessian.

    With P the reversal of the features, P H P = C C^T gives H = R R^T with R = P C P upper triangular, so U = R^-1: one
    factorisation and the inverse of a triangle, (2/3) n^3 FLOPs, where inverting H itself would take twice as many and
    square its condition.

    Args:
        hessian: [n, n], symmetric, X^T X or any positive semi-definite weighting of it; not changed. Or what makes it
            anew, contiguous, in float32 or float64: then it takes the memory of one matrix, which each attempt
            overwrites.
        damping: fraction of the mean diagonal that is added to the diagonal. Raised tenfold, at most five times,
            while the factorisation fails.

    Returns:
        `U` [n, n], upper triangular with U^T U = (H + damping * mean(diag H) * I)^-1, in float32 at least, and the
        damping that was used. Features that never fired (zero diagonal) count as independent, with the mean variance
        of the others.

    Raises:
        NotPositiveDefiniteError: when the last damping fails too, or an entry is not finite.
    """

    def fresh() -> Tensor:
        if callable(hessian):
            return hessian()
        wide = torch.promote_types(hessian.dtype, torch.float32)
        return hessian.to(wide, copy=True, memory_format=torch.contiguous_format)

    for attempt in range(_RAISES + 1):
        used = damping * 10**attempt
        matrix = fresh()
        damp_(matrix, used)
        trace = matrix.diagonal().sum()
        _reverse_(matrix)
        column_major, failed = cholesky_(matrix)
        _reverse_(matrix)  # now R^T
        _invert_lower_(matrix)
        # One look at all, since it waits for the device. A factor whose sum overflows is of no use either.
        if (failed == 0) & trace.isfinite() & matrix.sum().isfinite():
            return column_major, used
        del matrix, column_major  # before the next is made
        require_finite(fresh())
    raise NotPositiveDefiniteError(
        f"the Hessian is not positive definite even with damping {used:g} of its mean diagonal; use more calibration "
        "samples or a larger damping"
    )


def require_finite(*matrices: Tensor) -> None:
    """Refuse Hessians with entries that are NaN or infinite, by a `NotPositiveDefiniteError`."""
    if not all_finite(*matrices):
        raise NotPositiveDefiniteError("the Hessian has NaN or infinite entries, as the calibration activations do")


def cholesky_(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite a symmetric matrix by its lower Cholesky factor, a view of it; return that and a number, 0 if it is."""
    column_major = matrix.mT  # what LAPACK works on in place; symmetric, so it is the same matrix
    failed = torch.empty((), dtype=torch.int32, device=matrix.device)
    torch.linalg.cholesky_ex(column_major, out=(column_major, failed))
    return column_major, failed


@contextmanager
def refused(name: str) -> Iterator[None]:
    """Tell users of which linear's Hessian a `NotPositiveDefiniteError` is."""
    try:
        yield
    except NotPositiveDefiniteError as error:
        raise NotPositiveDefiniteError(f"{name}: {error}") from error


def damp_(matrix: Tensor, damping: float) -> None:
    """Add a fraction of a Hessian's mean diagonal to its diagonal, in place; dead features get the mean first."""
    diagonal = matrix.diagonal()
    bare = diagonal.clone()
    dead = bare == 0
    # The mean runs over live features only: dead ones would water the damping down.
    live = (~dead).sum()
    mean = torch.where(live > 0, bare.sum() / live.clamp_min(1), 1.0)
    diagonal.copy_(torch.where(dead, mean, bare) + damping * mean)


def _reverse_(matrix: Tensor) -> None:
    """Reverse the order of rows and of columns in place."""
    flat = matrix.view(-1)
    for start in range(0, len(flat) // 2, CHUNK):
        stop = min(start + CHUNK, len(flat) // 2)
        head, tail = flat[start:stop], flat[len(flat) - stop : len(flat) - start]
        kept = head.flip(0)
        head.copy_(tail.flip(0))
        tail.copy_(kept)


def _invert_lower_(matrix: Tensor) -> None:
    """Invert a lower triangular matrix in place, a panel of rows after the other; (1/3) n^3 FLOPs."""
    edges = [*range(0, len(matrix), PANEL), len(matrix)]
    for number, (start, stop) in enumerate(pairwise(edges)):
        corner = matrix[start:stop, start:stop]
        identity = torch.eye(stop - start, dtype=matrix.dtype, device=matrix.device)
        corner.copy_(torch.linalg.solve_triangular(corner, identity, upper=False))
        rest = corner @ matrix[start:stop, :start]
        for left, right in pairwise(edges[: number + 1]):
            # Above its diagonal the inverse so far is zero.
            torch.mm(rest[:, left:], matrix[left:start, left:right], out=matrix[start:stop, left:right]).neg_()


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
        ValueError: in_features not divisible by an N:M pattern's M, or numbers that are not finite.
    """
    rows, columns = weight.shape
    span = BLOCK_COLUMNS
    if isinstance(pattern, NM):
        pattern.groups(rows, columns)  # refuses columns that M does not divide
        span = max(pattern.of, span // pattern.of * pattern.of)
    w = weight.to(factor.dtype, copy=True)
    keep = torch.ones(rows, columns, dtype=torch.bool, device=weight.device)
    step = pattern.of if isinstance(pattern, NM) else STEP
    lost_sums = []  # of each column block: not finite where a number of its is not
    for start in range(0, columns, span):
        stop = min(start + span, columns)
        u = factor[start:stop, start:stop]
        block_keep = keep[:, start:stop]
        block_dead = None if dead is None else dead[start:stop]
        if not isinstance(pattern, NM):
            block_keep.copy_(_choose(w[:, start:stop], u.diagonal(), pattern, start, stop, rows, block_dead))
        block = w[:, start:stop].T.contiguous()  # [span, rows]: a column of the weight lies in one piece
        errors = torch.empty_like(block)  # of each column: what it loses / U_jj
        for first in range(0, stop - start, step):
            last = min(first + step, stop - start)
            block[first:last].addmm_(u[:first, first:last].T, errors[:first], alpha=-1.0)
            if isinstance(pattern, NM):
                part_dead = None if block_dead is None else block_dead[first:last]
                scores = _scores(block[first:last].T, u.diagonal()[first:last], part_dead)
                block_keep[:, first:last] = drop_lowest(scores, pattern.of - pattern.keep, known_finite=True)
            lost = (~block_keep[:, first:last]).T / u.diagonal()[first:last, None]
            for j in range(first, last):
                column = torch.addmv(block[j], errors[first:j].T, u[first:j, j], alpha=-1.0, out=block[j])
                torch.mul(column, lost[j - first], out=errors[j])
        w[:, start:stop] = torch.where(block_keep, block.T, 0.0)
        w[:, stop:].addmm_(errors.T, factor[start:stop, stop:], alpha=-1.0)
        lost_sums.append(errors.sum(dtype=torch.float64))
    # One look for the whole weight, since it waits for the device.
    check_scores(torch.stack(lost_sums))
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
    if isinstance(pattern, NM | Structured):
        raise TypeError("N:M is chosen group by group during the sweep, and units before it")
    scores = _scores(block, u_diagonal, dead)
    unit = 1 if pattern.group == "row" else rows
    count = count_dropped(pattern.sparsity, stop * unit) - count_dropped(pattern.sparsity, start * unit)
    shaped = scores if pattern.group == "row" else scores.reshape(1, -1)
    return drop_lowest(shaped, count, known_finite=True).view(scores.shape)


def wanda_scores(weight: Tensor, norms: Tensor) -> Tensor:
    """Score each weight by its share of the output's magnitude, |W_ij| * ||X_j||_2 as Wanda does.

    Equation 1 of arXiv 2306.11695: the root of OBS's score where the Hessian is diagonal.

    Args:
        weight: [..., out_features, in_features] in any float dtype.
        norms: ||X_j||_2 over all calibration tokens [in_features], or of a shape that broadcasts.

    Returns:
        Scores of the weight's shape, on its device and in the dtype of the norms.
    """
    norms = norms.to(weight.device)
    return weight.to(norms.dtype, copy=True).abs_().mul_(norms)  # in place: each new array is fresh pages of the system
