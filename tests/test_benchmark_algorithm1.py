"""The published method on one fused matrix: its gradient, its descent and its mask."""

from __future__ import annotations

import algorithm1
import pytest
import torch
from algorithm1 import DivergedError, FusedScores
from experiment import sample
from torch import Tensor

TOKENS, WIDTH = 24, 8
MASKS = {
    "causal": torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(),
    "full": torch.ones(TOKENS, TOKENS, dtype=torch.bool),
    "block": torch.block_diag(*[torch.ones(8, 8)] * 3).bool(),
}


def problem(mask: str = "causal", seeds: int = 3, scale: float = 0.4) -> FusedScores:
    return sample(range(seeds), tokens=TOKENS, width=WIDTH, scale=scale, mask=MASKS[mask]).attention


def random_mask(attention: FusedScores) -> Tensor:
    return torch.rand(attention.weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss_by_definition(attention: FusedScores, relaxed: Tensor, regularization: float) -> Tensor:
    """1/2 ||P~ - P||_F^2 + regularization / 2 ||M||_F^2 with P = diag((M_c∘A) 1)^-1 (M_c∘A), as the paper writes it."""

    def matrix(weight: Tensor) -> Tensor:
        a = torch.exp(attention.inputs @ weight @ attention.inputs.mT) * attention.mask
        return a / a.sum(dim=-1, keepdim=True)

    error = matrix(relaxed * attention.weight) - matrix(attention.weight)
    return error.square().sum(dim=(1, 2)) / 2 + regularization / 2 * relaxed.square().sum(dim=(1, 2))


@pytest.mark.parametrize(("mask", "regularization"), list(zip(MASKS, [1e-6, 1e-2, 10.0], strict=True)))
def test_the_closed_form_gradient_equals_autograd(mask: str, regularization: float):
    attention = problem(mask)
    relaxed = random_mask(attention).requires_grad_()
    expected = loss_by_definition(attention, relaxed, regularization)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), relaxed)
    loss, gradient = algorithm1.loss_and_gradient(attention, relaxed.detach(), regularization)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    difference = (gradient - expected_gradient).flatten(1).norm(dim=1)
    assert (difference <= 1e-10 * expected_gradient.flatten(1).norm(dim=1)).all()


@pytest.mark.parametrize("mask", MASKS)
def test_the_relative_error_is_the_ratio_of_squared_norms_under_the_attention_mask(mask: str):
    attention = problem(mask)
    pruned = attention.weight * random_mask(attention)
    p, p_pruned = attention.dense, attention.matrix(pruned)
    assert (p[:, ~MASKS[mask]] == 0).all()
    torch.testing.assert_close(p.sum(dim=-1), torch.ones(3, TOKENS, dtype=torch.float64))
    expected = torch.tensor([float((b - a).norm() ** 2 / a.norm() ** 2) for a, b in zip(p, p_pruned, strict=True)])
    torch.testing.assert_close(attention.relative_error(pruned), expected.double(), rtol=1e-6, atol=0)
    assert (attention.relative_error(attention.weight) == 0).all()


def test_the_curvature_is_the_diagonal_of_the_squared_jacobian():
    attention = problem("causal", seeds=1)
    jacobian = torch.autograd.functional.jacobian(
        lambda m: attention.matrix(m * attention.weight)[0], torch.ones_like(attention.weight), vectorize=True
    )  # [tokens, tokens, 1, width, width]
    torch.testing.assert_close(
        algorithm1.curvature(attention), jacobian.square().sum(dim=(0, 1)), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(("mask", "regularization"), list(zip(MASKS, [1.0, 1e-4, 1e-2], strict=True)))
def test_the_line_search_never_lets_a_loss_rise_and_ends_at_a_stationary_point(mask: str, regularization: float):
    attention = problem(mask)
    tolerance = 1e-4
    learned = algorithm1.learn_mask(attention, regularization, tolerance=tolerance)
    assert learned.losses.shape[1] == 3
    assert (learned.losses.diff(dim=0) <= 0).all()
    assert (learned.losses[-1] < learned.losses[0]).all()
    assert learned.converged.all()
    assert (learned.relaxed >= 0).all()
    assert (learned.relaxed <= 1).all()

    relaxed = learned.relaxed.clone().requires_grad_()
    loss = loss_by_definition(attention, relaxed, regularization)
    torch.testing.assert_close(learned.losses[-1], loss.detach(), rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), relaxed)
    projected = (learned.relaxed - gradient / regularization).clamp(0, 1) - learned.relaxed
    rms = projected.square().mean(dim=(1, 2)).sqrt()
    torch.testing.assert_close(learned.residual, rms, rtol=1e-3, atol=1e-9)
    assert (rms <= tolerance).all()
    alone = algorithm1.learn_mask(attention.take(torch.tensor([1])), regularization, tolerance=tolerance)
    torch.testing.assert_close(learned.losses[-1, 1], alone.losses[-1, 0], rtol=1e-6, atol=0)


