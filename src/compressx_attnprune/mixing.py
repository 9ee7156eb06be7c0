"""What a layer's heads mix, P V, as a function of its query, key and value weights, and its gradients.

Where the layer has gates, they multiply P V. Weights are float32 [heads * head_dim, in_features] of queries, keys and
values, in head order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from compressx_attnprune import objective
from compressx_attnprune.geometry import Attention, gated, place, place_backward, project, values, values_backward
from compressx_attnprune.losses import mixed_values, weight_gradient

Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Mixing:
    """A layer up to its output projection.

    Attributes:
        attention: the layer's geometry.
        value_bias: [h_kv * value_dim], or None.
    """

    attention: Attention
    value_bias: Tensor | None

    @property
    def apart(self) -> bool:
        """Whether heads mix the same without each other: no norm is over all of them."""
        return not any(side.norm is not None and side.norm.whole for side in (self.attention.query, self.attention.key))

    def mixed(self, x: Tensor, weights: Triple) -> Tensor:
        """Return P V of all heads beside each other, [batch, tokens, h * value_dim], of x [batch, tokens, n]."""
        query, key, value = weights
        q, k = (
            place(self.attention, side, project(self.attention, side, x, w))
            for side, w in ((self.attention.query, query), (self.attention.key, key))
        )
        mixed = mixed_values(self.attention, q, k, values(self.attention, x, value, self.value_bias))
        return gated(self.attention, x, mixed)

    def gradients(self, x: Tensor, weights: Triple, grad: Tensor) -> Triple:
        """Backpropagate a gradient of `mixed` [batch, tokens, h * value_dim] to the three weights."""
        attention = self.attention
        sides = (attention.query, attention.key)
        projected = [project(attention, side, x, w) for side, w in zip(sides, weights[:2], strict=True)]
        q, k = (place(attention, side, u) for side, u in zip(sides, projected, strict=True))
        v = values(attention, x, weights[2], self.value_bias)
        of_heads = gated(attention, x, grad).view(*grad.shape[:2], attention.query.heads, -1).transpose(1, 2)
        dv = torch.zeros_like(v)
        placed = objective.mixed_backward(attention, q, k, v, of_heads, dv)
        query, key = (
            weight_gradient(place_backward(attention, side, u, g), x)
            for side, u, g in zip(sides, projected, placed, strict=True)
        )
        dv = values_backward(attention, x, weights[2], self.value_bias, dv)
        return query, key, weight_gradient(dv, x)
