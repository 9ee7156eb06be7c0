"""Selection and reconstruction in a Kronecker metric, against dense solves and enumeration in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.compressx_attnprune.drawn import normal
from torch import Tensor

from compressx import NM, Pattern, Unstructured, keep_masks
from compressx_attnprune import gauss_newton
from compressx_attnprune.gauss_newton import Choose, Curvature, KroneckerProblem

HEADS, ROWS, COLUMNS = (4, 2), 6, 12
DAMPING = 1e-3
PATTERNS = [Unstructured(0.5, "joint"), Unstructured(0.8, "joint"), Unstructured(0.7, "layer"),
    Unstructured(0.75, "row"), NM(2, 4)]  # fmt: skip
each_pattern = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


def factor(heads: int, n: int, seed: int) -> Tensor:
    """Draw correlated covariances whose features differ in size by a factor of about three."""
    common = 2.0 * normal(heads, n, 1, seed=seed + 1000)
    root = (normal(heads, n, 2 * n, seed=seed) + common) * torch.linspace(-0.6, 0.6, n).exp()[:, None]
    return root @ root.transpose(1, 2)


def problem(seed: int, *, heads: Sequence[int] = HEADS, rows: int = ROWS, columns: int = COLUMNS) -> KroneckerProblem:
    drawn = [(10 * seed + i, h) for i, h in enumerate(heads)]
    dense = tuple(normal(h, rows, columns, seed=i) for i, h in drawn)
    return KroneckerProblem(
        dense, tuple(Curvature(factor(h, rows, i), factor(h, columns, i + 5)) for i, h in drawn), DAMPING
    )


def by(pattern: Pattern) -> Choose:
    """Return what turns scores of sides into masks of a pattern, as the solver's budget does."""

    def choose(scores: Sequence[Tensor], known_finite: bool = False) -> list[Tensor]:
        flat = {str(i): s.flatten(0, 1) for i, s in enumerate(scores)}
        masks = keep_masks(flat, dict.fromkeys(flat, pattern), known_finite=known_finite)
        return [masks[str(i)].view(s.shape) for i, s in enumerate(scores)]

    return choose


def damped(of: KroneckerProblem) -> list[Curvature]:
    """Return copies of the damped metric."""
    with of.damped():
        return [Curvature(c.rows.clone(), c.inputs.clone()) for c in of.metric]


def cost(of: KroneckerProblem, weights: Sequence[Tensor]) -> float:
    """Compute sum_h tr(R_h E_h H_h E_h^T) the plain way."""
    total = 0.0
    for dense, curvature, w in zip(of.dense, damped(of), weights, strict=True):
        for head in range(len(dense)):
            e = dense[head] - w[head]
            total += float((curvature.rows[head] @ e @ curvature.inputs[head] @ e.T).trace())
    return total


def exact(of: KroneckerProblem, keeps: Sequence[Tensor]) -> list[Tensor]:
    """Solve the normal equations of the whole Kronecker product, restricted to the kept weights, head by head."""
    result = []
    for dense, curvature, keep in zip(of.dense, damped(of), keeps, strict=True):
        solved = torch.zeros_like(dense)
        for head in range(len(dense)):
            metric = torch.kron(curvature.rows[head], curvature.inputs[head])  # of weights in row-major order
            kept = keep[head].flatten().nonzero()[:, 0]
            wanted = metric[kept] @ dense[head].flatten()
            solved[head].view(-1)[kept] = torch.linalg.solve(metric[kept][:, kept], wanted)
        result.append(solved)
    return result


def assert_solved(
    of: KroneckerProblem, keeps: Sequence[Tensor], got: Sequence[Tensor], *, excess: float = 1e-9
) -> None:
    """Assert that weights cost what the exact solution does, and are it to three digits."""
    best = exact(of, keeps)
    assert cost(of, got) == pytest.approx(cost(of, best), rel=excess)
    for weights, keep, wanted in zip(got, keeps, best, strict=True):
        assert not weights[~keep].any()
        assert (weights - wanted).norm() <= 1e-3 * wanted.norm()


