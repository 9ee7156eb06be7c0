"""Descent on a loss: what is returned, which text decides, and the steps themselves against a loop by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from compressx import Pattern, Unstructured, keep_masks
from compressx_attnprune import training
from compressx_attnprune.attention import Attention, Pair, Projection
from compressx_attnprune.losses import MatrixLoss, relative_error
from compressx_attnprune.training import Candidate, Text

ATTENTION = Attention(Projection(2), Projection(1), head_dim=4, scaling=0.5)
LOSS = MatrixLoss(ATTENTION)
WIDTH, TOKENS = 8, 12
HALF = Unstructured(0.5, "joint")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def dense() -> Pair:
    return 0.5 * normal(8, WIDTH, seed=1), 0.5 * normal(4, WIDTH, seed=2)


@pytest.fixture
def text() -> Text:
    """Return inputs with four directions and a little of all others, so that weights can stand in for one another."""
    directions = normal(4, WIDTH, seed=7) / 2
    train, held_out = (
        normal(n, TOKENS, 4, seed=n) @ directions + 0.1 * normal(n, TOKENS, WIDTH, seed=n + 1) for n in (10, 6)
    )
    return Text(train, held_out)


def double(numbers: float | list[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@dataclass
class Distance:
    """||W - a W_dense||^2 with a the first number of each sequence's first token: text says where the minimum is."""

    attention: Attention = ATTENTION
    seen: list[Tensor] = field(default_factory=list)

    def errors(self, x: Tensor, dense: Pair, candidates: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        a = float(x[:, 0, 0].mean())
        squares = [sum(float((w - a * d).square().sum()) for w, d in zip(c, dense, strict=True)) for c in candidates]
        return double(squares), double(sum(float(d.square().sum()) for d in dense))

    def gradients(self, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Pair]:
        self.seen.append(x)
        errors, norm = self.errors(x, dense, [pruned])
        a = float(x[:, 0, 0].mean())
        return errors[0] / norm, ((pruned[0] - a * dense[0]) / norm, (pruned[1] - a * dense[1]) / norm)

    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        raise AssertionError("training measures no curvature")


def towards(a: float, sequences: int = 4) -> Tensor:
    return torch.full((sequences, 1, 1), a)


def by_magnitude(dense: Pair, text: Text, pattern: Pattern = HALF) -> Candidate:
    query, key = keep_masks({"q": dense[0].abs(), "k": dense[1].abs()}, dict.fromkeys("qk", pattern)).values()
    keeps = (query, key)
    weights = (dense[0] * keeps[0], dense[1] * keeps[1])
    return Candidate(weights, keeps, relative_error(LOSS, text.held_out, dense, weights))


@pytest.mark.parametrize(("steps", "learning_rate"), [(1, 0.3), (3, 10.0), (9, 0.01), (9, 1e30)])
def test_a_refit_is_never_worse_on_the_held_out_text_than_its_start(steps, learning_rate, dense, text):
    start = by_magnitude(dense, text)
    done = training.refit(LOSS, text, dense, start, steps=steps, learning_rate=learning_rate)
    assert done.error <= start.error
    assert done.error == relative_error(LOSS, text.held_out, dense, done.weights)
    assert len(done.losses) == steps
    if learning_rate > 1.0:
        assert done.weights is start.weights
        assert done.error == start.error


@pytest.mark.parametrize(
    ("measured", "best"), [([3.0, 2.0, 1.0, 2.0], 2), ([math.nan, 3.0, 4.0, 5.0], 1), ([9.0, math.nan, 8.0, 7.0], None)]
)
def test_of_the_weights_on_the_way_those_that_measure_best_are_returned(measured, best, dense):
    candidates: list[Pair] = []

    class Scripted(Distance):
        def errors(self, x: Tensor, dense: Pair, candidates_: Sequence[Pair]) -> tuple[Tensor, Tensor]:
            candidates.append((candidates_[0][0].clone(), candidates_[0][1].clone()))
            return double([measured[len(candidates) - 1]]), double(1.0)

        def gradients(self, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Pair]:
            return double(0.0), (torch.ones_like(dense[0]), torch.ones_like(dense[1]))

    everything = (torch.ones_like(dense[0], dtype=torch.bool), torch.ones_like(dense[1], dtype=torch.bool))
    text, start = Text(towards(1.0), towards(1.0)), Candidate(dense, everything, 4.5)
    done = training.refit(Scripted(), text, dense, start, steps=8, learning_rate=0.01)
    assert len(candidates) == 4
    assert not torch.equal(candidates[0][0], candidates[1][0])
    assert done.error == (4.5 if best is None else measured[best])
    for got, wanted in zip(done.weights, dense if best is None else candidates[best], strict=True):
        assert torch.equal(got, wanted)


def ones(dense: Pair) -> Pair:
    return torch.ones_like(dense[0]), torch.ones_like(dense[1])


def descend_by_hand(
    start: Pair, gradients: Callable[[Tensor, Pair], Pair], x: Tensor, rates: Sequence[float], steps: int
) -> Iterator[Pair]:
    """Adam as published (arXiv 1412.6980, Algorithm 1), a half cosine for its step size; yields what it may change."""
    points = (start[0].clone(), start[1].clone())
    first, second = [torch.zeros_like(w) for w in points], [torch.zeros_like(w) for w in points]
    for step in range(steps):
        batch = x[[(4 * step + i) % len(x) for i in range(4)]]
        for i, gradient in enumerate(gradients(batch, points)):
            first[i] = 0.9 * first[i] + 0.1 * gradient
            second[i] = 0.95 * second[i] + 0.05 * gradient.square()
            mean = first[i] / (1 - 0.9 ** (step + 1))
            square = second[i] / (1 - 0.95 ** (step + 1))
            rate = rates[i] * (1 + math.cos(math.pi * step / steps)) / 2
            points[i].sub_(rate * mean / (square.sqrt() + 1e-8))
        yield points


def learn_by_hand(x: Tensor, dense: Pair, regularization: float, steps: int, learning_rate: float) -> Pair:
    def gradients(batch: Tensor, masks: Pair) -> Pair:
        _, (query, key) = LOSS.gradients(batch, dense, (masks[0] * dense[0], masks[1] * dense[1]))
        return (
            query * dense[0] + regularization * masks[0] / masks[0].numel(),
            key * dense[1] + regularization * masks[1] / masks[1].numel(),
        )

    for masks in descend_by_hand(ones(dense), gradients, x, [learning_rate] * 2, steps):
        masks[0].clamp_(0.0, 1.0)
        masks[1].clamp_(0.0, 1.0)
    return masks


def test_a_refit_takes_the_steps_that_are_taken_by_hand(dense: Pair, text: Text):
    text = Text(text.train, text.train)
    start = by_magnitude(dense, text)
    before = [w.clone() for w in start.weights]

    def gradients(batch: Tensor, weights: Pair) -> Pair:
        _, (query, key) = LOSS.gradients(batch, dense, weights)
        return query * start.keeps[0], key * start.keeps[1]

    rates = [0.01 * float(d.square().mean().sqrt()) for d in dense]
    *_, wanted = descend_by_hand(start.weights, gradients, text.train, rates, 8)
    done = training.refit(LOSS, text, dense, start, steps=8, learning_rate=0.01)
    assert done.error < start.error
    for weight, by_hand in zip(done.weights, wanted, strict=True):
        torch.testing.assert_close(weight, by_hand, rtol=1e-5, atol=1e-6)
    for keep, given, weight, same, was in zip(
        done.keeps, start.keeps, done.weights, start.weights, before, strict=True
    ):
        assert torch.equal(keep, given)
        assert not weight[~keep].any()
        assert torch.equal(same, was), "the start is left alone"


@pytest.mark.parametrize("regularization", [0.01, 10.0])
def test_masks_are_learnt_as_by_hand(regularization: float, dense: Pair, text: Text):
    got, losses = training.learn_masks(
        LOSS, text.train, dense, regularization=regularization, steps=12, learning_rate=0.05
    )
    for mask, wanted in zip(got, learn_by_hand(text.train, dense, regularization, 12, 0.05), strict=True):
        assert mask.min() >= 0.0
        assert mask.max() <= 1.0
        assert (mask < 1.0).any()
        torch.testing.assert_close(mask, wanted, rtol=1e-3, atol=1e-3)
    assert len(losses) == 12
    assert losses[0] == pytest.approx(0.0, abs=1e-12)  # all ones: the dense weights


@dataclass
class Scaled:
    """A loss and its gradients times a constant, as the gradients of a larger layer are smaller."""

    factor: float
    attention: Attention = ATTENTION

    def gradients(self, x: Tensor, dense: Pair, pruned: Pair) -> tuple[Tensor, Pair]:
        error, (query, key) = LOSS.gradients(x, dense, pruned)
        return error, (self.factor * query, self.factor * key)


def test_the_steps_of_the_masks_do_not_depend_on_the_size_of_their_gradients(dense: Pair, text: Text):
    learnt = [
        training.learn_masks(Scaled(f), text.train, dense, regularization=0.1 * f, steps=8, learning_rate=0.05)[0]  # type: ignore[arg-type]
        for f in (1.0, 1e-7)
    ]
    for large, small in zip(*learnt, strict=True):
        torch.testing.assert_close(small, large, rtol=1e-3, atol=1e-3)
