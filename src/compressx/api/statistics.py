"""Streaming statistics of what enters a linear.

Accumulators are float32 at least, whatever the model's dtype. Batches of any size give the same result up to float
order. Statistics are dataclasses that compare by kind and shape only, so the host shares them between linears with
the same input. A batch is [..., in_features].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressx.api.pruner import Reduction


def _zeros_to_come(size: int) -> Tensor:
    """Return zeros, float64 [size], that take no memory yet: the first batch tells on which device they are to be."""
    return torch.zeros((), dtype=torch.float64).expand(size)


def _accumulator(sums: Tensor, device: torch.device | None = None) -> Tensor:
    """Return sums on a device, or where they are, that can be written to."""
    if not sums.is_contiguous():
        return torch.zeros(sums.shape, dtype=sums.dtype, device=device)
    return sums if device is None else sums.to(device)


@dataclass
class FeatureNorms:
    """Sum of squares of each input feature: ||X_j||^2 of Wanda (arXiv 2306.11695)."""

    in_features: int
    squares: Tensor = field(init=False, repr=False, compare=False)  # [in_features], float64
    count: Tensor = field(init=False, repr=False, compare=False)  # of tokens, int64

    def __post_init__(self) -> None:
        self.squares = _zeros_to_come(self.in_features)
        self.count = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        flat = x.reshape(-1, self.in_features)
        self.squares = _accumulator(self.squares, flat.device)
        self.squares += flat.to(torch.float32, copy=True).square_().sum(dim=0)
        self.count += flat.shape[0]

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        self.squares = _accumulator(self.squares)
        return {"squares": (self.squares, "sum"), "count": (self.count, "sum")}

    @property
    def norms(self) -> Tensor:
        """||X_j||_2 of each feature, float32 [in_features]."""
        return self.squares.sqrt().float()


_PANEL = 256
"""Rows of X^T X in one product: enough for a fast one, few enough that little is computed below the diagonal."""


@dataclass
class Hessian:
    """X^T X over all calibration tokens, the Hessian (up to a factor) of a linear's squared output error.

    It is symmetric, so that only panels of rows from the diagonal on are gathered: little more than half of the
    products. Each batch's product is float32; they are added up in float64, so that the order, and with it the number
    of processes, does not matter: SparseGPT turns the rounding of a sum into other masks. On GPUs with few float64
    units that costs no time, since an addition moves 20 bytes.
    """

    in_features: int
    sums: Tensor = field(init=False, repr=False, compare=False)  # the panels one after the other, float64
    count: Tensor = field(init=False, repr=False, compare=False)  # of tokens, int64

    def __post_init__(self) -> None:
        size = sum((stop - start) * (self.in_features - start) for start, stop in self._rows())
        self.sums = _zeros_to_come(size)
        self.count = torch.zeros((), dtype=torch.int64)

    def update(self, x: Tensor) -> None:
        flat = x.reshape(-1, self.in_features)
        self.sums = _accumulator(self.sums, flat.device)
        exact = flat.is_cuda and flat.dtype in (torch.float16, torch.bfloat16)  # products of halves, float32 sums
        flat = flat if exact else flat.float()
        for start, stop, panel in self._panels():
            left, right = flat[:, start:stop].T, flat[:, start:]
            panel += torch.mm(left, right, out_dtype=torch.float32) if exact else left @ right  # noqa: PLW2901
        self.count += flat.shape[0]

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        self.sums = _accumulator(self.sums)
        return {"sums": (self.sums, "sum"), "count": (self.count, "sum")}

    @property
    def matrix(self) -> Tensor:
        """X^T X whole, float32 [in_features, in_features]; assembled anew each time."""
        return self.assembled()

    def assembled(self, minus: Tensor | None = None) -> Tensor:
        """Return `matrix`, the caller's to overwrite.

        Args:
            minus: m [in_features], float64, on the device of `sums`; m m^T is subtracted before anything is rounded.
        """
        full = self.sums.new_empty(self.in_features, self.in_features, dtype=torch.float32)
        for start, stop, panel in self._panels():
            part = panel if minus is None else panel - minus[start:stop, None] * minus[start:]
            full[start:stop, start:] = part
            full[stop:, start:stop] = part[:, stop - start :].T
        return full

    @property
    def diagonal(self) -> Tensor:
        """The squared norm of each feature, float64 [in_features]."""
        return torch.cat([panel.diagonal() for _, _, panel in self._panels()])

    def _rows(self) -> list[tuple[int, int]]:
        """Return the first row of each panel and the one after its last."""
        width = math.ceil(self.in_features / math.ceil(self.in_features / _PANEL))
        return [(start, min(start + width, self.in_features)) for start in range(0, self.in_features, width)]

    def _panels(self) -> Iterator[tuple[int, int, Tensor]]:
        """Yield each panel's rows and the panel [stop - start, in_features - start], which begins at the diagonal."""
        end = 0
        for start, stop in self._rows():
            begin, end = end, end + (stop - start) * (self.in_features - start)
            yield start, stop, self.sums[begin:end].view(stop - start, -1)


