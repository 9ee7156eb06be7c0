"""The attention-matrix objective: matrices, loss, closed-form gradient and Gauss-Newton statistics.

Pure functions of queries [batch, h, tokens, head_dim] and keys [batch, h_kv, tokens, head_dim] after norm and rotary
embedding. Everything but `attention_matrices` runs in blocks of query rows and one sequence at a time, so that memory
is O(rows * tokens) and not O(tokens^2), and what one block works on stays in the processor's cache. No autograd graph
is built: the gradients are those of Attention Weights Pruning (arXiv 2410.11261, Theorem on the gradient of L(M)),
carried through the two factors of a real layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compressx_attnprune.geometry import Attention

ROWS = 128
"""Query rows in a block: with 512 tokens and nine heads a block's scores take 2.4 MB, about a second-level cache."""


@dataclass(frozen=True, eq=False)
class _Rows:
    """A block of query rows and the keys that any of them sees.

    Attributes:
        queries: the rows.
        keys: from the first key that the first row sees to the last row's own.
        bias: 0 where a row sees a key and -inf where it does not, [rows, columns], over the last `columns` keys;
            all earlier keys are seen by every row.
    """

    queries: slice
    keys: slice
    bias: Tensor


def attention_matrices(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Compute P = softmax(scaling * q k^T + mask) [batch, h, tokens, tokens]; differentiable, whole matrices."""
    (rows,) = _row_blocks(attention, q, q.shape[2])
    matrices = [_probabilities(attention, qb, kb, rows)[0] for qb, kb in _sequences(attention, q, k)]
    return torch.stack([_unfold(attention, p) for p in matrices])


def squared_norms(attention: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Compute ||P||_F^2 of each query head, summed over the batch, float64 [h]."""
    total = torch.zeros(attention.query.heads, dtype=torch.float64, device=q.device)
    for rows in _row_blocks(attention, q, ROWS):
        for qb, kb in _sequences(attention, q, k):
            p, _ = _probabilities(attention, qb, kb, rows)
            total += _per_head(attention, p.square_())
    return total


def squared_errors(attention: Attention, dense: tuple[Tensor, Tensor], pruned: tuple[Tensor, Tensor]) -> Tensor:
    """Compute ||P~ - P||_F^2 of each query head, summed over the batch, float64 [h].

    Args:
        attention: the layer.
        dense: queries and keys of the dense weights.
        pruned: those of the pruned ones.
    """
    total = torch.zeros(attention.query.heads, dtype=torch.float64, device=dense[0].device)
    for rows in _row_blocks(attention, dense[0], ROWS):
        for (q, k), (qd, kd) in zip(_sequences(attention, *pruned), _sequences(attention, *dense), strict=True):
            p, _ = _probabilities(attention, q, k, rows)
            total += _per_head(attention, p.sub_(_probabilities(attention, qd, kd, rows)[0]).square_())
    return total


def gradients(
    attention: Attention, dense: tuple[Tensor, Tensor], pruned: tuple[Tensor, Tensor], head_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiate `1/2 sum_heads head_weights * ||P~ - P||_F^2` with respect to the pruned queries and keys.

    With C = P~ - P, the gradient of the scores is p = P~∘C - diag((P~∘C) 1) P~ (arXiv 2410.11261); from there to the
    queries `scaling * p k` and to the keys `scaling * p^T q`, summed over the query heads that share a key head.

    Args:
        attention: the layer.
        dense: queries and keys of the dense weights.
        pruned: those of the pruned ones.
        head_weights: [h].

    Returns:
        ||P~ - P||_F^2 of each head, float64 [h], and the gradients of the pruned queries and keys, of their shapes.
    """
    total = torch.zeros(attention.query.heads, dtype=torch.float64, device=dense[0].device)
    dq, dk = torch.zeros_like(pruned[0]), torch.zeros_like(pruned[1])
    factor = head_weights.to(dq.dtype).view(attention.key.heads, attention.groups, 1, 1) * attention.scaling
    for rows in _row_blocks(attention, dense[0], ROWS):
        pairs = zip(_sequences(attention, *pruned), _sequences(attention, *dense), strict=True)
        for i, ((q, k), (qd, kd)) in enumerate(pairs):
            p, slope = _probabilities(attention, q, k, rows)  # [h_kv, groups * rows, keys]
            c = p - _probabilities(attention, qd, kd, rows)[0]
            total += _per_head(attention, c.square())
            grad = c.mul_(p)
            grad.addcmul_(p, grad.sum(dim=-1, keepdim=True), value=-1.0)
            if slope is not None:
                grad.mul_(slope)
            folded = (-1, *factor.shape[1:2], rows.queries.stop - rows.queries.start, attention.head_dim)
            dq_rows = torch.bmm(grad, k[:, rows.keys]).view(folded) * factor  # [h_kv, groups, rows, head_dim]
            dq[i, :, rows.queries] += dq_rows.flatten(0, 1)
            scaled = (_fold(attention, q, rows).view(folded) * factor).flatten(1, 2)
            dk[i, :, rows.keys] += torch.bmm(grad.transpose(1, 2), scaled)
    return total, dq, dk


def gauss_newton(attention: Attention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the diagonals of the Gauss-Newton matrices of ||P~ - P||_F^2 for every query and every key.

    With J_i = diag(p_i) - p_i p_i^T the derivative of row i of P by its scores, and m_i = sum_j p_ij k_j:
    query i has scaling^2 sum_j p_ij^2 (k_j - m_i)(k_j - m_i)^T, and key j has
    scaling^2 sum_i p_ij^2 (1 - 2 p_ij + sum_l p_il^2) q_i q_i^T. Both are exact for one query or key alone; the
    products of different keys are dropped. A softcap multiplies the derivative of each score.

    Returns:
        [batch, h, tokens, head_dim] for the queries and [batch, h_kv, tokens, head_dim] for the keys.
    """
    query_diagonal, key_diagonal = torch.empty_like(q), torch.zeros_like(k)
    # Softmax does not see a shift common to all keys, but float32 does, and keys often share a large one.
    k_shifted = k - k.mean(dim=2, keepdim=True) if attention.softcap is None else k
    for rows in _row_blocks(attention, q, ROWS):
        for i, (qb, kb) in enumerate(_sequences(attention, q, k)):
            p, slope = _probabilities(attention, qb, kb, rows)  # [h_kv, groups * rows, keys]
            of_queries, of_keys = _curvature(p, slope, k_shifted[i, :, rows.keys], _fold(attention, qb, rows))
            query_diagonal[i, :, rows.queries] = _unfold(attention, of_queries)
            key_diagonal[i, :, rows.keys] += of_keys
    return query_diagonal.mul_(attention.scaling**2), key_diagonal.mul_(attention.scaling**2)


def _curvature(p: Tensor, slope: Tensor | None, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the two diagonals of `gauss_newton` over one block, without the scaling.

    Args:
        p: [h_kv, folded rows, keys]; overwritten.
        slope: derivative of the softcap, of the same shape, or None.
        k: [h_kv, keys, head_dim].
        q: [h_kv, folded rows, head_dim].

    Returns:
        [h_kv, folded rows, head_dim] and [h_kv, keys, head_dim].
    """
    squares = p.square()
    power = squares.sum(dim=-1, keepdim=True)  # sum_l p_il^2
    means = torch.bmm(p if slope is None else p * slope, k)  # m_i
    once = squares if slope is None else squares * slope
    twice = once if slope is None else once * slope
    of_queries = torch.bmm(twice, k.square())
    of_queries.addcmul_(means, torch.bmm(once, k), value=-2.0).addcmul_(means.square(), power).clamp_(min=0.0)
    column = p.mul_(-2.0).add_(power + 1.0).mul_(twice)  # slope^2 (J_i^2)_jj
    return of_queries, torch.bmm(column.transpose(1, 2), q.square())


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
    """Compute a block of P [h_kv, groups * rows, keys], and the derivative of the softcap there if there is one.

    Query heads that share a key head are folded into rows of one matrix, so that keys are never repeated.
    """
    scores = torch.bmm(_fold(attention, q, rows) * attention.scaling, k[:, rows.keys].transpose(1, 2))
    slope = None
    if attention.softcap is not None:
        capped = torch.tanh(scores / attention.softcap)
        scores, slope = capped * attention.softcap, 1.0 - capped.square()
    by_group = scores.view(*q.shape[:2], -1, scores.shape[-1])  # [h_kv, groups, rows, keys]
    by_group[..., -rows.bias.shape[-1] :] += rows.bias
    return torch.softmax(scores, dim=-1), slope


def _fold(attention: Attention, q: Tensor, rows: _Rows) -> Tensor:
    """Take a block's rows of [h_kv, groups, tokens, head_dim] as [h_kv, groups * rows, head_dim]."""
    return q[:, :, rows.queries].reshape(attention.key.heads, -1, attention.head_dim)


def _unfold(attention: Attention, folded: Tensor) -> Tensor:
    """Turn [h_kv, groups * rows, n] into [h, rows, n]."""
    return folded.reshape(attention.query.heads, -1, folded.shape[-1])


def _per_head(attention: Attention, folded: Tensor) -> Tensor:
    """Sum [h_kv, groups * rows, n] over each query head, float64 [h]."""
    return folded.sum(dim=-1, dtype=torch.float64).view(attention.query.heads, -1).sum(dim=-1)
