"""The units whose removal raises the output error least once the rest is solved again: ZipLM (arXiv 2302.04089).

With H the Hessian of the inputs of a linear W, removing the columns S of one unit and re-solving the others costs
tr(W_S (H^-1_SS)^-1 W_S^T) (Kurtic et al. 2022, arXiv 2203.07259, eq. 6), and what is left of W and H^-1 are their Schur
complements. ZipLM removes the cheapest unit, updates both, and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx.api.patterns import check_scores
from compressx.numerics.obs import PANEL, NotPositiveDefiniteError, damp_, inverse_cholesky

CANDIDATES = 512
"""Columns of the cheapest units, among which those to remove are looked for one at a time."""

ROUND = 64
"""Columns that are removed before the whole matrices are updated, by matmuls of so many at once."""


@dataclass(frozen=True, eq=False)
class RemovedUnits:
    """Which units are kept, and the weight without the others."""

    keep: Tensor  # bool [units], True = keep
    weight: Tensor  # [out_features, in_features], float32 at least, zero in the columns of removed units
    error: Tensor  # |(W' - W) X|^2 / |W X|^2, a scalar on the weight's device
    damping: float  # what was added to the diagonal of the scaled Hessian


def remove_units(
    weight: Tensor, hessian: Callable[[], Tensor], unit: Tensor, dropped: int, *, damping: float = 0.01,
    candidates: int = CANDIDATES, columns: int = ROUND,
) -> RemovedUnits:  # fmt: skip
    """Remove units of a weight's columns one after the other, and solve for the kept columns.

    The Hessian is scaled to a unit diagonal before it is damped: activations differ by orders of magnitude, and one
    number for all would count features that seldom fire as if they did.

    Args:
        weight: W [out_features, in_features]; not changed.
        hessian: makes H [in_features, in_features] anew, contiguous, in float32 or float64, to be overwritten.
        unit: int64 [in_features], the unit of each column, of which all have as many.
        dropped: units to remove.
        damping: added to the diagonal of the scaled Hessian; raised as in `inverse_cholesky`.
        candidates: as `CANDIDATES`; at least in_features makes the choice exact.
        columns: as `ROUND`.
    """
    first = hessian()
    squares = first.diagonal().clone()
    dead = squares <= 0
    scale = torch.where(dead, 1.0, squares.sqrt())

    def scaled(matrix: Tensor | None = None) -> Tensor:
        matrix = hessian() if matrix is None else matrix
        return matrix.div_(scale).div_(scale[:, None])

    w = weight.to(first.dtype) * torch.where(dead, 0.0, scale)  # what never fires costs nothing
    del first
    factor, used = inverse_cholesky(scaled, damping)
    inverse = _squared(factor)
    del factor
    members = members_of(unit.to(weight.device))
    changed = w.clone()
    keep = choose_(changed, inverse, members, dropped, candidates=candidates, columns=columns)
    del inverse, changed
    kept = keep[unit.to(weight.device)]
    new, error = _refit(w, scaled(), kept, used)
    moved = weight.to(w.dtype) + (new - w) / scale
    return RemovedUnits(keep, torch.where(kept, moved, 0.0), error, used)


def _squared(factor: Tensor) -> Tensor:
    """Return U^T U of an upper triangular U, a panel of rows after the other: (1/3) n^3 FLOPs."""
    full = torch.empty_like(factor, memory_format=torch.contiguous_format)
    for start in range(0, len(factor), PANEL):
        stop = start + PANEL
        full[start:stop, start:] = factor[:stop, start:stop].T @ factor[:stop, start:]
        full[stop:, start:stop] = full[start:stop, stop:].T
    return full


def members_of(unit: Tensor) -> Tensor:
    """Return the columns of each unit, int64 [units, columns of one], of which all have as many."""
    counts = torch.bincount(unit)
    if (counts != counts[0]).any():
        raise ValueError(f"units must have as many columns each, got {sorted(set(counts.tolist()))}")
    return unit.argsort(stable=True).view(len(counts), -1)


def choose_(
    weight: Tensor, inverse: Tensor, members: Tensor, dropped: int, *, candidates: int = CANDIDATES,
    columns: int = ROUND,
) -> Tensor:  # fmt: skip
    """Remove the unit of least loss, update weight and inverse, and go on; both are overwritten.

    One removal changes every entry of two large matrices, at the speed of memory. So a round looks only among the units
    that were the cheapest at its beginning, whose part of the inverse and of W^T W is small, and updates the matrices
    by products at its end. The count of operations is about 2 k n (n + out_features) for k of n columns.

    Args:
        weight: [out_features, in_features], with the outputs as they count.
        inverse: H^-1 [in_features, in_features].
        members: the columns of each unit, int64 [units, columns of one].
        dropped: units to remove.
        candidates: as `CANDIDATES`.
        columns: as `ROUND`.

    Returns:
        bool [units], True = keep.
    """
    units, size = members.shape
    gone = torch.zeros(units, dtype=torch.bool, device=weight.device)
    among = max(candidates // size, 1)
    at_once = max(columns // size, 1)
    for start in range(0, dropped, at_once):
        take = min(at_once, dropped - start)
        blocks = inverse[members[:, :, None], members[:, None, :]]  # [units, size, size]
        parts = weight.T[members]  # [units, size, out_features]
        losses = _losses(blocks, parts @ parts.mT).masked_fill(gone, torch.inf)
        few = losses.argsort(stable=True)[: min(max(among, take), units - start)].sort().values
        own = members[few].view(-1)
        part = weight[:, own]
        removed = few[_choose_few_(inverse[own[:, None], own], part.T @ part, size, take)]
        _eliminate_(weight, inverse, members[removed].view(-1))
        gone[removed] = True
    check_scores(weight)
    return ~gone


def _losses(blocks: Tensor, gram: Tensor) -> Tensor:
    """Return tr(B^-1 W_S^T W_S) of each unit, from B = H^-1_SS and W_S^T W_S, both [units, size, size]."""
    solved: Tensor = torch.linalg.solve_ex(blocks, gram)[0]
    return solved.diagonal(dim1=1, dim2=2).sum(dim=1)


def _choose_few_(inverse: Tensor, gram: Tensor, size: int, count: int) -> Tensor:
    """Remove units one at a time, with the parts of H^-1 and W^T W that belong to them.

    With L = H^-1_:S (H^-1_SS)^-1 what is left of the weight is W - W_S L^T. Both parts, [units * size, units * size]
    with a unit's columns together, are overwritten. Returns the numbers of the units, int64 [count], in their order.
    """
    units = len(inverse) // size
    gone = torch.zeros(units, dtype=torch.bool, device=inverse.device)
    order = []
    within = torch.arange(size, device=inverse.device)
    for _ in range(count):
        blocks, grams = (
            m.view(units, size, units, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1) for m in (inverse, gram)
        )
        chosen = _losses(blocks, grams).masked_fill(gone, torch.inf).argmin(keepdim=True)  # [1], never looked at here
        own = chosen * size + within
        rows = inverse[own]  # [size, units * size]
        left, _ = torch.linalg.solve_ex(rows[:, own], rows)  # L^T
        taken = gram[own]
        inner = taken[:, own]
        inverse.addmm_(rows.T, left, alpha=-1.0)
        cross = left.T @ (taken - 0.5 * inner @ left)
        gram.sub_(cross).sub_(cross.T)
        gone[chosen] = True
        order.append(chosen)
    return torch.cat(order)


def _eliminate_(weight: Tensor, inverse: Tensor, gone: Tensor) -> None:
    """Replace a weight and the inverse by what is left of them without some columns, which become zeros."""
    rows = inverse[gone]
    left, _ = torch.linalg.solve_ex(rows[:, gone], rows)  # [gone, in_features]
    weight.addmm_(weight[:, gone], left, alpha=-1.0)
    inverse.addmm_(rows.T, left, alpha=-1.0)
    weight[:, gone] = 0.0
    inverse[gone] = 0.0
    inverse[:, gone] = 0.0


def _refit(weight: Tensor, hessian: Tensor, kept: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Solve min |(W' - W) X|^2 + damping |W' - W|^2 over W' that is zero in the removed columns.

    The Hessian X X^T [in_features, in_features] has a unit diagonal. Returns W' [out_features, in_features], and
    |(W' - W) X|^2 / |W X|^2, a scalar.
    """
    rest, gone = kept.nonzero().view(-1), (~kept).nonzero().view(-1)
    lost, across = weight[:, gone], hessian[gone]
    inner = hessian[rest[:, None], rest]
    damp_(inner, damping)
    factor, failed = torch.linalg.cholesky_ex(inner)
    if failed.item():
        raise NotPositiveDefiniteError(f"the Hessian of the kept columns has no factor with damping {damping:g}")
    change = torch.cholesky_solve((lost @ across[:, rest]).T, factor).T
    new = weight.clone()
    new[:, gone] = 0.0
    new[:, rest] += change
    difference = new - weight
    size = (weight @ hessian * weight).sum()
    error = (difference @ hessian * difference).sum() / torch.where(size > 0, size, 1.0)
    return new, error
