"""Masks and weights for a layer's query and key projection, as pure functions.

Two solvers. `gauss_newton` measures once how much each query and key matters to the attention matrix, scores the
weights with it and updates the survivors by the Optimal Brain Surgeon sweep, head by head. `learn_masks` is the
published method (Attention Weights Pruning, arXiv 2410.11261) on the two factors of a real layer: gradient descent on
relaxed masks. Inputs [sequences, tokens, in_features] may be in any float dtype; they are taken to float32 a few
sequences at a time. Both weights are float32 [heads * head_dim, in_features], and every pair is (query, key).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from compressx import FixedMask, Pattern
from compressx.obs import inverse_cholesky, sweep
from compressx_attnprune import objective
from compressx_attnprune.geometry import (
    Attention,
    Projection,
    place,
    place_backward,
    place_backward_diagonal,
    project,
    queries_and_keys,
)

Pair: TypeAlias = tuple[Tensor, Tensor]

SEQUENCES = 8
"""Sequences that are worked on at a time."""


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """How much the attention matrix depends on one side's projection: diagonals of the Gauss-Newton matrix.

    Attributes:
        tokens: summed over each head's features, [heads, sequences * tokens].
        rows: summed over the tokens, [heads, head_dim].
    """

    tokens: Tensor
    rows: Tensor


@torch.no_grad()
def relative_error(attention: Attention, x: Tensor, dense: Pair, pruned: Pair) -> float:
    """Compute ||P~ - P||_F^2 / ||P||_F^2 over all heads and sequences: the ratio of the *squared* norms."""
    error = norm = 0.0
    for part in _parts(x):
        before = queries_and_keys(attention, part, *dense)
        after = queries_and_keys(attention, part, *pruned)
        error += float(objective.squared_errors(attention, before, after).sum())
        norm += float(objective.squared_norms(attention, *before).sum())
    return error / norm


@torch.no_grad()
def sensitivities(attention: Attention, x: Tensor, weights: Pair) -> tuple[Sensitivity, Sensitivity]:
    """Measure the sensitivity of the attention matrix to the projected queries and keys.

    Args:
        attention: the layer.
        x: inputs of both projections [sequences, tokens, in_features].
        weights: the dense weights.

    Returns:
        That of the query side and that of the key side.
    """
    sides = (attention.query, attention.key)
    tokens: tuple[list[Tensor], list[Tensor]] = ([], [])
    rows: list[Tensor | float] = [0.0, 0.0]
    for part in _parts(x):
        projected = [project(attention, side, part, w) for side, w in zip(sides, weights, strict=True)]
        q, k = (place(attention, side, u) for side, u in zip(sides, projected, strict=True))
        for i, diagonal in enumerate(objective.gauss_newton(attention, q, k)):
            # [batch, heads, tokens, head_dim]
            before = place_backward_diagonal(attention, sides[i], projected[i], diagonal)
            tokens[i].append(before.sum(dim=-1).transpose(0, 1).flatten(1))
            rows[i] = rows[i] + before.sum(dim=(0, 2))
    query, key = (Sensitivity(torch.cat(t, dim=1), torch.as_tensor(r)) for t, r in zip(tokens, rows, strict=True))
    return query, key


def scores(sensitivity: Sensitivity, x: Tensor, weight: Tensor) -> Tensor:
    """Score each weight by the loss of dropping it: W^2 diag(H) g / sum(g), head by head.

    H = sum_i tokens_i x_i x_i^T is the head's token-weighted Hessian and g its row weights: the Gauss-Newton matrix
    taken as the product of the two.

    Args:
        sensitivity: of the weight's side.
        x: [sequences, tokens, in_features].
        weight: [heads * head_dim, in_features].

    Returns:
        [heads * head_dim, in_features].
    """
    heads, head_dim = sensitivity.rows.shape
    diagonal = weight.new_zeros(heads, weight.shape[1])  # of H
    at = 0
    for part in _parts(x):
        flat = part.flatten(0, 1)
        diagonal.addmm_(sensitivity.tokens[:, at : at + len(flat)], flat.square_())
        at += len(flat)
    total = sensitivity.rows.sum(dim=1, keepdim=True)
    share = sensitivity.rows / torch.where(total > 0, total, 1.0)
    return (weight.view(heads, head_dim, -1).square() * diagonal[:, None] * share[:, :, None]).flatten(0, 1)


def update(
    sensitivity: Sensitivity, x: Tensor, weight: Tensor, keep: Tensor, pattern: Pattern, *, damping: float
) -> tuple[Tensor, float]:
    """Give the surviving weights new values that make up for the dropped ones, with one Hessian for each head.

    Args:
        sensitivity: of the weight's side.
        x: [sequences, tokens, in_features].
        weight: [heads * head_dim, in_features].
        keep: bool, of the weight's shape.
        pattern: what `keep` was chosen as.
        damping: fraction of the Hessian's mean diagonal that is added to its diagonal.

    Returns:
        The new weight, zero where not kept, and the largest damping that a head needed.

    Raises:
        compressx.obs.NotPositiveDefiniteError: when a head's Hessian cannot be factored.
    """
    if isinstance(pattern, FixedMask):
        pattern = pattern.chosen_as
    new, used = weight.clone(), damping
    head_dim = sensitivity.rows.shape[1]
    for head, tokens in enumerate(sensitivity.tokens):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        if keep[rows].all():
            continue
        factor, needed = inverse_cholesky(_hessian(tokens, x), damping)
        _, new[rows] = sweep(weight[rows], factor, FixedMask(keep[rows], pattern))
        used = max(used, needed)
    return new, used


def _hessian(tokens: Tensor, x: Tensor) -> Tensor:
    """Sum tokens_i x_i x_i^T over all tokens, [in_features, in_features]."""
    hessian = torch.zeros(x.shape[-1], x.shape[-1], device=x.device)
    at = 0
    for part in _parts(x):
        flat = part.flatten(0, 1)
        flat.mul_(tokens[at : at + len(flat), None].sqrt())
        hessian.addmm_(flat.T, flat)
        at += len(flat)
    return hessian


def learn_masks(
    attention: Attention, x: Tensor, weights: Pair, *, regularization: float, steps: int, learning_rate: float
) -> Pair:
    """Learn relaxed masks in [0, 1] by gradient descent on the attention-matrix loss.

    L = 1/(2 h) sum_heads ||P~ - P||_F^2 / ||P||_F^2 + regularization / 2 (mean M_Q^2 + mean M_K^2), each step on the
    next few sequences. Adam with clipping to [0, 1] and a cosine step size stands in for the momentum of the
    publication, whose fixed step diverges when the regularization is small.

    Args:
        attention: the layer.
        x: [sequences, tokens, in_features].
        weights: the dense weights.
        regularization: lambda.
        steps: number of gradient steps.
        learning_rate: largest change of a mask entry in a step, about.

    Returns:
        The masks, of the weights' shapes.
    """
    masks = tuple(torch.ones_like(w) for w in weights)
    optimizer = torch.optim.Adam(masks, lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    starts = range(0, len(x), SEQUENCES)
    for step in range(steps):
        start = starts[step % len(starts)]
        part = x[start : start + SEQUENCES].float()
        _, grads = loss_and_gradients(attention, part, weights, (masks[0] * weights[0], masks[1] * weights[1]))
        for mask, weight, grad in zip(masks, weights, grads, strict=True):
            mask.grad = grad * weight + regularization / mask.numel() * mask
        optimizer.step()
        schedule.step()
        for mask in masks:
            mask.clamp_(0.0, 1.0)
    return masks[0], masks[1]


def default_regularization(sparsity: float) -> float:
    """Return the lambda that `learn_masks` is given for a sparsity when nobody chose one.

    The best lambda grows with the sparsity: on SmolLM2 about 0.1 at 50%, 0.2 at 70% and 1 at 90%.
    """
    return 0.1 * sparsity / (1.0 - sparsity)


def ranked(masks: Pair, x: Tensor, weights: Pair) -> Pair:
    """Turn relaxed masks into scores whose order is the masks' own, ties broken by |W| * ||x||_2 (Wanda's score).

    Clipping leaves many entries at exactly 0 and 1, and the budget's threshold often falls among them.

    Args:
        masks: of `learn_masks`.
        x: [sequences, tokens, in_features].
        weights: the dense weights.

    Returns:
        Scores in float64, of the weights' shapes, comparable between the two.
    """
    squares = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
    for part in _parts(x):
        squares += part.flatten(0, 1).square_().sum(dim=0, dtype=torch.float64)
    second = [w.double().abs() * squares.sqrt() for w in weights]
    largest = max(float(s.max()) for s in second) or 1.0
    # Below the spacing of float32 numbers up to one, so that it orders ties and nothing else.
    query, key = (m.double() + s / largest * 2.0**-40 for m, s in zip(masks, second, strict=True))
    return query, key


@torch.no_grad()
def loss_and_gradients(attention: Attention, x: Tensor, dense: Pair, pruned: Pair) -> tuple[float, Pair]:
    """Compute 1/(2 h) sum_heads ||P~ - P||_F^2 / ||P||_F^2 and its gradients with respect to the pruned weights.

    Args:
        attention: the layer.
        x: [batch, tokens, in_features], in the weights' dtype.
        dense: the dense weights.
        pruned: the pruned weights.

    Returns:
        The loss and the two gradients, of the weights' shapes.
    """
    sides = (attention.query, attention.key)
    before = queries_and_keys(attention, x, *dense)
    projected = [project(attention, side, x, w) for side, w in zip(sides, pruned, strict=True)]
    q, k = (place(attention, side, u) for side, u in zip(sides, projected, strict=True))
    head_weights = 1.0 / (attention.query.heads * objective.squared_norms(attention, *before))
    errors, *grads = objective.gradients(attention, before, (q, k), head_weights)
    dq, dk = (_weight_gradient(attention, *args, x) for args in zip(sides, projected, grads, strict=True))
    return float((errors * head_weights).sum()) / 2, (dq, dk)


def _weight_gradient(attention: Attention, side: Projection, projected: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Carry the gradient of queries or keys [batch, heads, tokens, head_dim] back to their weight."""
    flat = place_backward(attention, side, projected, grad).transpose(1, 2).flatten(2)  # [batch, tokens, out]
    return flat.flatten(0, 1).T @ x.flatten(0, 1)


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield a few sequences at a time as a float32 copy."""
    for start in range(0, len(x), SEQUENCES):
        yield x[start : start + SEQUENCES].to(torch.float32, copy=True)
