"""One layer's attention as pure functions of tensors: from inputs and weights to P and P V, and back.

Queries and keys are `rope(norm(x W^T + b))`; norm and rotary embedding are optional, and several query heads may share
a key head and its values. Inputs are [batch, tokens, in_features], weights [heads * head_dim, in_features] in head
order, whatever the model's layout. Queries q are [batch, h, tokens, head_dim], keys k [batch, h_kv, tokens, head_dim],
values v [batch, h_kv, tokens, value_dim]; a pair is of both sides, (query, key).

The attention matrix P is computed in blocks of query rows, one sequence at a time, so memory is O(rows * tokens)
instead of O(tokens^2) and a block fits into the processor's cache. No autograd graph is built: the gradients are those
of Attention Weights Pruning (arXiv 2410.11261, Theorem on the gradient of L(M)), propagated to the two factors of a
real layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

Pair: TypeAlias = tuple[Tensor, Tensor]

ROWS = 128
"""Query rows per block: with 512 tokens and nine heads a block's scores take 2.4 MB, about the size of an L2 cache."""


@dataclass(frozen=True, eq=False)
class _RowBlock:
    """A block of query rows and the keys that they attend to."""

    queries: slice  # the rows
    keys: slice  # from the first key visible to the first row to the last row's own
    bias: Tensor  # [rows, columns], 0 or -inf where a key is hidden, of the last `columns` keys; all see earlier ones


@dataclass(frozen=True, eq=False)
class Norm:
    """Norm of queries or keys [batch, heads, tokens, head_dim]: `gain * u / sqrt(mean(u^2) + eps) + shift`."""

    gain: Tensor  # [head_dim], or [heads, 1, head_dim] for separate gains per head
    eps: float
    shift: Tensor | None = None  # of the gain's shape
    centered: bool = False  # the mean is subtracted first: LayerNorm (StableLM, Cohere), not RMSNorm (Qwen3, Gemma 3)
    whole: bool = False  # means are over all heads of a token (OLMo 2), not per head
    last: bool = False  # it comes after the rotary embedding (HunYuan), not before

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

    def _mean(self, u: Tensor) -> Tensor:
        return u.mean(dim=(-3, -1) if self.whole else -1, keepdim=True)

    def _rms(self, u: Tensor) -> Tensor:
        return (self._mean(u.square()) + self.eps).sqrt()

    def _centre(self, u: Tensor) -> Tensor:
        return u - self._mean(u) if self.centered else u


@dataclass(frozen=True, eq=False)
class Projection:
    """One side, query or key."""

    heads: int  # consecutive in its weight
    bias: Tensor | None = None  # [heads * head_dim]
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
    def sides(self) -> tuple[Projection, Projection]:
        """Both sides, in the order of a pair."""
        return self.query, self.key

    @property
    def groups(self) -> int:
        """Number of query heads per key head."""
        return self.query.heads // self.key.heads

    def first(self, tokens: int) -> Attention:
        """Return the attention restricted to the first tokens."""
        return replace(self, rotary=None if self.rotary is None else (self.rotary[0][:tokens], self.rotary[1][:tokens]))


def project(attention: Attention, x: Tensor, weights: Pair) -> Pair:
    """Apply weights and biases and split the heads: queries and keys before norm and rotary embedding."""
    query, key = (_heads(x, w, side.bias, side.heads) for side, w in zip(attention.sides, weights, strict=True))
    return query, key


def place(attention: Attention, projected: Pair) -> Pair:
    """Apply norms and rotary embedding to `project`'s result."""
    query, key = (_placed(attention, side.norm, u) for side, u in zip(attention.sides, projected, strict=True))
    return query, key


def place_backward(attention: Attention, projected: Pair, grads: Pair) -> Pair:
    """Return the gradients of `place`'s argument for those of its result."""
    query, key = (
        _placed_backward(attention, side.norm, u, grad)
        for side, u, grad in zip(attention.sides, projected, grads, strict=True)
    )
    return query, key


def queries_and_keys(attention: Attention, x: Tensor, weights: Pair) -> Pair:
    """Compute queries and keys after norm and rotary embedding; differentiable in inputs and weights."""
    return place(attention, project(attention, x, weights))


