from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compressx.api.scores import random_scores

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


@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 40),
    sparsity=st.floats(0, 0.999),
    group=st.sampled_from(["row", "layer"]),
    seed=st.integers(0, 99),
    levels=st.sampled_from([1, 3, 10_000]),
)
def test_an_unstructured_mask_drops_exactly_its_budget_even_among_ties(rows, columns, sparsity, group, seed, levels):
    scores = random_scores(rows, columns, seed, levels)
    pattern = Unstructured(sparsity, group)
    keep = keep_mask(scores, pattern)
    assert int((~keep).sum()) == pattern.zeros(rows, columns)
    if group == "row":
        assert len(set((~keep).sum(dim=1).tolist())) == 1
    if keep.any() and not keep.all():
        parts = [(scores[i], keep[i]) for i in range(rows)] if group == "row" else [(scores, keep)]
        for s, k in parts:
            assert not k.any() or k.all() or s[~k].max() <= s[k].min()


@settings(max_examples=40)
@given(
    rows=st.integers(1, 6),
    groups=st.integers(1, 5),
    keep=st.integers(1, 7),
    extra=st.integers(0, 7),
    seed=st.integers(0, 9),
)
def test_an_n_m_mask_keeps_the_n_highest_of_every_m_input_features(rows, groups, keep, extra, seed):
    pattern = NM(keep, keep + extra)
    scores = torch.rand(rows, groups * pattern.of, generator=torch.Generator().manual_seed(seed))
    mask = keep_mask(scores, pattern)
    for row in range(rows):
        for start in range(0, scores.shape[1], pattern.of):
            part = scores[row, start : start + pattern.of]
            expected = set(part.argsort(descending=True)[:keep].tolist())
            assert set(mask[row, start : start + pattern.of].nonzero().flatten().tolist()) == expected
    assert int((~mask).sum()) == pattern.zeros(*scores.shape)


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


def test_joint_linears_must_have_one_sparsity():
    scores = {"q": torch.rand(2, 4), "k": torch.rand(2, 4)}
    with pytest.raises(ValueError, match=r"\[0\.25, 0\.5\]"):
        keep_masks(scores, {"q": Unstructured(0.5, "joint"), "k": Unstructured(0.25, "joint")})


def test_a_fixed_mask_is_returned_as_it_is():
    keep = torch.tensor([[True, False], [False, True]])
    fixed = FixedMask(keep, Unstructured(0.5, "layer"))
    assert keep_mask(torch.rand(2, 2), fixed) is keep
    assert fixed.asked.zeros(2, 2) == 2
    assert str(fixed) == "50% layer"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        keep_mask(torch.tensor([[1.0, bad]]), Unstructured(0.5))


def test_features_that_do_not_divide_by_m_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"in_features 6 is not divisible by 4 \(pattern 2:4\)"):
        keep_mask(torch.rand(2, 6), NM(2, 4))


@pytest.mark.parametrize(
    "make", [lambda: Unstructured(1.1), lambda: Unstructured(-0.1), lambda: NM(5, 4), lambda: NM(0, 4)]
)
def test_impossible_patterns_cannot_be_made(make):
    with pytest.raises(ValueError, match="got"):
        make()


@pytest.mark.parametrize(
    ("pattern", "sparsity", "expected"),
    [(NM(2, 4), 0.3, NM(3, 4)), (NM(2, 4), 0.0, NM(3, 4)), (NM(1, 4), 0.99, NM(1, 4)), (NM(1, 8), 0.7, NM(2, 8)),
     (NM(2, 2), 0.5, NM(1, 2)), (Unstructured(0.5, "row"), 0.3, Unstructured(0.3, "row"))],
)  # fmt: skip
def test_the_nearest_pattern_of_a_kind_keeps_m_and_prunes_something_but_not_all(pattern, sparsity, expected):
    assert pattern.at(sparsity) == expected


def test_a_pattern_is_written_without_the_sparsity_that_was_chosen():
    assert [allocated_form(str(p)) for p in (NM(2, 4), NM(8, 8), Unstructured(0.375, "joint"))] == [
        "allocated N:4", "allocated N:8", "allocated joint"
    ]  # fmt: skip


def test_patterns_print_as_a_recipe_writes_them():
    assert str(NM(2, 4)) == "2:4"
    assert str(Unstructured(0.5, "row")) == "50% row"
    assert str(Unstructured(0.625, "joint")) == "62.5% joint"
    assert NM(2, 4).sparsity == 0.5
