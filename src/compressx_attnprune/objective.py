"""The attention matrix in row blocks: matrices, errors, closed-form gradients, Gauss-Newton probes, attended values.

Pure functions of queries [batch, h, tokens, head_dim] and keys [batch, h_kv, tokens, head_dim] after norm and rotary
embedding. All but `attention_matrices` process blocks of query rows, one sequence at a time, so memory is
O(rows * tokens) instead of O(tokens^2) and a block fits into the processor's cache. No autograd graph is built: the
gradients are those of Attention Weights Pruning (arXiv 2410.11261, Theorem on the gradient of L(M)), propagated to the
two factors of a real layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx_attnprune.geometry import Attention

ROWS = 128
"""Query rows per block: with 512 tokens and nine heads a block's scores take 2.4 MB, about the size of an L2 cache."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """A block of query rows and the keys that they attend to.

    Attributes:
        queries: the rows.
        keys: from the first key visible to the first row to the last row's own.
        bias: 0 where a key is visible and -inf elsewhere, [rows, columns], for the last `columns` keys; earlier keys
            are visible to every row.
    """

    queries: slice
    keys: slice
    bias: Tensor


def attention_matrices(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Compute P = softmax(scaling * q k^T + mask) [batch, h, tokens, tokens]; differentiable, whole matrices."""
    (rows,) = _row_blocks(attention, q, q.shape[2])
    matrices = [_probabilities(attention, qb, kb, rows)[0] for qb, kb in _sequences(attention, q, k)]
    return torch.stack([_unfold(attention, p) for p in matrices])


