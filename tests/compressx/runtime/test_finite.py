from __future__ import annotations

import pytest
import torch

from compressx.runtime.finite import all_finite, first_damaged


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_finite_numbers_whose_sum_overflows_are_finite(dtype):
    large = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
    assert not large.sum().isfinite()
    assert all_finite(large)
    for value in (float("nan"), float("inf"), -float("inf")):
        large[3] = value
        assert not all_finite(large)


@pytest.mark.parametrize("damaged", range(3))
def test_of_several_tensors_the_first_with_such_a_number_is_told(damaged):
    tensors = [torch.full((8,), torch.finfo(torch.float16).max, dtype=torch.float16), torch.ones(2, 3), torch.arange(4)]
    assert all_finite(*tensors)
    assert all_finite()
    tensors[damaged:] = [x.float().flatten().index_fill(0, torch.tensor(1), torch.nan) for x in tensors[damaged:]]
    assert not all_finite(*tensors)
    assert first_damaged(tensors) == damaged
