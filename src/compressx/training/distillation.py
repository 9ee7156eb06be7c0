"""The losses of fine-tuning, as pure functions of logits that are too large to copy in float32.

With a vocabulary of 49152 the logits of one window of 2048 tokens take 400 MB in float32, and autograd keeps several
copies. So a loss is computed a few rows at a time together with its gradient in closed form, and only the gradient is
kept. A chunk of rows fits into a CPU's last cache: its numbers are read a dozen times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

_RowLoss: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From logits [rows, vocabulary], which it may overwrite, and targets: the summed loss and its gradient."""

NO_TARGET = -100
"""Target of a window's last token, which has no next token."""

_AT_ONCE = 2**21
"""Logits converted to float32 at a time: 8 MiB, some 40 rows of a large vocabulary."""

_AT_ONCE_ON_ACCELERATOR = 2**26
"""The same where a chunk is a few kernel launches: 256 MiB."""


def distillation_loss(student: Tensor, teacher: Tensor, *, rows: int | None = None) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)), the mean over rows (Hinton et al., arXiv 1503.02531, T = 1).

    Args:
        student: logits [n, vocabulary], which receive the gradient.
        teacher: logits [n, vocabulary], constants, on the same device.
        rows: rows computed at a time.

    Returns:
        A scalar, at least float32 and non-negative up to rounding. `backward` can be called once.
    """

    def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # With p and q the teacher's and the student's probabilities, the loss is sum p (log p - log q) and its gradient
        # q - p.
        wanted = targets.to(logits.dtype, copy=True)
        wanted, predicted = wanted.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        p = torch.exp(wanted)
        loss = torch.dot(p.flatten(), wanted.sub_(predicted).flatten())
        return loss, predicted.exp_().sub_(p)

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

    def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.requires_grad_()
            loss = functional.cross_entropy(leaf, targets, reduction="sum", ignore_index=NO_TARGET)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    # Slicing the last token off the logits would copy them.
    return _mean(logits.flatten(0, 1), following, ids.numel() - len(ids), summed, rows)


def _mean(logits: Tensor, targets: Tensor, count: int, summed: _RowLoss, rows: int | None) -> Tensor:
    at_once = _AT_ONCE if logits.device.type == "cpu" else _AT_ONCE_ON_ACCELERATOR
    loss: Tensor = _InChunks.apply(  # type: ignore[no-untyped-call]
        logits, targets, count, summed, rows or max(1, at_once // logits.shape[-1])
    )
    return loss


class _InChunks(torch.autograd.Function):
    """A mean over chunks of rows that computes its gradient in the forward pass and keeps nothing else."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, count: int, summed: _RowLoss, rows: int) -> Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        ctx.gradient = torch.empty_like(logits)
        parts = (torch.split(logits.detach(), rows), torch.split(targets, rows), torch.split(ctx.gradient, rows))
        for chunk, target, into in zip(*parts, strict=True):
            loss, gradient = summed(chunk.to(dtype, copy=True), target)
            into.copy_(gradient.div_(count))
            total += loss
        return (total / count).to(dtype)

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scales[0]), None, None, None, None
