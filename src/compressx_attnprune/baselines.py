"""What Wanda and SparseGPT make of the same query and key projection under the same budget.

They are the starts that attention pruning must beat, layer by layer. Both are published with a budget for each row;
under a wider budget their rows stay balanced, and the counts are the budget's own, to the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compressx import NM, FixedMask, Pattern, Unstructured
from compressx.numerics.obs import inverse_cholesky, sweep
from compressx.numerics.wanda import wanda_scores
from compressx_attnprune.losses import Pair, parts

Choose = Callable[[Pair], Pair]
"""From scores of query and key to their masks, True = keep."""

_DAMPING = 0.01  # as SparseGPT is published


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the two methods measure of a layer's inputs, once for any number of budgets and when first needed.

    Attributes:
        x: [sequences, tokens, in_features] in any float dtype.
    """

    x: Tensor

    @cached_property
    def norms(self) -> Tensor:
        """||x_j||_2 of each input feature over all sequences and tokens, float64 [in_features]."""
        squares = torch.zeros(self.x.shape[-1], dtype=torch.float64, device=self.x.device)
        for part in parts(self.x):
            squares += part.flatten(0, 1).square_().sum(dim=0, dtype=torch.float64)
        return squares.sqrt()

    @cached_property
    def dead(self) -> Tensor:
        """Which features never fire, bool [in_features]."""
        return self.norms == 0

    @cached_property
    def factor(self) -> Tensor:
        """Factor of the inverse of the inputs' damped Hessian, as `numerics.obs.inverse_cholesky` gives it."""
        hessian = torch.zeros(self.x.shape[-1], self.x.shape[-1], device=self.x.device)
        for part in parts(self.x):
            flat = part.flatten(0, 1)
            hessian.addmm_(flat.T, flat)
        return inverse_cholesky(hessian, _DAMPING)[0]


def wanda(weights: Pair, inputs: Inputs, choose: Choose) -> tuple[Pair, Pair]:
    """Keep the largest |W| ||x||_2 of each row (Wanda, arXiv 2306.11695), values untouched.

    Args:
        weights: the dense weights.
        inputs: of the layer.
        choose: turns scores into masks.

    Returns:
        Masks and weights.
    """
    query, key = (_row_ranks(wanda_scores(w, inputs.norms)) for w in weights)
    keeps = choose((query, key))
    return keeps, (weights[0] * keeps[0], weights[1] * keeps[1])


def sparsegpt(weights: Pair, inputs: Inputs, choose: Choose, sparsity: float) -> tuple[Pair, Pair]:
    """Select and update by SparseGPT's sweep (arXiv 2301.00774), with one Hessian of the inputs.

    Args:
        weights: the dense weights.
        inputs: of the layer.
        choose: turns scores into masks; given masks are respected. For N:M there is `sparsegpt_nm`.
        sparsity: fraction of zeros that `choose` leaves.

    Returns:
        Masks and weights.

    Raises:
        compressx.numerics.obs.NotPositiveDefiniteError: when the Hessian cannot be factored.
    """
    pattern = Unstructured(sparsity, "row")
    both = torch.cat(weights)  # one sweep for query and key rows: its cost is in the columns
    swept, updated = sparsegpt_rows(both, inputs, pattern)
    # The sweep's own selection leads; what rounding by rows lacks of the budget, or has too much, is settled by score.
    scores = swept + _unit_rank(both / inputs.factor.diagonal())
    keeps = choose(_split(scores, weights))
    keep = torch.cat(keeps)
    if not torch.equal(keep, swept):
        _, updated = sparsegpt_rows(both, inputs, FixedMask(keep, pattern))
    return keeps, _split(updated, weights)


def sparsegpt_nm(weights: Pair, inputs: Inputs, patterns: tuple[NM, NM]) -> tuple[Pair, Pair]:
    """Do as `sparsegpt`, group by group as the sweep comes to it; each of the two has its N:M."""
    query, key = (sparsegpt_rows(w, inputs, pattern) for w, pattern in zip(weights, patterns, strict=True))
    return (query[0], key[0]), (query[1], key[1])


def sparsegpt_rows(weight: Tensor, inputs: Inputs, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Prune one weight [out_features, in_features] by SparseGPT; returns its mask and the new weight."""
    return sweep(weight, inputs.factor, pattern, inputs.dead)


def _row_ranks(scores: Tensor) -> Tensor:
    """Replace each score by its rank in its row, ties between rows in the order of the scores themselves."""
    return scores.argsort(dim=1, stable=True).argsort(dim=1) + _unit_rank(scores)


def _unit_rank(scores: Tensor) -> Tensor:
    """Map scores into [0, 1) in the order of their sizes, float64."""
    magnitude = scores.double().abs()
    return magnitude / (magnitude.max() * (1.0 + 1e-9)).clamp_min(torch.finfo(torch.float64).tiny)


def _split(both: Tensor, weights: Pair) -> Pair:
    query, key = torch.split(both, [len(w) for w in weights])
    return query, key
