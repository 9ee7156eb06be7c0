"""Remove key/value groups of one layer by what its output loses once the output projection was solved for anew.

A group's queries, keys and values go with its columns of the output projection. The other columns are solved for by
least squares, in closed form, so a set of groups is judged by what no other output projection can make up for. Whatever
is chosen and solved on the training text is compared on held-out text: dampings, and leaving the weights as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressx_attnprune.losses import parts
from compressx_attnprune.mixing import Mixing, Triple
from compressx_attnprune.moments import Moments, damped_factor, solve, unit_diagonal, without_factor
from compressx_attnprune.training import LEARNING_RATE, Descent, Text, batches, read

DAMPINGS = (0.03, 0.1, 0.3, 1.0)
"""Fractions of each feature's square that are tried: with little text, more damping."""

MOST_SETS = 512
"""Sets of groups that are compared; of more than so many, groups are removed one after the other."""


@dataclass(frozen=True, eq=False)
class Layer:
    """What removing groups needs of a layer and no choice changes.

    Attributes:
        mixing: the layer up to its output projection.
        text: training and held-out inputs.
        dense: the dense weights of query, key and value.
        output: the output projection's weight [out_features, h * value_dim].
        bias: whether it has a bias.
    """

    mixing: Mixing
    text: Text
    dense: Triple
    output: Tensor
    bias: bool

    def moments(self, weights: Triple | None = None) -> tuple[Moments, Moments]:
        """Gather the training and the held-out text with other weights of query, key and value, or the dense ones."""
        train, held_out = (self._gathered(x, weights) for x in (self.text.train, self.text.held_out))
        return train, held_out

    def _gathered(self, x: Tensor, weights: Triple | None) -> Moments:
        mixed = self.mixing.mixed
        if weights is None:
            return Moments.dense((mixed(part, self.dense) for part in parts(x)), self.output, bias=self.bias)
        pairs = ((mixed(part, weights), mixed(part, self.dense) @ self.output.T) for part in parts(x))
        return Moments.of(pairs, bias=self.bias)


@dataclass(frozen=True, eq=False)
class Solution:
    """A layer without some groups.

    Attributes:
        keep: bool [groups], True = keep.
        weights: of query, key and value, zero in the rows of groups that go.
        output: the output projection, zero in their columns.
        shift: what is added to its bias, float64 [out_features].
        damping: of the solution; infinite where the other columns stay as they are.
        error: |y' - y|^2 / |y|^2 of the attention's output on the held-out text, without its bias.
        cut: the same where nothing is solved for.
        losses: the same of the training sequences before each step of the refit.
    """

    keep: Tensor
    weights: Triple
    output: Tensor
    shift: Tensor
    damping: float
    error: float
    cut: float
    losses: tuple[float, ...] = ()


@torch.no_grad()
def prune(
    layer: Layer, groups: int, chosen: int | Tensor, *, dampings: Sequence[float] = DAMPINGS, refit: int = 0
) -> Solution:
    """Remove groups from a layer.

    Args:
        layer: inputs and dense weights.
        groups: how many there are.
        chosen: how many of them go, or which stay, bool [groups].
        dampings: to try; the best by held-out error is taken.
        refit: gradient steps that then train query, key and value of what stays, before the last solution.

    Raises:
        NotPositiveDefiniteError: second moments that cannot be factored with a damping.
    """
    if isinstance(chosen, int) and not chosen:  # nothing to prune: bit-identical
        every = torch.ones(groups, dtype=torch.bool, device=layer.output.device)
        return Solution(every, layer.dense, layer.output, layer.output.new_zeros(len(layer.output)), 0.0, 0.0, 0.0)
    train, held_out = layer.moments()
    keeps = {
        damping: choose(train, layer.output, groups, chosen, damping, bias=layer.bias)
        if isinstance(chosen, int)
        else chosen
        for damping in dampings
    }
    best = _best(layer, train, held_out, keeps, layer.dense)
    best = replace(best, weights=_cut(best.keep, layer.dense))
    if not layer.mixing.apart:  # what goes changes what the others mix
        best = _best(layer, *layer.moments(best.weights), dict.fromkeys(dampings, best.keep), best.weights)
    if not refit:
        return best
    weights, losses = _train(layer, best, steps=refit)
    trained = _best(layer, *layer.moments(weights), dict.fromkeys(dampings, best.keep), weights)
    better = trained if trained.error < best.error else best  # NaN never wins
    return replace(better, cut=best.cut, losses=losses)


