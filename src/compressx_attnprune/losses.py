"""The objectives of attention pruning: the error of the attention matrix, or of the attention's output.

A loss compares two pairs of (query, key) weights on the inputs of one layer. It computes the error, its gradients, and
random probes of its curvature at the dense weights. Inputs are [batch, tokens, in_features] in the weights' dtype,
weights [heads * head_dim, in_features].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

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
    place_pair,
    place_pair_backward,
    project_pair,
    queries_and_keys,
    random_signs_,
    squared_errors,
    values,
    weight_gradient,
)

SEQUENCES = 4
"""Sequences processed at a time."""


class Loss(Protocol):
    """A squared error caused by pruned query and key weights."""

    @property
    def attention(self) -> Attention:
        """The layer's geometry."""

    def with_scores(self, share: float) -> Loss:
        """Return the loss of a layer whose scores, before a softcap, are this share of them."""

    def errors(self, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Return each candidate's squared error on a batch, and the squared norm of the dense result.

        float64 [candidates] and [], on the inputs' device: reading them would make the host wait.
        """

    def gradients(self, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Pair]:
        """Return the relative error on a batch, and the gradients of half of it with respect to the pruned weights.

        The error is float64 [], on the inputs' device.
        """

    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        """Return the gradients of `project`'s results for random signs as the gradient of the compared tensor.

        The expectation of their outer products is the Gauss-Newton matrix of the squared error for each query and each
        key, both [batch, heads, tokens, head_dim].
        """


@dataclass(frozen=True, eq=False)
class MatrixLoss:
    """||P~ - P||_F^2 of the attention matrices (Attention Weights Pruning, arXiv 2410.11261), summed over heads.

    Attributes:
        attention: the layer's geometry.
    """

    attention: Attention

    def with_scores(self, share: float) -> Self:
        """Return the loss of a layer with a share of the scores."""
        return replace(self, attention=self.attention.with_scores(share))

    @torch.no_grad()
    def errors(self, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Return ||P~ - P||_F^2 of each candidate, and ||P||_F^2."""
        before, *after = (queries_and_keys(self.attention, x, *pair) for pair in (dense, *candidates))
        errors, norms = squared_errors(self.attention, before, after)
        return errors.sum(dim=1), norms.sum()

    @torch.no_grad()
    def gradients(self, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Pair]:
        """Return ||P~ - P||_F^2 / ||P||_F^2 and the gradients of half of it, in closed form by row blocks."""
        attention = self.attention
        before = queries_and_keys(attention, x, *dense)
        projected = project_pair(attention, x, *pruned)
        errors, norms, grads = matrix_gradients(attention, before, place_pair(attention, projected))
        return _relative(errors.sum(), norms.sum(), x, place_pair_backward(attention, projected, grads))

    @torch.no_grad()
    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        """Return the gradients for random signs as the gradient of P."""
        projected = project_pair(self.attention, x, *weights)
        grads = matrix_probe(self.attention, *place_pair(self.attention, projected), generator)
        return place_pair_backward(self.attention, projected, grads)


@dataclass(frozen=True, eq=False)
class OutputLoss:
    """||(P~ - P) V W_O^T||_F^2, the error of the attention's output caused by that of the attention matrices.

    Where the layer has gates, they multiply P V.

    Never holds a tokens x tokens tensor: outputs use `scaled_dot_product_attention`. Gradients use row blocks, as do
    outputs without a fused kernel: capped scores, sinks, a window, values of another size than keys.

    Attributes:
        attention: the layer's geometry.
        value_weight: [h_kv * value_dim, in_features].
        value_bias: [h_kv * value_dim], or None.
        output_weight: [out_features, h * value_dim].
    """

    attention: Attention
    value_weight: Tensor
    value_bias: Tensor | None
    output_weight: Tensor

    def with_scores(self, share: float) -> Self:
        """Return the loss of a layer with a share of the scores."""
        return replace(self, attention=self.attention.with_scores(share))

    @torch.no_grad()
    def errors(self, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Return ||(P~ - P) V W_O^T||_F^2 of each candidate, and ||P V W_O^T||_F^2."""
        v = values(self.attention, x, self.value_weight, self.value_bias)
        pairs = (queries_and_keys(self.attention, x, *pair) for pair in (dense, *candidates))
        before, *after = (self._output(x, *pair, v) for pair in pairs)
        return torch.stack([_squared_norm(a - before) for a in after]), _squared_norm(before)

    @torch.no_grad()
    def gradients(self, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Pair]:
        """Return ||(P~ - P) V W_O^T||_F^2 / ||P V W_O^T||_F^2 and the gradients of half of it."""
        v = values(self.attention, x, self.value_weight, self.value_bias)
        before = self._output(x, *queries_and_keys(self.attention, x, *dense), v)
        projected = project_pair(self.attention, x, *pruned)
        error = self._output(x, *place_pair(self.attention, projected), v) - before
        return _relative(_squared_norm(error), _squared_norm(before), x, self._backward(x, projected, v, error))

    @torch.no_grad()
    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        """Return the gradients for random signs as the gradient of the attention's output."""
        v = values(self.attention, x, self.value_weight, self.value_bias)
        signs = random_signs_(x.new_empty(*x.shape[:2], len(self.output_weight)), generator)
        return self._backward(x, project_pair(self.attention, x, *weights), v, signs)

    def _output(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Apply attention to the values and project them, [batch, tokens, out_features]."""
        mixed = gated(self.attention, x, mixed_values(self.attention, q, k, v))
        return torch.nn.functional.linear(mixed, self.output_weight)

    def _backward(self, x: Tensor, projected: Pair, v: Tensor, grad: Tensor) -> Pair:
        """Backpropagate a gradient of the output [batch, tokens, out_features] to `project`'s results."""
        return place_pair_backward(self.attention, projected, self._mixed_backward(x, projected, v, grad))

    def _mixed_backward(self, x: Tensor, projected: Pair, v: Tensor, grad: Tensor) -> Pair:
        """Backpropagate it to queries and keys; what this takes is freed before the rest of the way."""
        of_mixed = gated(self.attention, x, grad @ self.output_weight)
        return mixed_backward(self.attention, *place_pair(self.attention, projected), v, of_mixed)


def relative_errors(loss: Loss, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> list[float]:
    """Compute relative errors, ratios of *squared* norms, on any number of sequences in any float dtype.

    Args:
        loss: the objective.
        x: [sequences, tokens, in_features].
        dense: the dense weights.
        candidates: pruned weights.

    Returns:
        One number per candidate; 0 if the dense result is zero.
    """
    errors, norms = zip(*(loss.errors(part, dense, candidates) for part in parts(x)), strict=True)
    error, norm = torch.stack(errors).sum(dim=0), torch.stack(norms).sum()
    relative: list[float] = torch.where(norm > 0.0, error / norm, 0.0).tolist()
    return relative


def _relative(error: Tensor, norm: Tensor, x: Tensor, projected: Pair) -> tuple[Tensor, Pair]:
    """Return the relative error and the gradients of half of it, from those of `project`'s results.

    Both are zero for a zero norm, as in added blocks whose output projection is initialised to zero.
    """
    scale = torch.where(norm > 0.0, 1.0 / norm, 0.0)
    query, key = (weight_gradient(g, x).mul_(scale) for g in projected)
    return error * scale, (query, key)


def relative_error(loss: Loss, x: Tensor, dense: Pair, pruned: Pair) -> float:
    """Return `relative_errors` of one candidate."""
    return relative_errors(loss, x, dense, [pruned])[0]


def parts(x: Tensor) -> Iterator[Tensor]:
    """Yield float32 copies of `SEQUENCES` sequences at a time."""
    for start in range(0, len(x), SEQUENCES):
        yield x[start : start + SEQUENCES].to(torch.float32, copy=True)


def _squared_norm(x: Tensor) -> Tensor:
    return x.square().sum(dtype=torch.float64)
