"""Magnitude pruning: drop the smallest weights. Needs no calibration; the baseline of every comparison."""

from torch import Tensor

from compressx import score_pruner


@score_pruner(
    "magnitude",
    "drops the smallest weights; no calibration",
    groups=("layer", "row", "joint"),
    units=("neurons", "kv-groups"),
)
def magnitude(weight: Tensor) -> Tensor:
    """Score a weight by its absolute value."""
    return weight.abs()
