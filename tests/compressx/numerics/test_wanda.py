from __future__ import annotations

import pytest
import torch

from compressx.numerics.obs import wanda_scores


@pytest.mark.parametrize("weights", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("norms", [torch.float32, torch.float64])
def test_each_score_is_that_of_the_paper_in_the_dtype_of_the_norms(weights: torch.dtype, norms: torch.dtype) -> None:
    weight, of = torch.randn(5, 7).to(weights), torch.rand(7).to(norms)
    scores = wanda_scores(weight, of)
    assert scores.dtype == norms
    for i in range(5):
        for j in range(7):
            assert scores[i, j].item() == pytest.approx(abs(weight[i, j].item()) * of[j].item(), rel=1e-6)