def magnitude(of: KroneckerProblem, choose: Choose) -> list[Tensor]:
    """Keep what is largest in the metric's own units."""
    return list(choose([(w * c.scale()).square() for w, c in zip(of.dense, damped(of), strict=True)], False))


@each_pattern
def test_reconstruction_is_the_least_squares_solution_on_the_kept_weights(pattern: Pattern):
    of = problem(0)
    keeps = magnitude(of, by(pattern))
    assert_solved(of, keeps, gauss_newton.reconstruct(of, keeps, iterations=300))


def test_each_head_is_solved_whatever_the_others_need():
    """One head keeps all, one nothing, the others half: their step sizes are their own."""
    of = problem(3)
    keeps = magnitude(of, by(PATTERNS[0]))
    keeps[0][0], keeps[0][1] = True, False
    got = gauss_newton.reconstruct(of, keeps, iterations=300)
    torch.testing.assert_close(got[0][0], of.dense[0][0])
    assert not got[0][1].any()
    assert_solved(of, keeps, got)


@each_pattern
def test_a_selection_takes_the_steps_of_admm_with_the_dual_as_published(pattern: Pattern):
    """A linear system for W, a projection for Z, the dual V itself, which a rise of the penalty does not change."""
    of, choose, iterations = problem(0), by(pattern), 24
    keeps = admm(of, choose, iterations)
    for got, wanted in zip(gauss_newton.select(of, choose, iterations=iterations)[0], keeps, strict=True):
        assert torch.equal(got, wanted)


