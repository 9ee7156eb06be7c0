"""Wanda and SparseGPT on the same query and key projections under the same budget.

They are the starting points that attention pruning must beat in every layer. Both are published with a budget per row;
under a wider budget rows stay balanced, and the number of zeros matches the budget exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compressx import NM, FixedMask, Pattern, Unstructured, keep_masks
from compressx.numerics.obs import inverse_cholesky, sweep, wanda_scores
from compressx_attnprune.attention import Pair
from compressx_attnprune.losses import parts

_DAMPING = 0.01  # as published for SparseGPT


@dataclass(frozen=True)
class Budget:
    """The patterns of query and key: how many weights are kept, and which of them compete."""

    query: Pattern
    key: Pattern

    def choose(self, scores: Pair, known_finite: bool = False) -> Pair:
        """Turn scores [heads * head_dim, in_features] into masks (True = keep), as `keep_masks` does."""
        patterns = {"query": self.query, "key": self.key}
        query, key = keep_masks({"query": scores[0], "key": scores[1]}, patterns, known_finite=known_finite).values()
        return query, key

    @property
    def fixed(self) -> bool:
        """Whether the masks are fixed."""
        return isinstance(self.query, FixedMask)


@dataclass(frozen=True, eq=False)
class InputStatistics:
    """Statistics of a layer's inputs for both methods, computed on first use and shared by all budgets."""

    x: Tensor  # [sequences, tokens, in_features] in any float dtype

    @cached_property
    def norms(self) -> Tensor:
        """||x_j||_2 of each input feature over all sequences and tokens, float64 [in_features]."""
        squares = torch.zeros(self.x.shape[-1], dtype=torch.float64, device=self.x.device)
        for part in parts(self.x):
            squares += part.flatten(0, 1).square_().sum(dim=0, dtype=torch.float64)
        return squares.sqrt()

    @cached_property
    def factor(self) -> Tensor:
        """Cholesky factor of the inverse of the damped Hessian, from `numerics.obs.inverse_cholesky`."""
        hessian = torch.zeros(self.x.shape[-1], self.x.shape[-1], device=self.x.device)
        for part in parts(self.x):
            flat = part.flatten(0, 1)
            hessian.addmm_(flat.T, flat)
        return inverse_cholesky(hessian, _DAMPING)[0]


def wanda(weights: Pair, inputs: InputStatistics, budget: Budget) -> tuple[Pair, Pair]:
    """Keep the largest |W| ||x||_2 of each row (Wanda, arXiv 2306.11695); return masks and unchanged kept weights."""
    scores = (wanda_scores(w, inputs.norms) for w in weights)
    # The rank within the row; equal ranks of different rows are ordered by score.
    query, key = (s.argsort(dim=1, stable=True).argsort(dim=1) + _unit_rank(s) for s in scores)
    keeps = budget.choose((query, key))
    return keeps, (weights[0] * keeps[0], weights[1] * keeps[1])


def sparsegpt(weights: Pair, inputs: InputStatistics, budget: Budget) -> tuple[Pair, Pair]:
    """Select and update by SparseGPT's sweep (arXiv 2301.00774), with one Hessian of the inputs.

    Returns:
        Masks and weights.
    """
    if isinstance(budget.query, NM):  # the sweep selects group by group
        sides = zip(weights, (budget.query, budget.key), strict=True)
        (keep_q, query), (keep_k, key) = (sparsegpt_rows(w, inputs, pattern) for w, pattern in sides)
        return (keep_q, keep_k), (query, key)
    pattern = Unstructured(budget.query.sparsity, "row")
    both = torch.cat(weights)  # one sweep for both: its cost depends on the columns
    swept, updated = sparsegpt_rows(both, inputs, pattern)
    # The sweep's selection comes first; scores settle the difference between its rounding by rows and the budget.
    scores = swept + _unit_rank(both / inputs.factor.diagonal())
    keeps = budget.choose(_split(scores, weights))
    keep = torch.cat(keeps)
    if not torch.equal(keep, swept):
        _, updated = sparsegpt_rows(both, inputs, FixedMask(keep, pattern))
    return keeps, _split(updated, weights)


def sparsegpt_rows(weight: Tensor, inputs: InputStatistics, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Prune one weight [out_features, in_features] by SparseGPT; return its mask and the new weight."""
    return sweep(weight, inputs.factor, pattern, inputs.norms == 0)


def _unit_rank(scores: Tensor) -> Tensor:
    """Scale absolute scores to [0, 1), float64."""
    magnitude = scores.double().abs()
    return magnitude / (magnitude.max() * (1.0 + 1e-9)).clamp_min(torch.finfo(torch.float64).tiny)


def _split(both: Tensor, weights: Pair) -> Pair:
    query, key = torch.split(both, [len(w) for w in weights])
    return query, key
