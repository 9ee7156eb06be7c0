"""Scores, updates and learnt masks, against slow references and one another."""

from __future__ import annotations

import pytest
import torch
from tests.compressx_attnprune import blocks
from torch import Tensor

from compressx import FixedMask, Unstructured, keep_masks
from compressx.obs import inverse_cholesky, sweep
from compressx_attnprune import layer, objective, solver
from compressx_attnprune.geometry import Attention, Projection, queries_and_keys

HALF = Unstructured(0.5, "joint")
ATTENTION = Attention(Projection(4), Projection(2), head_dim=8, scaling=0.5)


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(0.2, 2.0, 24)  # features of different size
    return torch.randn(10, 20, 24, generator=generator) * scale  # more sequences than are worked on at a time


@pytest.fixture
def weights() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, 24, generator=generator) * 0.3, torch.randn(16, 24, generator=generator) * 0.3


def masks_of(scores: tuple[Tensor, Tensor], pattern: Unstructured = HALF) -> tuple[Tensor, Tensor]:
    query, key = keep_masks(dict(zip("qk", scores, strict=True)), dict.fromkeys("qk", pattern)).values()
    return query, key


def test_scores_equal_the_products_of_explicit_hessians_and_row_weights(x: Tensor, weights: tuple[Tensor, Tensor]):
    diagonals = objective.gauss_newton(ATTENTION, *queries_and_keys(ATTENTION, x, *weights))
    flat = x.flatten(0, 1).double()
    for sensitivity, diagonal, weight in zip(
        solver.sensitivities(ATTENTION, x, weights), diagonals, weights, strict=True
    ):
        expected = torch.zeros_like(weight, dtype=torch.float64)
        for head in range(diagonal.shape[1]):
            per_token = diagonal[:, head].reshape(-1, 8).double()  # [sequences * tokens, head_dim]
            hessian = sum(t * torch.outer(v, v) for t, v in zip(per_token.sum(dim=1), flat, strict=True))
            g = per_token.sum(dim=0)
            rows = slice(8 * head, 8 * head + 8)
            expected[rows] = weight[rows].double() ** 2 * hessian.diagonal() * (g / g.sum())[:, None]
        got = solver.scores(sensitivity, x, weight)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-6 * expected.max().item())


def test_the_update_sweeps_every_head_with_its_own_hessian(x: Tensor, weights: tuple[Tensor, Tensor]):
    sensitivity, weight = solver.sensitivities(ATTENTION, x, weights)[0], weights[0]
    keep = masks_of((solver.scores(sensitivity, x, weight), weights[1].square()))[0]
    keep[8:16] = True
    new, damping = solver.update(sensitivity, x, weight, keep, HALF, damping=0.01)
    assert damping == 0.01
    assert torch.equal(new[8:16], weight[8:16])
    assert (new[~keep] == 0).all()
    flat = x.flatten(0, 1).double()
    for head in (0, 2, 3):
        rows = slice(8 * head, 8 * head + 8)
        hessian = flat.T @ (sensitivity.tokens[head].double()[:, None] * flat)
        factor, _ = inverse_cholesky(hessian)
        _, expected = sweep(weight[rows].double(), factor, FixedMask(keep[rows], HALF))
        torch.testing.assert_close(new[rows].double(), expected, rtol=1e-3, atol=1e-4)


def test_the_reported_damping_is_what_the_hardest_head_needed(x: Tensor, weights: tuple[Tensor, Tensor]):
    sensitivity = solver.sensitivities(ATTENTION, x, weights)[0]
    copied = x[..., :1].expand(-1, -1, 24) * 1.0  # one feature 24 times: rank one
    keep = weights[0] > 0
    new, damping = solver.update(sensitivity, copied, weights[0], keep, HALF, damping=1e-9)
    assert damping > 1e-9
    assert torch.isfinite(new).all()


def test_a_feature_that_never_fires_is_dropped_first(x: Tensor, weights: tuple[Tensor, Tensor]):
    x[..., 3] = 0.0
    found = solver.sensitivities(ATTENTION, x, weights)
    scores = tuple(solver.scores(s, x, w) for s, w in zip(found, weights, strict=True))
    query, key = masks_of((scores[0], scores[1]), Unstructured(1 / 24, "joint"))
    assert not query[:, 3].any()
    assert not key[:, 3].any()


