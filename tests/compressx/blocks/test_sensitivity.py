"""Sensitivities of a block's own loss, and pruning by either loss's."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.compressx.blocks.test_prune import batches, plan_all
from tests.compressx.pruners.problems import correlated_inputs, one_linear
from tests.compressx.references import channel_weights_reference

from compressx import Block, CalibrationError, Sensitivity, UnsupportedModelError
from compressx.api.patterns import NM, Unstructured
from compressx.blocks.fisher import fisher_of
from compressx.blocks.prune import prune_model
from compressx.blocks.sensitivity import Gathering, of_block
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.models.capture import capture_calls, replay
from compressx.planning.plan import PlannedRule
from compressx.pruners import magnitude, sensitivity, sparsegpt
from compressx.runtime.ranks import Ranks
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

(SPEC,) = sensitivity.compressx_pruners()
HALF = Unstructured(0.5, "layer")


def test_a_linear_that_no_token_came_through_is_refused_since_it_would_seem_to_matter_to_nothing():
    linears = survey(tiny_model("llama")).linears
    with pytest.raises(CalibrationError, match=r"no calibration token reached model\.layers\.0\.self_attn\.q_proj"):
        Gathering(linears, [], torch.device("cpu")).result()


def test_a_linear_that_some_batches_did_not_reach_has_no_weights_of_tokens():
    linears = {"q": survey(tiny_model("llama")).linears["model.layers.0.self_attn.q_proj"]}
    gathering = Gathering(linears, [torch.Size([2, 5]), torch.Size([2, 5])], torch.device("cpu"))
    gathering.sums["q"].add(torch.ones(2, 5, 64))
    its = gathering.result()["q"]
    assert its.rows.tolist() == [1.0] * 64
    assert its.tokens == ()


def test_rows_are_means_over_the_tokens_of_all_processes(monkeypatch):
    linears = {"q": survey(tiny_model("llama")).linears["model.layers.0.self_attn.q_proj"]}

    def gathered(tokens, value):
        made = Gathering(linears, [], torch.device("cpu"))
        if tokens:
            made.sums["q"].add(torch.full((1, tokens, 64), value))
        return made

    others = gathered(6, 3.0).sums["q"]
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, tensor: tensor.add_(others.rows))
    monkeypatch.setattr(Ranks, "all_gather", lambda self, value: [value, others.count])
    for tokens, expected in ((2, 7.0), (0, 9.0)):  # (2 * 1 + 6 * 9) / 8; reached in the other process only
        assert gathered(tokens, 1.0).result(Ranks(0, 2))["q"].rows.tolist() == [expected] * 64


@pytest.mark.parametrize(("power", "read"), [(0.0, False), (0.5, True)])
def test_the_plan_knows_of_which_loss_tokens_are_read(power, read):
    spec = SPEC
    for loss, other in (("model", "block"), ("block", "model")):
        rule = PlannedRule(0, spec, spec.options(loss=loss, tokens=power), None, None)
        assert rule.reads_tokens(loss) is read
        assert not rule.reads_tokens(other)
    (without,) = sparsegpt.compressx_pruners()
    assert not PlannedRule(0, without, without.options(), None, None).reads_tokens("model")
    assert PlannedRule(0, replace(spec, reads_tokens=None), spec.options(), None, None).reads_tokens("model")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_refused(bad):
    name = "model.layers.0.self_attn.q_proj"
    gathering = Gathering({name: survey(tiny_model("llama")).linears[name]}, [], torch.device("cpu"))
    gathering.sums[name].add(torch.full((2, 64), bad))
    with pytest.raises(
        UnsupportedModelError, match=rf"^{re.escape(name)}: the gradient .* model\.dtype may be too narrow"
    ):
        gathering.result()


@pytest.mark.slow
def test_a_blocks_sensitivities_are_those_of_its_relative_change_by_the_whole_jacobian():
    model = tiny_model("llama").double()
    found = survey(model)
    ids = tiny_tokens(sequences=1, length=6)
    (state,), calls = capture_calls(model, found.blocks, [ids])
    fqn, module = next(iter(found.blocks.items()))
    linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
    run = partial(replay, module, call=calls[fqn][0])
    probes = 1500
    measured = of_block(linears, [run] * probes, [state] * probes)

    name = f"{fqn}.mlp.up_proj"
    kept = {}
    hook = linears[name].module.register_forward_hook(lambda m, a, out: kept.__setitem__("out", out))
    out = run(state)
    hook.remove()
    roots = channel_weights_reference(out).sqrt()
    scaled = roots * out / (roots * out.detach()).norm(dim=-1, keepdim=True)
    squares = torch.zeros_like(kept["out"][0])
    for entry in scaled.flatten():
        (gradient,) = torch.autograd.grad(entry, kept["out"], retain_graph=True)
        squares += gradient[0].square()
    torch.testing.assert_close(measured[name].rows.double(), squares.mean(0), rtol=0.25, atol=0.02 * squares.max())
    tokens = torch.stack([t.double()[0] for t in measured[name].tokens]).mean(0)
    torch.testing.assert_close(tokens, squares.mean(1), rtol=0.1, atol=0.01 * squares.mean(1).max())


def test_experts_have_row_weights_and_no_token_weights():
    model = tiny_model("mixtral")
    found = survey(model)
    measured = fisher_of(InMemory(model), found, found.linears, batches()).linears
    experts = {n: s for n, s in measured.items() if ".experts." in n}
    assert experts
    assert all(not s.tokens for s in experts.values())
    assert sum(bool((s.rows > 0).any()) for s in experts.values()) > len(experts) / 2


def block_of_one(rows: int = 12, columns: int = 16, seed: int = 0) -> tuple[Block, torch.Tensor, Sensitivity]:
    x = correlated_inputs(columns, tokens=64).reshape(4, 16, columns)
    generator = torch.Generator().manual_seed(seed)
    of_rows = torch.rand(rows, generator=generator) ** 4 + 1e-3
    of_tokens = tuple(torch.rand(2, 16, generator=generator) ** 4 + 1e-3 for _ in range(2))
    its = Sensitivity(of_rows * torch.cat(of_tokens).mean() / of_rows.mean(), of_tokens)  # means of the same squares
    block = one_linear(rows, columns)
    return Block(0, "block", block.module, block.linears, (), None, {"model": {"fc": its}}), x, its


def prune(block: Block, x: torch.Tensor, pattern, **options):
    pruner = SPEC.build(SPEC.options(**options))
    statistic = pruner.observe(block, "fc")
    for part in x.split(2):
        statistic.update(part)
    return pruner.prune(block, {"fc": pattern}, {"fc": statistic})["fc"], statistic


@pytest.mark.parametrize("rows", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("tokens", [0.0, 0.5, 1.0])
def test_costs_are_those_of_a_slow_float64_reading(rows, tokens):
    block, x, its = block_of_one()
    result, statistic = prune(block, x, HALF, rows=rows, tokens=tokens)
    a = torch.cat(its.tokens).double().flatten()
    a = (a / a.mean()) ** tokens
    flat = x.double().reshape(-1, x.shape[-1])
    hessian = sum(a[i] * torch.outer(flat[i], flat[i]) for i in range(len(flat)))
    torch.testing.assert_close(statistic.matrix.double(), hessian, rtol=1e-4, atol=1e-5 * float(hessian.max()))
    weight = block.linears["fc"].weight.double()
    mean = its.rows.double().mean()
    cost = weight**2 * hessian.diagonal() * (mean * (its.rows.double() / mean) ** rows)[:, None]
    dropped = cost.flatten().argsort()[: cost.numel() // 2]
    expected = torch.ones(cost.numel(), dtype=torch.bool)
    expected[dropped] = False
    assert torch.equal(result.keep.flatten(), expected)


def test_the_update_lowers_the_weighted_error_of_the_same_mask():
    block, x, its = block_of_one()
    result, statistic = prune(block, x, HALF, tokens=1.0, damping=1e-4)
    weight = block.linears["fc"].weight
    for rows in (torch.ones_like(its.rows), its.rows):
        errors = []
        for new in (torch.where(result.keep, weight, 0.0), torch.where(result.keep, result.weight, 0.0)):
            change = new - weight
            errors.append(float((rows[:, None] * (change @ statistic.matrix) * change).sum()))
        assert errors[1] < 0.7 * errors[0]


def test_a_batch_that_is_not_the_one_the_weights_are_for_is_refused():
    block, x, _ = block_of_one()
    statistic = SPEC.build(SPEC.options(tokens=0.5)).observe(block, "fc")
    with pytest.raises(UnsupportedModelError, match=r"fc: its inputs come as \(4, 16\) tokens .* tokens: 0"):
        statistic.update(x)


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
@pytest.mark.parametrize("loss", ["model", "block"])
@pytest.mark.parametrize("pattern", [HALF, NM(2, 4)], ids=str)
def test_every_architecture_is_pruned_by_either_loss(architecture, loss, pattern):
    model = tiny_model(architecture)
    found = survey(model)
    plan = plan_all(model, SPEC, pattern)
    rule = plan.rules[0]
    object.__setattr__(rule, "options", SPEC.options(loss=loss, tokens=0.5))
    assert plan.sensitive_to(loss) == set(found.linears)
    given = fisher_of(InMemory(model), found, plan.sensitive_to("model"), batches()) if loss == "model" else None
    pruned = list(prune_model(InMemory(model), plan, batches(), fisher=given))
    assert all(layer.sparsity == 0.5 for block in pruned for layer in block.report.layers)


def test_the_blocks_own_loss_is_gathered_on_what_the_pruned_blocks_before_it_give():
    given = {}

    class Spy(sensitivity.SensitivityPruner):
        def prune(self, block, patterns, stats):
            given.update(block.sensitivities["block"])
            return super().prune(block, patterns, stats)

    spec, model, plain = replace(SPEC, build=Spy), tiny_model("llama"), tiny_model("llama")
    plan = plan_all(model, spec, HALF)
    object.__setattr__(plan.rules[0], "options", spec.options(loss="block"))
    list(prune_model(InMemory(model), plan, batches()))
    plain.model.layers[0].load_state_dict(model.model.layers[0].state_dict())
    found = survey(plain)
    states, calls = capture_calls(plain, found.blocks, batches())
    zero, one, *_ = found.blocks
    with torch.no_grad():
        states = [replay(found.blocks[zero], x, c) for x, c in zip(states, calls[zero], strict=True)]
    runs = [partial(replay, found.blocks[one], call=c) for c in calls[one]]
    linears = {n: x for n, x in found.linears.items() if n.startswith(f"{one}.")}
    for name, its in of_block(linears, runs, states).items():
        torch.testing.assert_close(given[name].rows, its.rows)


def test_as_a_reconstructor_it_keeps_the_mask_of_the_other():
    (selects,) = magnitude.compressx_pruners()
    model, plain = tiny_model("llama"), tiny_model("llama")
    found = survey(model)
    plan = plan_all(model, selects, HALF, reconstructor=SPEC)
    given = fisher_of(InMemory(model), found, plan.sensitive_to("model"), batches())
    first = next(iter(prune_model(InMemory(model), plan, batches(), fisher=given)))
    other = next(iter(prune_model(InMemory(plain), plan_all(plain, selects, HALF), batches())))
    for name, entry in first.masks.items():
        assert torch.equal(entry.keep, other.masks[name].keep)
        assert not torch.equal(found.linears[name].weight, survey(plain).linears[name].weight)


def test_token_weights_are_relative_to_the_mean_of_all_processes():
    """`rows` is the mean of all processes' tokens, `tokens` are those of one of them."""
    block, x, its = block_of_one()
    whole = prune(block, x, HALF, tokens=0.5)[1]
    parts = []
    for tokens, inputs in zip(its.tokens, x.split(2), strict=True):
        sensitivities = {"model": {"fc": Sensitivity(its.rows, (tokens,))}}
        statistic = SPEC.build(SPEC.options(tokens=0.5)).observe(replace(block, sensitivities=sensitivities), "fc")
        statistic.update(inputs)
        parts.append(statistic.matrix)
    torch.testing.assert_close(sum(parts), whole.matrix)


