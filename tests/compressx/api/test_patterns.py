from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compressx.api.test_lowest import kept_by_sorting, random_scores

from compressx.api.patterns import (
    NM,
    FixedMask,
    Unstructured,
    allocated_form,
    count_dropped,
    keep_mask,
    keep_masks,
)
from compressx.numerics.obs import sweep


@st.composite
def patterns_with_a_size(draw):
    """A pattern, and the rows and columns of a weight that it divides."""
    rows, columns, keep, of = (draw(st.integers(1, n)) for n in (12, 40, 7, 14))
    nm = NM(min(keep, of), of)
    sparsity = draw(st.floats(0, 0.999))
    pattern = draw(st.sampled_from([Unstructured(sparsity, "row"), Unstructured(sparsity, "layer"), nm]))
    return pattern, rows, nm.of * (1 + columns % 5) if pattern == nm else columns


@settings(max_examples=80)
@given(patterns_with_a_size(), st.integers(0, 99), st.sampled_from([1, 3, 10_000]))
def test_a_mask_drops_exactly_the_lowest_of_each_group_even_among_ties(sized, seed, levels):
    pattern, rows, columns = sized
    scores = random_scores(rows, columns, seed, levels)
    keep = keep_mask(scores, pattern)
    size, dropped = pattern.groups(rows, columns)
    assert torch.equal(keep.view(-1, size), kept_by_sorting(scores.view(-1, size), dropped))
    assert int((~keep).sum()) == pattern.zeros(rows, columns)
    expected = pattern.sparsity * size
    assert size == (pattern.of if isinstance(pattern, NM) else columns if pattern.group == "row" else rows * columns)
    assert abs(dropped - expected) <= 0.5 + 1e-6


@pytest.mark.parametrize(("rows", "columns"), [(3, 15), (15, 3), (5, 21)])
def test_a_budget_half_way_between_two_counts_is_one_count_everywhere(rows, columns):
    """.1 x 3 x 15 is 4.5, and a little more where it is multiplied in another order."""
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0))
    for sparsity in (0.1, 0.3, 0.7, 0.9):
        pattern = Unstructured(sparsity, "layer")
        swept, _ = sweep(scores, torch.eye(columns), pattern)
        assert int((~keep_mask(scores, pattern)).sum()) == int((~swept).sum()) == pattern.zeros(rows, columns)


def test_a_sparsity_of_k_in_n_drops_k_though_no_float_is_that_fraction():
    """15 / 22 * 22 is a little less than 15."""
    assert all(count_dropped(k / n, n) == k for n in range(1, 65) for k in range(n + 1))


def test_joint_linears_share_one_threshold_and_their_total_is_exact():
    generator = torch.Generator().manual_seed(0)
    scores = {"q": torch.rand(6, 8, generator=generator), "k": torch.rand(3, 8, generator=generator) * 0.5}
    masks = keep_masks(scores, dict.fromkeys(scores, Unstructured(0.5, "joint")))
    assert sum(int((~m).sum()) for m in masks.values()) == 36
    assert (~masks["k"]).float().mean() > (~masks["q"]).float().mean()
    dropped = torch.cat([scores[n][~masks[n]] for n in scores])
    kept = torch.cat([scores[n][masks[n]] for n in scores])
    assert dropped.max() <= kept.min()


def test_a_fixed_mask_is_returned_as_it_is():
    keep = torch.tensor([[True, False], [False, True]])
    fixed = FixedMask(keep, Unstructured(0.5, "layer"))
    assert keep_mask(torch.rand(2, 2), fixed) is keep
    assert fixed.asked.zeros(2, 2) == 2
    assert str(fixed) == "50% layer"


HALF = Unstructured(0.5, "joint")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: keep_mask(torch.tensor([[1.0, torch.nan]]), HALF), "finite"),
        (lambda: keep_mask(torch.tensor([[1.0, torch.inf]]), HALF), "finite"),
        *((make, "got") for make in (lambda: HALF.at(1.1), lambda: HALF.at(-0.1), lambda: NM(5, 4), lambda: NM(0, 4))),
        (lambda: keep_mask(torch.rand(2, 6), NM(2, 4)), r"in_features 6 is not divisible by 4 \(pattern 2:4\)"),
        (
            lambda: keep_masks(dict.fromkeys("qk", torch.rand(2, 4)), {"q": HALF, "k": HALF.at(0.25)}),
            r"need one sparsity, got \[0\.25, 0\.5\]",
        ),
    ],
)
def test_impossible_patterns_and_scores_are_refused(make, told):
    with pytest.raises(ValueError, match=told):
        make()


@pytest.mark.parametrize(
    ("pattern", "sparsity", "expected"),
    [(NM(2, 4), 0.3, NM(3, 4)), (NM(2, 4), 0.0, NM(3, 4)), (NM(1, 4), 0.99, NM(1, 4)), (NM(1, 8), 0.7, NM(2, 8)),
     (NM(2, 2), 0.5, NM(1, 2)), (Unstructured(0.5, "row"), 0.3, Unstructured(0.3, "row"))],
)  # fmt: skip
def test_the_nearest_pattern_of_a_kind_keeps_m_and_prunes_something_but_not_all(pattern, sparsity, expected):
    assert pattern.at(sparsity) == expected


@pytest.mark.parametrize(
    ("pattern", "written", "allocated"),
    [(NM(2, 4), "2:4", "allocated N:4"), (NM(8, 8), "8:8", "allocated N:8"),
     (Unstructured(0.5, "row"), "50% row", "allocated row"),
     (Unstructured(0.625, "joint"), "62.5% joint", "allocated joint")],
    ids=str,
)  # fmt: skip
def test_patterns_are_written_as_in_a_recipe_and_without_the_sparsity_that_was_chosen(pattern, written, allocated):
    assert (str(pattern), allocated_form(str(pattern))) == (written, allocated)
