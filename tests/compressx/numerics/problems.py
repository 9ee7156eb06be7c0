"""Least-squares problems of a linear, and errors read off slowly."""

from __future__ import annotations

import torch
from torch import Tensor


def problem(rows: int = 24, columns: int = 48, mix: float = 0.6, tokens: int = 400, seed: int = 0):
    """A weight and inputs that are correlated as much as `mix` says and differ in scale, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-1, 1, columns, dtype=torch.float64)[torch.randperm(columns, generator=generator)]
    x = x @ (torch.eye(columns, dtype=torch.float64) + mix * mixing) * scale
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), x


def damped(hessian: Tensor, damping: float = 0.01) -> Tensor:
    return hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)


def squares(change: Tensor, hessian: Tensor) -> float:
    return float(((change @ hessian) * change).sum())
