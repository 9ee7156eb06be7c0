from __future__ import annotations

import pytest
import torch

from compressx.runtime.finite import all_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_finite_numbers_whose_sum_overflows_are_finite(dtype):
    large = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)
    assert not large.sum().isfinite()
    assert all_finite(large)
    for value in (float("nan"), float("inf"), -float("inf")):
        large[3] = value
        assert not all_finite(large)
