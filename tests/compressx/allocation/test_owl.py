"""OWL against a slow reference, and what its paper promises of the sparsities."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.compressx.allocation.test_measure import REST, one_rule

from compressx.allocation.measure import outlier_ratio
from compressx.allocation.methods import chosen, measured, outlier_weighed
from compressx.models.access import InMemory
from compressx.recipe.sections import OwlAllocation
from compressx.testing import tiny_model, tiny_tokens

BLOCKS = st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10**9)), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("threshold", "dtype"), [(1.0, torch.float32), (2.0, torch.bfloat16), (5.0, torch.float32)], ids=str
)
def test_the_outlier_ratio_is_that_of_all_scores_of_a_block_together(threshold: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 12), (5, 12), (12, 30))
    pairs = [
        (torch.randn(shape, generator=generator).pow(3).to(dtype), torch.rand(shape[1], generator=generator) ** 4)
        for shape in shapes
    ]
    scores = torch.cat([(weight.double().abs() * norms.double()).flatten() for weight, norms in pairs])
    expected = float((scores > threshold * scores.mean()).double().mean())
    assert 0 < expected < 0.5
    assert outlier_ratio(pairs, threshold) == pytest.approx(expected, abs=1e-12)
    assert outlier_ratio([(torch.ones(4, 6), torch.ones(6))], 5.0) == 0.0


def test_as_many_windows_are_measured_and_as_many_outliers_counted_as_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    planned = one_rule(model, "magnitude", *REST)

    def outliers(samples: int, threshold: float) -> list[float]:
        monkeypatch.setattr("compressx.allocation.methods.OUTLIER_THRESHOLD", threshold)
        settings = OwlAllocation(method="owl", target=0.5, samples=samples)
        found = measured(InMemory(model), planned, settings, tiny_tokens().split(2))
        return [u.outliers for u in chosen(planned, settings, found)[1].units]

    few, all_of_them, rarer = outliers(2, 2.0), outliers(8, 2.0), outliers(8, 4.0)
    assert few != all_of_them
    assert all(a > b for a, b in zip(all_of_them, rarer, strict=True))


@given(BLOCKS, st.floats(0.1, 0.9), st.floats(0, 0.1))
def test_the_mean_is_the_target_no_block_leaves_the_spread_and_more_outliers_mean_less_sparsity(
    blocks: list[tuple[float, int]], target: float, spread: float
) -> None:
    ratios, weights = map(list, zip(*blocks, strict=True))
    chosen = outlier_weighed(ratios, weights, target, spread)
    assert np.average(chosen, weights=weights) == pytest.approx(target, abs=1e-9)
    assert all(target - spread - 1e-9 <= s <= target + spread + 1e-9 for s in chosen)
    assert all(a[1] >= b[1] for a, b in pairwise(sorted(zip(ratios, chosen, strict=True))))


def test_the_block_farthest_from_the_mean_uses_the_whole_spread_and_alike_ones_none_of_it() -> None:
    assert outlier_weighed([0.0, 0.0, 0.0, 0.4], [10] * 4, 0.6, 0.09) == pytest.approx([0.63, 0.63, 0.63, 0.51])
    assert outlier_weighed([0.03, 0.03], [10, 90], 0.7, 0.08) == [0.7, 0.7]
    assert outlier_weighed([0.03], [10], 0.7, 0.08) == [0.7]


@pytest.mark.parametrize("target", [0.07, 0.88])
def test_a_target_that_leaves_no_room_for_the_spread_is_refused(target: float) -> None:
    with pytest.raises(ValidationError, match=r"than or equal to (0\.08|0\.87)"):
        OwlAllocation(method="owl", target=target)
