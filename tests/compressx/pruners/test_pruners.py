"""The built-in pruners against each other's limits, on one linear with correlated inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.compressx.pruners.problems import SPECS, correlated_inputs, one_linear, output_error, prune

from compressx import UnsupportedModelError
from compressx.api.patterns import NM, FixedMask, Unstructured
from compressx.pruners.dare import Dare, DareOptions


@pytest.mark.parametrize("pattern", [Unstructured(0.5, "row"), Unstructured(0.7, "layer"), NM(2, 4)], ids=str)
def test_on_correlated_inputs_alps_is_below_sparsegpt_that_below_wanda_and_that_below_magnitude(pattern):
    block, x = one_linear(), correlated_inputs()
    error = {name: output_error(block, prune(name, block, pattern, x)["fc"], x) for name in SPECS}
    assert error["alps"] < 0.8 * error["sparsegpt"]
    assert error["sparsegpt"] < 0.7 * error["wanda"]
    assert error["wanda"] < error["magnitude"]


def test_with_independent_inputs_sparsegpt_chooses_as_wanda_and_updates_nothing():
    block = one_linear()
    x = torch.diag(torch.logspace(-1, 1, 48))[None]  # X^T X is diagonal
    pattern = Unstructured(0.5, "row")
    second_order = prune("sparsegpt", block, pattern, x, damping=1e-7)["fc"]
    assert torch.equal(second_order.keep, prune("wanda", block, pattern, x)["fc"].keep)
    kept = second_order.keep
    torch.testing.assert_close(second_order.weight[kept], block.linears["fc"].weight[kept], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "selector", "at_most"),
    [("sparsegpt", "wanda", 0.7), ("alps", "magnitude", 0.6), ("alps", "sparsegpt", 0.95)],
)
def test_on_a_given_mask_the_error_is_below_that_of_the_pruner_that_chose_it(name, selector, at_most):
    block, x = one_linear(), correlated_inputs()
    chosen = prune(selector, block, Unstructured(0.5, "row"), x)["fc"]
    rebuilt = prune(name, block, FixedMask(chosen.keep, Unstructured(0.5, "row")), x)["fc"]
    assert torch.equal(rebuilt.keep, chosen.keep)
    assert output_error(block, rebuilt, x) < at_most * output_error(block, chosen, x)
    assert SPECS[name].reconstructs
    assert not SPECS["wanda"].reconstructs


def test_sparsegpt_reports_its_damping_and_inputs_that_are_no_numbers_fail_with_the_layers_name():
    block, x = one_linear(), correlated_inputs()
    assert prune("sparsegpt", block, Unstructured(0.5, "layer"), x, damping=0.05)["fc"].info["damping"] == 0.05
    for name, bad in (("sparsegpt", float("nan")), ("alps", float("inf"))):
        x[0, 0, 0] = bad
        with pytest.raises(UnsupportedModelError, match="fc: the Hessian has NaN"):
            prune(name, block, Unstructured(0.5, "layer"), x)


def test_alps_keeps_the_dtype_solves_halves_in_float32_and_reports_its_error_and_how_it_was_reached():
    block, x = one_linear(), correlated_inputs()
    result = prune("alps", block, NM(2, 4), x)["fc"]
    reference = output_error(block, result, x)
    assert result.info["linear_error"] == pytest.approx(reference, rel=1e-3)
    assert 3 <= result.info["steps"] <= 300
    assert 0 <= result.info["solver_residual"] <= 0.01
    block.linears["fc"].module.to(torch.bfloat16)
    result = prune("alps", block, NM(2, 4), x)["fc"]
    assert result.weight.dtype == torch.bfloat16
    rounded = block.linears["fc"].weight.float()
    lost = x @ (result.weight.float() - rounded).T
    assert float(lost.square().sum() / (x @ rounded.T).square().sum()) < 1.1 * reference


def test_features_that_never_fire_are_dropped_first_by_all_that_are_calibrated():
    block, x = one_linear(), correlated_inputs()
    dead = [3, 17, 40]
    x[..., dead] = 0
    for name in ("wanda", "sparsegpt", "alps"):
        result = prune(name, block, Unstructured(3 / 48, "row"), x)["fc"]
        assert (~result.keep).nonzero()[:, 1].unique().tolist() == dead, name


def test_dare_draws_for_each_linear_and_each_seed_anew():
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        block = one_linear(**{"layers-0-q": (16, 48), "layers-0-k": (16, 48), "layers-1-q": (16, 48)})
        patterns = dict.fromkeys(block.linears, Unstructured(0.5, "layer"))
        return {name: result.keep for name, result in Dare(DareOptions(seed=seed)).prune(block, patterns, {}).items()}

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    masks = [*first.values(), *other.values()]
    shares = [float((a == b).float().mean()) for a, b in itertools.combinations(masks, 2)]
    assert shares == pytest.approx([0.5] * 15, abs=0.1), "of independent draws half of the entries agree"
