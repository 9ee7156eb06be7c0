"""How far what leaves a block is from what should leave it: each token against its own size, channels by weights.

Whatever reads a residual stream reads it through a norm, to which the size of a token does not matter, and whose gains
make up for the sizes of channels: a few tokens are thousands of times larger than the others (Sun et al., "Massive
Activations in Large Language Models", arXiv 2402.17762), and of Gemma 3's channels one holds nine tenths of every
token's sum of squares, with gains a tenth of the others'. A plain sum of squares sees little but these.

What a channel counts is best read off the model's loss (`compressx.blocks.fisher`); `channel_weights` is for where no
gradient of it is taken.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from compressx.runtime.ranks import ALONE, Ranks


def channel_weights(targets: Iterable[Tensor], ranks: Ranks = ALONE) -> Tensor:
    """Return what an error in each channel counts: one over the square root of its share in a token's sum of squares.

    The whole share would make all channels count alike, however small; none, the largest alone. Ours, by measurement
    (docs/design.md), not published.

    Args:
        targets: what should leave the block, each [batch, tokens, width].
        ranks: the processes; shares are means over the tokens of all.

    Returns:
        float32 [width].
    """
    sums = torch.stack([shares_of(x.float()).sum(dim=(0, 1), dtype=torch.float64) for x in targets]).sum(dim=0)
    total = torch.stack(ranks.gathered(sums.cpu())).sum(dim=0)
    share = total / total.sum().clamp_min(1.0)
    # A channel that is always zero is not worth more than the least that float32 can tell from nothing beside others.
    return share.clamp_min(torch.finfo(torch.float32).eps).rsqrt().float()


def relative_errors(output: Tensor, target: Tensor, channels: Tensor | None = None) -> Tensor:
    """Return sum_c w_c (output_c - target_c)^2 / sum_c w_c target_c^2 of each token, float32 [batch, tokens].

    A token that has no size counts as it is. Autocast makes no difference: in bfloat16 errors that differ by less than
    half a percent would be one number.

    Args:
        output: [batch, tokens, width].
        target: [batch, tokens, width].
        channels: w [width], as `channel_weights` or `compressx.blocks.fisher` give them; ones when absent.
    """
    wanted = target.to(output.device, torch.float32)  # what is kept in files is on the CPU
    weights = wanted.new_ones(wanted.shape[-1]) if channels is None else channels.to(output.device)
    with torch.autocast(output.device.type, enabled=False):
        size = wanted.square() @ weights
        return (output.float() - wanted).square() @ weights / torch.where(size > 0, size, 1.0)


def shares_of(x: Tensor) -> Tensor:
    """Return each channel's part of its token's sum of squares [batch, tokens, width]; zeros where there is none."""
    squares = x.square()
    size = squares.sum(dim=-1, keepdim=True)
    return squares / torch.where(size > 0, size, 1.0)
