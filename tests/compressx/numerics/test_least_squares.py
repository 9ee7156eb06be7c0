from __future__ import annotations

import pytest
import torch
from tests.compressx.numerics.problems import damped, problem, squares

from compressx.numerics.least_squares import Correction, Metric, solve


def test_a_metric_is_the_damped_hessian_with_a_unit_diagonal():
    weight, x = problem()
    hessian = x.T @ x
    metric = Metric.of(hessian.clone(), 0.05)
    assert torch.equal(metric.gram.diagonal(), torch.ones(48, dtype=torch.float64))
    torch.testing.assert_close(metric.gram * metric.scale * metric.scale[:, None], damped(hessian, 0.05))
    with_damping, without = metric.squares(metric.scaled(weight))[0]
    assert with_damping == pytest.approx(squares(weight, damped(hessian, 0.05)))
    assert without == pytest.approx(float((x @ weight.T).square().sum()))


def test_the_solver_finds_the_least_squares_weights_of_each_row():
    weight, x = problem()
    hessian = x.T @ x
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) > 0.6
    metric = Metric.of(hessian.clone(), 0.01)
    root = torch.linalg.cholesky(damped(hessian)).T  # root^T root is the damped Hessian
    expected = torch.zeros_like(weight)
    for row, kept, target in zip(expected, keep, weight @ root.T, strict=True):
        row[kept] = torch.linalg.lstsq(root[:, kept], target[:, None]).solution[:, 0]
    for start in (None, metric.scaled(torch.randn_like(weight))):
        solved, steps, residual = solve(metric.scaled(weight), metric, keep, start, tolerance=1e-10)
        torch.testing.assert_close(solved / metric.scale, expected, rtol=1e-7, atol=1e-9)
        assert residual <= 1e-10
        assert 5 < steps < 100


def test_the_solver_stops_when_every_row_is_solved_or_out_of_steps_and_says_what_is_left():
    weight, x = problem()
    metric = Metric.of(x.T @ x, 0.01)
    target = metric.scaled(weight)
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) > 0.5
    _, steps, residual = solve(target, metric, keep, tolerance=1e-4)
    assert 1e-8 < residual <= 1e-4
    solved, all_of_them, left = solve(target, metric, keep, tolerance=1e-4, steps=steps - 1)
    assert all_of_them == steps - 1
    assert left > 1e-4
    wanted = (target * ~keep @ metric.gram) * keep
    missing = ((target - solved) @ metric.gram) * keep
    assert left == pytest.approx(float((missing.norm(dim=1) / wanted.norm(dim=1)).max()), rel=1e-6)
    untouched, none, whole = solve(target, metric, keep, steps=0)
    assert none == 0
    assert whole == pytest.approx(1.0)
    assert torch.equal(untouched, target * keep)


def test_a_row_that_loses_only_zeros_keeps_its_weights_to_the_bit_wherever_the_solver_begins():
    weight, x = problem()
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) > 0.5
    weight[5, ~keep[5]] = 0.0  # as in a model that has been pruned before
    metric = Metric.of((x.T @ x).float(), 0.01)
    target = metric.scaled(weight)
    solved, steps, residual = solve(target, metric, keep, 1.1 * target)
    assert torch.equal(solved[5], target[5])
    assert not torch.equal(solved[6], (target * keep)[6])
    assert steps < 100
    assert residual <= 0.01


def test_a_change_that_the_inputs_do_not_see_costs_nothing_and_never_less():
    weight, x = problem(tokens=20)
    metric = Metric.of((x.T @ x).float(), 0.01)
    unseen = torch.linalg.svd(x, full_matrices=True).Vh[20:].float()
    costs = [metric.squares(metric.scaled(change[None]))[0][1] for change in unseen]
    assert min(costs) >= 0.0
    assert max(costs) < 1e-3 * metric.squares(metric.scaled(weight))[0][1]


def test_a_correction_is_the_weighted_least_squares_change_and_says_what_it_leaves():
    _, x = problem()
    tokens, n = x.shape
    drawn = torch.Generator().manual_seed(1)
    missing = torch.randn(tokens, 6, generator=drawn, dtype=torch.float64) + x[:, :6]
    counts = torch.rand(tokens, generator=drawn, dtype=torch.float64) + 0.1
    correction = Correction(6, n, torch.device("cpu"))
    for part in torch.arange(tokens).split(7):
        correction.update(x[part], missing[part], counts[part])
    change, left = correction.solved(0.01)
    added = (0.01 * (x * counts[:, None]).square().sum(dim=0).mean()).sqrt() * torch.eye(n)
    inputs = torch.cat([x * counts[:, None], added])
    expected = torch.linalg.lstsq(inputs, torch.cat([missing * counts[:, None], torch.zeros(n, 6)])).solution.T
    torch.testing.assert_close(change, expected, rtol=1e-7, atol=1e-9)
    squares_left = ((missing - x @ change.T) * counts[:, None]).square().sum()
    assert left == pytest.approx(float(squares_left / (missing * counts[:, None]).square().sum()), rel=1e-6)
    nothing, whole = Correction(6, n, torch.device("cpu")).solved(0.01)
    assert not nothing.any()
    assert whole == 0
