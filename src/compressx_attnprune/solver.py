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
class Text:
    """Inputs of one layer, [sequences, tokens, in_features] in any float dtype.

    Attributes:
        train: to learn from.
        held_out: to choose between candidates by.
    """

    train: Tensor
    held_out: Tensor


@dataclass(frozen=True, eq=False)
class Candidate:
    """Candidate weights and masks.

    Attributes:
        weights: zero where not kept.
        keeps: their masks, True = keep.
        error: relative error on the held-out sequences.
        losses: relative error on each gradient step's sequences before the step.
    """

    weights: Pair
    keeps: Pair
    error: float
    losses: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class QueryKeyLayer:
    """The inputs of a layer's solvers; statistics that do not depend on the budget are computed once, on first use.

    Attributes:
        loss: the objective.
        text: training and held-out inputs.
        dense: the dense weights.
    """

    loss: Loss
    text: Text
    dense: Pair

    @cached_property
    def inputs(self) -> InputStatistics:
        """Input statistics for Wanda and SparseGPT."""
        return InputStatistics(self.text.train)

    @cached_property
    def problem(self) -> KroneckerProblem:
        """The dense weights and their curvature, decomposed."""
        curvature = gauss_newton.measured_curvature(self.loss, self.text.train, self.dense)
        return KroneckerProblem(tuple(self.by_head(self.dense)), curvature, DAMPING)

    def by_head(self, pair: Pair) -> list[Tensor]:
        """View [heads * head_dim, in_features] as [heads, head_dim, in_features]."""
        return [w.view(-1, self.loss.attention.head_dim, w.shape[1]) for w in pair]


@dataclass(frozen=True, eq=False)
class QueryKeySolution:
    """A layer's result.

    Attributes:
        keeps: masks, True = keep.
        weights: zero where not kept.
        starts: the weights of Wanda and SparseGPT, by name.
        errors: relative held-out error of the result (key "") and of each start.
        losses: relative training error at each gradient step, if there were any.
        fell_back: whether a start was better than the mode's result.
    """

    keeps: Pair
    weights: Pair
    starts: Mapping[str, Pair]
    errors: Mapping[str, float]
    losses: tuple[float, ...]
    fell_back: bool


def solve(layer: QueryKeyLayer, budget: Budget, options: AttnPruneOptions) -> QueryKeySolution:
    """Prune a layer.

    Args:
        layer: inputs, dense weights and loss.
        budget: what to keep.
        options: the mode. Fixed masks are always reconstructed in closed form.

    Raises:
        NotPositiveDefiniteError: when the inputs' Hessian cannot be factored for SparseGPT's start.
    """
    starts = {
        "wanda": baselines.wanda(layer.dense, layer.inputs, budget),
        "sparsegpt": baselines.sparsegpt(layer.dense, layer.inputs, budget),
    }
    in_closed_form = budget.fixed or options.mode == "gauss-newton"
    if in_closed_form:
        *started, ours = judge(layer, [*starts.values(), closed_form(layer, budget)])
    else:
        started = judge(layer, list(starts.values()))
        ours = mask(layer, budget, regularization=options.regularization)
    best_start = min(started, key=lambda t: t.error)
    damping = DAMPING
    if ours.error > best_start.error and in_closed_form:
        layer.problem.forget()
    while ours.error > best_start.error and in_closed_form and damping < MOST_DAMPING:
        # With little text the curvature is inaccurate and needs more damping.
        damping = min(10.0 * damping, MOST_DAMPING)
        again = judge(layer, [closed_form(layer, budget, replace(layer.problem, damping=damping))])
        ours = min(ours, *again, key=lambda t: t.error)
    best = ours if ours.error <= best_start.error else best_start  # NaN never wins
    errors = {"": best.error, **{name: start.error for name, start in zip(starts, started, strict=True)}}
    weights = {name: weight for name, (_, weight) in starts.items()}
    return QueryKeySolution(best.keeps, best.weights, weights, errors, ours.losses, fell_back=best is best_start)


def closed_form(layer: QueryKeyLayer, budget: Budget, problem: KroneckerProblem | None = None) -> tuple[Pair, Pair]:
    """Select and reconstruct in closed form, in the metric of the loss; with fixed masks, only reconstruct.

    Returns masks and weights.
    """

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
        relaxed, losses = learn_masks(gradients, layer.text.train, layer.dense, regularization=value)
        keeps = budget.choose(ranked((relaxed[0], relaxed[1]), layer.inputs, layer.dense))
        masked = (layer.dense[0] * keeps[0], layer.dense[1] * keeps[1])
        tried.append(replace(judge(layer, [(keeps, masked)])[0], losses=losses))
    return min(tried, key=lambda t: t.error)


def judge(layer: QueryKeyLayer, candidates: Sequence[tuple[Pair, Pair]]) -> list[Candidate]:
    """Measure candidates (masks, weights) on the held-out text."""
    errors = relative_errors(layer.loss, layer.text.held_out, layer.dense, [w for _, w in candidates])
    return [Candidate(w, k, e) for (k, w), e in zip(candidates, errors, strict=True)]


def ranked(masks: Pair, inputs: InputStatistics, weights: Pair) -> Pair:
    """Turn relaxed masks into scores in the same order, with ties broken by Wanda's |W| * ||x||_2.

    Clipping leaves many entries at exactly 0 or 1, and the budget's threshold often falls among them.

    Returns:
        Scores in float64, in the weights' shapes, comparable between query and key.
    """
    second = [wanda_scores(w, inputs.norms) for w in weights]
    largest = max(float(s.max()) for s in second) or 1.0
    # Below the spacing of float32 values up to one, so that it only orders ties.
    query, key = (m.double() + s / largest * 2.0**-40 for m, s in zip(masks, second, strict=True))
    return query, key


def _by_row(pair: Sequence[Tensor]) -> Pair:
    return pair[0].flatten(0, 1), pair[1].flatten(0, 1)
