"""How far a model's predictions are from the dense model's, on the same tokens: llama.cpp's figures, and one more."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

FIGURES = (
    "perplexity_ratio", "kl_divergence", "top1_agreement", "kl_divergence_median", "kl_divergence_99%", "context_gain",
    "context_gain_change",
)  # fmt: skip


def compare(targets: Tensor, pruned: Tensor, dense: Tensor) -> Tensor:
    """Compare two models' predictions of the same tokens.

    With x the dense logits and e = exp(x - max x), the divergence is sum(e (x - y)) / sum(e) - lse(x) + lse(y): one
    exponential for each model, and within 1e-6 of float64.

    Args:
        targets: int64 [n].
        pruned: float32 or float64 logits [n, vocabulary]; -inf for what is no token.
        dense: likewise.

    Returns:
        float64 [4, n]: negative log-likelihoods by the pruned and by the dense model and KL(dense, pruned), in nats,
        and 1 where both find the same token likeliest, else 0.
    """
    (top_x, first_x), (top_y, first_y) = dense.max(-1, keepdim=True), pruned.max(-1, keepdim=True)
    x, y = dense - top_x, pruned - top_y  # so that neither offsets nor their sums cost digits
    target_x, target_y = (z.gather(1, targets[:, None])[:, 0] for z in (x, y))
    weights = x.exp()
    total = weights.sum(-1).double()
    # -inf less -inf, and less a number, has the weight 0: their product would not be a number.
    apart = weights.mul_(x.sub_(y).nan_to_num_()).sum(-1) / total
    log_x, log_y = total.log(), y.exp_().sum(-1).double().log()
    same = (first_x == first_y)[:, 0].double()
    return torch.stack([log_y - target_y, log_x - target_x, apart - log_x + log_y, same])


def fidelity(tokens: Tensor) -> dict[str, float]:
    """Summarize tokens, float64 [1 or 4, windows, T - 1], as `compare` returns them, or losses alone.

    Divergence, agreement and the paired ratio are llama.cpp's. Standard errors are those of means over windows, since a
    window's tokens depend on one another; one window has none. The context gain is the mean loss at positions 33 to 64
    less that of the last quarter (arXiv 2209.11895), in nats; windows of 128 tokens or more have it.
    """
    loss, *compared = tokens
    found: dict[str, float] = {}
    if compared:
        dense, divergence, same = compared
        ratio = math.exp((loss - dense).mean())  # whose error is the logarithm's, times itself
        found |= _estimate("perplexity_ratio", ratio * (loss - dense)) | {"perplexity_ratio": ratio}
        found |= _estimate("kl_divergence", divergence) | _estimate("top1_agreement", same)
        median, highest = np.quantile(divergence.numpy(), [0.5, 0.99])
        found |= {"kl_divergence_median": float(median), "kl_divergence_99%": float(highest)}
    if (length := loss.shape[1] + 1) >= 128:
        # Positions 33 to 64: the first token is not predicted.
        own, *dense_gain = (x[:, 31:63].mean(1) - x[:, -(length // 4) :].mean(1) for x in tokens[:2])
        found["context_gain"] = float(own.mean())
        for gain in dense_gain:
            found |= _estimate("context_gain_change", (own - gain)[:, None])
    return found


def _estimate(name: str, values: Tensor) -> dict[str, float]:
    """Return the mean of [windows, n] and, of several windows, its standard error."""
    windows = values.mean(1)
    error = {f"{name}_stderr": float(windows.std()) / math.sqrt(len(windows))} if len(windows) > 1 else {}
    return {name: float(windows.mean()), **error}
