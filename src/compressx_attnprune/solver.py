"""Prune the query and key projection of one layer, never worse than Wanda or SparseGPT.

By the closed-form solver (`gauss-newton`), or masks by gradient descent (`mask`). Wanda's and SparseGPT's solutions are
computed as well, and the one with the lowest held-out error is returned.
Weights are float32 [heads * head_dim, in_features]; every pair is (query, key).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from compressx.numerics.obs import wanda_scores
from compressx_attnprune import baselines, gauss_newton
from compressx_attnprune.attention import Pair
from compressx_attnprune.baselines import Budget, InputStatistics
from compressx_attnprune.gauss_newton import KroneckerProblem
from compressx_attnprune.losses import Loss, MatrixLoss, relative_errors
from compressx_attnprune.options import AttnPruneOptions
from compressx_attnprune.training import learn_masks

DAMPING, MOST_DAMPING = 0.003, 0.3
"""Of the curvature, as a fraction of its mean; the most that is tried where another method is better."""

REGULARIZATIONS = (0.03, 0.1, 0.3, 1.0)
"""The lambdas that mask mode tries when none is given; ours, not published."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """Masks and weights, and how good they are."""

    keeps: Pair  # True = keep
    weights: Pair  # zero where not kept
    error: float  # relative, on the held-out sequences
    losses: tuple[float, ...] = ()  # relative error on each gradient step's sequences, before the step


@dataclass(frozen=True, eq=False)
class QueryKeyLayer:
    """A layer to prune; statistics that do not depend on the budget are computed once, on first use.

    Texts are inputs of the layer, [sequences, tokens, in_features] in any float dtype.
    """

    loss: Loss  # the objective
    text: Tensor  # to learn from
    held_out: Tensor  # to choose between candidates by
    dense: Pair

    @cached_property
    def inputs(self) -> InputStatistics:
        """Input statistics for Wanda and SparseGPT."""
        return InputStatistics(self.text)

    @cached_property
    def problem(self) -> KroneckerProblem:
        """The dense weights and their curvature, decomposed."""
        curvature = gauss_newton.measured_curvature(self.loss, self.text, self.dense)
        return KroneckerProblem(tuple(self.by_head(self.dense)), curvature, DAMPING)

    def by_head(self, pair: Pair) -> list[Tensor]:
        """View [heads * head_dim, in_features] as [heads, head_dim, in_features]."""
        return [w.view(-1, self.loss.attention.head_dim, w.shape[1]) for w in pair]


@dataclass(frozen=True, eq=False)
class Solution:
    """A layer's result."""

    best: Candidate
    ours: Candidate  # of the mode; the best, unless a start is better
    starts: Mapping[str, Candidate]  # Wanda's and SparseGPT's, by name


def prune_layer(layer: QueryKeyLayer, budget: Budget, options: AttnPruneOptions) -> Solution:
    """Prune a layer as the options say; fixed masks are always reconstructed in closed form."""
    starts = [method(layer.dense, layer.inputs, budget) for method in (baselines.wanda, baselines.sparsegpt)]
    in_closed_form = budget.fixed or options.mode == "gauss-newton"
    if in_closed_form:
        *started, ours = judge(layer, [*starts, closed_form(layer, budget)])
    else:
        started, ours = judge(layer, starts), mask(layer, budget, regularization=options.regularization)
    best_start = min(started, key=lambda t: t.error)
    damping = DAMPING
    if ours.error > best_start.error and in_closed_form:
        vars(layer.problem).pop("sides", None)  # made anew when needed again: two decompositions take much memory
    while ours.error > best_start.error and in_closed_form and damping < MOST_DAMPING:
        # With little text the curvature is inaccurate and needs more damping.
        damping = min(10.0 * damping, MOST_DAMPING)
        again = judge(layer, [closed_form(layer, budget, replace(layer.problem, damping=damping))])
        ours = min(ours, *again, key=lambda t: t.error)
    best = ours if ours.error <= best_start.error else best_start  # NaN never wins
    return Solution(best, ours, dict(zip(("wanda", "sparsegpt"), started, strict=True)))


def closed_form(layer: QueryKeyLayer, budget: Budget, problem: KroneckerProblem | None = None) -> tuple[Pair, Pair]:
    """Return masks and weights in closed form, in the metric of the loss; of fixed masks, the weights."""

    def choose(scores: Sequence[Tensor], known_finite: bool) -> list[Tensor]:
        return layer.by_head(budget.choose(_by_row(scores), known_finite=known_finite))

    if budget.fixed:
        keeps = choose(layer.by_head(layer.dense), known_finite=False)
        weights = gauss_newton.reconstruct(problem or layer.problem, keeps)
    elif all(k.all() for k in budget.choose(layer.dense)):
        return budget.choose(layer.dense), layer.dense  # nothing to prune: bit-identical
    else:
        keeps, weights = gauss_newton.select(problem or layer.problem, choose)
    return _by_row(keeps), _by_row(weights)


def mask(layer: QueryKeyLayer, budget: Budget, *, regularization: float | None = None) -> Candidate:
    """Learn masks as published, without changing kept weights.

    Without a lambda, masks are learned to the end for each of `REGULARIZATIONS` and the best by held-out error is
    taken: too large a lambda is ahead early on.
    """
    loss, tried = layer.loss, []
    assert isinstance(loss, MatrixLoss)  # noqa: S101 - as the options say

    def gradients(x: Tensor, pruned: Sequence[Tensor]) -> tuple[Tensor, Pair]:
        return loss.gradients(x, layer.dense, (pruned[0], pruned[1]))

    for value in REGULARIZATIONS if regularization is None else (regularization,):
        relaxed, losses = learn_masks(gradients, layer.text, layer.dense, regularization=value)
        keeps = budget.choose(ranked((relaxed[0], relaxed[1]), layer.inputs, layer.dense))
        masked = (layer.dense[0] * keeps[0], layer.dense[1] * keeps[1])
        tried.append(replace(judge(layer, [(keeps, masked)])[0], losses=losses))
    return min(tried, key=lambda t: t.error)


def judge(layer: QueryKeyLayer, candidates: Sequence[tuple[Pair, Pair]]) -> list[Candidate]:
    """Measure candidates (masks, weights) on the held-out text."""
    errors = relative_errors(layer.loss, layer.held_out, layer.dense, [w for _, w in candidates])
    return [Candidate(*of, error) for of, error in zip(candidates, errors, strict=True)]


def ranked(masks: Pair, inputs: InputStatistics, weights: Pair) -> Pair:
    """Turn relaxed masks into float64 scores in the same order, with ties broken by Wanda's |W| * ||x||_2.

    Clipping leaves many entries at exactly 0 or 1, and the budget's threshold often falls among them.
    """
    second = [wanda_scores(w, inputs.norms) for w in weights]
    largest = max(float(s.max()) for s in second) or 1.0
    # Below the spacing of float32 values up to one, so that it only orders ties.
    query, key = (m.double() + s / largest * 2.0**-40 for m, s in zip(masks, second, strict=True))
    return query, key


def _by_row(pair: Sequence[Tensor]) -> Pair:
    return pair[0].flatten(0, 1), pair[1].flatten(0, 1)
