"""Attention Weights Pruning as published, on one fused matrix: the setting of the paper's Figure 2.

A relaxed mask `M` in [0, 1] on the fused `W = W_Q W_K^T` preserves `P = softmax(X W X^T)` under an attention mask:

    L(M) = 1/2 ||P~ - P||_F^2 + regularization/2 ||M||_F^2,    P~ = softmax(X (M∘W) X^T)

(arXiv 2410.11261, Algorithm 1 and the theorem on the gradient of L). `learn_mask` minimises L, `binarize` turns
the minimiser into a mask, and the baselines prune the two factors, which are what a model stores. Everything is float64
and batched: the first dimension of every tensor is the seed. The paper does not give its constants (width, tokens,
regularization, steps, step size, momentum, scale); all defaults are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from compressx import Unstructured, drop_lowest
from compressx.numerics.obs import inverse_cholesky, sweep
from compressx.numerics.wanda import wanda_scores
from compressx_attnprune.figure2 import descent

Optimizer: TypeAlias = Literal["line-search", "momentum"]


@dataclass(frozen=True, eq=False)
class FusedAttention:
    """Attention with fused weights, batched over seeds.

    Attributes:
        inputs: X [seeds, tokens, width].
        weight: W [seeds, width, width], dense.
        mask: bool [tokens, tokens], True where the row's token attends to the column's; any kind.

    Raises:
        ValueError: a mask that is not bool [tokens, tokens], or that has a row without True.
    """

    inputs: Tensor
    weight: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        tokens = self.inputs.shape[1]
        if self.mask.dtype != torch.bool or self.mask.shape != (tokens, tokens):
            raise ValueError(
                f"the attention mask must be bool [{tokens}, {tokens}], got {self.mask.dtype} {list(self.mask.shape)}"
            )
        if not self.mask.any(dim=1).all():
            row = int((~self.mask.any(dim=1)).nonzero()[0])
            raise ValueError(f"row {row} of the attention mask attends to no token, so its softmax is undefined")

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

    def take(self, seeds: Tensor) -> FusedAttention:
        """Return the attention of a subset of seeds, by index."""
        if len(seeds) == len(self.inputs):
            return self
        part = replace(self, inputs=self.inputs[seeds], weight=self.weight[seeds])
        vars(part).update(dense=self.dense[seeds], _bias=self._bias)  # reuse the cached properties
        return part


@dataclass(frozen=True, eq=False)
class Sample:
    """Random problems of the published experiment, one per seed.

    Attributes:
        attention: X and the fused W = W_Q W_K^T under the attention mask.
        query: the factor W_Q^T, weight[out, in] as a model stores it, [seeds, width, width].
        key: W_K^T likewise.
    """

    attention: FusedAttention
    query: Tensor
    key: Tensor


def sample(
    seeds: Sequence[int], *, tokens: int, width: int, rank: int = 4, scale: float = 0.15, mask: Tensor | None = None
) -> Sample:
    """Draw Gaussian W_Q and W_K, truncated to their largest singular values, and a full-rank Gaussian X.

    Args:
        seeds: one per problem; the factors do not depend on the number of tokens.
        tokens: rows of X.
        width: columns of X.
        rank: number of singular values kept; four in the paper.
        scale: standard deviation of the factors' entries before truncation (ours).
        mask: bool [tokens, tokens]; causal when None.

    Raises:
        ValueError: a rank outside [1, width], or an invalid mask.
    """
    if not 1 <= rank <= width:
        raise ValueError(f"rank must be between 1 and the width {width}, got {rank}")
    factors, inputs = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        factors.append(scale * torch.randn(2, width, width, generator=generator, dtype=torch.float64))
        inputs.append(torch.randn(tokens, width, generator=generator, dtype=torch.float64))
    u, singular, v = torch.linalg.svd(torch.stack(factors))  # [seeds, 2, width, width]
    query, key = ((u[..., :rank] * singular[..., None, :rank]) @ v[..., :rank, :]).unbind(dim=1)
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril_()
    weight = query.transpose(1, 2) @ key
    return Sample(FusedAttention(torch.stack(inputs), weight, causal if mask is None else mask), query, key)


def loss_and_gradient(attention: FusedAttention, relaxed: Tensor, regularization: float) -> tuple[Tensor, Tensor]:
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


def curvature(attention: FusedAttention) -> Tensor:
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
    attention: FusedAttention,
    regularization: float,
    *,
    optimizer: Optimizer = "line-search",
    steps: int = 2000,
    tolerance: float = 1e-3,
    step_size: float = 0.5,
    momentum: float = 0.9,
) -> Learned:
    """Minimise L(M) from M = 1 (Algorithm 1 before it binarises).

    `line-search` is monotone projected gradient descent on [0, 1], scaled by the diagonal of `curvature` plus the
    regularization (`descent.minimize_in_box`). `momentum` is the published descent: a fixed step without projection,
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
        descent.DivergedError: `momentum` diverged.
    """
    if not 0.0 < regularization < float("inf"):
        raise ValueError(f"regularization must be positive and finite, got {regularization}")
    dense = torch.ones_like(attention.weight)

    def objective(relaxed: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        return loss_and_gradient(attention.take(seeds), relaxed, regularization)

    with torch.no_grad(), _flushed_denormals():
        if optimizer == "momentum":
            relaxed, losses = descent.minimize_with_momentum(
                objective, dense, step_size=step_size, momentum=momentum, steps=steps
            )
        else:
            metric = curvature(attention).add_(regularization)
            relaxed, losses = descent.minimize_in_box(
                objective, dense, metric, scale=regularization, steps=steps, tolerance=tolerance
            )
        _, gradient = loss_and_gradient(attention, relaxed, regularization)
        residual = descent.residual(relaxed, gradient, regularization)
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


def magnitude_fused(drawn: Sample, sparsity: float) -> Tensor:
    """Drop the smallest |W| of each fused matrix."""
    weight = drawn.attention.weight
    keep = drop_lowest(weight.abs().flatten(1), round(sparsity * weight[0].numel()))
    return weight * keep.view(weight.shape)


def wanda_factors(drawn: Sample, sparsity: float) -> Tensor:
    """Prune each factor by Wanda (arXiv 2306.11695), |W_ij| ||X_j||_2 within each output row, then fuse them."""
    norms = drawn.attention.inputs.norm(dim=1)[:, None]  # [seeds, 1, width]
    query, key = (_wanda(w, norms, sparsity) for w in (drawn.query, drawn.key))
    return query.transpose(1, 2) @ key


def _wanda(weight: Tensor, norms: Tensor, sparsity: float) -> Tensor:
    scores = wanda_scores(weight, norms).flatten(0, 1)  # [seeds * out, in]
    return weight * drop_lowest(scores, round(sparsity * scores.shape[1])).view(weight.shape)


def sparsegpt_factors(drawn: Sample, sparsity: float) -> Tensor:
    """Prune and update each factor by SparseGPT (arXiv 2301.00774), thresholds over column blocks, then fuse them."""
    pattern = Unstructured(sparsity, group="layer")
    fused = []
    for x, query, key in zip(drawn.attention.inputs, drawn.query, drawn.key, strict=True):
        factor, _ = inverse_cholesky(x.T @ x)
        fused.append(sweep(query, factor, pattern)[1].T @ sweep(key, factor, pattern)[1])
    return torch.stack(fused)


BASELINES: Mapping[str, Callable[[Sample, float], Tensor]] = {
    "SparseGPT on factors": sparsegpt_factors,
    "Wanda on factors": wanda_factors,
    "magnitude on fused W": magnitude_fused,
}
"""By name, functions of a sample and a sparsity that return the fused pruned weight [seeds, width, width]."""


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
