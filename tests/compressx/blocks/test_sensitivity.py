"""Squared gradients at the outputs of linears, and pruning by them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from tests.compressx.blocks.test_prune import batches, plan_all
from tests.compressx.pruners.problems import correlated_inputs, one_linear

from compressx import Block, CalibrationError, UnsupportedModelError
from compressx.api.patterns import NM, Unstructured
from compressx.blocks.fisher import fisher_diagonal
from compressx.blocks.observe import Observed
from compressx.blocks.prepared import answer_of
from compressx.blocks.prune import prune_model
from compressx.blocks.sensitivity import SquaredGradients
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.pruners import magnitude, sensitivity
from compressx.runtime.ranks import Ranks
from compressx.testing import TINY_CONFIGS, tiny_model

(SPEC,) = sensitivity.compressx_pruners()
HALF = Unstructured(0.5, "layer")


def test_a_linear_that_no_token_came_through_is_refused_since_it_would_seem_to_matter_to_nothing():
    linears = survey(tiny_model("llama")).linears
    with pytest.raises(CalibrationError, match=r"no calibration token reached model\.layers\.0\.self_attn\.q_proj"):
        SquaredGradients(linears, torch.device("cpu")).means()


def test_rows_are_means_over_the_tokens_of_all_processes(monkeypatch):
    linears = {"q": survey(tiny_model("llama")).linears["model.layers.0.self_attn.q_proj"]}

    def gathered(tokens, value):
        made = SquaredGradients(linears, torch.device("cpu"))
        if tokens:
            made.add("q", torch.full((1, tokens, 64), value))
        return made

    others = gathered(6, 3.0)
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor.add_(others.sums["q"]))
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value, others.tokens["q"]])
    for tokens, expected in ((2, 7.0), (0, 9.0)):  # (2 * 1 + 6 * 9) / 8; reached in the other process only
        assert gathered(tokens, 1.0).means(Ranks(0, 2))["q"].tolist() == [expected] * 64


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_refused(bad):
    name = "model.layers.0.self_attn.q_proj"
    gradients = SquaredGradients({name: survey(tiny_model("llama")).linears[name]}, torch.device("cpu"))
    gradients.add(name, torch.full((2, 64), bad))
    with pytest.raises(
        UnsupportedModelError, match=rf"^{re.escape(name)}: the gradient .* model\.dtype may be too narrow"
    ):
        gradients.means()


def test_experts_are_measured_on_the_tokens_that_reach_them():
    model = tiny_model("mixtral")
    found = survey(model)
    measured = fisher_diagonal(InMemory(model), found, found.linears, batches()).linears
    experts = {n: s for n, s in measured.items() if ".experts." in n}
    assert experts
    assert sum(bool((rows > 0).any()) for rows in experts.values()) > len(experts) / 2


def block_of_one(rows: int = 12, columns: int = 16, seed: int = 0) -> tuple[Block, torch.Tensor]:
    x = correlated_inputs(columns, tokens=64).reshape(4, 16, columns)
    sensitivities = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) ** 4 + 1e-3
    return replace(one_linear(rows, columns), sensitivities={"fc": sensitivities}), x


def prune(block: Block, x: torch.Tensor, pattern, **options):
    pruner = SPEC.build(SPEC.options(**options))
    statistic = pruner.observe(block, "fc")
    for part in x.split(2):
        statistic.update(part)
    return answer_of("sensitivity", pruner, block, {"fc": pattern}, {"fc": Observed(statistic)})["fc"], statistic


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_costs_are_those_of_a_slow_float64_reading(power):
    block, x = block_of_one()
    result, _ = prune(block, x, HALF, rows=power)
    flat = x.double().reshape(-1, x.shape[-1])
    hessian = sum(torch.outer(row, row) for row in flat)
    weight, rows = block.linears["fc"].weight.double(), block.sensitivities["fc"].double()
    cost = weight**2 * hessian.diagonal() * (rows.mean() * (rows / rows.mean()) ** power)[:, None]
    dropped = cost.flatten().argsort()[: cost.numel() // 2]
    expected = torch.ones(cost.numel(), dtype=torch.bool)
    expected[dropped] = False
    assert torch.equal(result.keep.flatten(), expected)


def test_the_update_lowers_the_weighted_error_of_the_same_mask():
    block, x = block_of_one()
    result, statistic = prune(block, x, HALF, damping=1e-4)
    weight = block.linears["fc"].weight
    for rows in (torch.ones(len(weight)), block.sensitivities["fc"]):
        errors = []
        for new in (torch.where(result.keep, weight, 0.0), torch.where(result.keep, result.weight, 0.0)):
            change = new - weight
            errors.append(float((rows[:, None] * (change @ statistic.matrix) * change).sum()))
        assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
@pytest.mark.parametrize("pattern", [HALF, NM(2, 4)], ids=str)
def test_every_architecture_is_pruned(architecture, pattern):
    model = tiny_model(architecture)
    found = survey(model)
    plan = plan_all(model, SPEC, pattern)
    assert plan.sensitive == set(found.linears)
    given = fisher_diagonal(InMemory(model), found, plan.sensitive, batches())
    pruned = list(prune_model(InMemory(model), plan, batches(), fisher=given))
    assert all(layer.sparsity == 0.5 for block in pruned for layer in block.report.layers)


def test_as_a_reconstructor_it_keeps_the_mask_of_the_other():
    (selects,) = magnitude.compressx_pruners()
    model, plain = tiny_model("llama"), tiny_model("llama")
    found = survey(model)
    plan = plan_all(model, selects, HALF, reconstructor=SPEC)
    given = fisher_diagonal(InMemory(model), found, plan.sensitive, batches())
    first = next(iter(prune_model(InMemory(model), plan, batches(), fisher=given)))
    other = next(iter(prune_model(InMemory(plain), plan_all(plain, selects, HALF), batches())))
    for name, entry in first.masks.items():
        assert torch.equal(entry.keep, other.masks[name].keep)
        assert not torch.equal(found.linears[name].weight, survey(plain).linears[name].weight)


@pytest.mark.parametrize("rows", [0.0, 0.5, 1.0])
def test_the_scale_of_a_linear_that_a_norm_follows_does_not_matter_to_a_joint_choice(rows):
    """Eight times the weight is an eighth of the gradient, where the output is normalised anyway."""

    def kept(scale):
        inputs = correlated_inputs(16, tokens=64)
        linears, its = {}, {}
        for seed, name in enumerate(("fc", "normed")):
            (linear,) = one_linear(12, 16).linears.values()
            generator = torch.Generator().manual_seed(seed)
            linear.weight.copy_(torch.randn(12, 16, generator=generator) * (scale if name == "normed" else 1))
            gradients = torch.rand(12, generator=generator) / (scale if name == "normed" else 1)
            linears[name], its[name] = linear, gradients.square()
        block = Block(0, "block", torch.nn.Module(), linears, (), None, its)
        pruner = SPEC.build(SPEC.options(rows=rows))
        stats = {name: Observed(pruner.observe(block, name)) for name in linears}
        for observed in stats.values():
            observed.statistic.update(inputs)
        results = answer_of("sensitivity", pruner, block, dict.fromkeys(linears, Unstructured(0.5, "joint")), stats)
        return torch.stack([results[name].keep for name in linears])

    assert torch.equal(kept(1.0), kept(8.0))
    assert torch.equal(kept(1.0), kept(1 / 8))