@pytest.mark.parametrize("architecture", blocks.CHECKED)
def test_gauss_newton_beats_magnitude_and_wanda_and_its_update_beats_its_mask(architecture: str):
    recorded = blocks.record(architecture, sequences=16)
    attention, dense = layer.describe(recorded.block), blocks.weights(recorded.block)
    norms = recorded.x.flatten(0, 1).norm(dim=0)

    def error(pruned: tuple[Tensor, Tensor]) -> float:
        return solver.relative_error(attention, recorded.x, dense, pruned)

    def masked(scores: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query, key = masks_of((scores[0], scores[1]))
        return dense[0] * query, dense[1] * key

    found = solver.sensitivities(attention, recorded.x, dense)
    scores = tuple(solver.scores(s, recorded.x, w) for s, w in zip(found, dense, strict=True))
    keeps = masks_of((scores[0], scores[1]))
    query, key = (
        solver.update(s, recorded.x, w, keep, HALF, damping=0.01)[0]
        for s, w, keep in zip(found, dense, keeps, strict=True)
    )
    by_magnitude = error(masked(tuple(w.abs() for w in dense)))
    by_wanda = error(masked(tuple(w.abs() * norms for w in dense)))
    mask_only, updated = error(masked(scores)), error((query, key))
    assert 0 < updated < mask_only < min(by_magnitude, by_wanda)


def test_the_relative_error_is_the_ratio_of_squared_norms(x: Tensor, weights: tuple[Tensor, Tensor]):
    pruned = (weights[0] * (weights[0] > 0), weights[1])
    p, p_pruned = (
        objective.attention_matrices(ATTENTION, *queries_and_keys(ATTENTION, x, *w)) for w in (weights, pruned)
    )
    expected = (p_pruned - p).norm() ** 2 / p.norm() ** 2
    assert solver.relative_error(ATTENTION, x, weights, pruned) == pytest.approx(expected.item(), rel=1e-4)
    assert solver.relative_error(ATTENTION, x, weights, weights) == 0.0


def test_learnt_masks_lie_in_the_unit_interval_and_a_larger_lambda_empties_them(
    x: Tensor, weights: tuple[Tensor, Tensor]
):
    def learn(regularization: float) -> tuple[Tensor, Tensor]:
        return solver.learn_masks(ATTENTION, x, weights, regularization=regularization, steps=30, learning_rate=0.05)

    loose, tight = learn(0.01), learn(1.0)
    for mask in (*loose, *tight):
        assert mask.min() >= 0
        assert mask.max() <= 1
    assert sum(float(m.mean()) for m in tight) < sum(float(m.mean()) for m in loose) < 2.0


def test_learnt_masks_beat_magnitude_at_the_same_budget(x: Tensor, weights: tuple[Tensor, Tensor]):
    relaxed = solver.learn_masks(
        ATTENTION, x, weights, regularization=solver.default_regularization(0.5), steps=60, learning_rate=0.05
    )
    learnt = masks_of(solver.ranked(relaxed, x, weights))
    magnitude = masks_of((weights[0].abs(), weights[1].abs()))
    errors = [
        solver.relative_error(ATTENTION, x, weights, (weights[0] * m[0], weights[1] * m[1]))
        for m in (learnt, magnitude)
    ]
    assert errors[0] < errors[1]


def test_ties_between_relaxed_masks_fall_to_the_smaller_weight_times_feature_norm():
    x = torch.ones(1, 4, 3)
    weights = (torch.tensor([[3.0, -2.0, 1.0]]), torch.tensor([[0.5, 4.0, 0.1]]))
    masks = (torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, torch.finfo(torch.float32).eps, 1.0]]))
    query, key = solver.ranked(masks, x, weights)
    order = torch.cat([query, key], dim=1).flatten().argsort().tolist()
    assert order == [2, 4, 5, 3, 1, 0]


def test_the_default_lambda_grows_with_the_sparsity():
    assert solver.default_regularization(0.5) == pytest.approx(0.1)
    assert solver.default_regularization(0.9) == pytest.approx(0.9)
