from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.compressx.pruners.problems import correlated_inputs, one_linear, output_error, prune

from compressx.api.patterns import NM, FixedMask, Unstructured

ROOT = Path(__file__).parents[3]
PATTERNS = [Unstructured(0.5, "layer"), Unstructured(0.6, "row"), Unstructured(0.7, "layer"), NM(2, 4)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_error_is_below_that_of_sparsegpt_with_the_same_budget(pattern):
    block, x = one_linear(), correlated_inputs()
    error = {name: output_error(block, prune(name, block, pattern, x)["fc"], x) for name in ("sparsegpt", "alps")}
    assert error["alps"] < 0.8 * error["sparsegpt"]


@pytest.mark.parametrize(
    ("selector", "pattern"), list(zip(["magnitude", "wanda", "sparsegpt", "wanda"], PATTERNS, strict=True)), ids=str
)
def test_on_a_given_mask_the_error_is_below_that_of_the_pruner_that_chose_it(selector, pattern):
    block, x = one_linear(), correlated_inputs()
    chosen = prune(selector, block, pattern, x)["fc"]
    rebuilt = prune("alps", block, FixedMask(chosen.keep, pattern), x)["fc"]
    assert torch.equal(rebuilt.keep, chosen.keep)
    assert output_error(block, rebuilt, x) < (0.95 if selector == "sparsegpt" else 0.6) * output_error(block, chosen, x)


def test_weights_keep_their_dtype_and_halves_are_solved_in_float32():
    block, x = one_linear(), correlated_inputs()
    reference = output_error(block, prune("alps", block, NM(2, 4), x)["fc"], x)
    block.linears["fc"].module.to(torch.bfloat16)
    result = prune("alps", block, NM(2, 4), x)["fc"]
    assert result.weight.dtype == torch.bfloat16
    rounded = block.linears["fc"].weight.float()
    lost = x @ (result.weight.float() - rounded).T
    assert float(lost.square().sum() / (x @ rounded.T).square().sum()) < 1.1 * reference


def test_the_report_has_the_output_error_and_how_it_was_reached():
    block, x = one_linear(), correlated_inputs()
    result = prune("alps", block, NM(2, 4), x)["fc"]
    assert result.info["linear_error"] == pytest.approx(output_error(block, result, x), rel=1e-3)
    assert 3 <= result.info["steps"] <= 300
    assert 0 <= result.info["solver_residual"] <= 0.01
