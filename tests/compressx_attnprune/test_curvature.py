"""Kronecker factors of the curvature, against sums over tokens in float64 and the exact Gauss-Newton matrices."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import pytest
import torch
from tests.compressx_attnprune import drawn
from tests.compressx_attnprune.signs import Signs, count_signs, gauss_newton_matrix, hadamard, outer
from torch import Tensor

from compressx_attnprune import gauss_newton
from compressx_attnprune.attention import Attention, Pair, Projection, attention_matrices, queries_and_keys
from compressx_attnprune.gauss_newton import Curvature, KroneckerProblem, measured_curvature
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss

ATTENTION = Attention(Projection(4), Projection(2), head_dim=4, scaling=0.5)
WIDTH, TOKENS = 6, 9
KINDS = ["matrix", "output"]


normal = partial(drawn.normal, dtype=torch.float32)


def make(kind: str, attention: Attention = ATTENTION) -> Loss:
    if kind == "matrix":
        return MatrixLoss(attention)
    return OutputLoss(attention, normal(8, WIDTH, seed=5), normal(8, seed=6), normal(5, 16, seed=7))


@pytest.fixture(autouse=True)
def _narrow_panels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gauss_newton, "PANEL", 4)


@pytest.fixture
def weights() -> Pair:
    return normal(16, WIDTH, seed=1), normal(8, WIDTH, seed=2)


@pytest.fixture
def x() -> Tensor:
    return normal(10, TOKENS, WIDTH, seed=0)  # three parts, the last of two sequences


@dataclass
class Recording:
    """A loss that keeps what its probes were asked and gave."""

    loss: Loss
    probes: list[tuple[Tensor, Pair]] = field(default_factory=list)

    @property
    def attention(self) -> Attention:
        return self.loss.attention

    def probe(self, x: Tensor, weights: Pair, generator: torch.Generator) -> Pair:
        query, key = self.loss.probe(x, weights, generator)
        self.probes.append((x.clone(), (query.clone(), key.clone())))
        return query, key


@pytest.mark.parametrize("halfway", [0.0, 0.3])
def test_over_all_signs_the_factors_are_mean_and_trace_weighted_sum_of_the_gauss_newton_matrices(
    halfway: float, weights: Pair
):
    """rows = sum_i G_i / tr, inputs = sum_i tr(G_i) x_i x_i^T, with G_i from autograd's Jacobians by whole scores: at
    the dense ones, and at half of them."""
    x = normal(2, 5, WIDTH, seed=3)
    loss = make("matrix")
    signs = hadamard(count_signs(lambda: loss.probe(x, weights, torch.Generator())))
    with Signs(torch.cat([signs, signs]) if halfway else signs):
        measured = measured_curvature(loss, x, weights, probes=len(signs), tokens=1.0, halfway=halfway)
    half = replace(ATTENTION, scaling=ATTENTION.scaling / 2)
    rows, inputs = [torch.zeros(4, 4, 4), torch.zeros(2, 4, 4)], [torch.zeros(4, 6, 6), torch.zeros(2, 6, 6)]
    for q, k, v in zip(*queries_and_keys(ATTENTION, x, weights), x, strict=True):
        dense, halved = (
            gauss_newton_matrix(lambda a, b, at=at: attention_matrices(at, a[None], b[None]), q, k)
            for at in (ATTENTION, half)
        )
        for i, of_tokens in enumerate(d + 4.0 * halfway * h for d, h in zip(dense, halved, strict=True)):
            # of_tokens: [heads, tokens, head_dim, head_dim]
            rows[i] += of_tokens.sum(dim=1)
            traces = of_tokens.diagonal(dim1=2, dim2=3).sum(dim=2)  # [heads, tokens]
            inputs[i] += torch.einsum("ht,tij->hij", traces, outer(v))
    for side, r, h in zip(measured, rows, inputs, strict=True):
        trace = r.diagonal(dim1=1, dim2=2).sum(dim=1)
        torch.testing.assert_close(side.rows, r / trace[:, None, None], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(side.inputs, h, rtol=1e-3, atol=1e-4 * float(h.max()))


def test_a_sample_of_the_tokens_has_the_sum_over_all_as_its_expectation(x: Tensor, weights: Pair):
    recording = Recording(make("matrix"))
    samples = 100
    mean = torch.zeros(4, WIDTH, WIDTH)
    for seed in range(samples):
        sampled = measured_curvature(recording, x, weights, tokens=0.4, halfway=0.0, seed=seed)[0]
        assert torch.linalg.matrix_rank(sampled.inputs).max() == WIDTH
        mean += sampled.inputs / samples
    whole = torch.zeros(4, WIDTH, WIDTH)
    for part, (query, _) in recording.probes:
        traces = query.square().sum(dim=3)  # [sequences, heads, tokens]
        whole += torch.einsum("sht,sti,stj->hij", traces, part, part) / samples
    torch.testing.assert_close(mean, whole, rtol=0.02, atol=0.02 * float(whole.abs().max()))


def test_some_sequences_are_measured_halfway_and_count_for_the_others(weights: Pair, monkeypatch: pytest.MonkeyPatch):
    """Of ten equal sequences in three parts, the first part and the last stand for all."""
    monkeypatch.setattr(gauss_newton, "HALFWAY_PARTS", 2)
    x = normal(1, TOKENS, WIDTH, seed=0).expand(10, -1, -1)
    loss = make("matrix")
    probes = 80
    dense, both = (
        measured_curvature(loss, x, weights, probes=probes, tokens=1.0, halfway=halfway)[0].inputs
        for halfway in (0.0, 1.0)
    )
    half = make("matrix", replace(ATTENTION, scaling=ATTENTION.scaling / 2))
    alone = measured_curvature(half, x, weights, probes=probes, tokens=1.0, halfway=0.0)[0].inputs
    torch.testing.assert_close(both - dense, 4.0 * alone, rtol=0.15, atol=0.1 * float(alone.max()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_looks_at_one_token_whatever_it_reads_counts_for_what_it_does_without_its_weights(kind: str):
    """Its curvature at the dense weights is next to nothing, but without them it looks everywhere."""
    x = normal(8, TOKENS, WIDTH, seed=0)
    x[..., 0], x[..., 1] = 1.0, 0.0  # in all tokens; and in the first one only
    x[:, 0, 1] = 3.0
    query, key = normal(16, WIDTH, seed=1) * 0.3, normal(8, WIDTH, seed=2) * 0.3
    query[0, 0], key[0, 1] = 8.0, 2.0  # the first feature of the first head: its first score is 24 larger
    loss = make(kind)
    (dense, _), (both, _) = (measured_curvature(loss, x, (query, key), tokens=1.0, halfway=h) for h in (0.0, 0.1))
    of_heads = [side.inputs.diagonal(dim1=1, dim2=2).sum(dim=1) for side in (dense, both)]
    assert of_heads[0][0] < 1e-3 * of_heads[0][1:].min()
    growth = of_heads[1] / of_heads[0]
    assert growth[0] > 30
    assert growth[1:].max() < 2


def test_heavy_tokens_are_always_in_the_sample_with_the_weight_that_they_have():
    weights = torch.full((2, 50), 1e-3)
    weights[0, 7], weights[1, 40:42] = 5.0, 2.0
    for seed in range(20):
        chosen, importance = gauss_newton._sample(weights, 12, torch.Generator().manual_seed(seed))
        assert chosen.shape == importance.shape == (2, 12)
        assert all(len(set(row)) == 12 for row in chosen.tolist())
        assert importance[0][chosen[0] == 7].tolist() == [5.0]
        assert importance[1][(chosen[1] == 40) | (chosen[1] == 41)].tolist() == [2.0, 2.0]
        assert (importance[weights.gather(1, chosen) < 1].min() >= 1e-3).all()


@pytest.mark.parametrize("kind", KINDS)
def test_attention_to_a_single_token_curves_nothing_and_leaves_factors_that_can_be_solved(kind: str, weights: Pair):
    for side in measured_curvature(make(kind), normal(3, 1, WIDTH, seed=3), weights):
        torch.testing.assert_close(side.rows.diagonal(dim1=1, dim2=2).sum(dim=1), torch.ones(len(side.rows)))
        assert side.inputs.abs().max() < 1e-6
        with KroneckerProblem((), (side,), 0.01).damped():
            for factor in (side.rows, side.inputs):
                assert torch.isfinite(factor).all()
                assert torch.linalg.cholesky_ex(factor).info.sum() == 0
            assert (side.scale() > 0).all()


@pytest.mark.parametrize("scale", [1e-6, 1e-10])
def test_tiny_weights_have_the_curvature_of_their_gradients_in_float64_but_for_its_unit(scale: float, x: Tensor):
    """Squares of their gradients are below the smallest float32 number."""
    made = make("output")
    assert isinstance(made, OutputLoss)
    assert made.value_bias is not None
    tiny = [w * scale for w in (made.value_weight, made.value_bias, made.output_weight)]
    recording = Recording(OutputLoss(ATTENTION, *tiny))
    weights = normal(16, WIDTH, seed=1) * scale, normal(8, WIDTH, seed=2) * scale
    sides = measured_curvature(recording, x, weights, tokens=1.0, halfway=0.0)
    wanted = [torch.zeros_like(side.inputs, dtype=torch.float64) for side in sides]
    for part, (query, key) in recording.probes:
        for into, gradient in zip(wanted, (query.double(), key.double()), strict=True):
            into.add_(torch.einsum("bhtd,bti,btj->hij", gradient.square(), part.double(), part.double()))
    unit = wanted[0].sum() / sides[0].inputs.double().sum()
    assert unit < 1e-30
    for side, inputs in zip(sides, wanted, strict=True):
        torch.testing.assert_close(side.inputs.double() * unit, inputs, rtol=1e-4, atol=1e-5 * float(inputs.max()))
        trace = side.rows.diagonal(dim1=1, dim2=2).sum(dim=1)
        torch.testing.assert_close(trace, torch.ones_like(trace))
        assert 1e-3 < float(side.scale().max()) < 1e3


def test_damping_adds_a_fraction_of_the_mean_diagonal_and_ten_times_that_to_the_rows_and_takes_it_back():
    before = [root @ root.mT for root in (normal(3, 4, 6, seed=0), normal(3, 6, 8, seed=1))]
    measured, zeros = Curvature(*(f.clone() for f in before)), Curvature(torch.zeros(1, 4, 4), torch.zeros(1, 6, 6))
    with KroneckerProblem((), (measured, zeros), 0.02).damped():
        for factors, damped, fraction in zip(before, (measured.rows, measured.inputs), (0.2, 0.02), strict=True):
            for factor, after in zip(factors, damped, strict=True):
                expected = factor + fraction * factor.trace() / len(factor) * torch.eye(len(factor))
                torch.testing.assert_close(after, expected)
        assert torch.equal(zeros.rows[0], torch.eye(4))
        assert torch.equal(zeros.inputs[0], torch.eye(6))
    assert torch.equal(measured.rows, before[0])
    assert torch.equal(measured.inputs, before[1])