def choose(moments: Moments, weight: Tensor, groups: int, dropped: int, damping: float, *, bias: bool) -> Tensor:
    """Choose the groups whose columns of a weight are missed least after the others were solved for.

    Without the columns S the least damped error is tr(W_S ((H^-1)_SS)^-1 W_S^T), the inverse of a Schur complement of
    the damped Hessian H (Hassibi and Stork 1993, of several weights at once: Kurtic et al. 2022, arXiv 2203.07259,
    eq. 6).

    Args:
        moments: of the dense layer.
        weight: W [out_features, h * value_dim], groups beside each other.
        groups: how many there are.
        dropped: how many go.
        damping: as for `moments.solve`.
        bias: as there.

    Returns:
        bool [groups], True = keep: the best set of all, or where there are more than `MOST_SETS` the one that is found
        by removing the cheapest group, and again.

    Raises:
        NotPositiveDefiniteError: the damped Hessian, or a part of its inverse, cannot be factored.
    """
    scaled, scale = unit_diagonal(moments.centred()[0] if bias else moments.mixed)
    inverse = torch.cholesky_inverse(damped_factor(scaled, damping))
    w = weight.double() * torch.where(scaled.diagonal() > 0.0, scale, 0.0)  # what is never mixed costs nothing
    columns = torch.arange(len(scaled), device=weight.device).view(groups, -1)

    def cheapest(sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        losses = []
        for gone in sets:
            own = columns[list(gone)].view(-1)
            part = w[:, own]
            solution, failed = torch.linalg.solve_ex(inverse[own[:, None], own], part.T @ part)
            losses.append(solution.diagonal().sum().masked_fill(failed > 0, math.nan))
        known = torch.stack(losses).tolist()
        if not all(map(math.isfinite, known)):
            raise without_factor(damping)
        return sets[min(range(len(sets)), key=known.__getitem__)]

    if math.comb(groups, dropped) <= MOST_SETS:
        gone = cheapest(list(itertools.combinations(range(groups), dropped)))
    else:
        gone = ()
        for _ in range(dropped):
            gone = cheapest([(*gone, group) for group in range(groups) if group not in gone])
    keep = torch.ones(groups, dtype=torch.bool, device=weight.device)
    keep[list(gone)] = False
    return keep


def spread(keep: Tensor, rows: int) -> Tensor:
    """Give each row or column of a linear the value of its group, bool [rows]."""
    return keep.repeat_interleave(rows // len(keep))


def _best(layer: Layer, train: Moments, held_out: Moments, keeps: Mapping[float, Tensor], weights: Triple) -> Solution:
    """Solve with each damping for the groups chosen with it, and return the best on the held-out text.

    Raises:
        NotPositiveDefiniteError: a damping with which the equations have no Cholesky factor.
    """
    candidates: list[tuple[float, Tensor, Tensor, Tensor]] = []
    for damping, keep in keeps.items():
        columns = spread(keep, layer.output.shape[1])
        candidates.append((damping, keep, *solve(train, layer.output, columns, damping, bias=layer.bias)))
        as_it_is = layer.output * columns
        shift = train.shift(as_it_is) if layer.bias else torch.zeros_like(train.output_sum)
        candidates.append((math.inf, keep, as_it_is, shift))  # at odd places
    errors = torch.stack([held_out.error(output, shift) for _, _, output, shift in candidates]).tolist()
    for place, damping in enumerate(keeps):
        if math.isnan(errors[2 * place]) and not math.isnan(errors[2 * place + 1]):
            raise without_factor(damping)
    at = min(range(len(errors)), key=errors.__getitem__)
    damping, keep, output, shift = candidates[at]
    return Solution(keep, weights, output, shift, damping, errors[at], errors[at | 1])


def _cut(keep: Tensor, weights: Triple) -> Triple:
    """Return weights whose rows of groups that go are zero."""
    query, key, value = (w * spread(keep, len(w))[:, None] for w in weights)
    return query, key, value


def _train(layer: Layer, start: Solution, *, steps: int) -> tuple[Triple, tuple[float, ...]]:
    """Train query, key and value of what stays towards the dense layer's output, with the output projection held."""
    query, key, value = (w.clone() for w in start.weights)
    weights = (query, key, value)
    optimizer = Descent(weights, layer.dense, LEARNING_RATE, steps)
    losses: list[Tensor] = []
    for x in batches(layer.text.train, steps):
        wanted = layer.mixing.mixed(x, layer.dense) @ layer.output.T
        missing = layer.mixing.mixed(x, weights) @ start.output.T + start.shift.to(wanted) - wanted
        size = wanted.square().sum().clamp_min(torch.finfo(wanted.dtype).tiny)
        losses.append(missing.square().sum() / size)
        grads = layer.mixing.gradients(x, weights, missing @ start.output / size)
        optimizer.step(_cut(start.keep, grads))
    return weights, read(losses)
