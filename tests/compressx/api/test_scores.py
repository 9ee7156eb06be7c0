"""Pruners made of a function: what it is given, what its parameters become, and what is refused."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch
from pydantic import Field, ValidationError
from tests.compressx.pruners.problems import correlated_inputs, one_linear
from torch import Tensor, nn

from compressx import Block, FeatureNorms, Hessian, Linear, NoOptions, Unstructured, score_pruner
from compressx.testing import check_plugin


@score_pruner("softened", units=("neurons",))
def softened(
    weight: Tensor, norms: Tensor, *, power: Annotated[float, Field(ge=0, description="of the norms")] = 0.5, plus=1
):
    """Wanda, with softened norms.

    And more.
    """
    return (weight.abs() + plus) * norms**power


def test_a_function_is_a_pruner_with_typed_options_that_keeps_every_promise():
    (spec,) = softened()
    assert (spec.name, spec.summary, spec.units, spec.separable) == (
        "softened", "Wanda, with softened norms.", ("neurons",), True
    )  # fmt: skip
    assert spec.options().model_dump() == {"power": 0.5, "plus": 1}
    for wrong in ({"power": -1.0}, {"plus": "x"}, {"powr": 1.0}):
        with pytest.raises(ValidationError):
            spec.options(**wrong)
    check_plugin(spec, architectures=["gpt2"])


@pytest.mark.parametrize(
    ("inputs", "statistic"),
    [("weight", None), ("weight, norms", FeatureNorms), ("hessian, weight", Hessian), ("norms, hessian", Hessian)],
)
def test_a_function_is_given_what_it_names_and_only_that_is_measured(inputs: str, statistic: Any):
    seen: dict[str, Tensor] = {}
    names: dict[str, Any] = {"seen": seen, "torch": torch}
    exec(f"def score({inputs}):\n    seen.update(locals())\n    return torch.ones(24, 48)", names)  # noqa: S102 - ours
    (spec,) = score_pruner("mine")(names["score"])()
    assert spec.options is NoOptions
    pruner, block, x = spec.build(NoOptions()), one_linear(), correlated_inputs()
    asked = pruner.observe(block, "fc")
    assert (statistic is None and asked is None) or type(asked) is statistic
    if asked is not None:
        asked.update(x)
    result = pruner.prune(block, {"fc": Unstructured(0.5, "row")}, {} if asked is None else {"fc": asked})["fc"]
    assert (~result.keep).sum(dim=1).tolist() == [24] * 24
    expected = {"weight": block.linears["fc"].weight, "norms": x[0].norm(dim=0), "hessian": x[0].T @ x[0]}
    assert seen.keys() == {*inputs.split(", ")}
    for name, given in seen.items():
        torch.testing.assert_close(given, expected[name], rtol=1e-4, atol=1e-3)


def test_an_input_that_does_not_exist_an_option_without_a_type_and_scores_of_another_shape_are_refused():
    with pytest.raises(TypeError, match=r"^pruner 'x': a score has no input 'power'; it takes weight, norms, hessian"):
        score_pruner("x")(lambda weight, power=1.0: weight)
    with pytest.raises(TypeError, match=r"^pruner 'x': the option 'power' needs a type, or a default that has one$"):
        score_pruner("x")(lambda weight, *, power: weight)
    (spec,) = score_pruner("x")(lambda weight: weight.sum(dim=0))()
    linear = Linear("fc", nn.Linear(4, 2))
    block = Block(0, "block", nn.Module(), {"fc": linear}, (), None)
    with pytest.raises(ValueError, match=r"^fc: expected scores \[2, 4\], got \[4\]$"):
        spec.build(NoOptions()).prune(block, {"fc": Unstructured(0.5)}, {})
