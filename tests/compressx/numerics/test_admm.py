from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.compressx.numerics.problems import damped, problem, squares
from torch import Tensor

from compressx.api.patterns import NM, FixedMask, Unstructured, keep_mask, keep_masks
from compressx.numerics import admm
from compressx.numerics.admm import MaskedSolution, Problem, prune, select
from compressx.numerics.least_squares import Metric, solve
from compressx.numerics.obs import NotPositiveDefiniteError, inverse_cholesky, sweep

PATTERNS = [Unstructured(0.5, "layer"), Unstructured(0.6, "row"), Unstructured(0.7, "layer"), NM(2, 4)]


def pruned(weight: Tensor, hessian: Tensor, pattern, **options) -> MaskedSolution:
    return alone(weight, Metric.of(hessian.clone(), 0.01), pattern, **options)


def alone(weight: Tensor, metric: Metric, pattern, **options) -> MaskedSolution:
    """Prune one linear."""
    return prune({"fc": Problem(weight, metric, pattern)}, **options)["fc"]


def selected(weight: Tensor, metric: Metric, pattern, **options) -> tuple[Tensor, Tensor, int]:
    problem = Problem(weight, metric, pattern)
    keep, near, steps = select({"fc": problem}, {"fc": problem.target()}, **options)
    return keep["fc"], near["fc"], steps


def written_out(problems: dict[str, Problem], steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """ADMM as in the paper's equation 4: a linear system for W, a projection for D, and the dual V, each by itself.

    Each row has a penalty and a system of its own, and one projection is for all linears that compete.
    """
    dense = {n: p.target() for n, p in problems.items()}
    counts = {n: torch.ones_like(p.dense[:, :1]) if p.rows is None else p.rows for n, p in problems.items()}

    def project(total: dict[str, Tensor]) -> dict[str, Tensor]:
        costs = {n: counts[n] * x.square() for n, x in total.items()}
        masks = keep_masks(costs, {n: p.pattern for n, p in problems.items()})
        return {n: x * masks[n] for n, x in total.items()}

    d = project(dense)
    v, penalty, support = {n: torch.zeros_like(t) for n, t in dense.items()}, 0.1, {n: x != 0 for n, x in d.items()}
    for step in range(1, steps + 1):
        w = {n: torch.zeros_like(t) for n, t in dense.items()}
        for n, p in problems.items():
            for r, count in enumerate(counts[n]):
                system = count * p.metric.gram + penalty * count * torch.eye(len(p.metric.gram), dtype=torch.float64)
                right = count * (dense[n][r] @ p.metric.gram) - v[n][r] + penalty * count * d[n][r]
                w[n][r] = torch.linalg.solve(system, right)
        d = project({n: w[n] + v[n] / (penalty * counts[n]) for n in problems})
        v = {n: v[n] + penalty * counts[n] * (w[n] - d[n]) for n in problems}
        if step % 3 == 0:
            moved = sum(int(((d[n] != 0) != support[n]).sum()) for n in d)
            changed = moved / sum(int(x.sum()) for x in support.values())
            support = {n: x != 0 for n, x in d.items()}
            penalty *= 1.3 if changed > 0.1 else 1.2 if changed > 0.005 else 1.1
    return {n: x != 0 for n, x in d.items()}, d


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [*zip(PATTERNS, [13, 7, 1, 13], strict=True), *((Unstructured(0.6, "joint"), steps) for steps in (1, 7, 12))],
    ids=str,
)
def test_admm_takes_the_steps_of_its_three_variables_solved_one_after_the_other(pattern, steps):
    problems = competing(pattern) if pattern.joint else {"fc": lone(pattern)}
    keep, near, taken = select(problems, {n: p.target() for n, p in problems.items()}, steps=steps)
    expected_keep, expected = written_out(problems, steps)
    assert taken == steps
    for name in problems:
        assert torch.equal(keep[name], expected_keep[name])
        torch.testing.assert_close(near[name], expected[name], rtol=1e-9, atol=1e-12)


def lone(pattern) -> Problem:
    weight, x = problem(rows=32)
    return Problem(weight, Metric.of(x.T @ x, 0.01), pattern)