def test_tokens_without_their_batch_are_weighted_as_those_with_it():
    block, x, _ = block_of_one()
    pruner = SPEC.build(SPEC.options(tokens=0.5))
    whole, flat = (pruner.observe(block, "fc") for _ in range(2))
    for part in x.split(2):
        whole.update(part)
        flat.update(part.flatten(0, 1))
    assert torch.equal(whole.matrix, flat.matrix)


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
            linears[name], its[name] = linear, Sensitivity(gradients.square(), ())
        block = Block(0, "block", torch.nn.Module(), linears, (), None, {"model": its})
        pruner = SPEC.build(SPEC.options(rows=rows))
        stats = {name: pruner.observe(block, name) for name in linears}
        for statistic in stats.values():
            statistic.update(inputs)
        results = pruner.prune(block, dict.fromkeys(linears, Unstructured(0.5, "joint")), stats)
        return torch.stack([results[name].keep for name in linears])

    assert torch.equal(kept(1.0), kept(8.0))
    assert torch.equal(kept(1.0), kept(1 / 8))


def test_float16_inputs_are_weighted_in_float32():
    block, x, _ = block_of_one()
    statistic = SPEC.build(SPEC.options(tokens=1.0)).observe(block, "fc")
    for part in (x * 6e4 / x.abs().max()).half().split(2):
        statistic.update(part)
    assert statistic.matrix.isfinite().all()
