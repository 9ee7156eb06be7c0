"""The constants of Figure 2, importable without torch for a fast command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FIRST_TUNING_SEED = 1_000_000
"""First tuning seed; reported seeds start at 0."""


@dataclass(frozen=True)
class Settings:
    """The constants of the experiment; the defaults are ours, since the paper gives none.

    Attributes:
        seeds: number of reported problems, at least two.
        tuning_seeds: number of problems for choosing lambda in the panels over n and the pruning ratio.
        width: d, number of features of X.
        tokens: n of the panels over lambda and the pruning ratio.
        rank: rank of W_Q and W_K after truncation; four in the paper.
        scale: standard deviation of the entries of W_Q and W_K before truncation.
        sparsity: rho, the pruning ratio, of the panels over lambda and n.
        regularizations: the grid of lambda, increasing.
        token_counts: the grid of n, increasing.
        sparsities: the grid of rho, increasing.
        optimizer: as `steps`, `tolerance`, `step_size` and `momentum`, an argument of `synthetic.learn_mask`.
    """

    seeds: int = 10
    tuning_seeds: int = 5
    width: int = 32
    tokens: int = 128
    rank: int = 4
    scale: float = 0.15
    sparsity: float = 0.7
    regularizations: tuple[float, ...] = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    token_counts: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    sparsities: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    optimizer: Literal["line-search", "momentum"] = "line-search"
    steps: int = 2000
    tolerance: float = 1e-3
    step_size: float = 0.5
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.rank > self.width:
            raise ValueError(f"rank {self.rank} exceeds width {self.width}; reduce the rank or increase the width")
        if self.seeds < 2:
            raise ValueError(f"a confidence interval needs at least two seeds, got {self.seeds}")

    @property
    def reported(self) -> range:
        """The seeds that are reported."""
        return range(self.seeds)

    @property
    def tuning(self) -> range:
        """The seeds for choosing lambda."""
        return range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + self.tuning_seeds)


QUICK = Settings(
    seeds=5,
    tuning_seeds=3,
    width=16,
    tokens=64,
    scale=0.2,
    regularizations=(1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
    token_counts=(16, 32, 64, 128),
    sparsities=(0.3, 0.5, 0.7, 0.9),
    steps=500,
)
"""Smaller constants that take seconds."""
