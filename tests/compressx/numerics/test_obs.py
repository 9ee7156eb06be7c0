from __future__ import annotations

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.numerics.problems import damped, problem

from compressx.api.patterns import NM, FixedMask, Unstructured
from compressx.api.statistics import Hessian
from compressx.numerics.obs import NotPositiveDefiniteError, inverse_cholesky, sweep, wanda_scores


def one_weight_at_a_time(weight: torch.Tensor, hessian: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """The update written out as in the paper's derivation: before each column, invert the Hessian of what is left."""
    w = weight.clone()
    columns = w.shape[1]
    for j in range(columns):
        rest = torch.linalg.inv(hessian[j:, j:])
        for r in range(w.shape[0]):
            if not keep[r, j]:
                w[r, j:] = w[r, j:] - w[r, j] / rest[0, 0] * rest[0]
                w[r, j] = 0.0
    return w


@pytest.mark.parametrize("columns", [1, 257])
def test_the_factor_is_the_upper_cholesky_factor_of_the_damped_inverse(columns):
    _, x = problem(1, columns, tokens=2 * columns + 10)
    hessian = x.T @ x
    before = hessian.clone()
    factor, damping = inverse_cholesky(hessian, 0.01)
    assert torch.equal(hessian, before)
    assert damping == 0.01
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor.T @ factor, torch.linalg.inv(damped(hessian)), rtol=1e-9, atol=1e-12)


def test_a_factor_in_float32_is_as_good_as_one_that_inverts_in_float64(monkeypatch):
    monkeypatch.setattr("compressx.numerics.obs.CHUNK", 1000)
    _, x = problem(1, 300, tokens=600)
    hessian = x.T @ x
    expected, _ = inverse_cholesky(hessian)
    factor, _ = inverse_cholesky(hessian.float())
    assert factor.dtype == torch.float32
    assert (factor - expected).norm() < 1e-4 * expected.norm()


def test_a_sweep_over_a_fixed_mask_equals_the_update_derived_one_weight_at_a_time():
    weight, x = problem(7, 20)
    hessian = x.T @ x
    keep = torch.rand(7, 20, generator=torch.Generator().manual_seed(3)) > 0.4
    factor, damping = inverse_cholesky(hessian, 1e-8)
    got_keep, got = sweep(weight, factor, FixedMask(keep, Unstructured(0.4)))
    assert torch.equal(got_keep, keep)
    expected = one_weight_at_a_time(weight, damped(hessian, damping), keep)
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


def test_column_blocks_do_not_change_the_update(monkeypatch):
    weight, x = problem(5, 33)
    factor, _ = inverse_cholesky(x.T @ x)
    fixed = FixedMask(torch.rand(5, 33, generator=torch.Generator().manual_seed(1)) > 0.5, Unstructured(0.5))
    whole = sweep(weight, factor, fixed)[1]
    monkeypatch.setattr("compressx.numerics.obs.BLOCK_COLUMNS", 8)
    torch.testing.assert_close(sweep(weight, factor, fixed)[1], whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pattern", [
    Unstructured(0.5, "row"), Unstructured(0.37, "layer"), Unstructured(0.999, "row"), Unstructured(0.9, "layer"),
    NM(2, 4), NM(1, 3), NM(4, 8), NM(3, 3),
])  # fmt: skip
@pytest.mark.parametrize("columns", [264, 129])
def test_budgets_are_exact_over_column_blocks(pattern, columns):
    if isinstance(pattern, NM):
        columns = columns // pattern.of * pattern.of
    weight, x = problem(6, columns, tokens=300)
    keep, new = sweep(weight, inverse_cholesky(x.T @ x)[0], pattern)
    assert int((~keep).sum()) == pattern.zeros(6, columns)
    assert torch.equal(new == 0, ~keep)
    if isinstance(pattern, NM):
        assert (keep.view(6, -1, pattern.of).sum(dim=2) == pattern.keep).all()
    elif pattern.group == "row":
        assert len(set(keep.sum(dim=1).tolist())) == 1


def test_sparsity_zero_returns_the_weight_bit_for_bit():
    weight, x = problem(6, 140)
    weight = weight.bfloat16()
    keep, new = sweep(weight, inverse_cholesky((x.T @ x).float())[0], Unstructured(0.0, "layer"))
    assert keep.all()
    assert torch.equal(new.bfloat16(), weight)