def test_admm_stops_when_the_support_has_settled():
    weight, x = problem(rows=64, columns=96)
    metric = Metric.of(x.T @ x, 0.01)
    keep, _, steps = selected(weight, metric, Unstructured(0.6, "layer"))
    assert 9 < steps < 100
    assert torch.equal(selected(weight, metric, Unstructured(0.6, "layer"), steps=steps)[0], keep)
    before = selected(weight, metric, Unstructured(0.6, "layer"), steps=steps - 3)[0]
    assert int((before != keep).sum()) <= 3e-4 * int(keep.sum())


@pytest.mark.parametrize(
    "pattern", [*PATTERNS, Unstructured(0.333, "row"), Unstructured(0.0, "layer"), NM(1, 4)], ids=str
)
def test_the_zeros_are_as_many_as_the_pattern_says(pattern):
    weight, x = problem(rows=17)
    solution = pruned(weight.float(), (x.T @ x).float(), pattern)
    assert int((~solution.keep).sum()) == pattern.zeros(17, 48)
    assert torch.equal(solution.keep, keep_mask(solution.keep.float(), pattern))  # within every group, too
    assert not solution.weight[~solution.keep].any()


def test_with_fewer_tokens_than_features_the_error_is_below_that_of_sparsegpt():
    weight, x = (t.float() for t in problem(rows=40, columns=64, tokens=20))
    hessian, pattern = x.T @ x, Unstructured(0.7, "layer")
    _, swept = sweep(weight, inverse_cholesky(hessian, 0.01)[0], pattern)
    change = pruned(weight, hessian, pattern).weight - weight
    assert squares(change, hessian) < 0.7 * squares(swept - weight, hessian)


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
    keep, near, _ = selected(weight, metric, NM(2, 4))
    by_admm, _, _ = solve(target, metric, keep, near)
    start = keep_mask(target.square(), NM(2, 4))
    (of_admm, _), (of_start, _) = metric.squares(by_admm - target, target * start - target)
    assert of_admm > of_start
    solution = alone(weight, metric, NM(2, 4))
    solved, steps, _ = solve(target, metric, start)
    assert torch.equal(solution.keep, start)
    assert solution.solver_steps == steps > 0
    torch.testing.assert_close(metric.scaled(solution.weight), solved)


def test_the_reported_error_is_that_of_the_output():
    weight, x = problem()
    for pattern in (NM(2, 4), FixedMask(torch.rand(24, 48) > 0.5, Unstructured(0.5))):
        solution = pruned(weight, x.T @ x, pattern)
        y = x @ weight.T
        assert solution.error == pytest.approx(float((x @ solution.weight.T - y).square().sum() / y.square().sum()))


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


def test_a_hessian_that_is_not_finite_or_indefinite_is_refused():
    with pytest.raises(NotPositiveDefiniteError, match="NaN"):
        Metric.of(torch.full((2, 2), float("nan")))
    indefinite = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    for steps in (1, 3, 300):
        with pytest.raises(NotPositiveDefiniteError, match="penalty"):
            pruned(torch.ones(2, 2), indefinite, Unstructured(0.5, "row"), steps=steps)
    at_zero = Metric(torch.tensor([[1.0, 4.0], [4.0, 1.0]]), torch.ones(2), torch.zeros(2), torch.zeros(2).bool())
    with pytest.raises(NotPositiveDefiniteError, match="penalty"):  # the factor stops at a zero
        alone(torch.ones(2, 2), at_zero, Unstructured(0.5, "row"), penalty=3.0)
    with pytest.raises(NotPositiveDefiniteError, match=r"penalty of 0\.1 is not positive definite; use more calib"):
        pruned(torch.ones(2, 2), indefinite, Unstructured(0.5, "row"))


@pytest.mark.parametrize("steps", [0, 1, 3, 300])
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_a_weight_that_is_not_finite_is_refused(pattern, steps):
    weight, x = problem()
    weight[5, 7] = float("nan")
    with pytest.raises(ValueError, match=r"^fc: scores must be finite"):
        pruned(weight, x.T @ x, pattern, steps=steps)


# --- linears that compete, and outputs that count differently

SHAPES = {"small": (12, 32), "wide": (20, 48)}


def competing(pattern, seed: int = 0, mix: float = 0.6) -> dict[str, Problem]:
    """Two linears with inputs of their own, whose outputs count from a thousandth to 1."""
    problems = {}
    for i, (name, (rows, columns)) in enumerate(SHAPES.items()):
        weight, x = problem(rows, columns, mix, seed=seed + i)
        counts = torch.logspace(-3, 0, rows, dtype=torch.float64)[:, None] / columns
        problems[name] = Problem(weight, Metric.of(x.T @ x / x.square().sum(), 0.01), pattern, counts)
    return problems


