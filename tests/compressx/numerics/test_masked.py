"""What the groups of a mask keep, against a plain sum."""

from __future__ import annotations

import pytest
import torch

from compressx.numerics.masked import count_in_groups, pattern_mismatch


@pytest.mark.parametrize("of", [1, 2, 3, 4, 5, 8, 12, 16, 20, 60, 256, 4096])
def test_groups_of_every_size_are_counted_exactly_however_the_mask_lies_in_memory(of):
    flat = torch.rand(3 * 4 * of + 1, generator=torch.Generator().manual_seed(of)) < 0.7
    plain, offset = flat[:-1].view(3, 4 * of), flat[1:].view(3, 4 * of)
    transposed = plain.T.contiguous().T
    for keep in (plain, offset, transposed, torch.ones_like(plain), torch.zeros_like(plain)):
        assert torch.equal(count_in_groups(keep, of).long(), keep.reshape(-1, of).sum(dim=1))


@pytest.mark.parametrize("pattern", ["50% row", "50% of neurons", "", "x", "2:0", "2:4 ", "9" * 5000 + ":4"])
def test_only_n_of_m_is_looked_for_in_the_pattern_of_a_masks_file(pattern):
    assert pattern_mismatch(torch.ones(2, 8, dtype=torch.bool), pattern) == ""


def test_a_pattern_that_does_not_divide_the_input_features_is_told():
    keep = torch.ones(2, 6, dtype=torch.bool)
    assert pattern_mismatch(keep, "2:4") == "6 input features are no multiple of 4"
    assert pattern_mismatch(keep, f"2:{10**9 - 1}") == f"6 input features are no multiple of {10**9 - 1}"
