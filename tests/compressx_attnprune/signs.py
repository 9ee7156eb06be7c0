"""Exact expectations over random signs, from a few chosen ones, and closed forms to hold them against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Signs(TorchFunctionMode):
    """Hands out given signs where random ones are drawn.

    Attributes:
        left: those not handed out yet, 0 and 1, flat.
    """

    def __init__(self, signs: Tensor) -> None:
        self.left = signs.flatten()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.random_:
            return func(*args, **(kwargs or {}))
        into, first, end = args
        assert (first, end) == (0, 2)
        given, self.left = self.left[: into.numel()], self.left[into.numel() :]
        return into.copy_(given.view(into.shape))


def hadamard(entries: int) -> Tensor:
    """Return sign patterns [patterns, entries], 0 and 1, that stand for all 2^entries.

    They are the rows of a Hadamard matrix (Sylvester's). Its columns are orthogonal, so that the mean of z z^T over the
    rows z is the identity, to the last bit; that is all that the expectation of an outer product of linear functions
    of z depends on.
    """
    matrix = torch.zeros(1, 1, dtype=torch.int8)
    while len(matrix) < entries:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, 1 - matrix], dim=1)])
    return matrix[:, :entries]


def count_signs(draw: Callable[[], object]) -> int:
    """Return how many signs a call draws."""
    with Signs(torch.zeros(1 << 20, dtype=torch.int8)) as counting:
        draw()
    return (1 << 20) - len(counting.left)


def expected_outer_products(draw: Callable[[], tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return the expectation of g g^T over the signs for both gradients g, [..., head_dim, head_dim]."""
    patterns = hadamard(count_signs(draw))
    totals: list[Tensor] = [torch.zeros(()), torch.zeros(())]
    with Signs(patterns) as signs:
        for _ in patterns:
            totals = [total + outer(g) for total, g in zip(totals, draw(), strict=True)]
    assert not len(signs.left)
    return [total / len(patterns) for total in totals]


def outer(g: Tensor) -> Tensor:
    """Return g g^T of [..., head_dim]."""
    return g[..., :, None] * g[..., None, :]


def gauss_newton_matrix(function: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> list[Tensor]:
    """Return J^T J of a function for each token of two arguments [heads, tokens, head_dim], by autograd's Jacobian.

    Only the blocks between a token's features and themselves: [heads, tokens, head_dim, head_dim].
    """
    jacobians = torch.autograd.functional.jacobian(function, (first, second), vectorize=True)
    flat = [j.flatten(0, j.dim() - 4) for j in jacobians]  # [outputs, heads, tokens, head_dim]
    return [torch.einsum("ohtd,ohte->htde", j, j) for j in flat]
