"""What Wanda and SparseGPT make of the same query and key projection under the same budget.

They are the starts that attention pruning must beat, layer by layer. Both are published with a budget for each row;
under a wider budget their rows stay balanced, and the counts are the budget's own, to the weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from compressx import FixedMask, Pattern, Unstructured
from compressx.obs import inverse_cholesky, sweep
from compressx_attnprune.losses import Pair, parts

Choose = Callable[[Pair], Pair]
"""From scores of query and key to their masks, True = keep."""

_DAMPING = 0.01  # as SparseGPT is published


def wanda(weights: Pair, x: Tensor, choose: Choose) -> tuple[Pair, Pair]:
    """Keep the largest |W| ||x||_2 of each row (Wanda, arXiv 2306.11695), values untouched.

    Args:
        weights: the dense weights.
        x: inputs [sequences, tokens, in_features].
        choose: turns scores into masks.

    Returns:
        Masks and weights.
    """
    norms = feature_norms(x)
    query, key = (_row_ranks(w.double().abs() * norms) for w in weights)
    keeps = choose((query, key))
    return keeps, (weights[0] * keeps[0], weights[1] * keeps[1])


def sparsegpt(weights: Pair, x: Tensor, choose: Choose, sparsity: float) -> tuple[Pair, Pair]:
    """Select and update by SparseGPT's sweep (arXiv 2301.00774), with one Hessian of the inputs.

    Args:
        weights: the dense weights.
        x: inputs [sequences, tokens, in_features].
        choose: turns scores into masks; given masks or N:M groups are respected.
        sparsity: fraction of zeros that `choose` leaves.

    Returns:
        Masks and weights.

    Raises:
        compressx.obs.NotPositiveDefiniteError: when the Hessian cannot be factored.
    """
    factor, dead = _factor(x)
    pattern = Unstructured(sparsity, "row")
    # The sweep's own selection leads; what rounding by rows lacks of the budget, or has too much, is settled by score.
    swept = [sweep(w, factor, pattern, dead) for w in weights]
    scores = [keep + _unit_rank(w / factor.diagonal()) for (keep, _), w in zip(swept, weights, strict=True)]
    keeps = choose((scores[0], scores[1]))
    query, key = (sweep(w, factor, FixedMask(k, pattern))[1] for w, k in zip(weights, keeps, strict=True))
    return keeps, (query, key)


def sparsegpt_rows(weight: Tensor, x: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Prune one weight [out_features, in_features] by SparseGPT; returns its mask and the new weight."""
    factor, dead = _factor(x)
    return sweep(weight, factor, pattern, dead)


def feature_norms(x: Tensor) -> Tensor:
    """Compute ||x_j||_2 of each input feature over all sequences and tokens, float64 [in_features]."""
    squares = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
    for part in parts(x):
        squares += part.flatten(0, 1).square_().sum(dim=0, dtype=torch.float64)
    return squares.sqrt()


def _factor(x: Tensor) -> tuple[Tensor, Tensor]:
    """Factor the inverse of the inputs' damped Hessian; returns it and which features never fire, bool."""
    hessian = torch.zeros(x.shape[-1], x.shape[-1], device=x.device)
    for part in parts(x):
        flat = part.flatten(0, 1)
        hessian.addmm_(flat.T, flat)
    return inverse_cholesky(hessian, _DAMPING)[0], hessian.diagonal() == 0


def _row_ranks(scores: Tensor) -> Tensor:
    """Replace each score by its rank in its row, ties between rows in the order of the scores themselves."""
    return scores.argsort(dim=1, stable=True).argsort(dim=1) + _unit_rank(scores)


def _unit_rank(scores: Tensor) -> Tensor:
    """Map scores into [0, 1) in the order of their sizes, float64."""
    magnitude = scores.double().abs()
    return magnitude / (magnitude.max() * (1.0 + 1e-9)).clamp_min(torch.finfo(torch.float64).tiny)
