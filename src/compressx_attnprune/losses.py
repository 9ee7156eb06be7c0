"""The objectives of attention pruning: the error of the attention matrix, or of the attention's output.

A loss compares two pairs of (query, key) weights on the inputs of one layer. It computes the error, and random probes
of its curvature at the dense weights. Inputs are [batch, tokens, in_features] in the weights' dtype, weights
[heads * head_dim, in_features].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx_attnprune.attention import (
    Attention,
    Pair,
    gated,
    matrix_gradients,
    matrix_probe,
    mixed_backward,
    mixed_values,
    place,
    place_backward,
    project,
    queries_and_keys,
    random_signs_,
    squared_errors,
    values,
)

SEQUENCES = 4
"""Sequences processed at a time."""


@dataclass(frozen=True, eq=False)
class Loss(ABC):
    """A squared error caused by pruned query and key weights."""

    attention: Attention

    @abstractmethod
    def errors(self, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Return each candidate's squared error on a batch, and the squared norm of the dense result.

        float64 [candidates] and [], on the inputs' device: reading them would make the host wait.
        """

    @abstractmethod
    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        """Return the gradients of `project`'s results for random signs as the gradient of what is compared.

        The expectation of their outer products is the Gauss-Newton matrix of the squared error for each query and each
        key, both [batch, heads, tokens, head_dim].
        """


@dataclass(frozen=True, eq=False)
class MatrixLoss(Loss):
    """||P~ - P||_F^2 of the attention matrices (Attention Weights Pruning, arXiv 2410.11261), summed over heads."""

    @torch.no_grad()
    def errors(self, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        before, *after = (queries_and_keys(self.attention, x, pair) for pair in (dense, *candidates))
        errors, norms = squared_errors(self.attention, before, after)
        return errors.sum(dim=1), norms.sum()

    @torch.no_grad()
    def gradients(self, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Pair]:
        """Return ||P~ - P||_F^2 / ||P||_F^2 and the gradients of half of it by the pruned weights, in closed form.

        The error is float64 [], on the inputs' device. All is zero for a zero norm.
        """
        attention = self.attention
        before = queries_and_keys(attention, x, dense)
        projected = project(attention, x, pruned)
        errors, norms, grads = matrix_gradients(attention, before, place(attention, projected))
        norm = norms.sum()
        scale = torch.where(norm > 0.0, 1.0 / norm, 0.0)
        by_token = (g.transpose(1, 2).flatten(2).flatten(0, 1) for g in place_backward(attention, projected, grads))
        query, key = ((g.T @ x.flatten(0, 1)).mul_(scale) for g in by_token)  # of [batch * tokens, heads * head_dim]
        return errors.sum() * scale, (query, key)

    @torch.no_grad()
    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        projected = project(self.attention, x, weights)
        grads = matrix_probe(self.attention, *place(self.attention, projected), generator)
        return place_backward(self.attention, projected, grads)


@dataclass(frozen=True, eq=False)
class OutputLoss(Loss):
    """||(P~ - P) V W_O^T||_F^2, the error of the attention's output caused by that of the attention matrices.

    Where the layer has gates, they multiply P V.

    Never holds a tokens x tokens tensor: outputs use `scaled_dot_product_attention`. Probes use row blocks, as do
    outputs without a fused kernel: capped scores, sinks, a window, values of another size than keys.
    """

    value_weight: Tensor  # [h_kv * value_dim, in_features]
    value_bias: Tensor | None  # [h_kv * value_dim]
    output_weight: Tensor  # [out_features, h * value_dim]

    @torch.no_grad()
    def errors(self, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        v = values(self.attention, x, self.value_weight, self.value_bias)
        pairs = (queries_and_keys(self.attention, x, pair) for pair in (dense, *candidates))
        mixed = (gated(self.attention, x, mixed_values(self.attention, *pair, v)) for pair in pairs)
        before, *after = (torch.nn.functional.linear(m, self.output_weight) for m in mixed)
        *errors, norm = (t.square().sum(dtype=torch.float64) for t in (*(a - before for a in after), before))
        return torch.stack(errors), norm

    @torch.no_grad()
    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        v = values(self.attention, x, self.value_weight, self.value_bias)
        signs = random_signs_(x.new_empty(*x.shape[:2], len(self.output_weight)), generator)
        of_mixed = gated(self.attention, x, signs @ self.output_weight)  # [batch, tokens, h * value_dim]
        del signs
        projected = project(self.attention, x, weights)
        grads = mixed_backward(self.attention, *place(self.attention, projected), v, of_mixed)
        del v, of_mixed  # before what the rest of the way takes
        return place_backward(self.attention, projected, grads)


def relative_errors(loss: Loss, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> list[float]:
    """Compute each candidate's relative error, a ratio of *squared* norms; 0 if the dense result is zero.

    Inputs are any number of sequences [sequences, tokens, in_features] in any float dtype.
    """
    errors, norms = zip(*(loss.errors(part, dense, candidates) for part in parts(x)), strict=True)
    error, norm = torch.stack(errors).sum(dim=0), torch.stack(norms).sum()
    relative: list[float] = torch.where(norm > 0.0, error / norm, 0.0).tolist()
    return relative


def parts(x: Tensor) -> Iterator[Tensor]:
    """Yield float32 copies of `SEQUENCES` sequences at a time."""
    for start in range(0, len(x), SEQUENCES):
        yield x[start : start + SEQUENCES].to(torch.float32, copy=True)
