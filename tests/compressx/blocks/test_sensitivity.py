"""Squared gradients at the outputs of linears, and pruning by them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from tests.compressx.blocks.test_prune import batches, plan_all
from tests.compressx.pruners.problems import correlated_inputs, one_linear

from compressx import Block, CalibrationError, UnsupportedModelError
from compressx.api.patterns import NM, Unstructured
from compressx.blocks.contract import answer_of
from compressx.blocks.fisher import SquaredGradients, fisher_diagonal
from compressx.blocks.observe import Observed
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.numerics.admm import Problem
from compressx.numerics.admm import prune as solve
from compressx.pruners import sensitivity
from compressx.runtime.ranks import Ranks
from compressx.testing import tiny_model

(SPEC,) = sensitivity.compressx_pruners()
HALF = Unstructured(0.5, "layer")
QUERY = "model.layers.0.self_attn.q_proj"
LINEARS = {QUERY: survey(tiny_model("llama")).linears[QUERY]}


def test_a_linear_that_no_token_came_through_is_refused_since_it_would_seem_to_matter_to_nothing():
    with pytest.raises(CalibrationError, match=rf"no calibration token reached {re.escape(QUERY)}"):
        SquaredGradients(LINEARS, torch.device("cpu")).means()


def test_rows_are_means_over_the_tokens_of_all_processes(monkeypatch):
    def gathered(tokens, value):
        made = SquaredGradients(LINEARS, torch.device("cpu"))
        if tokens:
            made.add(QUERY, torch.full((1, tokens, 64), value))
        return made

    others = gathered(6, 3.0)
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor.add_(others.sums[QUERY]))
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value, others.tokens[QUERY]])
    for tokens, expected in ((2, 7.0), (0, 9.0)):  # (2 * 1 + 6 * 9) / 8; reached in the other process only
        assert gathered(tokens, 1.0).means(Ranks(0, 2))[QUERY].tolist() == [expected] * 64


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_refused(bad):
    squares = SquaredGradients(LINEARS, torch.device("cpu"))
    squares.add(QUERY, torch.full((2, 64), bad))
    with pytest.raises(
        UnsupportedModelError, match=rf"^{re.escape(QUERY)}: the gradient .* model\.dtype may be too narrow"
    ):
        squares.means()


def test_an_output_that_no_gradient_reaches_is_refused_with_the_linear():
    model = tiny_model("llama")
    query = model.model.layers[1].self_attn.q_proj
    query.forward = torch.no_grad()(query.forward)
    found = survey(model)
    with pytest.raises(
        UnsupportedModelError, match=r"^model\.layers\.1\.self_attn\.q_proj: no gradient reaches its output"
    ):
        fisher_diagonal(InMemory(model), found, found.linears, batches())


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
def test_without_steps_what_goes_is_the_cheapest_by_a_slow_float64_reading(power):
    block, x = block_of_one()
    result, _ = prune(block, x, HALF, rows=power, steps=0, damping=1e-9)
    weight, rows = block.linears["fc"].weight.double(), block.sensitivities["fc"].double()
    cost = weight**2 * x.double().square().sum(dim=(0, 1)) * (rows.mean() * (rows / rows.mean()) ** power)[:, None]
    assert torch.equal(result.keep, cost > cost.flatten().sort().values[cost.numel() // 2 - 1])


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


def weighted_error(block: Block, matrix: torch.Tensor, result, power: float) -> float:
    change = torch.where(result.keep, result.weight, 0.0) - block.linears["fc"].weight
    return float((block.sensitivities["fc"].pow(power)[:, None] * (change @ matrix) * change).sum())


@pytest.mark.parametrize("pattern", [HALF, NM(2, 4)], ids=str)
def test_steps_lower_the_weighted_error(pattern):
    block, x = block_of_one(rows=24, columns=32)
    results = {steps: prune(block, x, pattern, steps=steps, damping=1e-3) for steps in (0, 12)}
    errors = {n: weighted_error(block, statistic.matrix, result, 0.5) for n, (result, statistic) in results.items()}
    assert errors[12] < 0.95 * errors[0]


def test_rows_that_count_more_lose_fewer_weights():
    block, x = block_of_one()
    order = block.sensitivities["fc"].argsort()
    kept = [prune(block, x, HALF, rows=power)[0].keep.sum(dim=1)[order].double() for power in (0.0, 1.0)]
    place = torch.arange(12.0, dtype=torch.double)
    even, weighted = (float(torch.corrcoef(torch.stack([place, x]))[0, 1]) for x in kept)
    assert weighted > 0.8
    assert weighted > even + 0.3


def test_a_lower_penalty_takes_more_steps():
    block, x = block_of_one(rows=24, columns=32)
    low, high = (prune(block, x, HALF, penalty=p, steps=60)[0].info["steps"] for p in (0.03, 1.0))
    assert low > high


@pytest.mark.parametrize("pattern", [NM(2, 4), Unstructured(0.5, "row")], ids=str)
def test_within_an_output_sensitivities_do_not_count_and_may_be_zero(pattern):
    block, x = block_of_one()
    silent = replace(block, sensitivities={"fc": block.sensitivities["fc"] * (torch.arange(12) > 5)})
    (result, _), (expected, _) = (prune(each, x, pattern) for each in (silent, block))
    assert torch.equal(result.keep, expected.keep)


def test_linears_that_compete_are_solved_side_by_side():
    inputs = correlated_inputs(16, tokens=64)
    block = one_linear(few=(12, 16), many=(12, 16))
    block = replace(block, sensitivities={"few": torch.full((12,), 1e-3), "many": torch.ones(12)})
    pruner = SPEC.build(SPEC.options())
    stats = {name: Observed(pruner.observe(block, name)) for name in block.linears}
    for observed in stats.values():
        observed.statistic.update(inputs)
    pattern = Unstructured(0.5, "joint")
    results = answer_of("sensitivity", pruner, block, dict.fromkeys(block.linears, pattern), stats)
    problems = {
        name: Problem(linear.weight, pruner.prepare(block, name, stats[name].statistic), pattern,
                      block.sensitivities[name][:, None])
        for name, linear in block.linears.items()
    }  # fmt: skip
    expected = solve(problems, penalty=0.3, steps=12)
    for name in block.linears:
        assert torch.equal(results[name].keep, expected[name].keep)
        torch.testing.assert_close(results[name].weight, expected[name].weight)
    assert results["few"].keep.sum() < results["many"].keep.sum()


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    list(zip(["llama", "gpt2", "gemma3", "mixtral", "phi3"], cycle([HALF, NM(2, 4)]))),
    ids=str,
)
def test_every_kind_of_architecture_is_pruned(architecture, pattern):
    model = tiny_model(architecture)
    found = survey(model)
    plan = plan_all(model, SPEC, pattern)
    assert plan.sensitive == set(found.linears)
    given = fisher_diagonal(InMemory(model), found, plan.sensitive, batches())
    blocks = list(prune_model(InMemory(model), plan, batches(), fisher=given))
    assert all(layer.sparsity == 0.5 for block in blocks for layer in block.report.layers)


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
