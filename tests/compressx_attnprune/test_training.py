"""Masks learned by gradient descent, against the steps taken by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from compressx_attnprune.attention import Attention, Pair, Projection
from compressx_attnprune.losses import MatrixLoss
from compressx_attnprune.training import LEARNING_RATE, learn_masks

LOSS = MatrixLoss(Attention(Projection(2), Projection(1), head_dim=4, scaling=0.5))
WIDTH, TOKENS = 8, 12


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def dense() -> Pair:
    return 0.5 * normal(8, WIDTH, seed=1), 0.5 * normal(4, WIDTH, seed=2)


@pytest.fixture
def x() -> Tensor:
    """Return inputs with four directions and a little of all others, so that weights can stand in for one another."""
    return normal(10, TOKENS, 4, seed=10) @ normal(4, WIDTH, seed=7) / 2 + 0.1 * normal(10, TOKENS, WIDTH, seed=11)


def gradients(dense: Pair, x: Tensor, pruned: Sequence[Tensor], factor: float = 1.0) -> tuple[Tensor, list[Tensor]]:
    error, grads = LOSS.gradients(x, dense, tuple(pruned))
    return error, [factor * grad for grad in grads]


def by_hand(x: Tensor, dense: Pair, regularization: float, steps: int) -> list[Tensor]:
    """Adam as published (arXiv 1412.6980, Algorithm 1), with a half cosine for its step size and clipping."""
    masks = [torch.ones_like(w) for w in dense]
    first, second = [torch.zeros_like(w) for w in dense], [torch.zeros_like(w) for w in dense]
    for step in range(steps):
        batch = x[[(4 * step + i) % len(x) for i in range(4)]]
        _, grads = gradients(dense, batch, [m * w for m, w in zip(masks, dense, strict=True)])
        for i, mask in enumerate(masks):
            gradient = grads[i] * dense[i] + regularization * mask / mask.numel()
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.95 * second[i] + 0.05 * gradient.square()
            mean, square = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.95 ** (step + 1))
            rate = LEARNING_RATE * (1 + math.cos(math.pi * step / steps)) / 2
            mask.sub_(rate * mean / (square.sqrt() + 1e-20)).clamp_(0.0, 1.0)
    return masks


@pytest.mark.parametrize("regularization", [0.01, 10.0])
def test_masks_are_learnt_as_by_hand(regularization: float, dense: Pair, x: Tensor):
    got, losses = learn_masks(partial(gradients, dense), x, dense, regularization=regularization, steps=12)
    for mask, wanted in zip(got, by_hand(x, dense, regularization, 12), strict=True):
        assert mask.min() >= 0.0
        assert mask.max() <= 1.0
        assert (mask < 1.0).any()
        torch.testing.assert_close(mask, wanted, rtol=1e-3, atol=1e-3)
    assert len(losses) == 12
    assert losses[0] == pytest.approx(0.0, abs=1e-12)  # all ones: the dense weights


def test_the_steps_of_the_masks_do_not_depend_on_the_size_of_their_gradients(dense: Pair, x: Tensor):
    """The gradients of a larger layer are smaller."""
    learnt = [
        learn_masks(partial(gradients, dense, factor=f), x, dense, regularization=0.1 * f, steps=8)[0]
        for f in (1.0, 1e-7)
    ]
    for large, small in zip(*learnt, strict=True):
        torch.testing.assert_close(small, large, rtol=1e-3, atol=1e-3)
