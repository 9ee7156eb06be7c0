"""The mode `gauss-newton`: a loss's curvature as one Kronecker product per head, and pruning in its metric.

The Gauss-Newton matrix of a head's weight [head_dim, in_features] is a sum over tokens of `G_i ⊗ x_i x_i^T`. It is
approximated by `rows ⊗ inputs`: the mean of the G_i, and the sum of the x_i x_i^T weighted by the traces of the G_i.
Both come from `Loss.probe`: for random signs, the gradients c_i satisfy E[c_i c_i^T] = G_i. So one backward pass per
batch measures both, for any rotary embedding, norm, window and values.

A head whose softmax is saturated, such as one that always looks at the first token, has next to no curvature at the
dense weights, and all of its weights would go for nothing; but without them it looks everywhere. So a little of the
curvature halfway to there, where the scores are half as large, is added.

`select` and `reconstruct` minimise `sum_h tr(R_h (W_h - V_h) H_h (W_h - V_h)^T)` over weights W that a pattern allows,
V being the dense ones, R and H the row and input factors. SparseGPT and ALPS solve this for R = I and one H; here rows
and heads have their own. Both are matrix products over all heads at once; no n x n matrix is decomposed. Weights are
[heads, head_dim, n], n being in_features, and the sides (query and key) are solved together, because one budget may run
over both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from compressx.numerics.least_squares import ratio
from compressx_attnprune.attention import Pair
from compressx_attnprune.losses import SEQUENCES, Loss, parts


@dataclass(frozen=True, eq=False)
class Curvature:
    """One side's Gauss-Newton matrix, `rows[h] ⊗ inputs[h]` for each head."""

    rows: Tensor  # [heads, head_dim, head_dim], each of trace one
    inputs: Tensor  # [heads, in_features, in_features]

    def scale(self) -> Tensor:
        """Return the square root of the diagonal, [heads, head_dim, in_features]."""
        rows, inputs = (f.diagonal(dim1=1, dim2=2).sqrt() for f in (self.rows, self.inputs))
        return rows[:, :, None] * inputs[:, None, :]


TOKENS = 1 / 3
"""Share of the tokens that `inputs` are summed over. Token weights are uneven, so a sample is enough: compared with all
tokens, the errors of pruned layers grow by 2% at 50% sparsity and by less at higher sparsities."""

HALFWAY, HALFWAY_PARTS = 0.1, 4
"""Weight of the curvature at half of the scores beside that at the dense ones, and of how many parts one is measured
there, too. Ours, not published."""

TINY = 2.0**-30
"""Largest gradient below which all are scaled up: by weights of 1e-6, their squares are too small for float32."""

PANEL = 128
"""Rows of `inputs` at least that are accumulated at once, from the diagonal on."""


def measured_curvature(
    loss: Loss,
    x: Tensor,
    weights: Pair,
    *,
    probes: int = 1,
    tokens: float = TOKENS,
    halfway: float = HALFWAY,
    seed: int = 0,
) -> tuple[Curvature, Curvature]:
    """Measure the curvature of the query side and of the key side, in a unit that both share.

    What is made of a curvature is the same in any unit. It is one, unless all weights are tiny. Inputs are [sequences,
    tokens, in_features] in any float dtype, `probes` the random signs drawn for each; tokens are sampled per head.
    """
    head_dim, sides = loss.attention.head_dim, loss.attention.sides
    unit: Tensor | None = None
    generator = torch.Generator(x.device).manual_seed(seed)
    rows = [x.new_zeros(s.heads, head_dim, head_dim, dtype=torch.float32) for s in sides]
    inputs = [x.new_zeros(s.heads, x.shape[-1], x.shape[-1], dtype=torch.float32) for s in sides]
    for part, at, counts in _points(loss, x, halfway):
        for _ in range(probes):
            grads = at.probe(part, weights, generator)
            unit = _unit(grads) if unit is None else unit
            for grad in grads:
                grad.mul_(unit)
            _add(rows, inputs, part, grads, counts, tokens, generator)
            del grads
    for matrix in (m for side in inputs for m in side):
        matrix.triu_().add_(matrix.triu(1).T)
    query, key = (Curvature(_of_trace_one(r), m.div_(probes)) for r, m in zip(rows, inputs, strict=True))
    return query, key


