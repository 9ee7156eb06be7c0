"""The formulas for what the methods cost, held against what torch counts while they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compressx.flops import counter

from compressx import NM, FeatureNorms, FixedMask, Hessian, Pattern, SequenceSample, Unstructured, Windows
from compressx.api.patterns import keep_mask
from compressx.numerics import admm, obs, work
from compressx.numerics.least_squares import Metric

SHAPES = [(5, 32), (48, 128), (96, 200), (64, 600)]
PATTERNS: list[Pattern] = [Unstructured(0.5, "layer"), Unstructured(0.3, "row"), NM(2, 4), NM(4, 8)]


def hessian(n: int) -> torch.Tensor:
    x = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(0))
    return x.T @ x


def counted(run: Any) -> tuple[int, Any]:
    with counter() as flops_of:
        result = run()
    return flops_of.total, result


@pytest.mark.parametrize("n", [31, 256, 257, 700])
def test_factoring_the_inverse_hessian_multiplies_and_returns_as_counted(n):
    matrix = hessian(n)
    flops, (factor, _) = counted(lambda: obs.inverse_cholesky(matrix))
    found = work.inverse_cholesky(n)
    assert (found["float32"], found.returned) == (flops, factor.nbytes)


def test_a_large_factor_takes_two_thirds_of_the_cube():
    n = 8192
    assert work.inverse_cholesky(n).flops == pytest.approx(2 / 3 * n**3, rel=0.06)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_sweep_multiplies_as_counted_also_with_a_given_mask(shape, pattern):
    weight = torch.randn(*shape)
    factor, _ = obs.inverse_cholesky(hessian(shape[1]))
    flops, (keep, _) = counted(lambda: obs.sweep(weight, factor, pattern))
    assert work.sweep(*shape, pattern)["float32"] == flops
    fixed = FixedMask(keep, pattern)  # type: ignore[arg-type]
    flops, _ = counted(lambda: obs.sweep(weight, factor, fixed))
    assert work.sweep(*shape, fixed)["float32"] == flops


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pattern", [*PATTERNS, FixedMask])
def test_admm_multiplies_as_counted_for_the_steps_that_it_took(shape, pattern):
    weight, metric = torch.randn(*shape), Metric.of(hessian(shape[1]))
    if pattern is FixedMask:
        half = Unstructured(0.5, "row")
        pattern = FixedMask(keep_mask(weight.abs(), half), half)
    problem = admm.Problem(weight, metric, pattern)
    flops, found = counted(lambda: admm.prune({"fc": problem}, steps=12, solver_steps=5))
    solution = found["fc"]
    expected = work.admm(*shape, pattern, steps=solution.steps, solver_steps=solution.solver_steps)
    product = 2 * weight.numel() * shape[1]
    again = 3 * product if flops > expected["float32"] else 0  # the start was better, and its weights were solved for
    assert flops - expected["float32"] in (0, *(product * n for n in range(1, 8) if again))


@pytest.mark.parametrize(("features", "batch"), [(20, 2), (300, 1), (513, 3)])
def test_the_hessian_multiplies_and_holds_as_counted(features, batch):
    text = Windows(6, 10, batch)
    statistic = Hessian(features)
    flops, _ = counted(lambda: [statistic.update(torch.randn(batch, 10, features)) for _ in range(text.batches)])
    found = statistic.work(text)
    assert found["float32"] == flops
    assert statistic.sums.nbytes <= found.memory <= statistic.sums.nbytes + 4 * 257 * features


def test_a_gpu_multiplies_narrow_inputs_of_a_hessian_as_they_are():
    wide = Hessian(64).work(Windows(8, 16, 2, itemsize=2))
    narrow = Hessian(64).work(Windows(8, 16, 2, itemsize=2, gpu=True))
    assert (narrow["bfloat16"], narrow["float32"]) == (wide["float32"], 0)


def test_a_sample_of_sequences_holds_its_limit_and_norms_hold_next_to_nothing():
    text = Windows(8, 10, 2, itemsize=2)
    sample = SequenceSample(16, limit=4)
    for _ in range(text.batches):
        sample.update(torch.randn(2, 10, 16, dtype=torch.bfloat16))
    held = sum(x.nbytes for x in sample.batches) + sample.sequences.nbytes
    assert sample.work(text).memory == held
    assert FeatureNorms(16).work(text).memory == 4 * 2 * 10 * 16  # a float32 copy of a batch


def test_a_router_leaves_a_linear_its_share_of_the_work():
    whole, some = (Hessian(64).work(Windows(8, 16, 2, share=share))["float32"] for share in (1.0, 0.25))
    assert some == whole / 4


def test_of_n_of_m_patterns_nothing_is_selected_by_threshold_and_of_given_masks_nothing_at_all():
    assert work.selection(8, 16, NM(2, 4))["selected"] == 0
    assert work.selection(8, 16, Unstructured(0.5))["selected"] == 128
    assert work.selection(8, 16, FixedMask(torch.ones(8, 16, dtype=torch.bool), NM(2, 4))).counts == {}