_CONSTANT = 1e-12
"""A feature's variance over its mean square below which it counts as constant: what float64 sums round is 1e-15."""


@dataclass
class Covariance:
    """X^T X and the sum of X: the Hessian of a linear whose bias takes up what its inputs are on the average.

    With a bias the least squared output error is that of inputs less their mean. Products are of inputs less the mean
    of their batch, which is put back in float64: float32 products of a feature that hardly varies would leave rounding
    in place of its variance.
    """

    in_features: int
    hessian: Hessian = field(init=False, repr=False, compare=False)
    total: Tensor = field(init=False, repr=False, compare=False)  # [in_features], float64

    def __post_init__(self) -> None:
        self.hessian = Hessian(self.in_features)
        self.total = _zeros_to_come(self.in_features)

    def update(self, x: Tensor) -> None:
        flat = x.reshape(-1, self.in_features).float()
        mean = flat.sum(dim=0) / max(1, len(flat))
        centred = flat - mean
        self.hessian.update(centred)
        mean, rest = mean.double(), centred.sum(dim=0, dtype=torch.float64)  # of rounding, and what it has left
        total = len(flat) * mean + rest
        self.total = _accumulator(self.total, x.device)
        self.total += total
        left, right = torch.stack([mean, rest], dim=1), torch.stack([total, mean])
        for start, stop, panel in self.hessian._panels():
            panel.addmm_(left[start:stop], right[:, start:])

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        self.total = _accumulator(self.total)
        return {**self.hessian.tensors(), "total": (self.total, "sum")}

    @property
    def mean(self) -> Tensor:
        """The mean of each feature, float64 [in_features]."""
        return self.total / self.hessian.count.clamp_min(1)

    def assembled(self) -> Tensor:
        """Return the sum over tokens of (x - mean) (x - mean)^T, float32 [in_features, in_features], to overwrite.

        Rows and columns of features that are constant but for rounding are zero.
        """
        means = self.total / self.hessian.count.clamp_min(1).double().sqrt()
        squares = self.hessian.diagonal
        varies = squares - means.square() > _CONSTANT * squares
        return self.hessian.assembled(means).mul_(varies).mul_(varies[:, None])


@dataclass
class SequenceSample:
    """The first `limit` input sequences, kept whole in the model's dtype, for methods that need token order.

    Unlike the other statistics this one stores activations: `limit * tokens * in_features` of them, in all processes
    together.
    """

    in_features: int
    limit: int | None = None
    batches: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)
    before: int = field(default=0, init=False, repr=False, compare=False)

    def after(self, windows: int) -> None:
        """Leave out of the limit what other processes see: so many sequences, which come before this process's."""
        self.before = windows

    def update(self, x: Tensor) -> None:
        """Keep a batch [batch, tokens, in_features], up to the limit."""
        have = sum(len(b) for b in self.batches)
        have += self.before if x.dim() > 2 else 0  # where the model flattens sequences, what is limited are tokens
        room = len(x) if self.limit is None else max(0, min(len(x), self.limit - have))
        if room or not self.batches:  # of nothing at least its width, for the other processes
            self.batches.append(x[:room].detach().clone())

    def tensors(self) -> Mapping[str, tuple[Tensor, Reduction]]:
        return {"sequences": (self.sequences, "cat")}

    @property
    def sequences(self) -> Tensor:
        """All kept sequences [sequences, tokens, in_features]."""
        return torch.cat(self.batches)
