"""Remove whole key/value groups of one layer by what its output loses once the output projection was solved for anew.

A group's queries, keys and values go with its columns of the output projection. The other columns are solved for by
least squares, in closed form, so a set of groups is judged by what no other output projection can make up for. Whatever
is chosen and solved on the training text is compared on held-out text: dampings, and leaving the weights as they are.

With m the mixed values P V of a token, all heads beside each other, and y = W m' the output of the dense layer, whose
mixed values are m', everything that a new output projection is judged and solved by are sums over tokens of m m^T,
m y^T and |y|^2 (`Moments`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from compressx import FixedMask, Linear, Pattern, Projections, PruneResult, RecipeError, Structured
from compressx.numerics.obs import NotPositiveDefiniteError
from compressx_attnprune.attention import (
    Attention,
    gated,
    mixed_backward,
    mixed_values,
    place_pair,
    place_pair_backward,
    project_pair,
    queries_and_keys,
    values,
    values_backward,
    weight_gradient,
)
from compressx_attnprune.losses import parts
from compressx_attnprune.options import AttnPruneOptions
from compressx_attnprune.training import LEARNING_RATE, Descent, Text, batches, read

_ONLY = {"mode": "gauss-newton", "objective": "attention-output"}
"""The values with which groups can be pruned."""


def check_options(patterns: Mapping[str, Pattern], options: AttnPruneOptions) -> None:
    """Refuse options that have no effect on what a rule asks for.

    Raises:
        RecipeError: names the option, and what to do.
    """
    if asked_units(patterns) is None:
        return
    for name, only in _ONLY.items():
        if (given := getattr(options, name)) != only:
            raise RecipeError(
                f"{name}: {given} has no effect on kv-groups, which are chosen in closed form by the attention's "
                f"output; leave {name} out"
            )


def asked_units(patterns: Mapping[str, Pattern]) -> Structured | None:
    """Return the pattern of whole units that a rule asks for, or was asked for when masks were given; None for others.

    Raises:
        RecipeError: units other than key/value groups.
    """
    first = next(iter(patterns.values()))
    pattern = first.chosen_as if isinstance(first, FixedMask) else first
    if not isinstance(pattern, Structured):
        return None
    if pattern.unit != "kv-groups":
        raise RecipeError(
            f"attnprune prunes attention, and this rule's units are {pattern.unit}; of units it takes kv-groups"
        )
    return pattern


def prune_groups(
    layer: GroupedLayer, projections: Projections, patterns: Mapping[str, Pattern], pattern: Structured,
    options: AttnPruneOptions,
) -> dict[str, PruneResult]:  # fmt: skip
    """Remove groups from a layer, or solve for what stays where masks are given.

    Args:
        layer: inputs and dense weights.
        projections: of the block.
        patterns: of its four projections, or of two where one weight fuses query, key and value.
        pattern: which of the units of `patterns` go.
        options: with a mode and an objective that groups have.

    Raises:
        NotPositiveDefiniteError: as `remove_groups`.
    """
    units = pattern.units
    given = {n: p.keep for n, p in patterns.items() if isinstance(p, FixedMask)}
    chosen = units.kept(given) if given else pattern.dropped
    dampings = DAMPINGS if options.damping is None else (options.damping,)
    solution = remove_groups(layer, units.count, chosen, dampings=dampings, refit=options.refit)
    shapes = {n: (rows.out_features, rows.in_features) for n, rows in _linears(projections).items()}
    masks = units.masks(solution.keep, shapes)
    info = {"output_error": solution.error, "output_error.cut": solution.cut}
    info |= {"fell_back": 1.0} if solution.damping == torch.inf else {"damping": solution.damping}
    history = {"refit": solution.losses} if solution.losses else {}
    weights = _assemble(projections, solution)
    bias = projections.output.bias
    return {
        name: PruneResult(
            masks[name], weights[name], info, history=history, group="attention",
            bias=bias + solution.shift.to(bias.dtype) if name == projections.output.name and bias is not None else None,
        )
        for name in patterns
    }  # fmt: skip


def _linears(projections: Projections) -> dict[str, Linear]:
    return {**{rows.name: rows.linear for rows in projections.inward}, projections.output.name: projections.output}


def _assemble(projections: Projections, solution: GroupSolution) -> dict[str, Tensor]:
    """Put rows of queries, keys and values where their linears have them; gates stay as they are."""
    weights = {n: torch.zeros_like(x.weight, dtype=torch.float32) for n, x in _linears(projections).items()}
    sides = (projections.query, projections.key, projections.value)
    gates = () if projections.gate is None else ((projections.gate, projections.gate.weight),)
    for rows, weight in (*zip(sides, solution.weights, strict=True), *gates):
        weights[rows.name][slice(None) if rows.index is None else rows.index] = weight
    weights[projections.output.name] = solution.output
    return weights


Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Mixing:
    """A layer up to its output projection.

    Attributes:
        attention: the layer's geometry.
        value_bias: [h_kv * value_dim], or None.
    """

    attention: Attention
    value_bias: Tensor | None

    @property
    def apart(self) -> bool:
        """Whether heads mix the same without each other: no norm is over all of them."""
        return not any(side.norm is not None and side.norm.whole for side in (self.attention.query, self.attention.key))

    def mixed(self, x: Tensor, weights: Triple) -> Tensor:
        """Return P V of all heads beside each other, [batch, tokens, h * value_dim], of x [batch, tokens, n]."""
        query, key, value = weights
        q, k = queries_and_keys(self.attention, x, query, key)
        mixed = mixed_values(self.attention, q, k, values(self.attention, x, value, self.value_bias))
        return gated(self.attention, x, mixed)

    def gradients(self, x: Tensor, weights: Triple, grad: Tensor) -> Triple:
        """Backpropagate a gradient of `mixed` [batch, tokens, h * value_dim] to the three weights."""
        attention, (query, key, value) = self.attention, weights
        projected = project_pair(attention, x, query, key)
        v = values(attention, x, value, self.value_bias)
        dv = torch.zeros_like(v)
        placed = mixed_backward(attention, *place_pair(attention, projected), v, gated(attention, x, grad), dv)
        dq, dk = place_pair_backward(attention, projected, placed)
        dv = values_backward(attention, x, value, self.value_bias, dv)
        return weight_gradient(dq, x), weight_gradient(dk, x), weight_gradient(dv, x)


DAMPINGS = (0.03, 0.1, 0.3, 1.0)
"""Fractions of each feature's square that are tried: with little text, more damping."""

