"""Least squares for the output projection, against the same equations on the tokens themselves, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressx_attnprune.groups import Moments, damped_factor, solve

TOKENS, MIXED, OUTPUTS = 60, 12, 7
DEAD = 5
KEPT = torch.arange(MIXED) % 3 != 1
each_bias = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "a bias"])


def draw(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw W, m with means and sizes of its own and a column that is always zero, and a y that is not quite W m."""
    generator = torch.Generator().manual_seed(seed)
    w, m, noise = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((OUTPUTS, MIXED), (4, TOKENS // 4, MIXED), (4, TOKENS // 4, OUTPUTS))
    )
    m = (m + 0.7) * torch.logspace(-2, 1, MIXED, dtype=torch.float64)
    m[..., DEAD] = 0.0
    return w, m, m @ w.T + 0.3 * noise + 0.5


def reference(w: Tensor, m: Tensor, y: Tensor, damping: float, bias: bool) -> tuple[Tensor, Tensor]:
    """Solve ridge regression towards W on the tokens and some more equations for the damping, by lstsq."""
    m, y = m.flatten(0, -2), y.flatten(0, -2)
    mean_m, mean_y = bias * m.mean(dim=0), bias * y.mean(dim=0)
    a, b = (m - mean_m)[:, KEPT], y - mean_y
    pull = torch.diag((damping * a.square().sum(dim=0)).sqrt())
    left, right = torch.cat([a, pull]), torch.cat([b, pull @ w[:, KEPT].T])
    live = a.square().sum(dim=0) > 0
    new = torch.zeros_like(w)
    solution = w[:, KEPT].T.clone()  # what never fires stays as it is
    solution[live] = torch.linalg.lstsq(left[:, live], right).solution
    new[:, KEPT] = solution.T
    return new, mean_y - new @ mean_m


@each_bias
@pytest.mark.parametrize("damping", [1e-6, 0.1, 3.0])
def test_the_solution_is_ridge_regression_on_the_tokens(damping: float, bias: bool):
    w, m, y = draw()
    new, shift = solve(Moments.of(zip(m, y, strict=True)), w, KEPT, damping, bias=bias)
    wanted, wanted_shift = reference(w, m, y, damping, bias)
    torch.testing.assert_close(new, wanted, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(shift, wanted_shift)
    assert not new[:, ~KEPT].any()


@pytest.mark.parametrize("shifted", [0.0, 1.0])
def test_the_error_is_that_of_the_tokens(shifted: float):
    _, m, y = draw()
    other, c = draw(1)[0], shifted * torch.linspace(-1, 1, OUTPUTS, dtype=torch.float64)
    error = Moments.of(zip(m, y, strict=True)).error(other, c)
    torch.testing.assert_close(error, (m @ other.T + c - y).square().sum() / y.square().sum())


@each_bias
def test_a_dense_layer_needs_no_outputs(bias: bool):
    w, m, _ = draw()
    of, dense = Moments.of((x, x @ w.T) for x in m), Moments.dense(m, w)
    for name in ("mixed", "cross", "mixed_sum", "output_sum", "squares"):
        torch.testing.assert_close(getattr(dense, name), getattr(of, name), rtol=1e-9, atol=1e-9)
    assert of.tokens == dense.tokens == TOKENS
    everything, shift = solve(dense, w, torch.ones(MIXED, dtype=torch.bool), 0.1, bias=bias)
    torch.testing.assert_close(everything, w)
    torch.testing.assert_close(shift, torch.zeros(OUTPUTS).double(), rtol=0, atol=1e-9)
    assert dense.error(w, shift) < 1e-12


@pytest.mark.parametrize("spread", [0.0, 1e-4, 1e-2])
def test_values_that_hardly_vary_are_left_to_the_bias_by_their_variance_and_not_by_rounding(spread: float):
    """As those of heads that always look at one token: float32 products left rounding, of which there is no factor."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(OUTPUTS, MIXED, generator=generator)
    m = torch.randn(4, 256, MIXED, generator=generator)
    m[..., :5] = torch.tensor([50.0, -7.0, 0.3, 1.0, 300.0]) + spread * m[..., :5]
    exact = Moments.dense(m.double(), w, bias=True)
    centred = m.double() - m.double().mean(dim=(0, 1))
    around = centred.flatten(0, 1).T @ centred.flatten(0, 1)
    varies = around.diagonal() > 1e-12 * m.double().square().sum(dim=(0, 1))
    torch.testing.assert_close(exact.centred()[0], around * varies * varies[:, None], rtol=1e-3, atol=1e-6)
    pairs = Moments.of(((x, x @ w.T) for x in m), bias=True)
    for moments in (Moments.dense(m, w, bias=True), pairs):
        new, shift = solve(moments, w, KEPT, 0.03, bias=True)
        wanted, wanted_shift = solve(exact, w, KEPT, 0.03, bias=True)
        assert exact.error(new, shift) <= 1.0001 * exact.error(wanted, wanted_shift) + 1e-12


def test_products_of_float32_are_summed_in_float64():
    w, m, _ = draw()
    moments = Moments.dense(m.float(), w.float())
    assert {x.dtype for x in (moments.mixed, moments.cross, moments.mixed_sum, moments.squares)} == {torch.float64}
    new, _ = solve(moments, w.float(), KEPT, 0.1, bias=False)
    assert new.dtype == torch.float32
    torch.testing.assert_close(new.double(), reference(w, m, m @ w.T, 0.1, False)[0], rtol=1e-4, atol=1e-4)


def test_a_layer_that_puts_out_nothing_has_no_error():
    w, m, _ = draw()
    assert Moments.dense(m, 0.0 * w).error(w, torch.zeros(OUTPUTS)) == 0.0


def test_a_factor_that_does_not_exist_is_nan():
    assert damped_factor(-torch.eye(3), 1e-6).isnan().all()
    assert damped_factor(torch.eye(3), 1e-6).isfinite().all()
