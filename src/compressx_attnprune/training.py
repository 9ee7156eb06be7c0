"""Gradient descent on a loss: learned masks as published, and refit of kept weights.

Each step uses the next few sequences, so all training text is used. `refit` returns the iterate with the lowest
held-out error, never a worse one than it started from. Weights are float32 [heads * head_dim, in_features], and every
pair is (query, key).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressx_attnprune.attention import Pair
from compressx_attnprune.losses import SEQUENCES, Loss, relative_error

LEARNING_RATE = 0.01
"""Of refits: approximate largest change of a weight per step, as a fraction of the weights' root mean square."""

MASK_LEARNING_RATE = 0.05
"""Approximate largest change of a mask entry per step."""

_CHECKS = 4  # measurements of the held-out error during training


@dataclass(frozen=True, eq=False)
class Text:
    """Inputs of one layer, [sequences, tokens, in_features] in any float dtype.

    Attributes:
        train: for gradients.
        held_out: for selecting the best iterate.
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
        losses: relative error on each step's sequences before the step.
    """

    weights: Pair
    keeps: Pair
    error: float
    losses: tuple[float, ...] = ()


def refit(
    loss: Loss, text: Text, dense: Pair, start: Candidate, *, steps: int, learning_rate: float = LEARNING_RATE
) -> Candidate:
    """Train the kept weights on the loss, with fixed masks.

    Args:
        loss: the objective.
        text: inputs.
        dense: the dense weights.
        start: initial weights and the masks; its weights are returned if no step is better on the held-out text.
        steps: gradient steps, each on a few sequences.
        learning_rate: as `LEARNING_RATE`.
    """
    best, keeps, weights = start, start.keeps, (start.weights[0].clone(), start.weights[1].clone())
    optimizer = Descent(weights, dense, learning_rate, steps)
    losses: list[Tensor] = []
    for step, x in enumerate(batches(text.train, steps)):
        value, grads = loss.gradients(x, dense, weights)
        losses.append(value)
        optimizer.step((grads[0] * keeps[0], grads[1] * keeps[1]))
        if (step + 1) % max(1, steps // _CHECKS) == 0 or step + 1 == steps:
            error = relative_error(loss, text.held_out, dense, weights)
            if error < best.error:  # NaN never wins
                best = Candidate((weights[0].clone(), weights[1].clone()), keeps, error)
    return replace(best, losses=read(losses))


def learn_masks(
    loss: Loss,
    x: Tensor,
    weights: Pair,
    *,
    regularization: float,
    steps: int,
    learning_rate: float = MASK_LEARNING_RATE,
) -> tuple[Pair, tuple[float, ...]]:
    """Learn relaxed masks in [0, 1] by gradient descent, the published method on the two factors of a real layer.

    Minimises 1/2 error / norm + regularization / 2 (mean M_Q^2 + mean M_K^2) (arXiv 2410.11261, Algorithm 1). Adam with
    clipping to [0, 1] and a cosine step size replaces the published momentum, whose fixed step diverges for small
    regularization.

    Args:
        loss: the objective.
        x: inputs [sequences, tokens, in_features] in any float dtype.
        weights: the dense weights.
        regularization: lambda.
        steps: gradient steps.
        learning_rate: as `MASK_LEARNING_RATE`.

    Returns:
        The masks, in the weights' shapes, and the relative error at each step.
    """
    masks = (torch.ones_like(weights[0]), torch.ones_like(weights[1]))
    # An entry's pull falls with the number of entries: the usual epsilon would suppress it in large layers.
    optimizer = torch.optim.Adam(masks, lr=learning_rate, betas=(0.9, 0.95), eps=1e-20)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses: list[Tensor] = []
    for part in batches(x, steps):
        value, grads = loss.gradients(part, weights, (masks[0] * weights[0], masks[1] * weights[1]))
        losses.append(value)
        for mask, weight, grad in zip(masks, weights, grads, strict=True):
            mask.grad = grad * weight + regularization / mask.numel() * mask
        optimizer.step()
        schedule.step()
        for mask in masks:
            mask.clamp_(0.0, 1.0)
    return masks, read(losses)


class Descent:
    """Adam on some weights in place, with a cosine step size."""

    def __init__(self, weights: Sequence[Tensor], dense: Sequence[Tensor], learning_rate: float, steps: int) -> None:
        self.weights = weights
        groups = [
            {"params": [w], "lr": learning_rate * float(d.square().mean().sqrt())}
            for w, d in zip(weights, dense, strict=True)
        ]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))
        )

    def step(self, grads: Sequence[Tensor]) -> None:
        """Take one step; weights whose gradients have always been zero do not change."""
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = grad
        self.optimizer.step()
        self.schedule.step()


def batches(x: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield a float32 batch for each step, cycling through the sequences in order."""
    size = min(SEQUENCES, len(x))
    for step in range(steps):
        at = [(step * size + i) % len(x) for i in range(size)]
        yield x[at].float()


def read(losses: list[Tensor]) -> tuple[float, ...]:
    """Copy the losses of all steps to the host at once: reading each in its step would make the host wait for it."""
    return tuple(torch.stack(losses).tolist()) if losses else ()
