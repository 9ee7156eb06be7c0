"""`ziplm` on whole blocks of every kind: the kept weights against least squares on the inputs that were seen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tests.compressx.architectures import KINDS
from tests.compressx.built_in import BUILT_IN
from torch import Tensor

from compressx import Covariance, Hessian, PruneResult, Structured
from compressx.blocks.observe import linears_watched
from compressx.testing.subject import Scene, Subject, Whole

SPEC = BUILT_IN["ziplm"]
ARCHITECTURES = [*KINDS, "gpt-neox", "falcon", "llama-mqa"]
ONE_GROUP = {"gemma3", "falcon", "llama-mqa"}
"""Of their key/value groups none can go."""


def cases(architectures: Iterable[str], *claims: Whole) -> list[Any]:
    """Each architecture with each claim that it can meet."""
    possible = [(a, c) for c in claims for a in architectures if a not in ONE_GROUP or c.unit == "neurons"]
    return [pytest.param(a, c, id=f"{c}-{a}") for a, c in possible]


@torch.no_grad()
def inputs_of(scene: Scene) -> dict[str, Tensor]:
    """What every linear of the block reads, float64 [tokens, in_features]."""
    seen: dict[str, list[Tensor]] = {}

    def see(name: str, x: Tensor) -> None:
        seen.setdefault(name, []).append(x.detach().double().reshape(-1, x.shape[-1]))

    with linears_watched(scene.block.linears, see):
        for run in scene.passes:
            run()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def fitted(x: Tensor, target: Tensor, kept: Tensor, intercept: bool) -> float:
    """The squared error of a new fit by the columns that stay."""
    features = torch.cat([x[:, kept], torch.ones(len(x), 1).double()], dim=1) if intercept else x[:, kept]
    fit = torch.linalg.lstsq(features, target, driver="gelsd").solution
    return float((features @ fit - target).square().sum())


def columns_of(scene: Scene, subject: Subject, claim: Whole) -> list[tuple[str, Structured]]:
    """The linears that read units, with their patterns."""
    asked = subject.by_linear(scene.block, claim)
    return [(n, p) for n, p in asked.items() if isinstance(p, Structured) and p.units.owners[n].dim == 1]


def outputs(x: Tensor, scene: Scene, name: str, result: PruneResult | None = None) -> Tensor:
    linear = scene.block.linears[name]
    weight, bias = linear.weight, linear.bias
    if result is not None:
        weight = torch.where(result.keep, weight if result.weight is None else result.weight, 0.0)
        bias = bias if result.bias is None else result.bias
    y = x @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize(
    ("architecture", "claim"), cases(ARCHITECTURES, Whole("neurons", 0.4), Whole("kv-groups", 0.5))
)
def test_what_is_lost_is_what_a_new_fit_of_the_outputs_loses_with_a_bias_where_there_is_one(architecture, claim):
    subject = Subject(SPEC, SPEC.options(damping=1e-6), architecture)
    scene = subject.scene()
    inputs, results = inputs_of(scene), subject.decided(scene, claim)
    for name, pattern in columns_of(scene, subject, claim):
        linear, result, x = scene.block.linears[name], results[name], inputs[name]
        assert (result.bias is None) == (linear.bias is None)
        kept = result.keep[0]
        assert torch.equal(result.keep, kept.expand_as(result.keep))
        dense = outputs(x, scene, name)
        lost = float((outputs(x, scene, name, result) - dense).square().sum())
        least = fitted(x, dense, kept, linear.bias is not None)
        masked = float((x[:, ~kept] @ linear.weight[:, ~kept].double().T).square().sum())
        assert lost <= 1.02 * least + 1e-4 * float(dense.square().sum()), name
        assert lost < 0.9 * masked
        others = [n for n, own in pattern.units.owners.items() if own.dim == 0]
        assert others
        assert all(results[n].weight is None and results[n].bias is None for n in others)


@pytest.mark.parametrize(("architecture", "statistic"), [("llama", Hessian), ("gpt2", Covariance)])
def test_only_linears_that_read_units_are_observed_and_with_a_mean_where_there_is_a_bias(architecture, statistic):
    subject = Subject(SPEC, SPEC.options(), architecture)
    block = subject.scene(weights=False).block
    pruner = SPEC.build(SPEC.options())
    observed = {name: pruner.observe(block, name) for name in block.linears}
    reading = {"llama": {"o_proj", "down_proj"}, "gpt2": {"attn.c_proj", "mlp.c_proj"}}[architecture]
    asked = {name for name, one in observed.items() if one is not None}
    assert {name.removeprefix(f"{block.fqn}.").removeprefix("self_attn.") for name in asked} in (
        reading, {f"mlp.{n}" if n == "down_proj" else n for n in reading}
    )  # fmt: skip
    assert all(type(observed[name]) is statistic for name in asked)


def test_what_inputs_are_on_the_average_goes_into_the_bias():
    def always_on(model: Any) -> None:
        model.transformer.h[0].mlp.c_fc.bias += 3.0

    subject = Subject(SPEC, SPEC.options(damping=1e-6), "gpt2")
    scene, claim = subject.scene(change=always_on), Whole("neurons", 0.5)
    inputs, results = inputs_of(scene), subject.decided(scene, claim)
    ((name, _),) = columns_of(scene, subject, claim)
    x, result = inputs[name], results[name]
    dense = outputs(x, scene, name)
    off = outputs(x, scene, name, result) - dense
    assert float(off.mean(dim=0).abs().max()) < 1e-4 * float(dense.abs().max())
    assert float((result.bias - scene.block.linears[name].bias).abs().max()) > 0.1


def test_the_report_has_the_error_of_the_output_and_the_damping():
    subject = Subject(SPEC, SPEC.options(damping=0.03), "llama")
    scene = subject.scene()
    claim = Whole("neurons", 0.3)
    x, results = inputs_of(scene), subject.decided(scene, claim)
    ((name, _),) = columns_of(scene, subject, claim)
    dense = outputs(x[name], scene, name)
    lost = (outputs(x[name], scene, name, results[name]) - dense).square().sum() / dense.square().sum()
    assert results[name].info == {"linear_error": pytest.approx(float(lost), rel=1e-3), "damping": 0.03}
    assert not results[name.replace("down", "up")].info
