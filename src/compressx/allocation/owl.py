"""Outlier Weighed Layerwise sparsity, OWL (Yin et al., arXiv 2310.05175), on plain tensors.

Blocks with more outliers among weights times inputs keep more weights. The paper bounds sparsities by target +- lambda.
The authors' code stretches the ratios over a range of 2 lambda and then shifts their mean to the target, which exceeds
the bound on the long side of a skewed distribution. Here ratios are scaled about their mean, so the bound holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compressx.numerics.wanda import wanda_scores


def outlier_ratio(pairs: Sequence[tuple[Tensor, Tensor]], threshold: float) -> float:
    """Return the fraction of scores |W_ij| * ||X_j||_2 above `threshold` times their mean.

    Args:
        pairs: weights [out_features, in_features] with the norms of their input features [in_features]; scores of all
            pairs form one distribution.
        threshold: the paper's M.

    Returns:
        A fraction in [0, 1]; the paper's layerwise outlier distribution gives it in percent.
    """
    weights = sum(weight.numel() for weight, _ in pairs)
    total = sum(float(wanda_scores(*pair).sum(dtype=torch.float64)) for pair in pairs)
    return sum(int((wanda_scores(*pair) > threshold * total / weights).sum()) for pair in pairs) / weights


def sparsities(ratios: Sequence[float], weights: Sequence[int], target: float, spread: float) -> list[float]:
    """Return sparsities that decrease linearly with outlier ratios, within target +- spread.

    Args:
        ratios: outlier ratio of each block.
        weights: number of weights of each block.
        target: mean sparsity over all weights.
        spread: lambda, the deviation from the target of the block with the most extreme ratio.
    """
    mean = sum(r * w for r, w in zip(ratios, weights, strict=True)) / sum(weights)
    farthest = max(abs(r - mean) for r in ratios)
    if farthest <= 1e-12:  # one block, or equal ratios
        return [target] * len(ratios)
    return [target - spread * (r - mean) / farthest for r in ratios]
