"""Streaming statistics of what enters a linear.

Accumulators are float32 at least, whatever the model's dtype. Batches of any size give the same result up to float
order. Statistics are dataclasses that compare by kind and shape only, so the walk shares them between linears with
the same input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressx.pruner import Reduction


@dataclass
class FeatureNorms:
    """Sum of squares of each input feature: ||X_j||^2 of Wanda (arXiv 2306.11695)."""

    in_features: int
    squares: Tensor = field(init=False, repr=False, compare=False)  # [in_features], float64
    tokens: int = field(default=0, init=False, compare=False)

    def __post_init__(self) -> None:
        self.squares = torch.zeros(self.in_features, dtype=torch.float64)

    def update(self, x: Tensor) -> None:
        """Add a batch [..., in_features]."""
        flat = x.reshape(-1, self.in_features)
        self.squares = self.squares.to(flat.device) + flat.float().square().sum(dim=0, dtype=torch.float64)
        self.tokens += flat.shape[0]

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """Return `squares` [in_features]."""
        return {"squares": (self.squares, "sum")}

    @property
    def norms(self) -> Tensor:
        """||X_j||_2 of each feature, float32 [in_features]."""
        return self.squares.sqrt().float()


@dataclass
class Hessian:
    """X^T X over all calibration tokens, the Hessian (up to a factor) of a linear's squared output error.

    Each batch's product is float32; they are added up in float64, so that the order, and with it the number of
    processes, does not matter: SparseGPT turns the rounding of a sum into other masks.
    """

    in_features: int
    matrix: Tensor = field(init=False, repr=False, compare=False)  # [in_features, in_features], float64
    tokens: int = field(default=0, init=False, compare=False)

    def __post_init__(self) -> None:
        self.matrix = torch.zeros(self.in_features, self.in_features, dtype=torch.float64)

    def update(self, x: Tensor) -> None:
        """Add a batch [..., in_features]."""
        flat = x.reshape(-1, self.in_features).float()
        if self.matrix.device != flat.device:
            self.matrix = self.matrix.to(flat.device)
        self.matrix += flat.T @ flat
        self.tokens += flat.shape[0]

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """Return `matrix` [in_features, in_features]."""
        return {"matrix": (self.matrix, "sum")}


@dataclass
class SequenceSample:
    """The first `limit` input sequences, kept whole in the model's dtype, for methods that need token order.

    Unlike the other statistics this one stores activations: `limit * tokens * in_features` of them.
    """

    in_features: int
    limit: int | None = None
    batches: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def update(self, x: Tensor) -> None:
        """Keep a batch [batch, tokens, in_features], up to the limit."""
        have = sum(len(b) for b in self.batches)
        room = len(x) if self.limit is None else min(len(x), self.limit - have)
        if room > 0:
            self.batches.append(x[:room].detach().clone())

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        """Return `sequences` [sequences, tokens, in_features]."""
        return {"sequences": (self.sequences, "cat")}

    @property
    def sequences(self) -> Tensor:
        """All kept sequences [sequences, tokens, in_features]."""
        return torch.cat(self.batches)
