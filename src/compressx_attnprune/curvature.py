"""Curvature of a loss at the dense query and key weights, as one Kronecker product per head.

The Gauss-Newton matrix of a head's weight [head_dim, in_features] is a sum over tokens of `G_i ⊗ x_i x_i^T`. It is
approximated by `rows ⊗ inputs`: the mean of the G_i, and the sum of the x_i x_i^T weighted by the traces of the G_i.
Both come from `Loss.probe`: for random signs, the gradients c_i satisfy E[c_i c_i^T] = G_i. So one backward pass per
batch measures both, for any rotary embedding, norm, window and values.

A head whose softmax is saturated, such as one that always looks at the first token, has next to no curvature at the
dense weights, and all of its weights would go for nothing; but without them it looks everywhere. So a little of the
curvature halfway to there, where the scores are half as large, is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx_attnprune.losses import SEQUENCES, Loss, Pair, parts


@dataclass(frozen=True, eq=False)
class Curvature:
    """One side's Gauss-Newton matrix, `rows[h] ⊗ inputs[h]` for each head.

    Attributes:
        rows: [heads, head_dim, head_dim], each of trace one.
        inputs: [heads, in_features, in_features].
    """

    rows: Tensor
    inputs: Tensor

    @contextmanager
    def damped(self, damping: float) -> Iterator[Curvature]:
        """Add a fraction of each factor's mean diagonal to its diagonal in a `with`, ten times more for `rows`.

        The row factor is small and well measured, but often close to rank one. This is done in place, because a copy
        of `inputs` would take as much memory again, and taken back exactly.
        """
        with _damped(self.rows, 10.0 * damping), _damped(self.inputs, damping):
            yield self

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


def measure(
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

    What is made of a curvature is the same in any unit. It is one, unless all weights are tiny.

    Args:
        loss: the objective.
        x: [sequences, tokens, in_features] in any float dtype.
        weights: the dense weights.
        probes: random sign draws per sequence.
        tokens: share of the tokens that `inputs` are summed over, sampled per head; 1 takes all.
        halfway: weight of the curvature at half of the scores.
        seed: of the signs and samples.
    """
    attention = loss.attention
    sides = (attention.query, attention.key)
    unit: Tensor | None = None
    generator = torch.Generator(x.device).manual_seed(seed)
    rows = [x.new_zeros(s.heads, attention.head_dim, attention.head_dim, dtype=torch.float32) for s in sides]
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
    half, step = loss.with_scores(0.5), SEQUENCES * HALFWAY_PARTS
    seen = sum(min(SEQUENCES, len(x) - start) for start in range(0, len(x), step))
    for number, part in enumerate(parts(x)):
        yield part, loss, 1.0
        if halfway and number % HALFWAY_PARTS == 0:
            # Halved scores halve the gradients by queries and keys, too, whose outer products count here.
            yield part, half, 4.0 * halfway * len(x) / seen


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
    raises their weights to at least the largest priority not taken. Heavy tokens are always included.

    Args:
        weights: [heads, tokens], non-negative.
        count: at most the number of tokens.
        generator: on the weights' device.

    Returns:
        Indices and weights, both [heads, count].
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


@contextmanager
def _damped(matrices: Tensor, damping: float) -> Iterator[None]:
    diagonal = matrices.diagonal(dim1=1, dim2=2)
    measured, mean = diagonal.clone(), diagonal.mean(dim=1, keepdim=True)
    # A head without influence (one token, or equal probabilities) still needs an invertible factor.
    diagonal.add_(torch.where(mean > 0, damping * mean, 1.0))
    try:
        yield
    finally:
        diagonal.copy_(measured)
