from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.compressx.pruners.problems import SPECS, correlated_inputs, one_linear, output_error, prune
from tests.compressx.saved import save_tiny

import compressx
from compressx import Hessian, RecipeError
from compressx.api.patterns import NM, FixedMask, Unstructured
from compressx.blocks.contract import answer_of
from compressx.blocks.observe import Observed
from compressx.plugins.manager import load_plugins

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


def test_linears_with_one_input_share_its_scaled_hessian_and_come_out_as_apart(monkeypatch):
    block, x = one_linear(q=(16, 48), k=(8, 48)), correlated_inputs()
    apart = prune("alps", block, NM(2, 4), x)
    shared = Hessian(48)
    shared.update(x)
    assembled = []
    monkeypatch.setattr(Hessian, "assembled", lambda h, f=Hessian.assembled: assembled.append(h) or f(h))
    pruner = SPECS["alps"].build(SPECS["alps"].options())
    stats = dict.fromkeys(("q", "k"), Observed(shared))
    together = answer_of("alps", pruner, block, dict.fromkeys(stats, NM(2, 4)), stats)
    assert assembled == [shared]
    for name in ("q", "k"):
        assert torch.equal(together[name].weight, apart[name].weight)


@pytest.fixture
def recipe(project: Path):
    model = save_tiny(project / "model", "llama")

    def of(**rule):
        return {
            "model": {"path": str(model)},
            "calibration": {"dataset": {"text": "text.txt"}, "samples": 8, "sequence_length": 32},
            "prune": [{"targets": ["*"], **rule}],
            "output": "out",
        }

    return of


@pytest.fixture
def plugins():
    return load_plugins(toml=ROOT / "plugins.toml")


def test_a_recipe_prunes_every_linear_of_a_model_to_the_planned_sparsity(recipe, plugins):
    asked = recipe(pruner="alps", sparsity=0.6)
    planned = compressx.plan(asked, plugins=plugins)
    assert {x.pattern for x in planned.linears} == {Unstructured(0.6, "layer")}
    report = compressx.run(asked, plugins=plugins)
    assert len(report.layers) == 21
    for layer in report.layers:
        weights = layer.shape[0] * layer.shape[1]
        assert layer.sparsity * weights == pytest.approx(round(0.6 * weights), abs=1e-6)
        assert 0 < layer.info["linear_error"] < 1


def test_a_recipe_takes_the_mask_of_one_and_the_weights_of_alps(recipe, plugins):
    report = compressx.run(recipe(pruner="wanda", pattern="2:4", reconstruct="alps"), plugins=plugins)
    assert {x.pruner for x in report.layers} == {"wanda+alps"}
    assert {x.sparsity for x in report.layers} == {0.5}
    assert {x.info["steps"] for x in report.layers} == {0.0}


@pytest.mark.parametrize(("options", "message"), [({"damping": 0}, "damping"), ({"iterations": 5}, "iterations")])
def test_an_option_that_is_unknown_or_out_of_range_is_refused_while_planning(options, message, recipe, plugins):
    with pytest.raises(RecipeError, match=message):
        compressx.plan(recipe(pruner="alps", sparsity=0.5, options=options), plugins=plugins)