def test_the_dense_start_has_residual_one_and_too_few_steps_are_reported_as_unconverged():
    attention = problem()
    start = torch.ones_like(attention.weight)
    _, gradient = algorithm1.loss_and_gradient(attention, start, 1e-3)
    torch.testing.assert_close(algorithm1.box_residual(start, gradient, 1e-3), torch.ones(3, dtype=torch.float64))
    learned = algorithm1.learn_mask(attention, 1e-3, steps=2, tolerance=1e-6)
    assert len(learned.losses) == 3
    assert not learned.converged.any()


def test_momentum_is_the_plain_loop_of_the_publication():
    attention = problem()
    regularization, step_size, momentum = 1e-2, 0.2, 0.8
    m, velocity, losses = torch.ones_like(attention.weight), torch.zeros_like(attention.weight), []
    for _ in range(40):
        relaxed = m.clone().requires_grad_()
        loss = loss_by_definition(attention, relaxed, regularization)
        (gradient,) = torch.autograd.grad(loss.sum(), relaxed)
        losses.append(loss.detach())
        velocity = momentum * velocity + gradient
        m = m - step_size * velocity
    learned = algorithm1.learn_mask(
        attention, regularization, optimizer="momentum", steps=40, step_size=step_size, momentum=momentum
    )
    torch.testing.assert_close(learned.relaxed, m, rtol=0, atol=1e-9)
    assert learned.losses.shape == (41, 3)
    torch.testing.assert_close(learned.losses[:-1], torch.stack(losses), rtol=1e-9, atol=0)
    assert (m - 1).abs().max() > 0.1


def test_a_fixed_step_that_is_too_long_and_a_regularization_that_is_not_positive_and_finite_are_refused():
    with pytest.raises(DivergedError, match=r"step size 1000 diverged.*smaller step size"):
        algorithm1.learn_mask(problem(), 1.0, optimizer="momentum", step_size=1000.0)
    for regularization in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="regularization must be positive"):
            algorithm1.learn_mask(problem(), regularization)


def test_a_line_search_that_cannot_descend_leaves_the_point_where_it_is():
    def lying(point: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        """Its gradient points uphill."""
        return point.square().sum(dim=(1, 2)), -2 * point

    start = torch.full((2, 3, 3), 0.5, dtype=torch.float64)
    point, losses = algorithm1.minimize_in_box(lying, start, torch.ones_like(start), scale=1.0, steps=5, tolerance=1e-6)
    torch.testing.assert_close(point, start, rtol=0, atol=0)
    assert len(losses) == 2
    assert (losses == losses[0]).all()


@pytest.mark.parametrize("sparsity", [0.0, 0.77])
def test_binarising_drops_exactly_the_lowest_entries_of_each_seed(sparsity: float):
    attention = problem()
    relaxed = random_mask(attention)
    keep = algorithm1.binarize(relaxed, attention.weight, sparsity)
    count = round(sparsity * WIDTH * WIDTH)
    assert ((~keep).sum(dim=(1, 2)) == count).all()
    for mask, values in zip(keep, relaxed, strict=True):
        if count:
            assert values[~mask].max() < values[mask].min()


def test_among_equal_entries_the_smaller_weight_is_dropped_first():
    attention = problem(seeds=2)
    relaxed = torch.zeros_like(attention.weight)
    relaxed[:, :2] = 1.0  # sixteen entries at one bound, forty-eight at the other
    weight = attention.weight.abs()
    some = algorithm1.binarize(relaxed, attention.weight, 0.25)
    assert some[:, :2].all()
    for mask, w in zip(some[:, 2:], weight[:, 2:], strict=True):
        assert w[~mask].max() < w[mask].min()
    most = algorithm1.binarize(relaxed, attention.weight, 0.875)
    assert not most[:, 2:].any()
    for mask, w in zip(most[:, :2], weight[:, :2], strict=True):
        assert w[~mask].max() < w[mask].min()


@pytest.mark.parametrize("flushing", [False, True])
def test_the_processors_treatment_of_denormals_is_put_back(flushing: bool):
    denormal = torch.full((1,), torch.finfo(torch.float64).tiny, dtype=torch.float64)
    try:
        torch.set_flush_denormal(flushing)
        with algorithm1._flushed_denormals():
            assert denormal.div(2).item() == 0
        assert (denormal.div(2).item() == 0) is flushing
    finally:
        torch.set_flush_denormal(False)
