"""Linear least squares for the output projection, from second moments of what a layer's heads mix.

With m the mixed values P V of a token, all heads beside each other, and y = W m' the output of the dense layer, whose
mixed values are m', everything that a new output projection is judged and solved by are sums over tokens of m m^T,
m y^T and |y|^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx.numerics.obs import NotPositiveDefiniteError


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over tokens, float64.

    Attributes:
        mixed: of m m^T, [h * value_dim, h * value_dim].
        cross: of m y^T, [h * value_dim, out_features].
        mixed_sum: of m, [h * value_dim].
        output_sum: of y, [out_features].
        squares: of |y|^2, [].
        tokens: how many.
    """

    mixed: Tensor
    cross: Tensor
    mixed_sum: Tensor
    output_sum: Tensor
    squares: Tensor
    tokens: int

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Moments:
        """Gather batches of m [..., h * value_dim] and y [..., out_features]; products are of their dtype."""
        sums: list[Tensor] = []
        tokens = 0
        for mixed, output in pairs:
            m, y = mixed.flatten(0, -2), output.flatten(0, -2)
            new = (m.T @ m, m.T @ y, m.sum(dim=0), y.sum(dim=0), y.square().sum(dtype=torch.float64))
            sums = [a + b for a, b in zip(sums, new, strict=True)] if sums else [b.double() for b in new]
            tokens += len(m)
        return cls(sums[0], sums[1], sums[2], sums[3], sums[4], tokens)

    @classmethod
    def dense(cls, batches: Iterable[Tensor], weight: Tensor) -> Moments:
        """Gather batches of m where y = W m, with W [out_features, h * value_dim]."""
        own = cls.of((m, m[..., :0]) for m in batches)
        w = weight.double()
        cross = own.mixed @ w.T
        return cls(own.mixed, cross, own.mixed_sum, w @ own.mixed_sum, (cross * w.T).sum(), own.tokens)

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return `mixed` and `cross` of m and y less their means."""
        mean = self.mixed_sum / self.tokens
        return self.mixed - torch.outer(mean, self.mixed_sum), self.cross - torch.outer(mean, self.output_sum)

    def shift(self, weight: Tensor) -> Tensor:
        """Return mean(y - W m) [out_features], the best addition to the bias for a weight [out_features, n]."""
        return (self.output_sum - weight.double() @ self.mixed_sum) / self.tokens

    def error(self, weight: Tensor, shift: Tensor) -> Tensor:
        """Return the sum of |W m + shift - y|^2 over that of |y|^2, float64 []; 0 where there is no output."""
        w, c = weight.double(), shift.double()
        of_weight = ((w @ self.mixed).T * w.T - 2.0 * self.cross * w.T).sum()
        of_shift = self.tokens * c.square().sum() + 2.0 * (c * (w @ self.mixed_sum - self.output_sum)).sum()
        lost = (of_weight + of_shift + self.squares).clamp_min(0.0)  # below zero only by rounding
        return torch.where(self.squares > 0.0, lost / self.squares, 0.0)


def solve(moments: Moments, weight: Tensor, kept: Tensor, damping: float, *, bias: bool) -> tuple[Tensor, Tensor]:
    """Solve for the output projection on some of its columns, in closed form.

    Minimises the mean of |W' m + c - y|^2 + damping |(W' - W) E|^2 over W' and, where there is a bias, c; E are the
    root mean squares of m, so that one damping serves features of any size. The normal equations of ridge regression
    (Hoerl and Kennard 1970) that shrinks towards W.

    Args:
        moments: of the training text.
        weight: W [out_features, h * value_dim], towards which the damping pulls.
        kept: bool [h * value_dim], the columns that stay.
        damping: as a fraction of each feature's own square.
        bias: whether the projection has one, so that the means of m and y can be left to it.

    Returns:
        W' in the dtype of `weight`, zero in the other columns, and c [out_features], float64, zero without a bias; the
        kept columns are NaN where the equations have no Cholesky factor.
    """
    mixed, cross = moments.centred() if bias else (moments.mixed, moments.cross)
    columns = kept.nonzero().view(-1)
    scaled, scale = unit_diagonal(mixed[columns[:, None], columns])
    start = weight.double()[:, columns] * scale
    missing = cross[columns].T / scale - start @ scaled  # what W leaves of the equations
    change = torch.cholesky_solve(missing.T, damped_factor(scaled, damping)).T
    new = torch.zeros_like(weight)
    new[:, columns] = ((start + change) / scale).to(weight.dtype)
    return new, moments.shift(new) if bias else torch.zeros_like(moments.output_sum)


def unit_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a positive semi-definite matrix [n, n] scaled to a unit diagonal, zero where it was, and the scale [n]."""
    squares = matrix.diagonal()
    scale = torch.where(squares > 0.0, squares.clamp_min(0.0).sqrt(), 1.0)
    return matrix / scale / scale[:, None], scale


def damped_factor(scaled: Tensor, damping: float) -> Tensor:
    """Return the lower Cholesky factor of a matrix [n, n] of a unit diagonal plus `damping` times the identity.

    Where there is none it is NaN, which shows in what is computed with it: to ask is to wait for the device.
    """
    damped = scaled.clone()
    damped.diagonal().add_(damping)
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(damped)
    return factor.masked_fill(failed > 0, math.nan)


def without_factor(damping: float) -> NotPositiveDefiniteError:
    """Return the error of a matrix of which `damped_factor` is NaN."""
    return NotPositiveDefiniteError(
        f"the second moments of the mixed values have no Cholesky factor with damping {damping:g}; use a larger damping"
    )
