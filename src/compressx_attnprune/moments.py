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

_CONSTANT = 1e-12
"""A feature's variance over its mean square below which it counts as constant: what float64 sums round is 1e-15."""


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
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]], *, bias: bool = False) -> Moments:
        """Gather batches of m [..., h * value_dim] and y [..., out_features]; products are of their dtype.

        Args:
            pairs: the batches.
            bias: whether `centred` will be asked for. Then products are of m and y less their means in the batch, which
                are put back in float64: a head that always looks at one token mixes values that hardly vary, and
                float32 products would leave rounding in place of their variances.
        """
        sums: list[Tensor] = []
        tokens = 0
        for mixed, output in pairs:
            m, y = mixed.flatten(0, -2), output.flatten(0, -2)
            squares = y.square().sum(dtype=torch.float64)
            new = (*(_around_means(m, y) if bias else (m.T @ m, m.T @ y, m.sum(dim=0), y.sum(dim=0))), squares)
            sums = [a + b for a, b in zip(sums, new, strict=True)] if sums else [b.double() for b in new]
            tokens += len(m)
        return cls(sums[0], sums[1], sums[2], sums[3], sums[4], tokens)

    @classmethod
    def dense(cls, batches: Iterable[Tensor], weight: Tensor, *, bias: bool = False) -> Moments:
        """Gather batches of m where y = W m, with W [out_features, h * value_dim]; `bias` as for `of`."""
        own = cls.of(((m, m[..., :0]) for m in batches), bias=bias)
        w = weight.double()
        cross = own.mixed @ w.T
        return cls(own.mixed, cross, own.mixed_sum, w @ own.mixed_sum, (cross * w.T).sum(), own.tokens)

    def centred(self) -> tuple[Tensor, Tensor]:
        """Return `mixed` and `cross` of m and y less their means; zeros for what of m is constant but for rounding."""
        mean = self.mixed_sum / self.tokens
        mixed, cross = self.mixed - torch.outer(mean, self.mixed_sum), self.cross - torch.outer(mean, self.output_sum)
        varies = mixed.diagonal() > _CONSTANT * self.mixed.diagonal()
        return mixed.mul_(varies).mul_(varies[:, None]), cross.mul_(varies[:, None])

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


def _around_means(m: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sums over tokens of m m^T, m y^T, m and y, float64, by products of both less their means."""
    means = m.mean(dim=0), y.mean(dim=0)
    a, b = m - means[0], y - means[1]
    of_m, of_y = (mean.double() for mean in means)
    left_a, left_b = (x.sum(dim=0, dtype=torch.float64) for x in (a, b))  # by the rounding of the means
    sum_m, sum_y = len(m) * of_m + left_a, len(y) * of_y + left_b
    mixed = (a.T @ a).double().addr_(of_m, sum_m).addr_(left_a, of_m)
    cross = (a.T @ b).double().addr_(of_m, sum_y).addr_(left_a, of_y)
    return mixed, cross, sum_m, sum_y


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