def _unit(grads: Pair) -> Tensor:
    """Return a power of two that brings tiny gradients to about one; one if the largest is not tiny, or zero.

    A power of two changes no digit of what is made of them.
    """
    largest = torch.stack([torch.linalg.vector_norm(x, torch.inf) for x in grads]).amax()
    unit = torch.ldexp(torch.ones_like(largest), -torch.frexp(largest).exponent)
    return torch.where(largest < TINY, unit, 1.0)


def _points(loss: Loss, x: Tensor, halfway: float) -> Iterator[tuple[Tensor, Loss, float]]:
    """Yield parts of the sequences, each with the loss to probe there and what its Gauss-Newton matrix counts."""
    step = SEQUENCES * HALFWAY_PARTS
    seen = sum(min(SEQUENCES, len(x) - start) for start in range(0, len(x), step))
    for number, part in enumerate(parts(x)):
        yield part, loss, 1.0
        if halfway and number % HALFWAY_PARTS == 0:
            half = replace(loss.attention, scaling=0.5 * loss.attention.scaling)
            # Halved scores halve the gradients by queries and keys, too, whose outer products count here.
            yield part, replace(loss, attention=half), 4.0 * halfway * len(x) / seen


def _add(
    rows: Sequence[Tensor], inputs: Sequence[Tensor], x: Tensor, grads: Pair, counts: float, tokens: float,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Add what a probe's gradients, [batch, heads, tokens, head_dim] of each side, tell of both factors."""
    flat = x.flatten(0, 1)  # [tokens, in_features]
    count = math.ceil(tokens * len(flat))
    for of_rows, of_inputs, grad in zip(rows, inputs, grads, strict=True):
        of_heads = grad.transpose(0, 1).flatten(1, 2)  # [heads, tokens, head_dim]
        of_rows.baddbmm_(of_heads.transpose(1, 2), of_heads, alpha=counts)
        chosen, importance = _sample(of_heads.square().sum(dim=2), count, generator)
        for matrix, which, weight in zip(of_inputs, chosen, importance, strict=True):
            _add_upper(matrix, flat[which] * (counts * weight).sqrt()[:, None])


def _add_upper(matrix: Tensor, x: Tensor) -> None:
    """Add x^T x [n, n] of x [tokens, n] in panels of rows from the diagonal on, 56% to 60% of the products."""
    panel = max(PANEL, len(matrix) // 8)
    for start in range(0, len(matrix), panel):
        matrix[start : start + panel, start:].addmm_(x[:, start : start + panel].T, x[:, start:])


def _sample(weights: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample `count` tokens of each head, with new weights that keep weighted sums unbiased.

    Priority sampling (Duffield, Lund and Thorup 2007): takes the tokens with the largest priority `w / uniform`, and
    raises their weights to at least the largest priority not taken. Heavy tokens are always included. Weights [heads,
    tokens] are not negative. Returns indices and weights, both [heads, count].
    """
    if count == weights.shape[1]:
        return torch.arange(count, device=weights.device).expand(len(weights), count), weights
    uniform = torch.empty_like(weights).uniform_(generator=generator)
    priority, index = (weights / (1.0 - uniform)).topk(count + 1, dim=1)  # 1 - u, which is never 0
    chosen = index[:, :-1]
    return chosen, torch.maximum(weights.gather(1, chosen), priority[:, -1:])


def _of_trace_one(matrices: Tensor) -> Tensor:
    trace = matrices.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]
    identity = torch.eye(matrices.shape[-1], device=matrices.device) / matrices.shape[-1]
    return torch.where(trace > 0, matrices / trace.clamp_min(torch.finfo(matrices.dtype).tiny), identity)


Choose = Callable[[Sequence[Tensor], bool], Sequence[Tensor]]
"""From scores of each side, of the weights' shapes, to masks (True = keep) that meet the budget exactly; without a
check for NaN, for which the host would wait, where the second argument is true."""

PENALTIES = (0.02, 1.5)
"""First and last penalty of `select`, in units of the normalised metric's diagonal. Ours, not published."""

RELAXATION = 1.4
"""Over-relaxation of `select`: each dense point is taken so far beyond the last sparse one, for more iterations' worth
(Boyd et al. 2011, Distributed Optimization via ADMM, section 3.4.3, takes 1.5 to 1.8 with exact steps)."""


LEADING, FEWEST = 1 / 6, 64
"""Share of each input factor's eigenvectors that `select` looks for, those of the largest eigenvalues; and how many at
least, which are all of a small factor."""


_CHECK = 10
"""Steps of the conjugate gradient between looks at whether all heads are solved, for which the host has to wait."""


@dataclass(frozen=True, eq=False)
class _Side:
    """One side in scaled variables, in which the metric has a unit diagonal.

    With rows turned into eigenvectors of the row factor, the metric of each row is its eigenvalue times one matrix, the
    normalised input factor: head_dim systems of n equations, where there was one of head_dim * n.
    """

    scale: Tensor  # what a weight is multiplied with to get a unit diagonal
    dense: Tensor  # the scaled dense weights, not turned
    turn: Tensor  # eigenvectors of the normalised row factor, [heads, head_dim, head_dim]
    rows: Tensor  # its eigenvalues, [heads, head_dim, 1]
    inputs: Tensor  # the damped input factor, not normalised, [heads, n, n]
    unit: Tensor  # square root of its diagonal, [heads, 1, n]
    leading: Tensor  # approximate eigenvectors of the normalised input factor's largest eigenvalues, [heads, n, rank]
    values: Tensor  # these eigenvalues, ascending, [heads, 1, rank]
    felt: Tensor  # where a weight has any curvature; damping alone is no reason to keep the others

    def metric(self, w: Tensor) -> Tensor:
        """Multiply turned weights by the metric."""
        return (((w / self.unit) @ self.inputs) / self.unit).mul_(self.rows)

    def descent(self, residual: Tensor, penalty: float) -> Tensor:
        """Solve (metric + penalty) x = residual as if all other eigenvalues were the smallest leading one.

        The result is in units of that eigenvalue's equation: a step size has to follow.
        """
        rest = self.rows * self.values[:, :, :1] + penalty  # [heads, head_dim, 1]
        known = self.rows * self.values + penalty  # [heads, head_dim, rank]
        return residual + ((residual @ self.leading).mul_(rest / known - 1.0)) @ self.leading.mT


class _Pull:
    """Follow the minimum of the distance from the dense weights plus the penalty times that from a moving point.

    Each move costs one step of preconditioned steepest descent, with a step size for each row. With all eigenvectors
    known, a step ends at the minimum; with `LEADING` of them the point moves less than the steps gain.
    """

    def __init__(self, side: _Side) -> None:
        self.side = side
        self.near = side.turn.mT @ side.dense  # [heads, head_dim, n], the minimum so far, turned
        self.slope = torch.zeros_like(side.dense)  # the metric times (dense - near)

    def towards(self, point: Tensor, penalty: float) -> Tensor:
        """Step towards the minimum near a point [heads, head_dim, n], and return where that ends, not turned."""
        side = self.side
        residual = (side.turn.mT @ point).sub_(self.near).mul_(penalty).add_(self.slope)
        direction = side.descent(residual, penalty)
        image = side.metric(direction)
        power = (direction * image).sum(dim=2, keepdim=True) + penalty * direction.square().sum(dim=2, keepdim=True)
        step = ratio((direction * residual).sum(dim=2, keepdim=True), power)
        self.near = self.near.addcmul(step, direction)
        self.slope = self.slope.addcmul(step, image, value=-1.0)
        return side.turn @ self.near


@dataclass(frozen=True, eq=False)
class KroneckerProblem:
    """Dense weights and their metric, decomposed once for any number of budgets."""

    dense: tuple[Tensor, ...]  # of each side
    metric: tuple[Curvature, ...]  # of each side; as it was measured, but within `damped`
    damping: float  # fraction of each input factor's mean diagonal that is added to its diagonal; positive

    @contextmanager
    def damped(self) -> Iterator[None]:
        """Damp the metric in a `with`: in place, as a copy of `inputs` would take as much memory again.

        The row factor gets ten times more. It is small and well measured, but often close to rank one.
        """
        factors = [of for c in self.metric for of in ((c.rows, 10.0 * self.damping), (c.inputs, self.damping))]
        diagonals = [factor.diagonal(dim1=1, dim2=2) for factor, _ in factors]
        measured = [diagonal.clone() for diagonal in diagonals]
        for diagonal, (_, fraction) in zip(diagonals, factors, strict=True):
            mean = diagonal.mean(dim=1, keepdim=True)
            # A head without influence (one token, or equal probabilities) still needs an invertible factor.
            diagonal.add_(torch.where(mean > 0, fraction * mean, 1.0))
        try:
            yield
        finally:
            for diagonal, before in zip(diagonals, measured, strict=True):
                diagonal.copy_(before)

    @cached_property
    def sides(self) -> tuple[_Side, ...]:
        """The damped metric in normalised variables and decomposed, which given masks do without.

        The sides' input factors are those of `metric`, so they multiply by what is damped within `damped` alone.
        """
        felt = [c.scale() > 0 for c in self.metric]
        with self.damped():
            return tuple(_side(*of) for of in zip(self.dense, self.metric, felt, strict=True))


def select(problem: KroneckerProblem, choose: Choose, *, iterations: int = 48) -> tuple[list[Tensor], list[Tensor]]:
    """Choose which weights to keep and give them values: ADMM with a rising penalty, as ALPS does for one linear.

    Alternates between the unconstrained minimum near the last sparse point and the projection onto the budget, where
    weights compete by what dropping each costs (ALPS, arXiv 2406.07831, eq. 4; the geometric rise of the penalty is
    ours). The minimum is followed by one step of descent, and not solved for: 48 such steps reach a lower cost than 24
    exact ones, which take all eigenvectors of each head's input factor.

    FLOPs of a head: a step (2 + 4 * LEADING) n^2 head_dim + 4 n head_dim^2; once, for the leading eigenvectors, about
    1 n^3. For n = 4096 and head_dim = 128 that is 0.29e12 in 48 steps, 0.07e12 once and 0.05e12 for the reconstruction:
    16e12 for the 40 query and key heads of Llama-3-8B. All eigenvectors (9 n^3, half of it not matrix products) and 24
    exact steps took 35e12.

    Returns:
        Masks (True = keep) and weights, zero where not kept, of each side.
    """
    sides = problem.sides
    with problem.damped():
        sparse, keeps = _alternate(sides, choose, iterations)
        start = [z / s.scale for z, s in zip(sparse, sides, strict=True)]
        del sparse
        return keeps, _solved(problem, keeps, start, 10)


def _alternate(sides: Sequence[_Side], choose: Choose, iterations: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the last sparse point, in scaled variables, and its masks."""
    sparse, keeps = _project(sides, [s.dense for s in sides], choose, known_finite=False)
    duals = [torch.zeros_like(w) for w in sparse]
    pulls = [_Pull(s) for s in sides]
    first, last = PENALTIES
    rise = (last / first) ** (1.0 / max(1, iterations - 1))
    for step in range(iterations):
        penalty = first * rise**step
        near = [p.towards(z - u, penalty) for p, z, u in zip(pulls, sparse, duals, strict=True)]
        sums = [z + RELAXATION * (w - z) + u for w, z, u in zip(near, sparse, duals, strict=True)]
        for spent in (near, sparse, duals):  # a selection takes the most memory
            spent.clear()
        # NaN does not go away, so the last look finds any.
        sparse, keeps = _project(sides, sums, choose, known_finite=step + 1 < iterations)
        # The dual is in units of the penalty, which is about to rise.
        duals = [(w - z) / rise for w, z in zip(sums, sparse, strict=True)]
        del sums
    return sparse, keeps


def reconstruct(problem: KroneckerProblem, keeps: Sequence[Tensor], *, iterations: int = 60) -> list[Tensor]:
    """Give the kept weights the values that make up for the dropped ones: preconditioned conjugate gradient.

    Returns:
        Weights of each side, zero where not kept.
    """
    with problem.damped():
        return _solved(problem, keeps, problem.dense, iterations)


def _solved(
    problem: KroneckerProblem, keeps: Sequence[Tensor], starts: Sequence[Tensor], iterations: int
) -> list[Tensor]:
    sides = zip(problem.dense, problem.metric, keeps, starts, strict=True)
    return [_conjugate_gradient(*side, iterations) for side in sides]


def _conjugate_gradient(dense: Tensor, curvature: Curvature, keep: Tensor, start: Tensor, iterations: int) -> Tensor:
    """Solve one side, all its heads at once, each with its own step sizes, in the metric's unit-diagonal variables."""
    inverse = keep / curvature.scale().square()
    w = start * keep
    residual = (curvature.rows @ (dense - w) @ curvature.inputs).mul_(keep)
    direction = residual * inverse
    power = _dot(residual, direction)
    first = power.clone()
    for taken in range(iterations):
        if taken % _CHECK == 0 and taken and (power <= 1e-12 * first).all():
            break
        image = (curvature.rows @ direction @ curvature.inputs).mul_(keep)
        step = ratio(power, _dot(direction, image))
        w.add_(step * direction)
        residual.sub_(image.mul_(step))
        torch.mul(residual, inverse, out=image)
        power, before = _dot(residual, image), power
        direction.mul_(ratio(power, before)).add_(image)
    return w


def _side(dense: Tensor, curvature: Curvature, felt: Tensor) -> _Side:
    scale = curvature.scale()
    unit = curvature.rows.diagonal(dim1=1, dim2=2).sqrt()
    rows, turn = torch.linalg.eigh(curvature.rows / (unit[:, :, None] * unit[:, None, :]))
    unit = curvature.inputs.diagonal(dim1=1, dim2=2).sqrt()[:, None, :]
    leading, values = _leading(curvature.inputs, unit)
    # Rounding may leave eigenvalues a little below zero.
    rows = rows.clamp_min(0.0)[:, :, None]
    return _Side(scale, dense * scale, turn, rows, curvature.inputs, unit, leading, values, felt)


def _leading(inputs: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    """Return `_Side.leading` and `values` of factors [heads, n, n] scaled to a unit diagonal: subspace iteration."""
    stride = max(1, min(round(1 / LEADING), inputs.shape[-1] // FEWEST))
    columns = inputs[:, :, ::stride] / unit.mT  # a product with columns of the identity
    for _ in range(2):
        basis = torch.linalg.qr(columns).Q
        del columns
        columns = (inputs @ (basis / unit.mT)).div_(unit.mT)
    values, turn = torch.linalg.eigh(basis.mT @ columns)
    return basis @ turn, values.clamp_min(0.0)[:, None, :]


def _project(
    sides: Sequence[_Side], scaled: Sequence[Tensor], choose: Choose, *, known_finite: bool
) -> tuple[list[Tensor], list[Tensor]]:
    keeps = list(choose([w.square() * s.felt for w, s in zip(scaled, sides, strict=True)], known_finite))
    return [w * k for w, k in zip(scaled, keeps, strict=True)], keeps


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(1, 2), keepdim=True)