def weighted(problems: dict[str, Problem], weights: dict[str, Tensor]) -> float:
    """The damped errors of outputs as they count, read off the Hessians."""
    total = 0.0
    for name, p in problems.items():
        change = (weights[name] - p.dense) * p.metric.scale
        total += float((((change @ p.metric.gram) * change).sum(dim=1) * p.rows[:, 0]).sum())
    return total


@pytest.mark.parametrize("mix", [0.003, 0.6])
@pytest.mark.parametrize("pattern", [Unstructured(0.6, "joint"), Unstructured(0.6, "layer"), NM(2, 4)], ids=str)
def test_competing_linears_lose_exactly_the_zeros_and_never_more_than_by_dropping_what_is_cheapest(pattern, mix):
    problems = competing(pattern, mix=mix)
    found = prune(problems, penalty=0.3, steps=12)
    lost = sum(int((~x.keep).sum()) for x in found.values())
    assert lost == round(pattern.sparsity * sum(rows * columns for rows, columns in SHAPES.values()))
    cheapest = keep_masks({n: p.costs(p.target()) for n, p in problems.items()}, dict.fromkeys(problems, pattern))
    dropped = weighted(problems, {n: p.dense * cheapest[n] for n, p in problems.items()})
    ended = weighted(problems, {n: x.weight for n, x in found.items()})
    given = prune({n: replace(p, pattern=FixedMask(cheapest[n], pattern)) for n, p in problems.items()})
    solved = weighted(problems, {n: x.weight for n, x in given.items()})
    assert ended <= dropped
    assert ended <= (0.93 if mix == 0.6 else 1.0 + 1e-12) * solved


@pytest.mark.parametrize("pattern", [Unstructured(0.6, "row"), NM(2, 4)], ids=str)
def test_within_a_row_it_does_not_matter_how_much_the_row_counts(pattern):
    problems = competing(pattern)
    plain = prune({n: replace(p, rows=None) for n, p in problems.items()}, steps=60)
    for name, solution in prune(problems, steps=60).items():
        assert torch.equal(solution.keep, plain[name].keep)
        torch.testing.assert_close(solution.weight, plain[name].weight)


def test_a_linear_whose_hessian_is_indefinite_is_named_among_those_that_compete():
    problems = competing(Unstructured(0.5, "joint"))
    gram = torch.eye(48, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = 3.0
    problems["wide"] = replace(problems["wide"], metric=replace(problems["wide"].metric, gram=gram))
    with pytest.raises(NotPositiveDefiniteError, match=r"^wide: the damped Hessian plus ADMM's penalty of 0\.1 is not"):
        prune(problems)
    damaged = problems["small"].dense.clone()
    damaged[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"^small: scores must be finite"):
        prune({**competing(Unstructured(0.5, "joint")), "small": replace(problems["small"], dense=damaged)})


def test_steps_go_on_until_the_supports_of_all_linears_have_settled():
    problems = competing(Unstructured(0.6, "layer"))
    problems["small"] = replace(problems["small"], pattern=Unstructured(0.0, "layer"))  # never changes
    assert select(problems, {n: p.target() for n, p in problems.items()})[2] > 9


def test_linears_with_the_same_inputs_share_the_inverse_and_lose_the_same_as_with_their_own(monkeypatch):
    problems = competing(Unstructured(0.6, "joint"))
    twin = replace(problems["wide"], dense=problems["wide"].dense.flip(0))
    apart = {**problems, "twin": replace(twin, metric=replace(twin.metric, gram=twin.metric.gram.clone()))}
    inverted = []
    invert = admm._pull
    monkeypatch.setattr(admm, "_pull", lambda gram, penalty: inverted.append(len(gram)) or invert(gram, penalty))
    shared, own = prune({**problems, "twin": twin}, steps=6), prune(apart, steps=6)
    assert inverted == [32, 48] * 2 + [32, 48, 48] * 2
    for name, solution in shared.items():
        assert torch.equal(solution.weight, own[name].weight)
    inverted.clear()
    prune(problems, steps=0)
    assert not inverted
