"""The losses of fine-tuning, as pure functions of logits that are too large to copy in float32.

With a vocabulary of 49152 the logits of one window of 2048 tokens take 400 MB in float32, and autograd keeps several
copies. So a loss is computed a few rows at a time together with its gradient, and only the gradient is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

_RowLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

NO_TARGET = -100
"""Target of a window's last token, which has no next token."""

_IN_FLOAT32 = 2**24
"""Logits converted to float32 at a time: 64 MiB, a few hundred rows of a large vocabulary."""


def distillation_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, *, rows: int | None = None) -> Tensor:
    """Return T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over rows.

    Hinton et al. (arXiv 1503.02531, section 2). The factor T^2 keeps the gradient's scale independent of T.

    Args:
        student: logits [n, vocabulary], which receive the gradient.
        teacher: logits [n, vocabulary], constants, on the same device.
        temperature: T.
        rows: rows computed at a time.

    Returns:
        A scalar, at least float32 and non-negative up to rounding. `backward` can be called once.
    """

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        targets = (targets.to(logits.dtype) / temperature).log_softmax(dim=-1)
        predicted = (logits / temperature).log_softmax(dim=-1)
        return functional.kl_div(predicted, targets, reduction="sum", log_target=True) * temperature**2

    return _mean(student, teacher, len(student), summed, rows)


def next_token_loss(logits: Tensor, ids: Tensor, *, rows: int | None = None) -> Tensor:
    """Return the mean negative log-likelihood of all tokens but the first of each window.

    Args:
        logits: [windows, tokens, vocabulary].
        ids: int64 [windows, tokens].
        rows: as for `distillation_loss`.

    Returns:
        As `distillation_loss`.
    """
    following = functional.pad(ids[:, 1:], (0, 1), value=NO_TARGET).flatten()

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets, reduction="sum", ignore_index=NO_TARGET)

    # Slicing the last token off the logits would copy them.
    return _mean(logits.flatten(0, 1), following, ids.numel() - len(ids), summed, rows)


def _mean(logits: Tensor, targets: Tensor, count: int, summed: _RowLoss, rows: int | None) -> Tensor:
    loss: Tensor = _InChunks.apply(  # type: ignore[no-untyped-call]
        logits, targets, lambda x, y: summed(x, y) / count, rows or max(1, _IN_FLOAT32 // logits.shape[-1])
    )
    return loss


class _InChunks(torch.autograd.Function):
    """A sum over chunks of rows that computes its gradient in the forward pass and keeps nothing else."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, summed: _RowLoss, rows: int) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        ctx.gradient = torch.empty_like(logits)
        parts = (torch.split(logits.detach(), rows), torch.split(targets, rows), torch.split(ctx.gradient, rows))
        for chunk, target, into in zip(*parts, strict=True):
            with torch.enable_grad():
                leaf = chunk.to(dtype, copy=True).requires_grad_()
                loss = summed(leaf, target)
            into.copy_(torch.autograd.grad(loss, leaf)[0])
            total += loss.detach()
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scales[0]), None, None, None
