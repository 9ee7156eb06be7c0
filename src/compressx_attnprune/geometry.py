"""The geometry of one layer's attention: how inputs and weights become queries, keys and values.

A frozen value without modules, so that everything built on it is a pure function of tensors. Queries and keys are
`rope(norm(x W^T + b))`; norm and rotary embedding are optional, and several query heads may share a key head and its
values. Weights are in head order, whatever the model's layout; tensors are [batch, heads, tokens, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Norm:
    """Norm of queries or keys [batch, heads, tokens, head_dim]: `gain * u / sqrt(mean(u^2) + eps) + shift`.

    Attributes:
        gain: [head_dim], or [heads, 1, head_dim] for separate gains per head.
        eps: added to the mean square.
        shift: of the gain's shape, or None.
        centered: whether the mean is subtracted first: LayerNorm (StableLM, Cohere), not RMSNorm (Qwen3, Gemma 3).
        whole: whether the means are over all heads of a token (OLMo 2), not per head.
        last: whether it comes after the rotary embedding (HunYuan), not before.
    """

    gain: Tensor
    eps: float
    shift: Tensor | None = None
    centered: bool = False
    whole: bool = False
    last: bool = False

    def forward(self, u: Tensor) -> Tensor:
        """Normalise [batch, heads, tokens, head_dim]."""
        u = self._centre(u)
        normed = self.gain * (u / self._rms(u))
        return normed if self.shift is None else normed + self.shift

    def backward(self, u: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the input `u` for that of the output, both [batch, heads, tokens, head_dim]."""
        u = self._centre(u)
        rms = self._rms(u)
        unit, scaled = u / rms, grad * self.gain
        return self._centre((scaled - unit * self._mean(unit * scaled)) / rms)

    def to(self, dtype: torch.dtype) -> Norm:
        """Return a copy with tensors of another dtype."""
        return replace(self, gain=self.gain.to(dtype), shift=None if self.shift is None else self.shift.to(dtype))

    def _mean(self, u: Tensor) -> Tensor:
        return u.mean(dim=(-3, -1) if self.whole else -1, keepdim=True)

    def _rms(self, u: Tensor) -> Tensor:
        return (self._mean(u.square()) + self.eps).sqrt()

    def _centre(self, u: Tensor) -> Tensor:
        return u - self._mean(u) if self.centered else u


@dataclass(frozen=True, eq=False)
class Projection:
    """One side, query or key.

    Attributes:
        heads: number of heads, consecutive in its weight.
        bias: [heads * head_dim], or None.
        norm: the norm between projection and rotary embedding, or None.
    """

    heads: int
    bias: Tensor | None = None
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's causal attention, softmax(scaling * q k^T + mask), with or without sinks.

    Attributes:
        query: the query side.
        key: the key side; its number of heads divides the query's, and consecutive query heads share one.
        head_dim: features of a head.
        scaling: factor on the scores.
        rotary: cosine and sine [tokens, rotary_dim] of the rotary embedding, which rotates the first `rotary_dim`
            features of a head in pairs; entries are aligned with the features that they multiply; None without one.
        window: a query attends to itself and the `window - 1` tokens before it; to all before it when None.
        softcap: scores become `softcap * tanh(scores / softcap)` before the mask (Gemma 2); None without.
        rotary_interleaved: whether pairs are adjacent (Cohere, GLM), not half of `rotary_dim` apart (Llama).
        sinks: [query heads], one more score beside those of every query, whose probability goes to no token (GPT-OSS):
            rows of P sum to less than one; None without.
        value_norm: the norm of the values (Gemma 4); None without one.
        gate: weight [heads * value_dim, in_features] and bias [heads * value_dim] or None of the gates; None without.
    """

    query: Projection
    key: Projection
    head_dim: int
    scaling: float
    rotary: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    softcap: float | None = None
    rotary_interleaved: bool = False
    sinks: Tensor | None = None
    value_norm: Norm | None = None
    gate: tuple[Tensor, Tensor | None] | None = None

    @property
    def groups(self) -> int:
        """Number of query heads per key head."""
        return self.query.heads // self.key.heads

    def to(self, dtype: torch.dtype) -> Attention:
        """Return a copy with tensors of another dtype."""
        rotary = None if self.rotary is None else (self.rotary[0].to(dtype), self.rotary[1].to(dtype))
        sinks = None if self.sinks is None else self.sinks.to(dtype)
        gate = None if self.gate is None else (self.gate[0].to(dtype), _cast_bias(self.gate[1], dtype))
        query, key = _cast(self.query, dtype), _cast(self.key, dtype)
        norm = None if self.value_norm is None else self.value_norm.to(dtype)
        return replace(self, query=query, key=key, rotary=rotary, sinks=sinks, value_norm=norm, gate=gate)

    def first(self, tokens: int) -> Attention:
        """Return the attention restricted to the first tokens."""
        return replace(self, rotary=None if self.rotary is None else (self.rotary[0][:tokens], self.rotary[1][:tokens]))


def project(attention: Attention, side: Projection, x: Tensor, weight: Tensor) -> Tensor:
    """Apply a side's weight and bias and split the heads.

    Args:
        attention: the layer.
        side: `attention.query` or `attention.key`.
        x: [batch, tokens, in_features].
        weight: [heads * head_dim, in_features].

    Returns:
        [batch, heads, tokens, head_dim], before norm and rotary embedding.
    """
    flat = torch.nn.functional.linear(x, weight, side.bias)  # [batch, tokens, heads * head_dim]
    return flat.view(*flat.shape[:2], side.heads, attention.head_dim).transpose(1, 2)


def place(attention: Attention, side: Projection, u: Tensor) -> Tensor:
    """Apply a side's norm and rotary embedding to `project`'s result [batch, heads, tokens, head_dim]."""
    if side.norm is None:
        return _rotated(attention, u)
    return side.norm.forward(_rotated(attention, u)) if side.norm.last else _rotated(attention, side.norm.forward(u))


def place_backward(attention: Attention, side: Projection, u: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `place`'s argument `u` for that of its result, both [batch, heads, tokens, head_dim]."""
    if side.norm is not None and side.norm.last:
        return _rotated_backward(attention, side.norm.backward(_rotated(attention, u), grad))
    grad = _rotated_backward(attention, grad)
    return grad if side.norm is None else side.norm.backward(u, grad)