def squared_errors(
    attention: Attention, dense: tuple[Tensor, Tensor], candidates: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Compute ||P~ - P||_F^2 of several pruned layers, and ||P||_F^2.

    Returns:
        Summed over the batch, float64 [candidates, h] and [h].
    """
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


def gradients(
    attention: Attention, dense: tuple[Tensor, Tensor], pruned: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Differentiate `1/2 ||P~ - P||_F^2`, summed over heads and batch, with respect to the pruned queries and keys.

    With C = P~ - P, the gradient of the scores is p = P~∘C - diag((P~∘C) 1) P~ (arXiv 2410.11261); from there to the
    queries `scaling * p k` and to the keys `scaling * p^T q`, summed over the query heads that share a key head.

    Returns:
        ||P~ - P||_F^2 and ||P||_F^2 of each head, float64 [h], and the gradients of the pruned queries and keys, of
        their shapes.
    """
    errors, norms = torch.zeros(2, attention.query.heads, dtype=torch.float64, device=dense[0].device)
    dq, dk = torch.zeros_like(pruned[0]), torch.zeros_like(pruned[1])
    for rows in _row_blocks(attention, dense[0], ROWS):
        pairs = zip(_sequences(attention, *pruned), _sequences(attention, *dense), strict=True)
        for i, ((q, k), (qd, kd)) in enumerate(pairs):
            p, slope = _probabilities(attention, q, k, rows)  # [h_kv, groups * rows, keys]
            reference = _probabilities(attention, qd, kd, rows)[0]
            norms += _squared_norms(attention, reference)
            c = torch.sub(p, reference, out=reference)
            errors += _squared_norms(attention, c)
            _backward(attention, (q, k), rows, c.mul_(p), p, slope, (dq[i], dk[i]))
    return errors, norms, (dq.mul_(attention.scaling), dk.mul_(attention.scaling))


def probe(attention: Attention, q: Tensor, k: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Compute the gradients of queries and keys for independent random signs as the gradient of P.

    With J_i = diag(p_i) - p_i p_i^T the derivative of row i of P by its scores, the expectation of the outer products
    of these gradients are the Gauss-Newton matrices of ||P~ - P||_F^2 at the dense point: for query i
    `scaling^2 K^T J_i^2 K` and for key j, summed over the queries, `scaling^2 sum_i (J_i^2)_jj q_i q_i^T`. A softcap
    multiplies the derivative of each score.

    Returns:
        The gradients of queries and keys, of their shapes.
    """
    return _backpropagate(attention, q, k, lambda _i, _rows, p: random_signs_(torch.empty_like(p), generator))


def mixed(attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute P v, [batch, h, tokens, value_dim], of values [batch, h_kv, tokens, value_dim]."""
    k = _centred(attention, k)
    result = q.new_empty(*q.shape[:3], v.shape[-1])
    for rows in _row_blocks(attention, q, ROWS):
        for i, (qb, kb) in enumerate(_sequences(attention, q, k)):
            p, _ = _probabilities(attention, qb, kb, rows)  # [h_kv, groups * rows, keys]
            result[i, :, rows.queries] = _unfold(attention, torch.bmm(p, v[i][:, rows.keys]))
    return result


def mixed_backward(
    attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, dv: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Backpropagate a gradient of `mixed` to queries and keys, with four tokens x tokens products to autograd's seven.

    Args:
        attention: the layer.
        q: queries.
        k: keys.
        v: values [batch, h_kv, tokens, value_dim].
        grad: [batch, h, tokens, value_dim].
        dv: in the shape of `v`; the gradient of the values is added to it where it is given, by one more product.

    Returns:
        The gradients of queries and keys, of their shapes.
    """

    def of_matrix(i: int, rows: _Rows, p: Tensor) -> Tensor:
        of_rows = _fold(attention, grad[i].view(attention.key.heads, attention.groups, *grad.shape[2:]), rows)
        if dv is not None:
            dv[i][:, rows.keys] += torch.bmm(p.transpose(1, 2), of_rows)
        return torch.bmm(of_rows, v[i][:, rows.keys].transpose(1, 2))

    return _backpropagate(attention, q, k, of_matrix)


def random_signs_(x: Tensor, generator: torch.Generator) -> Tensor:
    """Overwrite `x` by -1 and 1, drawn with equal probability, and return it."""
    return x.random_(0, 2, generator=generator).mul_(2.0).sub_(1.0)  # bernoulli_ takes four times as long


def _backpropagate(
    attention: Attention, q: Tensor, k: Tensor, of_matrix: Callable[[int, _Rows, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Backpropagate a gradient of P, computed block by block, to queries and keys.

    Args:
        attention: the layer.
        q: queries.
        k: keys.
        of_matrix: maps a sequence's index, a block and its P [h_kv, groups * rows, keys] to the gradient of that P,
            which is overwritten.
    """
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    k = _centred(attention, k)
    for rows in _row_blocks(attention, q, ROWS):
        for i, (qb, kb) in enumerate(_sequences(attention, q, k)):
            p, slope = _probabilities(attention, qb, kb, rows)
            _backward(attention, (qb, kb), rows, of_matrix(i, rows, p).mul_(p), p, slope, (dq[i], dk[i]))
    return dq.mul_(attention.scaling), dk.mul_(attention.scaling)


def _backward(
    attention: Attention,
    pair: tuple[Tensor, Tensor],
    rows: _Rows,
    weighted: Tensor,
    p: Tensor,
    slope: Tensor | None,
    into: tuple[Tensor, Tensor],
) -> None:
    """Backpropagate a block's gradient of P through softmax and scores and accumulate it, without the scaling.

    A sink changes nothing here: its probability has no gradient.

    Args:
        attention: the layer.
        pair: one sequence's queries [h_kv, groups, tokens, head_dim] and keys [h_kv, tokens, head_dim].
        rows: the block.
        weighted: elementwise product of P and its gradient, [h_kv, groups * rows, keys]; overwritten.
        p: the block of P.
        slope: derivative of the softcap there, or None.
        into: gradients of the sequence's queries [h, tokens, head_dim] and keys [h_kv, tokens, head_dim].
    """
    weighted.addcmul_(p, weighted.sum(dim=-1, keepdim=True), value=-1.0)
    if slope is not None:
        weighted.mul_(slope)
    q, k = pair
    into[0][:, rows.queries] += _unfold(attention, torch.bmm(weighted, k[:, rows.keys]))
    into[1][:, rows.keys] += torch.bmm(weighted.transpose(1, 2), _fold(attention, q, rows))


def _centred(attention: Attention, k: Tensor) -> Tensor:
    """Subtract the mean key: softmax is invariant, and float32 loses less where keys share a large component.

    Not where something sees the scores themselves: a softcap, or a sink, whose score stays.
    """
    if attention.softcap is not None or attention.sinks is not None:
        return k
    return k - k.mean(dim=2, keepdim=True)


def _row_blocks(attention: Attention, q: Tensor, size: int) -> Iterator[_Rows]:
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
        yield _Rows(slice(start, stop), slice(first, stop), bias)


def _sequences(attention: Attention, q: Tensor, k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each sequence's queries [h_kv, groups, tokens, head_dim] and keys [h_kv, tokens, head_dim]."""
    for query, key in zip(q, k, strict=True):
        yield query.view(attention.key.heads, attention.groups, *query.shape[1:]), key


def _probabilities(attention: Attention, q: Tensor, k: Tensor, rows: _Rows) -> tuple[Tensor, Tensor | None]:
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


def _fold(attention: Attention, q: Tensor, rows: _Rows) -> Tensor:
    """Return a block's rows of [h_kv, groups, tokens, n] as [h_kv, groups * rows, n]."""
    return q[:, :, rows.queries].reshape(attention.key.heads, -1, q.shape[-1])


def _unfold(attention: Attention, folded: Tensor) -> Tensor:
    """Turn [h_kv, groups * rows, n] into [h, rows, n]."""
    return folded.reshape(attention.query.heads, -1, folded.shape[-1])


def _squared_norms(attention: Attention, folded: Tensor) -> Tensor:
    """Compute each query head's ||.||_F^2 of a block [h_kv, groups * rows, n], float64 [h]."""
    by_row: Tensor = torch.linalg.vector_norm(folded, dim=-1)  # one pass; a float64 sum would copy to float64
    return by_row.double().square().view(attention.query.heads, -1).sum(dim=-1)