def _heads(x: Tensor, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    flat = torch.nn.functional.linear(x, weight, bias)  # [batch, tokens, heads * head_dim]
    return flat.view(*flat.shape[:2], heads, -1).transpose(1, 2)


def _placed(attention: Attention, norm: Norm | None, u: Tensor) -> Tensor:
    if norm is None:
        return _rotated(attention, u)
    return norm.forward(_rotated(attention, u)) if norm.last else _rotated(attention, norm.forward(u))


def _placed_backward(attention: Attention, norm: Norm | None, u: Tensor, grad: Tensor) -> Tensor:
    if norm is not None and norm.last:
        return _rotated(attention, norm.backward(_rotated(attention, u), grad), back=True)
    grad = _rotated(attention, grad, back=True)
    return grad if norm is None else norm.backward(u, grad)


def _rotated(attention: Attention, u: Tensor, *, back: bool = False) -> Tensor:
    """Apply the rotary embedding, or its transpose."""
    if attention.rotary is None:
        return u
    (cos, sin), interleaved = attention.rotary, attention.rotary_interleaved
    turned, rest = u[..., : cos.shape[-1]], u[..., cos.shape[-1] :]
    # The transpose of a quarter turn is its negative.
    across = -quarter_turn(turned * sin, interleaved) if back else quarter_turn(turned, interleaved) * sin
    return torch.cat([turned * cos + across, rest], dim=-1)


def values(attention: Attention, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the values after their norm, one head for each key head; weight [h_kv * value_dim, in_features]."""
    heads = _heads(x, weight, bias, attention.key.heads)
    return heads if attention.value_norm is None else attention.value_norm.forward(heads)


def gated(attention: Attention, x: Tensor, mixed: Tensor) -> Tensor:
    """Multiply what the heads mix [batch, tokens, h * value_dim], or its gradient, by the sigmoids of any gates."""
    if attention.gate is None:
        return mixed
    return mixed * torch.nn.functional.linear(x, *attention.gate).sigmoid_()


def quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Rotate each pair of the last dimension's features by 90 degrees, (a, b) to (-b, a).

    Interleaved pairs are adjacent, (0, 1), (2, 3), ...; others half of the features apart.
    """
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def attention_matrices(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Compute P = softmax(scaling * q k^T + mask) [batch, h, tokens, tokens]; differentiable, whole matrices."""
    (rows,) = _row_blocks(attention, q, q.shape[2])
    matrices = [_probabilities(attention, qb, kb, rows)[0] for qb, kb in _sequences(attention, q, k)]
    return torch.stack([_unfold(attention, p) for p in matrices])


def squared_errors(attention: Attention, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Compute ||P~ - P||_F^2 of several pruned layers, and ||P||_F^2: over the batch, float64 [candidates, h], [h]."""
    heads, device = attention.query.heads, dense[0].device
    errors = torch.zeros(len(candidates), heads, dtype=torch.float64, device=device)
    norms = torch.zeros(heads, dtype=torch.float64, device=device)
    for rows in _row_blocks(attention, dense[0], ROWS):
        for i, (qd, kd) in enumerate(_sequences(attention, *dense)):
            reference = _probabilities(attention, qd, kd, rows)[0]  # [h_kv, groups * rows, keys]
            norms += _squared_norms(attention, reference)
            for candidate, (q, k) in enumerate(candidates):
                one = (q[i].view(qd.shape), k[i])
                errors[candidate] += _squared_norms(attention, _probabilities(attention, *one, rows)[0].sub_(reference))
    return errors, norms


def matrix_gradients(attention: Attention, dense: Pair, pruned: Pair) -> tuple[Tensor, Tensor, Pair]:
    """Differentiate `1/2 ||P~ - P||_F^2`, summed over heads and batch, with respect to the pruned queries and keys.

    With C = P~ - P, the gradient of the scores is p = P~∘C - diag((P~∘C) 1) P~ (arXiv 2410.11261); from there to the
    queries `scaling * p k` and to the keys `scaling * p^T q`, summed over the query heads that share a key head.

    Returns:
        ||P~ - P||_F^2 and ||P||_F^2 of each head, float64 [h], and the gradients of the pruned queries and keys.
    """
    errors, norms = torch.zeros(2, attention.query.heads, dtype=torch.float64, device=dense[0].device)
    unpruned = list(_sequences(attention, *dense))

    def difference(i: int, rows: _RowBlock, p: Tensor) -> Tensor:
        reference = _probabilities(attention, *unpruned[i], rows)[0]  # [h_kv, groups * rows, keys]
        norms.add_(_squared_norms(attention, reference))
        c = torch.sub(p, reference, out=reference)
        errors.add_(_squared_norms(attention, c))
        return c

    return errors, norms, _backpropagate(attention, *pruned, difference)


def matrix_probe(attention: Attention, q: Tensor, k: Tensor, generator: torch.Generator) -> Pair:
    """Compute the gradients of queries and keys for independent random signs as the gradient of P.

    With J_i = diag(p_i) - p_i p_i^T the derivative of row i of P by its scores, the expectation of the outer products
    of these gradients are the Gauss-Newton matrices of ||P~ - P||_F^2 at the dense point: for query i
    `scaling^2 K^T J_i^2 K` and for key j, summed over the queries, `scaling^2 sum_i (J_i^2)_jj q_i q_i^T`. A softcap
    multiplies the derivative of each score.
    """
    k = _centred(attention, k)
    return _backpropagate(attention, q, k, lambda _i, _rows, p: random_signs_(torch.empty_like(p), generator))


def mixed_values(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute P v of all heads beside each other, [batch, tokens, h * value_dim], by a fused kernel if there is one."""
    plain = attention.softcap is None and attention.sinks is None and attention.window is None
    if plain and v.shape[-1] == q.shape[-1]:
        # A key head for each query head: CUDA's only fused kernel for float32 shares none in some torch versions,
        # where `enable_gqa` means whole tokens x tokens matrices.
        k, v = (t.repeat_interleave(attention.groups, dim=1) for t in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=attention.scaling, is_causal=True
        )  # [batch, h, tokens, value_dim]
    else:
        mixed = mixed_by_rows(attention, q, k, v)
    return mixed.transpose(1, 2).flatten(2)


def mixed_by_rows(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute P v, [batch, h, tokens, value_dim]."""
    k = _centred(attention, k)
    result = q.new_empty(*q.shape[:3], v.shape[-1])
    for rows in _row_blocks(attention, q, ROWS):
        for i, (qb, kb) in enumerate(_sequences(attention, q, k)):
            p, _ = _probabilities(attention, qb, kb, rows)  # [h_kv, groups * rows, keys]
            result[i, :, rows.queries] = _unfold(attention, torch.bmm(p, v[i][:, rows.keys]))
    return result


def mixed_backward(attention: Attention, q: Tensor, k: Tensor, v: Tensor, of_mixed: Tensor) -> Pair:
    """Backpropagate a gradient of P v to queries and keys, with four tokens x tokens products to autograd's seven.

    `of_mixed` is the gradient of all heads beside each other, [batch, tokens, h * value_dim].
    """
    grad = of_mixed.view(*of_mixed.shape[:2], attention.query.heads, -1).transpose(1, 2)

    def of_matrix(i: int, rows: _RowBlock, _p: Tensor) -> Tensor:
        of_rows = _fold(attention, grad[i].view(attention.key.heads, attention.groups, *grad.shape[2:]), rows)
        return torch.bmm(of_rows, v[i][:, rows.keys].transpose(1, 2))

    return _backpropagate(attention, q, _centred(attention, k), of_matrix)


def random_signs_(x: Tensor, generator: torch.Generator) -> Tensor:
    """Overwrite `x` by -1 and 1, drawn with equal probability, and return it."""
    return x.random_(0, 2, generator=generator).mul_(2.0).sub_(1.0)  # bernoulli_ takes four times as long


def _backpropagate(
    attention: Attention, q: Tensor, k: Tensor, of_matrix: Callable[[int, _RowBlock, Tensor], Tensor]
) -> Pair:
    """Backpropagate a gradient of P, computed block by block, through softmax and scores to queries and keys.

    A sink changes nothing here: its probability has no gradient. `of_matrix` maps a sequence's index, a block and its
    P [h_kv, groups * rows, keys] to the gradient of that P, which is overwritten.
    """
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    for rows in _row_blocks(attention, q, ROWS):
        for i, (qb, kb) in enumerate(_sequences(attention, q, k)):
            p, slope = _probabilities(attention, qb, kb, rows)
            grad = of_matrix(i, rows, p).mul_(p)  # [h_kv, groups * rows, keys]
            grad.addcmul_(p, grad.sum(dim=-1, keepdim=True), value=-1.0)
            if slope is not None:
                grad.mul_(slope)
            dq[i][:, rows.queries] += _unfold(attention, torch.bmm(grad, kb[:, rows.keys]))
            dk[i][:, rows.keys] += torch.bmm(grad.transpose(1, 2), _fold(attention, qb, rows))
    return dq.mul_(attention.scaling), dk.mul_(attention.scaling)


def _centred(attention: Attention, k: Tensor) -> Tensor:
    """Subtract the mean key: softmax is invariant, and float32 loses less where keys share a large component.

    Not where something sees the scores themselves: a softcap, or a sink, whose score is not shifted.
    """
    if attention.softcap is not None or attention.sinks is not None:
        return k
    return k - k.mean(dim=2, keepdim=True)


def _row_blocks(attention: Attention, q: Tensor, size: int) -> Iterator[_RowBlock]:
    tokens = q.shape[2]
    window = attention.window or tokens
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        first = max(0, start - window + 1)
        masked_from = start if stop <= window else first
        i = torch.arange(start, stop, device=q.device)[:, None]
        j = torch.arange(masked_from, stop, device=q.device)
        hidden = (j > i) | (j <= i - window)
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        yield _RowBlock(slice(start, stop), slice(first, stop), bias)


def _sequences(attention: Attention, q: Tensor, k: Tensor) -> Iterator[Pair]:
    """Yield each sequence's queries [h_kv, groups, tokens, head_dim] and keys [h_kv, tokens, head_dim]."""
    for query, key in zip(q, k, strict=True):
        yield query.view(attention.key.heads, attention.groups, *query.shape[1:]), key


def _probabilities(attention: Attention, q: Tensor, k: Tensor, rows: _RowBlock) -> tuple[Tensor, Tensor | None]:
    """Compute a block of P [h_kv, groups * rows, keys], and the derivative of its softcap if there is one.

    Query heads that share a key head are folded into rows of one matrix, so keys are never repeated.
    """
    scores = torch.bmm(_fold(attention, q, rows) * attention.scaling, k[:, rows.keys].transpose(1, 2))
    slope = None
    if attention.softcap is not None:
        capped = torch.tanh(scores / attention.softcap)
        scores, slope = capped * attention.softcap, 1.0 - capped.square()
    by_group = scores.view(*q.shape[:2], -1, scores.shape[-1])  # [h_kv, groups, rows, keys]
    by_group[..., -rows.bias.shape[-1] :] += rows.bias
    if attention.sinks is None:
        return torch.softmax(scores, dim=-1), slope
    sinks = attention.sinks.to(q).view(*q.shape[:2], 1, 1).expand(*by_group.shape[:-1], 1)
    return torch.softmax(torch.cat([by_group, sinks], dim=-1), dim=-1)[..., :-1].flatten(1, 2), slope


def _fold(attention: Attention, q: Tensor, rows: _RowBlock) -> Tensor:
    """Return a block's rows of [h_kv, groups, tokens, n] as [h_kv, groups * rows, n]."""
    return q[:, :, rows.queries].reshape(attention.key.heads, -1, q.shape[-1])


def _unfold(attention: Attention, folded: Tensor) -> Tensor:
    """Turn [h_kv, groups * rows, n] into [h, rows, n]."""
    return folded.reshape(attention.query.heads, -1, folded.shape[-1])


def _squared_norms(attention: Attention, folded: Tensor) -> Tensor:
    """Compute each query head's ||.||_F^2 of a block [h_kv, groups * rows, n], float64 [h]."""
    by_row: Tensor = torch.linalg.vector_norm(folded, dim=-1)  # one pass; a float64 sum would copy to float64
    return by_row.double().square().view(attention.query.heads, -1).sum(dim=-1)