def _rotated(attention: Attention, u: Tensor) -> Tensor:
    if attention.rotary is None:
        return u
    cos, sin = attention.rotary
    turned, rest = u[..., : cos.shape[-1]], u[..., cos.shape[-1] :]
    return torch.cat([turned * cos + quarter_turn(turned, attention.rotary_interleaved) * sin, rest], dim=-1)


def _rotated_backward(attention: Attention, grad: Tensor) -> Tensor:
    if attention.rotary is None:
        return grad
    cos, sin = attention.rotary
    turned, rest = grad[..., : cos.shape[-1]], grad[..., cos.shape[-1] :]
    # The transpose of a quarter turn is its negative.
    return torch.cat([turned * cos - quarter_turn(turned * sin, attention.rotary_interleaved), rest], dim=-1)


def queries_and_keys(
    attention: Attention, x: Tensor, query_weight: Tensor, key_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute queries [batch, h, tokens, head_dim] and keys [batch, h_kv, tokens, head_dim] after norm and rotary.

    Differentiable in `x` [batch, tokens, in_features] and both weights [heads * head_dim, in_features].
    """
    query, key = attention.query, attention.key
    return (
        place(attention, query, project(attention, query, x, query_weight)),
        place(attention, key, project(attention, key, x, key_weight)),
    )


def values(attention: Attention, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the values, one head for each key head.

    Args:
        attention: the layer.
        x: [batch, tokens, in_features].
        weight: [h_kv * value_dim, in_features]; `value_dim` may differ from `attention.head_dim`.
        bias: [h_kv * value_dim], or None.

    Returns:
        [batch, h_kv, tokens, value_dim], after the norm.
    """
    heads = _value_heads(attention, x, weight, bias)
    return heads if attention.value_norm is None else attention.value_norm.forward(heads)


def values_backward(attention: Attention, x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> Tensor:
    """Return the gradient before the norm for that of `values`, both [batch, h_kv, tokens, value_dim]."""
    if attention.value_norm is None:
        return grad
    return attention.value_norm.backward(_value_heads(attention, x, weight, bias), grad)


def _value_heads(attention: Attention, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    flat = torch.nn.functional.linear(x, weight, bias)  # [batch, tokens, h_kv * value_dim]
    return flat.view(*flat.shape[:2], attention.key.heads, -1).transpose(1, 2)


def gated(attention: Attention, x: Tensor, mixed: Tensor) -> Tensor:
    """Multiply by the sigmoids of the gates, if there are any; the gradient goes back through the same product.

    Args:
        attention: the layer.
        x: [batch, tokens, in_features].
        mixed: what the heads mix, beside each other, or its gradient: [batch, tokens, h * value_dim].
    """
    if attention.gate is None:
        return mixed
    return mixed * torch.nn.functional.linear(x, *attention.gate).sigmoid_()


def quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Rotate each pair of features by 90 degrees, (a, b) to (-b, a).

    Args:
        x: [..., features].
        interleaved: pairs are adjacent, (0, 1), (2, 3), ...; otherwise half of the features apart.
    """
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _cast(side: Projection, dtype: torch.dtype) -> Projection:
    norm = None if side.norm is None else side.norm.to(dtype)
    return replace(side, bias=_cast_bias(side.bias, dtype), norm=norm)


def _cast_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)
