"""Masks learned by gradient descent, as published for Attention Weights Pruning (arXiv 2410.11261, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from compressx_attnprune.losses import SEQUENCES

Gradients: TypeAlias = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]
"""From inputs [sequences, tokens, in_features] and pruned weights to the relative error and the gradients of half of it
by these weights."""

LEARNING_RATE = 0.05
"""Approximate largest change of a mask entry per step."""

STEPS = 80
"""Gradient steps, each on a few sequences."""


def learn_masks(
    gradients: Gradients, x: Tensor, weights: Sequence[Tensor], *, regularization: float, steps: int | None = None
) -> tuple[list[Tensor], tuple[float, ...]]:
    """Learn relaxed masks in [0, 1] of one or several weights by gradient descent.

    Minimises 1/2 error / norm + regularization / 2 * (sum over the weights of mean M^2). Adam with clipping to [0, 1]
    and a cosine step size replaces the published momentum, whose fixed step diverges for small regularization.

    Each step takes the next few of the inputs [sequences, tokens, in_features], in any float dtype. Returns the masks,
    in the shapes of the dense weights, and the relative error at each step.
    """
    steps = steps or STEPS
    masks = [torch.ones_like(weight) for weight in weights]
    # An entry's pull falls with the number of entries: the usual epsilon would suppress it in large layers.
    optimizer = torch.optim.Adam(masks, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-20)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    losses: list[Tensor] = []
    for part in _batches(x, steps):
        value, grads = gradients(part, [mask * weight for mask, weight in zip(masks, weights, strict=True)])
        losses.append(value)
        for mask, weight, grad in zip(masks, weights, grads, strict=True):
            mask.grad = grad * weight + regularization / mask.numel() * mask
        optimizer.step()
        schedule.step()
        for mask in masks:
            mask.clamp_(0.0, 1.0)
    return masks, tuple(torch.stack(losses).tolist())  # read at once: each in its step would make the host wait for it


def _batches(x: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield a float32 batch for each step, cycling through the sequences in order."""
    size = min(SEQUENCES, len(x))
    for step in range(steps):
        yield x[[(step * size + i) % len(x) for i in range(size)]].float()
