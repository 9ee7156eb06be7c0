"""Slow float64 readings of definitions that several tests need."""

from __future__ import annotations

import torch


def channel_weights_reference(target: torch.Tensor) -> torch.Tensor:
    """Read the definition of `channel_weights` off, one token at a time: float64 [width]."""
    shares = [token**2 / (token**2).sum() for token in target.detach().double().flatten(0, -2)]
    return torch.stack(shares).mean(dim=0) ** -0.5


def relative_errors_reference(output: torch.Tensor, target: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Read the definition of `relative_errors` off, one token at a time: float64 [batch, tokens]."""
    pairs = zip(output.double().flatten(0, -2), target.double().flatten(0, -2), strict=True)
    errors = [(channels * (o - t) ** 2).sum() / (channels * t**2).sum() for o, t in pairs]
    return torch.stack(errors).view(target.shape[:-1])


def mean_error(output: torch.Tensor, target: torch.Tensor, of: torch.Tensor | None = None) -> float:
    """Return the mean error over tokens; channels weigh what they do in `of`, or in the target."""
    channels = channel_weights_reference(target if of is None else of)
    return float(relative_errors_reference(output, target, channels).mean())
