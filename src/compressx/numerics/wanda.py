"""The score of Wanda (arXiv 2306.11695)."""

from __future__ import annotations

from torch import Tensor


def wanda_scores(weight: Tensor, norms: Tensor) -> Tensor:
    """Score each weight by its share of the output's magnitude, |W_ij| * ||X_j||_2 (equation 1 of the paper).

    Args:
        weight: [..., out_features, in_features] in any float dtype.
        norms: ||X_j||_2 over all calibration tokens [in_features], or of a shape that broadcasts.

    Returns:
        Scores of the weight's shape, on its device and in the dtype of the norms.
    """
    norms = norms.to(weight.device)
    return weight.to(norms.dtype, copy=True).abs_().mul_(norms)  # in place: each new array is fresh pages of the system
