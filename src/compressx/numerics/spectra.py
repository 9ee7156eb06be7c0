"""Stable ranks ||W||_F^2 / ||W||_2^2 (Rudelson and Vershynin, J. ACM 54, 2007): between 1 and the rank, 0 for zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressx.runtime.errors import UnsupportedModelError


@dataclass(frozen=True)
class Change:
    """How a weight W differs from W_0, its base's.

    Attributes:
        relative: ||W - W_0||_F / ||W_0||_F; None if only W_0 is zero.
        largest: maximum of |W - W_0|.
        unchanged: fraction of equal entries.
        stable_rank: of W - W_0, with spectra.
        r90: fewest singular values of W - W_0 that hold 90% of its squares, with spectra.
    """

    relative: float | None
    largest: float
    unchanged: float
    stable_rank: float | None = None
    r90: int | None = None

    @classmethod
    def of(cls, weight: Tensor, base: Tensor, *, spectrum: bool) -> Change:
        """Compare two finite weights of one shape, in float64."""
        tau = weight.double() - base.double()
        size, before = float(tau.norm()), float(base.double().norm())
        relative = size / before if before else None if size else 0.0
        compared = (relative, float(tau.abs().max()), 1 - int(tau.count_nonzero()) / tau.numel())
        if not spectrum:
            return cls(*compared)
        held = (squares := squared_singular_values(tau)).cumsum(dim=0)
        return cls(*compared, float(stable_rank(squares)), int((held < 0.9 * held[-1]).sum()) + 1 if size else 0)


def squared_singular_values(matrix: Tensor) -> Tensor:
    """Return the squared singular values of a finite matrix, descending, float64 [smaller side]."""
    # 4096 x 4096 takes 7 s of one core; svdvals takes 26 s, and its squares differ by 3e-14 of the largest.
    x = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    ascending: Tensor = torch.linalg.eigvalsh(x @ x.T)
    return ascending.flip(0).clamp_min(0.0)


def stable_rank(squares: Tensor) -> Tensor:
    """Return the stable rank of each matrix with these squared singular values [..., n], descending: float64 [...]."""
    largest = squares[..., 0]
    return squares.sum(dim=-1).div(torch.where(largest > 0, largest, 1.0))


def stable_ranks_of_heads(query: Tensor, key: Tensor, head_dim: int) -> Tensor:
    """Return the stable rank of W_Q^T W_K [in_features, in_features] of each query head, float64 [heads].

    That matrix is not made: its singular values are those of R_Q R_K^T, with W_Q^T = Q_Q R_Q and W_K^T = Q_K R_K.

    Args:
        query: finite weight of the queries [heads * head_dim, in_features].
        key: that of the keys [key_heads * head_dim, in_features]; as many consecutive query heads share each key head.
        head_dim: rows of a head.

    Raises:
        UnsupportedModelError: the rows are no such heads.
    """
    if query.shape[0] % head_dim or key.shape[0] % head_dim or query.shape[0] % key.shape[0]:
        told = f"{query.shape[0]} features of queries and {key.shape[0]} of keys are no heads of {head_dim}"
        raise UnsupportedModelError(told)
    q, k = (torch.linalg.qr(x.double().view(-1, head_dim, x.shape[1]).mT, mode="r").R for x in (query, key))
    return stable_rank(torch.linalg.svdvals(q @ k.repeat_interleave(len(q) // len(k), dim=0).mT).square())
