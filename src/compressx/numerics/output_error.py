"""Errors of a block's output, relative to each token's norm, with a weight for each channel.

The residual stream is read through norms, which ignore a token's magnitude and whose gains compensate for the channels'
scales. A few tokens are thousands of times larger than the others (Sun et al., "Massive Activations in Large Language
Models", arXiv 2402.17762), and one channel of Gemma 3 holds nine tenths of every token's sum of squares, with gains a
tenth of the others'. A plain sum of squares would be dominated by these.

Channel weights are best measured on the model's loss (`compressx.blocks.fisher`); `channel_weights` is the alternative
without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from compressx.runtime.transfer import to_device


def channel_weights(targets: Iterable[Tensor], all_reduce_: Callable[[Tensor], None] = lambda _: None) -> Tensor:
    """Return each channel's weight: one over the square root of its share in a token's sum of squares.

    Dividing by the whole share would weight all channels equally, however small; not dividing, only the largest would
    count. The square root is ours, chosen by measurement (docs/design.md), not published.

    Args:
        targets: dense block outputs, each [batch, tokens, width].
        all_reduce_: adds to a tensor, in place, those of other processes' tokens.

    Returns:
        float32 [width], on the device of the targets.
    """
    sums = torch.stack([shares_of(x.float()).sum(dim=(0, 1), dtype=torch.float64) for x in targets]).sum(dim=0)
    all_reduce_(total := sums.cpu())
    share = total / total.sum().clamp_min(1.0)
    # Bounds the weight of a channel that is always zero.
    return share.clamp_min(torch.finfo(torch.float32).eps).rsqrt().float().to(sums.device)


def relative_errors(output: Tensor, target: Tensor, channels: Tensor | None = None) -> Tensor:
    """Return sum_c w_c (output_c - target_c)^2 / sum_c w_c target_c^2 of each token, float32 [batch, tokens].

    Output and target are [batch, tokens, width], channels are w [width], by default ones. A zero target is not divided
    by. Autocast is disabled, because bfloat16 cannot distinguish errors that differ by less than half a percent.
    """
    wanted = to_device(target, output.device).float()  # targets kept in files are on the CPU
    weights = wanted.new_ones(wanted.shape[-1]) if channels is None else to_device(channels, output.device)
    with torch.autocast(output.device.type, enabled=False):
        size = wanted.square() @ weights
        return (output.float() - wanted).square() @ weights / torch.where(size > 0, size, 1.0)


def shares_of(x: Tensor) -> Tensor:
    """Return each channel's share of its token's sum of squares [batch, tokens, width]; zeros for a zero token."""
    squares = x.square()
    size = squares.sum(dim=-1, keepdim=True)
    return squares / torch.where(size > 0, size, 1.0)
