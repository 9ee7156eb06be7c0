from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressx.api.patterns import NM, FixedMask, Unstructured, keep_mask, zeros_in
from compressx.numerics.admm import Metric, Solution, prune, select, solve
from compressx.numerics.obs import NotPositiveDefiniteError, inverse_cholesky, sweep

PATTERNS = [Unstructured(0.5, "layer"), Unstructured(0.6, "row"), Unstructured(0.7, "layer"), NM(2, 4)]


def problem(rows: int = 24, columns: int = 48, mix: float = 0.6, tokens: int = 400, seed: int = 0):
    """A weight and inputs that are correlated as much as `mix` says and differ in scale, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    mixing = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    scale = torch.logspace(-1, 1, columns, dtype=torch.float64)[torch.randperm(columns, generator=generator)]
    x = x @ (torch.eye(columns, dtype=torch.float64) + mix * mixing) * scale
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64), x


def damped(hessian: Tensor, damping: float = 0.01) -> Tensor:
    return hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)


def squares(change: Tensor, hessian: Tensor) -> float:
    return float(((change @ hessian) * change).sum())


def pruned(weight: Tensor, hessian: Tensor, pattern, **options) -> Solution:
    return prune(weight, Metric.of(hessian.clone(), 0.01), pattern, **options)


def written_out(weight: Tensor, hessian: Tensor, pattern, steps: int) -> tuple[Tensor, Tensor]:
    """ADMM as in the paper's equation 4: a linear system for W, a projection for D, and the dual V, each by itself."""
    norms = hessian.diagonal().sqrt()
    gram, dense = hessian / norms[:, None] / norms, weight * norms
    d = dense * keep_mask(dense.square(), pattern)
    v, penalty, support = torch.zeros_like(dense), 0.1, d != 0
    for step in range(1, steps + 1):
        system = gram + penalty * torch.eye(len(gram), dtype=gram.dtype)
        w = torch.linalg.solve(system, (dense @ gram - v + penalty * d).T).T
        total = w + v / penalty
        d = total * keep_mask(total.square(), pattern)
        v = v + penalty * (w - d)
        if step % 3 == 0:
            changed = int(((d != 0) != support).sum()) / int(support.sum())
            support = d != 0
            penalty *= 1.3 if changed > 0.1 else 1.2 if changed > 0.005 else 1.1
    return d != 0, d / norms


def test_a_metric_is_the_damped_hessian_with_a_unit_diagonal():
    weight, x = problem()
    hessian = x.T @ x
    metric = Metric.of(hessian.clone(), 0.05)
    assert torch.equal(metric.gram.diagonal(), torch.ones(48, dtype=torch.float64))
    torch.testing.assert_close(metric.gram * metric.scale * metric.scale[:, None], damped(hessian, 0.05))
    with_damping, without = metric.squares(metric.scaled(weight))[0]
    assert with_damping == pytest.approx(squares(weight, damped(hessian, 0.05)))
    assert without == pytest.approx(float((x @ weight.T).square().sum()))


@pytest.mark.parametrize(("pattern", "steps"), list(zip(PATTERNS, [13, 7, 1, 13], strict=True)), ids=str)
def test_admm_takes_the_steps_of_its_three_variables_solved_one_after_the_other(pattern, steps):
    weight, x = problem(rows=32)
    metric = Metric.of(x.T @ x, 0.01)
    keep, scaled, taken = select(metric.scaled(weight), metric, pattern, steps=steps)
    expected_keep, expected = written_out(weight, damped(x.T @ x), pattern, steps)
    assert taken == steps
    assert torch.equal(keep, expected_keep)
    torch.testing.assert_close(scaled / metric.scale, expected, rtol=1e-9, atol=1e-12)


def test_admm_stops_when_the_support_has_settled():
    weight, x = problem(rows=64, columns=96)
    metric = Metric.of(x.T @ x, 0.01)
    target = metric.scaled(weight)
    keep, _, steps = select(target, metric, Unstructured(0.6, "layer"))
    assert 9 < steps < 100
    assert torch.equal(select(target, metric, Unstructured(0.6, "layer"), steps=steps)[0], keep)
    before = select(target, metric, Unstructured(0.6, "layer"), steps=steps - 3)[0]
    assert int((before != keep).sum()) <= 3e-4 * int(keep.sum())


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


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, Unstructured(0.333, "row"), Unstructured(0.0, "layer"), NM(1, 4)], ids=str
)
def test_the_zeros_are_as_many_as_the_pattern_says(pattern):
    weight, x = problem(rows=17)
    solution = pruned(weight.float(), (x.T @ x).float(), pattern)
    assert int((~solution.keep).sum()) == zeros_in(pattern, 17, 48)
    assert torch.equal(solution.keep, keep_mask(solution.keep.float(), pattern))  # within every group, too
    assert not solution.weight[~solution.keep].any()


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


