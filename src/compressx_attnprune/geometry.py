"""The geometry of one layer's attention: how its inputs and its two weights become queries and keys.

A frozen value, without modules, so that the mathematics on top of it is a pure function of tensors. Queries and keys
are `rope(norm(x W^T + b))` per head; norm and rotary embedding are optional, and several query heads may share a key
head. Tensors are ordered [batch, heads, tokens, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMSNorm over each head's features (Qwen3, Gemma 3): `gain * u / sqrt(mean(u^2) + eps)`.

    Attributes:
        gain: [head_dim].
        eps: added to the mean square.
    """

    gain: Tensor
    eps: float

    def rms(self, u: Tensor) -> Tensor:
        """Return the root mean square [..., 1] of each head's vector [..., head_dim]."""
        return (u.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()

    def forward(self, u: Tensor) -> Tensor:
        """Normalise [..., head_dim]."""
        return self.gain * (u / self.rms(u))

    def backward(self, u: Tensor, grad: Tensor) -> Tensor:
        """Turn the gradient of the output into that of the input `u`, both [..., head_dim]."""
        rms = self.rms(u)
        unit, scaled = u / rms, grad * self.gain
        return (scaled - unit * (unit * scaled).mean(dim=-1, keepdim=True)) / rms


@dataclass(frozen=True, eq=False)
class Projection:
    """One side, query or key.

    Attributes:
        heads: number of heads that its weight holds, one after the other.
        bias: [heads * head_dim], or None.
        norm: the norm between projection and rotary embedding, or None.
    """

    heads: int
    bias: Tensor | None = None
    norm: HeadNorm | None = None


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's causal attention, softmax(scaling * q k^T + mask).

    Attributes:
        query: the query side.
        key: the key side; its heads divide the query's, and consecutive query heads share one.
        head_dim: features of a head.
        scaling: factor on the scores.
        rotary: cosine and sine [tokens, rotary_dim] of the rotary embedding, whose first `rotary_dim` features turn in
            pairs half of `rotary_dim` apart; None without one.
        window: a query sees itself and the `window - 1` tokens before it; all before it when None.
        softcap: scores become `softcap * tanh(scores / softcap)` before the mask (Gemma 2); None without.
    """

    query: Projection
    key: Projection
    head_dim: int
    scaling: float
    rotary: tuple[Tensor, Tensor] | None = None
    window: int | None = None
    softcap: float | None = None

    @property
    def groups(self) -> int:
        """How many query heads share one key head."""
        return self.query.heads // self.key.heads

    def to(self, dtype: torch.dtype) -> Attention:
        """Return the same attention with all its tensors in another dtype."""
        rotary = None if self.rotary is None else (self.rotary[0].to(dtype), self.rotary[1].to(dtype))
        return replace(self, query=_cast(self.query, dtype), key=_cast(self.key, dtype), rotary=rotary)


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
    normed = u if side.norm is None else side.norm.forward(u)
    if attention.rotary is None:
        return normed
    cos, sin = attention.rotary
    turned, rest = normed[..., : cos.shape[-1]], normed[..., cos.shape[-1] :]
    return torch.cat([turned * cos + rotate_half(turned) * sin, rest], dim=-1)


def place_backward(attention: Attention, side: Projection, u: Tensor, grad: Tensor) -> Tensor:
    """Turn the gradient of `place`'s result into that of its argument `u`, both [batch, heads, tokens, head_dim]."""
    if attention.rotary is not None:
        cos, sin = attention.rotary
        turned, rest = grad[..., : cos.shape[-1]], grad[..., cos.shape[-1] :]
        # The transpose of a quarter turn is the quarter turn back.
        grad = torch.cat([turned * cos - rotate_half(turned * sin), rest], dim=-1)
    return grad if side.norm is None else side.norm.backward(u, grad)


def place_backward_diagonal(attention: Attention, side: Projection, u: Tensor, diagonal: Tensor) -> Tensor:
    """Turn the diagonal of a quadratic form in `place`'s result into that of its argument, approximately.

    Both rotary partners get the mean of their two entries, as if every angle were equally likely, and the norm acts by
    its gain over the root mean square, its pull towards unit length dropped.

    Args:
        attention: the layer.
        side: the query or the key side.
        u: the argument of `place`, [batch, heads, tokens, head_dim].
        diagonal: [batch, heads, tokens, head_dim].

    Returns:
        [batch, heads, tokens, head_dim].
    """
    if attention.rotary is not None:
        cos, sin = attention.rotary
        turned, rest = diagonal[..., : cos.shape[-1]], diagonal[..., cos.shape[-1] :]
        partners = turned.roll(cos.shape[-1] // 2, dims=-1)
        # cos^2 + sin^2 is one, but for embeddings that also scale (YaRN).
        diagonal = torch.cat([(turned + partners) / 2 * (cos.square() + sin.square()), rest], dim=-1)
    return diagonal if side.norm is None else diagonal * (side.norm.gain / side.norm.rms(u)).square()


def queries_and_keys(
    attention: Attention, x: Tensor, query_weight: Tensor, key_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the queries [batch, h, tokens, head_dim] and keys [batch, h_kv, tokens, head_dim] that are compared.

    Differentiable in `x` [batch, tokens, in_features] and both weights [heads * head_dim, in_features].
    """
    query, key = attention.query, attention.key
    return (
        place(attention, query, project(attention, query, x, query_weight)),
        place(attention, key, project(attention, key, x, key_weight)),
    )


def rotate_half(x: Tensor) -> Tensor:
    """Turn each pair (j, j + half) by a quarter: (a, b) becomes (-b, a)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _cast(side: Projection, dtype: torch.dtype) -> Projection:
    bias = None if side.bias is None else side.bias.to(dtype)
    norm = None if side.norm is None else replace(side.norm, gain=side.norm.gain.to(dtype))
    return replace(side, bias=bias, norm=norm)