@pytest.mark.parametrize(
    ("pattern", "dead"),
    [(Unstructured(2 / 16, "row"), [3, 9]), (NM(2, 4), [1, 3, 4, 7, 8, 9, 14, 15])],  # two of every four
    ids=str,
)
def test_features_that_never_fire_are_dropped_first(pattern, dead):
    weight, x = problem(6, 16)
    x[:, dead] = 0
    weight[:, dead] *= 100
    hessian = x.T @ x
    keep, _ = sweep(weight, inverse_cholesky(hessian)[0], pattern, hessian.diagonal() == 0)
    assert (~keep).nonzero()[:, 1].unique().tolist() == dead


def test_features_that_never_fire_do_not_water_the_damping_down():
    _, x = problem(1, 12)
    x[:, :6] = 0
    hessian = x.T @ x
    factor, _ = inverse_cholesky(hessian, 0.1)
    expected = torch.linalg.inv(damped(hessian[6:, 6:], 0.1))
    torch.testing.assert_close((factor.T @ factor)[6:, 6:], expected, rtol=1e-9, atol=1e-12)


def test_the_factor_of_a_statistic_is_that_of_its_matrix():
    hessian = Hessian(12)
    hessian.update(problem(1, 12)[1])
    assert torch.equal(inverse_cholesky(hessian.assembled)[0], inverse_cholesky(hessian.matrix)[0])


def test_the_damping_is_raised_until_the_factor_exists_and_is_reported():
    bad = torch.diag(torch.tensor([1.0, 1.0, -0.3]))
    _, damping = inverse_cholesky(bad, 0.01)
    assert damping == pytest.approx(1.0)


def test_the_damping_is_raised_while_the_factor_is_beyond_float32():
    """A Cholesky factor with 2^-10 beside ones, exact in float32, whose inverse reaches 2^160."""
    root = 2.0**-10 * torch.eye(16) + torch.diag(torch.ones(15), -1)
    factor, damping = inverse_cholesky((root @ root.T).flip(0, 1), 1e-14)
    assert factor.isfinite().all()
    assert damping > 1e-14


@pytest.mark.parametrize(
    ("hessian", "told"),
    [(torch.diag(torch.tensor([1.0, 1.0, -5.0])), "damping 1 "), *((dense, "NaN or infinite") for dense in (
        torch.full((2, 2), torch.nan), torch.full((1, 1), torch.inf), torch.diag(torch.tensor([torch.inf, 1.0])),
        torch.diag(torch.tensor([1.0, 1.0, torch.inf])), torch.eye(3).index_fill(1, torch.tensor(1), torch.inf)))],
)  # fmt: skip
def test_a_hessian_that_no_damping_mends_or_that_is_not_finite_anywhere_is_refused(hessian, told):
    with pytest.raises(NotPositiveDefiniteError, match=told):
        inverse_cholesky(hessian, 1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("pattern", [
    Unstructured(0.5, "row"), Unstructured(0.5, "layer"), NM(2, 4),
    FixedMask(torch.arange(144).remainder(2).bool().expand(6, 144), Unstructured(0.5)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("column", [0, 130, 142, 143])
def test_a_weight_that_is_not_finite_is_refused_wherever_it_is(pattern, column, bad):
    weight, x = problem(6, 144)
    weight[3, column] = bad
    with pytest.raises(ValueError, match="finite"):
        sweep(weight, inverse_cholesky(x.T @ x)[0], pattern)


@pytest.mark.parametrize(
    ("pattern", "a_column"), [(Unstructured(0.5, "layer"), 3), (Unstructured(0.5, "row"), 3), (NM(2, 4), 7)], ids=str
)
def test_an_accelerator_is_waited_for_once_a_weight_and_starts_few_kernels_a_column(pattern, a_column):
    weight, x = (each.float() for each in problem(24, 256))
    factor, _ = inverse_cholesky(x.T @ x)
    expected = sweep(weight, factor, pattern)
    with pretended_accelerator() as record:
        hessian, placed = (x.T @ x).cuda(), (weight.cuda(), factor.cuda())
        with record.counted() as factoring:
            inverse_cholesky(hessian)
        with record.counted() as sweeping:
            got = sweep(*placed, pattern)
        assert factoring.synchronisations == sweeping.synchronisations == 1, sweeping.places()
        assert sweeping.launches <= a_column * 256
        assert all(torch.equal(mine.cpu(), its) for mine, its in zip(got, expected, strict=True))


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("norms", [torch.float32, torch.float64], ids=str)
def test_wandas_score_is_that_of_the_paper_in_the_dtype_of_the_norms(weights: torch.dtype, norms: torch.dtype):
    weight, of = torch.randn(5, 7).to(weights), torch.rand(7).to(norms)
    before, scores = weight.clone(), wanda_scores(weight, of)
    assert scores.dtype == norms
    torch.testing.assert_close(scores.double(), weight.double().abs() * of.double(), rtol=1e-6, atol=0)
    assert torch.equal(weight, before)