@pytest.mark.parametrize(("pattern", "tokens"), list(zip(PATTERNS, [400, 400, 20, 400], strict=True)), ids=str)
def test_on_correlated_inputs_the_error_is_below_that_of_sparsegpt_even_with_few_tokens(pattern, tokens):
    weight, x = (t.float() for t in problem(rows=40, columns=64, tokens=tokens))
    hessian = x.T @ x
    factor, _ = inverse_cholesky(hessian, 0.01)
    _, swept = sweep(weight, factor, pattern)
    solution = pruned(weight, hessian, pattern)
    assert squares(solution.weight - weight, hessian) < 0.7 * squares(swept - weight, hessian)


@pytest.mark.parametrize(
    ("pattern", "mix"), list(zip([*PATTERNS, PATTERNS[3]], [0.0, 0.003, 0.05, 0.01, 0.3], strict=True)), ids=str
)
def test_the_error_is_never_above_that_of_dropping_what_is_cheapest_to_drop(pattern, mix):
    weight, x = problem(mix=mix, tokens=20_000)
    if mix == 0.0:
        x = torch.diag(x.norm(dim=0))  # exactly independent: nothing better exists
    hessian = x.T @ x
    metric = damped(hessian)
    masked = weight * keep_mask(weight.square() * metric.diagonal(), pattern)
    solution = pruned(weight, hessian, pattern)
    assert squares(solution.weight - weight, metric) <= squares(masked - weight, metric) * (1 + 1e-12)


def test_with_nearly_independent_inputs_the_start_wins_and_its_weights_are_solved_for():
    """ADMM alone would end above it, so the comparison with the start is not for nothing."""
    weight, x = problem(mix=0.003, tokens=20_000)
    metric = Metric.of(x.T @ x, 0.01)
    target = metric.scaled(weight)
    keep, near, _ = select(target, metric, NM(2, 4))
    alone, _, _ = solve(target, metric, keep, near)
    start = keep_mask(target.square(), NM(2, 4))
    (of_admm, _), (of_start, _) = metric.squares(alone - target, target * start - target)
    assert of_admm > of_start
    solution = prune(weight, metric, NM(2, 4))
    solved, steps, _ = solve(target, metric, start)
    assert torch.equal(solution.keep, start)
    assert solution.solver_steps == steps > 0
    torch.testing.assert_close(metric.scaled(solution.weight), solved)


@pytest.mark.parametrize("look", [2, 4, 1000])
def test_steps_that_follow_until_someone_looks_change_nothing(look, monkeypatch):
    weight, x = problem()
    metric = Metric.of((x.T @ x).float(), 0.01)
    target = metric.scaled(weight)
    keep = torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)) > 0.5
    seen_at_once = [solve(target, metric, keep, steps=steps) for steps in (100, 3)]
    monkeypatch.setattr("compressx.numerics.admm._LOOK_EVERY", {"cpu": look})
    for expected, steps in zip(seen_at_once, (100, 3), strict=True):
        solved, taken, residual = solve(target, metric, keep, steps=steps)
        assert torch.equal(solved, expected[0])
        assert (taken, residual) == expected[1:]


def test_the_reported_error_is_that_of_the_output():
    weight, x = problem()
    for pattern in (NM(2, 4), FixedMask(torch.rand(24, 48) > 0.5, Unstructured(0.5))):
        solution = pruned(weight, x.T @ x, pattern)
        y = x @ weight.T
        assert solution.error == pytest.approx(float((x @ solution.weight.T - y).square().sum() / y.square().sum()))


def test_a_change_that_the_inputs_do_not_see_costs_nothing_and_never_less():
    weight, x = problem(tokens=20)
    metric = Metric.of((x.T @ x).float(), 0.01)
    unseen = torch.linalg.svd(x, full_matrices=True).Vh[20:].float()
    costs = [metric.squares(metric.scaled(change[None]))[0][1] for change in unseen]
    assert min(costs) >= 0.0
    assert max(costs) < 1e-3 * metric.squares(metric.scaled(weight))[0][1]


