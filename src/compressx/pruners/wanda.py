"""Wanda (arXiv 2306.11695): drop the smallest |W_ij| * ||X_j||_2, by default within each output row. No update."""

from torch import Tensor

from compressx import score_pruner


@score_pruner("wanda", "drops the smallest |W|*||X|| of each row (arXiv 2306.11695)", units=("neurons", "kv-groups"))
def wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """Score a weight by its magnitude times its input feature's norm."""
    return weight.abs().mul_(norms)