def admm(of: KroneckerProblem, choose: Choose, iterations: int) -> list[Tensor]:
    """Choose masks by ADMM with exact steps, each a solution of the whole Kronecker product."""
    metrics = [torch.stack([torch.kron(r, h) for r, h in zip(c.rows, c.inputs, strict=True)]) for c in damped(of)]
    units = [m.diagonal(dim1=1, dim2=2).sqrt() for m in metrics]
    grams = [m / u[:, :, None] / u[:, None, :] for m, u in zip(metrics, units, strict=True)]
    dense = [w.flatten(1) * u for w, u in zip(of.dense, units, strict=True)]

    def project(points: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        keeps = choose([p.square().view_as(w) for p, w in zip(points, of.dense, strict=True)], False)
        return [p * k.flatten(1) for p, k in zip(points, keeps, strict=True)], list(keeps)

    sparse, keeps = project(dense)
    duals = [torch.zeros_like(w) for w in dense]
    for penalty in torch.logspace(*(torch.tensor(gauss_newton.PENALTIES).log10().tolist()), iterations).double():
        sums = []
        for gram, w, z, v in zip(grams, dense, sparse, duals, strict=True):
            system = gram + penalty * torch.eye(w.shape[1], dtype=w.dtype)
            near = torch.linalg.solve(system, (gram @ w[..., None])[..., 0] + penalty * z - v)
            sums.append(gauss_newton.RELAXATION * near + (1 - gauss_newton.RELAXATION) * z + v / penalty)
        sparse, keeps = project(sums)
        duals = [penalty * (s - z) for s, z in zip(sums, sparse, strict=True)]
    return keeps


@pytest.mark.parametrize(("seed", "pattern"), enumerate(PATTERNS), ids=str)
def test_a_selection_beats_magnitude_reconstructed_exactly_and_is_all_but_the_best_on_its_mask(seed, pattern):
    of, choose = problem(seed), by(pattern)
    keeps, weights = gauss_newton.select(of, choose)
    assert cost(of, weights) < 0.8 * cost(of, exact(of, magnitude(of, choose)))
    assert cost(of, exact(of, keeps)) <= cost(of, weights) * (1 + 1e-9) <= 1.01 * cost(of, exact(of, keeps))


def test_a_selection_is_near_the_best_of_all_masks():
    """All 924 masks of 24 problems of 3 x 4 weights: the best itself most often, 1.1 times its cost in the mean."""
    dropped = torch.tensor(list(itertools.combinations(range(12), 6)))
    choose = by(Unstructured(0.5, "joint"))
    ratios, of_magnitude = [], []
    for seed in range(24):
        of = problem(seed, heads=(1,), rows=3, columns=4)
        inverse = torch.linalg.inv(torch.kron(damped(of)[0].rows[0], damped(of)[0].inputs[0]))
        lost = of.dense[0].flatten()[dropped]  # [masks, 6]; the others at their best cost w_D^T ((H^-1)_DD)^-1 w_D
        best = (lost * torch.linalg.solve(inverse[dropped[:, :, None], dropped[:, None, :]], lost)).sum(dim=1).min()
        ratios.append(cost(of, gauss_newton.select(of, choose)[1]) / float(best))
        of_magnitude.append(cost(of, exact(of, magnitude(of, choose))) / float(best))
    assert min(ratios) > 1 - 1e-9
    assert sum(r < 1 + 1e-6 for r in ratios) >= 12
    assert sum(ratios) / len(ratios) < 1.15
    assert max(ratios) < 2.0
    assert sum(of_magnitude) / len(of_magnitude) > 1.8


# --- with few of the eigenvectors, as of large factors


@pytest.fixture
def few_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixth of the eigenvectors, however small the factor."""
    monkeypatch.setattr(gauss_newton, "FEWEST", 1)


def nearest(curvature: Curvature, dense: Tensor, point: Tensor, penalty: float) -> Tensor:
    """Compute the minimum near a point in scaled variables, by the whole Kronecker product, head by head."""
    result = torch.empty_like(point)
    for head in range(len(point)):
        metric = torch.kron(curvature.rows[head], curvature.inputs[head])
        unit = metric.diagonal().sqrt()
        gram = metric / unit[:, None] / unit
        wanted = gram @ (dense[head].flatten() * unit) + penalty * point[head].flatten()
        solved = torch.linalg.solve(gram + penalty * torch.eye(len(gram), dtype=gram.dtype), wanted)
        result[head] = solved.view_as(point[head])
    return result


def test_with_all_eigenvectors_one_step_ends_at_the_closed_form():
    of = problem(1)
    for side, curvature, dense in zip(of.sides, damped(of), of.dense, strict=True):
        pull = gauss_newton._Pull(side)
        for seed, penalty in enumerate((0.02, 0.5)):
            point = normal(*dense.shape, seed=seed)
            with of.damped():
                got = pull.towards(point, penalty)
            torch.testing.assert_close(got, nearest(curvature, dense, point, penalty))


@pytest.mark.usefixtures("few_eigenvectors")
def test_with_few_eigenvectors_steps_lead_to_the_closed_form_and_follow_where_it_moves():
    of = problem(2, rows=4, columns=36)
    assert [s.leading.shape[-1] for s in of.sides] == [6, 6]
    for side, curvature, dense in zip(of.sides, damped(of), of.dense, strict=True):
        pull = gauss_newton._Pull(side)
        for seed, penalty in enumerate((1.0, 3.0)):
            point = normal(*dense.shape, seed=seed)
            wanted = nearest(curvature, dense, point, penalty)
            with of.damped():
                left = [float((pull.towards(point, penalty) - wanted).norm() / wanted.norm()) for _ in range(100)]
            assert left[0] > 1e-2  # six vectors of 36 are not enough for one step
            assert left[-1] < 1e-6


def test_leading_eigenvectors_are_those_of_the_largest_eigenvalues(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gauss_newton, "FEWEST", 8)
    decay = torch.logspace(0, -6, 48, dtype=torch.float64)
    factors = torch.stack([(q := torch.linalg.qr(normal(48, 48, seed=s)).Q) @ torch.diag(decay) @ q.T for s in (0, 1)])
    unit = factors.diagonal(dim1=1, dim2=2).sqrt()[:, None, :]
    vectors, values = gauss_newton._leading(factors, unit)
    normalised = factors / unit.mT / unit
    exact = torch.linalg.eigvalsh(normalised)[:, None, -8:]
    assert values.shape == (2, 1, 8)
    torch.testing.assert_close(values[..., 4:], exact[..., 4:], rtol=0.05, atol=0.0)
    assert (values <= exact * (1 + 1e-12)).all()  # as Rayleigh's quotients are
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(8, dtype=torch.float64).expand(2, 8, 8))
    torch.testing.assert_close(vectors.mT @ normalised @ vectors, torch.diag_embed(values[:, 0]))


@each_pattern
@pytest.mark.usefixtures("few_eigenvectors")
def test_many_cheap_steps_cost_no_more_than_half_as_many_exact_ones(pattern: Pattern):
    choose, ratios = by(pattern), []
    for seed in range(3):
        of = problem(seed, rows=4, columns=36)
        ratios.append(cost(of, gauss_newton.select(of, choose)[1]) / cost(of, exact(of, admm(of, choose, 24))))
    assert sum(ratios) / len(ratios) < 1.02


def test_weights_without_any_curvature_are_dropped_first_whatever_the_damping_says():
    """Inputs that never fire, a row that nothing depends on, a head that the attention does without."""
    dtype = torch.float32
    of, dead = problem(0), [torch.zeros(h, ROWS, COLUMNS, dtype=torch.bool) for h in HEADS]
    curvatures = []
    for c, d in zip(of.metric, dead, strict=True):
        row, columns, head = 2, [1, 4, 7], 1
        rows, inputs = 1e-4 * c.rows.clone(), c.inputs.clone()  # so small that an identity would stand out
        rows[:, row], rows[:, :, row] = 0.0, 0.0
        inputs[:, columns], inputs[:, :, columns] = 0.0, 0.0
        inputs[head] = 0.0
        d[:, row], d[:, :, columns], d[head] = True, True, True
        curvatures.append(Curvature(rows.to(dtype), inputs.to(dtype)))
    of = KroneckerProblem(tuple(w.to(dtype) for w in of.dense), tuple(curvatures), DAMPING)
    share = sum(int(d.sum()) for d in dead) / sum(d.numel() for d in dead)
    for sparsity in (share, 0.85):
        keeps, weights = gauss_newton.select(of, by(Unstructured(sparsity, "joint")))
        for keep, w, d in zip(keeps, weights, dead, strict=True):
            assert torch.isfinite(w).all()
            assert not keep[d].any()
    keeps, weights = gauss_newton.select(of, by(Unstructured(share, "joint")))
    for w, dense, d in zip(weights, of.dense, dead, strict=True):
        torch.testing.assert_close(w, dense.masked_fill(d, 0.0), rtol=1e-4, atol=1e-4)
    keeps, weights = gauss_newton.select(of, by(Unstructured(0.1, "joint")))
    for keep, w, dense, d in zip(keeps, weights, of.dense, dead, strict=True):
        assert keep[~d].all()
        torch.testing.assert_close(w[~d], dense[~d], rtol=1e-4, atol=1e-4)
    nothing = [Curvature(torch.zeros_like(c.rows), torch.zeros_like(c.inputs)) for c in curvatures]
    keeps, weights = gauss_newton.select(KroneckerProblem(of.dense, tuple(nothing), DAMPING), by(PATTERNS[0]))
    assert sum(int(k.sum()) for k in keeps) == sum(k.numel() for k in keeps) // 2
    for keep, w, dense in zip(keeps, weights, of.dense, strict=True):
        torch.testing.assert_close(w, dense * keep)


def test_another_damping_starts_from_what_was_measured_which_solving_does_not_change_whatever_happens():
    of, untouched = problem(0), problem(0)
    again = replace(replace(of, damping=0.1), damping=DAMPING)
    gauss_newton.select(of, by(PATTERNS[0]))
    with pytest.raises(ZeroDivisionError), of.damped():
        raise ZeroDivisionError
    for befores, afters in ((damped(of), damped(again)), (of.metric, untouched.metric)):
        for before, after in zip(befores, afters, strict=True):
            assert torch.equal(before.rows, after.rows)
            assert torch.equal(before.inputs, after.inputs)
    assert (damped(replace(of, damping=0.1))[0].inputs - damped(of)[0].inputs).norm() > 0