def test_a_fixed_mask_is_kept_and_its_weights_are_the_best_there_are():
    weight, x = problem()
    hessian = x.T @ x
    keep = torch.rand(24, 48, generator=torch.Generator().manual_seed(1)) > 0.5
    solution = pruned(weight, hessian, FixedMask(keep, Unstructured(0.5)))
    assert solution.keep is keep
    assert solution.steps == 0
    factor, _ = inverse_cholesky(hessian, 0.01)
    _, swept = sweep(weight, factor, FixedMask(keep, Unstructured(0.5)))
    metric = damped(hessian)
    assert squares(solution.weight - weight, metric) < 0.9 * squares(swept - weight, metric)


def test_features_that_never_fire_are_dropped_first_and_cost_nothing():
    weight, x = problem()
    dead = [3, 17, 40]
    x[:, dead] = 0
    solution = pruned(weight.float(), (x.T @ x).float(), Unstructured(3 / 48, "row"))
    assert (~solution.keep).nonzero()[:, 1].unique().tolist() == dead
    assert solution.error < 1e-9
    nothing = pruned(weight.float(), torch.zeros(48, 48), NM(2, 4))
    assert int(nothing.keep.sum()) == 24 * 24
    assert nothing.weight.isfinite().all()
    assert nothing.error == 0.0
    kept = pruned(weight.float(), (x.T @ x).float(), FixedMask(torch.ones(24, 48, dtype=torch.bool), Unstructured(0)))
    torch.testing.assert_close(kept.weight[:, dead], weight[:, dead].float())  # no reason to change them


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_float32_is_as_good_as_float64(pattern):
    weight, x = problem(rows=64, columns=96, mix=1.5)
    hessian = x.T @ x
    assert torch.linalg.cond(hessian) > 1e4
    single, double = pruned(weight.float(), hessian.float(), pattern), pruned(weight, hessian, pattern)
    assert (single.weight.dtype, double.weight.dtype) == (torch.float32, torch.float64)
    exact = [squares(s.weight.double() - weight, hessian) for s in (single, double)]
    assert exact[0] == pytest.approx(exact[1], rel=0.01)


def test_the_same_problem_has_the_same_solution_and_is_only_read():
    weight, x = problem()
    before = weight.clone()
    metric = Metric.of(x.T @ x, 0.01)
    gram = metric.gram.clone()
    first, second = (prune(weight, metric, Unstructured(0.6, "layer")) for _ in range(2))
    assert torch.equal(first.keep, second.keep)
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(weight, before)
    assert torch.equal(metric.gram, gram)


def test_a_lower_penalty_to_begin_with_takes_more_steps_for_a_lower_error():
    weight, x = problem(rows=64, columns=96)
    low, high = (pruned(weight, x.T @ x, Unstructured(0.7, "layer"), penalty=p) for p in (0.03, 1.0))
    assert low.steps > high.steps
    assert low.error < high.error


def test_a_hessian_that_is_not_finite_or_indefinite_is_refused():
    with pytest.raises(NotPositiveDefiniteError, match="NaN"):
        Metric.of(torch.full((2, 2), float("nan")))
    indefinite = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    for steps in (1, 3, 300):
        with pytest.raises(NotPositiveDefiniteError, match="penalty"):
            pruned(torch.ones(2, 2), indefinite, Unstructured(0.5, "row"), steps=steps)
    at_zero = Metric(torch.tensor([[1.0, 4.0], [4.0, 1.0]]), torch.ones(2), torch.zeros(2), torch.zeros(2).bool())
    with pytest.raises(NotPositiveDefiniteError, match="penalty"):  # the factor stops at a zero
        prune(torch.ones(2, 2), at_zero, Unstructured(0.5, "row"), penalty=3.0)
    with pytest.raises(NotPositiveDefiniteError, match=r"penalty of 0\.1 is not positive definite; use more calib"):
        pruned(torch.ones(2, 2), indefinite, Unstructured(0.5, "row"))


@pytest.mark.parametrize("steps", [1, 3, 300])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_weight_that_is_not_finite_is_refused(pattern, steps):
    weight, x = problem()
    weight[5, 7] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        pruned(weight, x.T @ x, pattern, steps=steps)
