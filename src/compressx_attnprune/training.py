"""Masks and weights by gradient descent on a loss: the published method, the refit of survivors, and both together.

Every step sees the next few sequences, so that the whole calibration text takes part, and a held-out part of it
decides which of the weights on the way are returned: none of these ever returns weights that are worse there than what
it was given. Weights are float32 [heads * head_dim, in_features], and every pair is (query, key).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressx_attnprune.losses import SEQUENCES, Loss, Pair, relative_error

Choose = Callable[[Pair, float], Pair]
"""From scores of query and key to their masks (True = keep) at a share of the budget, from 0 (all kept) to 1."""

_CHECKS = 4  # how often the held-out error is measured on the way


@dataclass(frozen=True, eq=False)
class Text:
    """Inputs of one layer, [sequences, tokens, in_features] in any float dtype.

    Attributes:
        train: what gradients see.
        held_out: what decides.
    """

    train: Tensor
    held_out: Tensor


@dataclass(frozen=True, eq=False)
class Trained:
    """Weights that were trained.

    Attributes:
        weights: zero where not kept.
        keeps: their masks, True = keep.
        error: relative error on the held-out sequences.
        losses: relative error on each step's sequences, before the step.
    """

    weights: Pair
    keeps: Pair
    error: float
    losses: tuple[float, ...] = ()


def refit(loss: Loss, text: Text, dense: Pair, start: Trained, *, steps: int, learning_rate: float) -> Trained:
    """Train the kept weights on the loss, the masks held.

    Args:
        loss: what the weights are held to.
        text: inputs.
        dense: the dense weights.
        start: weights to begin at, and the masks; returned as it is when no step is better on the held-out text.
        steps: gradient steps, each on a few sequences.
        learning_rate: largest change of a weight in a step, about, as a fraction of the weights' root mean square.
    """
    best, keeps, weights = start, start.keeps, _copy(start.weights)
    optimizer = _Descent(weights, dense, learning_rate, steps)
    losses: list[float] = []
    for step, x in enumerate(_batches(text.train, steps)):
        value, grads = loss.gradients(x, dense, weights)
        losses.append(value)
        optimizer.step((grads[0] * keeps[0], grads[1] * keeps[1]))
        if (step + 1) % max(1, steps // _CHECKS) == 0 or step + 1 == steps:
            best = _better(best, loss, text, dense, weights, keeps)
    return replace(best, losses=tuple(losses))


def joint(
    loss: Loss,
    text: Text,
    dense: Pair,
    metric: Pair,
    choose: Choose,
    *,
    steps: int,
    learning_rate: float,
) -> Trained:
    """Train weights from the dense ones on while the masks close in on the budget.

    The share of the budget that is dropped rises along a cubic curve over the first 60% of the steps (Zhu and Gupta,
    arXiv 1710.01878); a dropped weight may come back as long as it rises. The rest of the steps refits the survivors.

    Args:
        loss: what the weights are held to.
        text: inputs.
        dense: the dense weights.
        metric: what a change of each weight costs, its square root; |W| times this is what weights compete by.
        choose: turns scores into masks at a share of the budget.
        steps: gradient steps.
        learning_rate: as for `refit`.
    """
    weights = _copy(dense)
    keeps: Pair = (torch.ones_like(dense[0], dtype=torch.bool), torch.ones_like(dense[1], dtype=torch.bool))
    optimizer = _Descent(weights, dense, learning_rate, steps)
    rising = max(1, round(0.6 * steps))
    losses: list[float] = []
    best: Trained | None = None
    for step, x in enumerate(_batches(text.train, steps)):
        if step < rising:
            share = 1.0 - (1.0 - (step + 1) / rising) ** 3
            keeps = choose((weights[0].abs() * metric[0], weights[1].abs() * metric[1]), share)
        masked = (weights[0] * keeps[0], weights[1] * keeps[1])
        value, grads = loss.gradients(x, dense, masked)
        losses.append(value)
        # While the budget rises dropped weights are trained too, as if they were there: that is how they come back.
        optimizer.step(grads if step < rising else (grads[0] * keeps[0], grads[1] * keeps[1]))
        if step + 1 >= rising and ((steps - step - 1) % max(1, (steps - rising) // 2 or 1) == 0):
            best = _better(best, loss, text, dense, (weights[0] * keeps[0], weights[1] * keeps[1]), keeps)
    assert best is not None  # noqa: S101 - the last step is always measured
    return replace(best, losses=tuple(losses))


def learn_masks(
    loss: Loss, x: Tensor, weights: Pair, *, regularization: float, steps: int, learning_rate: float
) -> tuple[Pair, tuple[float, ...]]:
    """Learn relaxed masks in [0, 1] by gradient descent, the published method on the two factors of a real layer.

    Minimises 1/2 error / norm + regularization / 2 (mean M_Q^2 + mean M_K^2) (arXiv 2410.11261, Algorithm 1). Adam with
    clipping to [0, 1] and a cosine step size stands in for the momentum of the publication, whose fixed step diverges
    when the regularization is small.

    Args:
        loss: what the weights are held to.
        x: inputs [sequences, tokens, in_features] in any float dtype.
        weights: the dense weights.
        regularization: lambda.
        steps: gradient steps.
        learning_rate: largest change of a mask entry in a step, about.

    Returns:
        The masks, of the weights' shapes, and each step's relative error.
    """
    masks = (torch.ones_like(weights[0]), torch.ones_like(weights[1]))
    # The pull of an entry falls with their number: Adam's usual epsilon would stop it in large layers.
    optimizer = torch.optim.Adam(masks, lr=learning_rate, betas=(0.9, 0.95), eps=1e-20)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses: list[float] = []
    for part in _batches(x, steps):
        value, grads = loss.gradients(part, weights, (masks[0] * weights[0], masks[1] * weights[1]))
        losses.append(value)
        for mask, weight, grad in zip(masks, weights, grads, strict=True):
            mask.grad = grad * weight + regularization / mask.numel() * mask
        optimizer.step()
        schedule.step()
        for mask in masks:
            mask.clamp_(0.0, 1.0)
    return masks, tuple(losses)


class _Descent:
    """Adam on a pair of weights in place, the step size falling along a half cosine."""

    def __init__(self, weights: Pair, dense: Pair, learning_rate: float, steps: int) -> None:
        self.weights = weights
        groups = [
            {"params": [w], "lr": learning_rate * float(d.square().mean().sqrt())}
            for w, d in zip(weights, dense, strict=True)
        ]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))
        )

    def step(self, grads: Pair) -> None:
        """Take one step along the gradients; where they are zero from the start nothing moves."""
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = grad
        self.optimizer.step()
        self.schedule.step()


def _better(best: Trained | None, loss: Loss, text: Text, dense: Pair, weights: Pair, keeps: Pair) -> Trained:
    """Return the better of the best so far and a copy of these weights, by the held-out error."""
    error = relative_error(loss, text.held_out, dense, weights)
    # Written so that an error that is no number never wins.
    return Trained(_copy(weights), keeps, error) if best is None or error < best.error else best


def _batches(x: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield a float32 batch for each step, going through the sequences again and again in order."""
    size = min(SEQUENCES, len(x))
    for step in range(steps):
        at = [(step * size + i) % len(x) for i in range(size)]
        yield x[at].float()


def _copy(pair: Pair) -> Pair:
    return pair[0].clone(), pair[1].clone()
