"""Outlier Weighed Layerwise sparsity, OWL (Yin et al., arXiv 2310.05175): the mathematics, apart from models.

Blocks whose weights times inputs have more outliers keep more weights. The paper bounds sparsities by target +- lambda.
Its authors' program stretches the ratios over a range of 2 lambda and then moves their mean to the target, which leaves
that interval on the longer side of a skewed distribution. Here ratios are scaled about their mean, so that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressx.numerics.wanda import wanda_scores


def outlier_ratio(pairs: Sequence[tuple[Tensor, Tensor]], threshold: float) -> float:
    """Return the fraction of scores |W_ij| * ||X_j||_2 above so many times their mean.

    Args:
        pairs: each a weight [out_features, in_features] and the norms of its input features [in_features]; all count as
            one distribution.
        threshold: the paper's M.

    Returns:
        In [0, 1]: an entry of the paper's layerwise outlier distribution, which it gives in percent.
    """
    weights = sum(weight.numel() for weight, _ in pairs)
    total = sum(float(wanda_scores(*pair).sum(dtype=torch.float64)) for pair in pairs)
    return sum(int((wanda_scores(*pair) > threshold * total / weights).sum()) for pair in pairs) / weights


def sparsities(ratios: Sequence[float], weights: Sequence[int], target: float, spread: float) -> list[float]:
    """Return sparsities that fall in proportion with outlier ratios, within target +- spread.

    Args:
        ratios: of outliers, of each block.
        weights: number of weights of each.
        target: what the mean of the sparsities over all weights is.
        spread: lambda, by which the block farthest from the mean ratio differs from the target.
    """
    mean = sum(r * w for r, w in zip(ratios, weights, strict=True)) / sum(weights)
    farthest = max(abs(r - mean) for r in ratios)
    if farthest <= 1e-12:  # one block, or all alike
        return [target] * len(ratios)
    return [target - spread * (r - mean) / farthest for r in ratios]
