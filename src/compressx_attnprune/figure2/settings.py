"""The constants of Figure 2, without torch, so that the command line can name its defaults at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FIRST_TUNING_SEED = 1_000_000
"""Reported seeds count up from 0 and tuning seeds from here."""


@dataclass(frozen=True)
class Settings:
    """Every constant of the experiment; the defaults are ours, the paper's being unknown.

    Attributes:
        seeds: reported problems, at least two.
        tuning_seeds: problems on which lambda is chosen for the panels over n and the pruning ratio.
        width: d, features of X.
        tokens: n of the panels over lambda and the pruning ratio.
        rank: singular values that are left of W_Q and W_K; four in the paper.
        scale: standard deviation of the entries of W_Q and W_K before that cut.
        sparsity: rho, the pruning ratio, of the panels over lambda and n.
        regularizations: the grid of lambda, rising.
        token_counts: the grid of n, rising.
        sparsities: the grid of rho, rising.
        optimizer: of `synthetic.learn_mask`, and so are `steps`, `tolerance`, `step_size` and `momentum`.
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
            raise ValueError(f"rank {self.rank} exceeds width {self.width}; a smaller rank or a larger width is needed")
        if self.seeds < 2:
            raise ValueError(f"a confidence interval needs two seeds or more, got {self.seeds}")

    @property
    def reported(self) -> range:
        """The seeds that are reported."""
        return range(self.seeds)

    @property
    def tuning(self) -> range:
        """The seeds that lambda is chosen on."""
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
"""Constants for a first look, in seconds."""