MOST_SETS = 512
"""Sets of groups that are compared; of more than so many, groups are removed one after the other."""


@dataclass(frozen=True, eq=False)
class GroupedLayer:
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
class GroupSolution:
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
def remove_groups(
    layer: GroupedLayer, groups: int, chosen: int | Tensor, *, dampings: Sequence[float] = DAMPINGS, refit: int = 0
) -> GroupSolution:
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
        return GroupSolution(every, layer.dense, layer.output, layer.output.new_zeros(len(layer.output)), 0.0, 0.0, 0.0)
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
        damping: as for `solve`.
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


def _best(
    layer: GroupedLayer, train: Moments, held_out: Moments, keeps: Mapping[float, Tensor], weights: Triple
) -> GroupSolution:
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
    for number, damping in enumerate(keeps):
        if math.isnan(errors[2 * number]) and not math.isnan(errors[2 * number + 1]):
            raise without_factor(damping)
    at = min(range(len(errors)), key=errors.__getitem__)
    damping, keep, output, shift = candidates[at]
    return GroupSolution(keep, weights, output, shift, damping, errors[at], errors[at | 1])


def _cut(keep: Tensor, weights: Triple) -> Triple:
    """Return weights whose rows of groups that go are zero."""
    query, key, value = (w * spread(keep, len(w))[:, None] for w in weights)
    return query, key, value


def _train(layer: GroupedLayer, start: GroupSolution, *, steps: int) -> tuple[Triple, tuple[float, ...]]:
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
    (Hoerl and Kennard 1970) that pulls towards W.

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
