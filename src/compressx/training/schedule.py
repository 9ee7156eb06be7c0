"""How far a training is, by steps or by time, the learning rate there, and the windows of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compressx.recipe.sections import Finetune

WARMUP = 0.1
"""Fraction of a training in which the learning rate rises."""

CHECKS = 4
"""How often the held-out loss is measured during a training, beside once before it."""

BACK_OFF = 0.25
"""Factor of the learning rate after each held-out loss that is not below all before it."""


def fraction_done(settings: Finetune, steps: int, seconds: float) -> float:
    """Return the fraction of a training that is done, 1.0 when it is over.

    A training by time is over when less than half a step of time is left; it has at least one step.
    """
    if settings.minutes is None:
        return steps / settings.total_steps
    limit = 60.0 * settings.minutes
    over = steps > 0 and seconds + seconds / steps / 2 >= limit
    return 1.0 if over else min(seconds / limit, math.nextafter(1.0, 0.0))


def total_steps(settings: Finetune, steps: int, done: float) -> int:
    """Return how many steps a training has, by time an estimate from the `done` fraction of it."""
    if settings.minutes is None:
        return settings.total_steps
    return max(steps, round(steps / done)) if steps else 1


def learning_rate(settings: Finetune, done: float) -> float:
    """Return the learning rate after a fraction of a training: a linear warm-up, then a cosine to zero."""
    if done < WARMUP:
        return settings.learning_rate * (0.1 + 0.9 * done / WARMUP)
    along = (done - WARMUP) / (1.0 - WARMUP)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * along))


def backed_off(losses: Sequence[float]) -> float:
    """Return the factor of the learning rate after held-out losses, in the order in which they were measured."""
    return BACK_OFF ** sum(not loss < min(losses[:i]) for i, loss in enumerate(losses) if i)


def is_check_due(before: float, after: float) -> bool:
    """Return whether the held-out loss is to be measured after a step between two fractions of a training."""
    return math.floor(before * CHECKS) < math.floor(after * CHECKS)


def split_windows(windows: int, held_out: int) -> tuple[int, int]:
    """Return how many windows to train on and how many to hold out: the wanted number, at most an eighth."""
    unseen = min(held_out, windows // 8)
    return windows - unseen, unseen


def batch(windows: Tensor, step: int, settings: Finetune) -> Tensor:
    """Return the windows of a step [batch_size, tokens]; each epoch has its own order."""
    places = range(step * settings.batch_size, (step + 1) * settings.batch_size)
    orders = {
        epoch: torch.randperm(len(windows), generator=torch.Generator().manual_seed((settings.seed + epoch) % 2**63))
        for epoch in {place // len(windows) for place in places}
    }
    return windows[torch.stack([orders[place // len(windows)][place % len(windows)] for place in places])]
