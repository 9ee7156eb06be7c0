"""The pruner as the host sees it: options, reports, text, budgets of separate and fused weights, refusals."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.pruning import (
    HALF,
    HELD_OUT,
    MODES,
    OBJECTIVES,
    OF_MODE,
    PATTERNS,
    SEQUENCES,
    SPEC,
    asked,
    assert_as_asked,
    given_masks,
    observed,
    prune,
)
from tests.pairs import pairs
from torch import Tensor

from compressx import (
    CalibrationError,
    FixedMask,
    Hessian,
    Pattern,
    Projections,
    RecipeError,
    Rows,
    SequenceSample,
    Unstructured,
    count_dropped,
)
from compressx.api.patterns import sparsity_of
from compressx.api.pruner import Block, Linear
from compressx.blocks.observe import SharedStatistic
from compressx.blocks.select import write
from compressx.numerics.obs import NotPositiveDefiniteError, inverse_cholesky, sweep
from compressx.testing import tiny_tokens
from compressx_attnprune import baselines, layer, plugin, solver
from compressx_attnprune.attention import attention_matrices, queries_and_keys
from compressx_attnprune.baselines import Budget
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss
from compressx_attnprune.solver import Candidate


@cache
def of(architecture: str) -> blocks.Recorded:
    """Record a block of a tiny model once for all tests that only read it."""
    return blocks.record(architecture, sequences=SEQUENCES)


@pytest.fixture
def llama() -> blocks.Recorded:
    return of("llama")


@pytest.fixture
def recorded(architecture: str) -> blocks.Recorded:
    return of(architecture)


# --- what a recipe can say


def test_the_spec_offers_joint_budgets_first_and_every_option_has_a_description_and_a_default():
    assert (SPEC.name, SPEC.groups, SPEC.nm, SPEC.reconstructs) == ("attnprune", ("joint", "layer", "row"), True, True)
    fields = SPEC.options.model_fields.values()
    assert all(field.description and not field.is_required() for field in fields)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [*((wrong, next(iter(wrong))) for wrong in (
        {"lambda_": 0.1}, {"mode": "refit"}, {"objective": "perplexity"}, {"sequences": 1}, {"regularization": 0})),
     ({"regularization": 0.3}, "regularization has no effect with mode: gauss-newton; it needs mode: mask"),
     ({"mode": "mask"}, "mode: mask is the published method; write objective: attention-matrix beside it")],
    ids=str,
)  # fmt: skip
def test_an_option_that_is_unknown_out_of_range_or_would_change_nothing_is_refused(wrong: dict[str, Any], reason: str):
    with pytest.raises(ValidationError, match=reason):
        SPEC.options(**wrong)


# --- what is told


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_a_mode_that_does_worse_gives_way_and_the_report_says_so(recorded, monkeypatch):
    def upside_down(of: solver.QueryKeyLayer, budget: Budget, **_: Any) -> Candidate:
        keeps = budget.choose((-of.dense[0].abs(), -of.dense[1].abs()))
        return solver.judge(of, [(keeps, (of.dense[0] * keeps[0], of.dense[1] * keeps[1]))])[0]

    monkeypatch.setattr(solver, "mask", upside_down)
    results = prune(recorded, HALF, **OF_MODE["mask"])
    info = next(iter(results.values())).info
    assert info["fell_back"] == 1.0
    assert info["attention_error"] == min(info["attention_error.wanda"], info["attention_error.sparsegpt"])
    assert_as_asked(recorded.block, dict.fromkeys(results, HALF), results)


def test_the_objective_is_what_weights_are_chosen_by_and_nothing_else_of_the_report(llama, monkeypatch):
    seen: list[type[Loss]] = []
    original = solver.prune_layer
    monkeypatch.setattr(solver, "prune_layer", lambda of, *rest: seen.append(type(of.loss)) or original(of, *rest))
    by_matrix, by_output, default = (
        next(iter(prune(llama, HALF, **o).values())) for o in (*({"objective": name} for name in OBJECTIVES), {})
    )
    assert seen == [MatrixLoss, OutputLoss, OutputLoss]
    for result, own in ((by_matrix, "attention_error"), (by_output, "output_error")):
        assert 0 < result.info[own] <= min(result.info[f"{own}.wanda"], result.info[f"{own}.sparsegpt"])
    assert torch.equal(by_output.weight, default.weight)
    assert not torch.equal(by_output.keep, by_matrix.keep)
    for name in ("attention_error.wanda", "attention_error.sparsegpt", "output_error.wanda", "output_error.sparsegpt"):
        assert by_matrix.info[name] == pytest.approx(by_output.info[name])


@pytest.mark.parametrize(("architecture", "length"), [("llama", 32), ("mistral", 80), ("gpt2", 80)])
def test_heat_maps_show_the_head_whose_attention_changed_most(architecture: str, length: int):
    recorded = blocks.record(architecture, sequences=6, length=length)
    results = prune(recorded, Unstructured(0.7, "joint"))
    images = next(iter(results.values())).images
    tokens = min(length, plugin.HEAT_MAP_TOKENS)
    projections, attention = layer.projections_of(recorded.block), layer.describe(recorded.block).first(tokens)
    x = recorded.x[-1:, :tokens]  # one of six is held out
    sides = [(rows.index, results[rows.name].weight) for rows in (projections.query, projections.key)]
    pruned = [weight if index is None else weight[index] for index, weight in sides]
    after = attention_matrices(attention, *queries_and_keys(attention, x, pruned))[0]
    before = recorded.attentions[-1, :, :tokens, :tokens]
    head = (after - before).norm(dim=(1, 2)).argmax().item()
    assert list(images) == [f"head {head}, dense", f"head {head}, pruned"]
    for image, expected in zip(images.values(), (before[head], after[head]), strict=True):
        torch.testing.assert_close(image, expected, atol=1e-5, rtol=1e-4)


def test_what_query_and_key_have_in_common_is_one_group_and_mask_mode_shows_the_loss_of_each_step(llama):
    query, key = prune(llama, HALF, **OF_MODE["mask"]).values()
    assert query.group == key.group == "query and key"
    assert (query.info, [*query.images]) == (key.info, [*key.images])
    assert {name: len(curve) for name, curve in query.history.items()} == {"mask": 5}


# --- the text


def test_the_last_eighth_of_the_first_sequences_is_held_out_and_a_single_one_is_learnt_from_and_measured_on(llama):
    def prepared(recorded: blocks.Recorded, **options: Any) -> solver.QueryKeyLayer:
        pruner = SPEC.build(SPEC.options(**options))
        name, shared = next(iter(observed(recorded, pruner).items()))
        return pruner.prepare(recorded.block, name, shared.statistic).layer

    for options, used, learnt in (({}, SEQUENCES, SEQUENCES - 2), ({"sequences": 3}, 3, 2)):
        own = prepared(llama, **options)
        assert torch.equal(own.text, llama.x[:learnt])
        assert torch.equal(own.held_out, llama.x[learnt:used])
    own = prepared(replace(llama, x=llama.x[:1]))
    assert torch.equal(own.text, llama.x[:1])
    assert torch.equal(own.held_out, llama.x[:1])


# --- edges


def test_missing_calibration_is_an_error_that_names_the_layer_and_wrong_targets_are_refused_while_pruning_too(llama):
    query, key = blocks.targets(llama.block)
    pruner = SPEC.build(SPEC.options())
    patterns = dict.fromkeys((query, key), HALF)
    for kind in (None, SequenceSample, Hessian):
        stats = {n: SharedStatistic(kind(64)) for n in (query, key) if kind}
        with pytest.raises(CalibrationError, match=rf"{query}: attnprune needs calibration sequences"):
            asked(pruner, llama.block, patterns, stats)
    with pytest.raises(CalibrationError, match=rf"{key}: attnprune needs calibration sequences and got none"):
        asked(pruner, llama.block, patterns, {query: observed(llama, pruner)[query]})
    with pytest.raises(RecipeError, match="does not target"):
        asked(pruner, llama.block, {query: HALF}, {})


def test_inputs_of_query_and_key_that_are_equal_in_two_samples_are_as_good_as_one_and_others_are_refused(llama):
    query, key = blocks.targets(llama.block)
    pruner = SPEC.build(SPEC.options())
    stats = {**observed(llama, pruner), key: SharedStatistic(SequenceSample(64))}
    stats[key].statistic.update(llama.x)
    results = asked(pruner, llama.block, dict.fromkeys((query, key), HALF), stats)
    assert torch.equal(results[key].weight, prune(llama, HALF)[key].weight)
    stats = {**observed(llama, pruner), key: SharedStatistic(SequenceSample(64))}
    stats[key].statistic.update(llama.x + 1)
    with pytest.raises(CalibrationError, match=f"{query} and {key} were handed different inputs"):
        asked(pruner, llama.block, dict.fromkeys((query, key), HALF), stats)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_activations_without_a_usable_hessian_name_the_layer(architecture: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise NotPositiveDefiniteError("no factor")

    recorded = blocks.record(architecture)
    monkeypatch.setattr(baselines, "inverse_cholesky", fail)
    with pytest.raises(NotPositiveDefiniteError, match=rf"{blocks.targets(recorded.block)[0]}: no factor"):
        prune(recorded, HALF)


# --- budgets


@pytest.mark.parametrize(
    ("architecture", "mode", "pattern"), pairs(["llama", "qwen3-next", *blocks.FUSED], MODES, PATTERNS), ids=str
)
def test_budgets_are_exact_in_separate_and_in_fused_weights(recorded: Any, mode: str, pattern: Pattern):
    patterns = dict.fromkeys(blocks.targets(recorded.block), pattern)
    results = prune(recorded, patterns, **OF_MODE[mode])
    assert_as_asked(recorded.block, patterns, results)
    if layer.projections_of(recorded.block).gate is None:  # gates have a share of their own, half of the weight
        shares = [sparsity_of(result.keep) for result in results.values()]
        compete = len(shares) == 2 and pattern == Unstructured(0.637, "joint")
        assert (max(shares) - min(shares) > 0.005) == compete


@pytest.mark.parametrize("group", ["joint", "layer"])
def test_any_count_of_zeros_in_a_fused_weight_is_met_whatever_its_shape(group: Any):
    """192 of 1152 rows are values: a sixth of a count is often half a weight, which no product may round both ways."""
    outputs, inputs, values = 1152, 960, 192
    linear = Linear("qkv_proj", torch.nn.Linear(inputs, outputs, device="meta"))
    sides = torch.arange(outputs).split([outputs - 2 * values, values, values])
    projections = Projections(*(Rows(linear, index) for index in sides), output=linear)
    for count in range(3, outputs * inputs, 6 * 301):
        pattern = Unstructured(count / (outputs * inputs), group)
        budget = plugin._budget(projections, {"qkv_proj": pattern})
        of_values = plugin._of_others(pattern, projections.value)
        assert budget.query == budget.key
        of_rest = count_dropped(budget.query.sparsity, (outputs - values) * inputs)
        assert of_rest + count_dropped(of_values.sparsity, inputs * values) == count  # as `sweep` rounds


# --- fused weights


@pytest.mark.parametrize(
    ("architecture", "pattern"),
    [
        *zip(["gpt2", "phi3", "gpt-neox", "gpt2", "phi3"], [*PATTERNS, "given"], strict=True),
        *(("qwen3-next", pattern) for pattern in [*PATTERNS, "given"]),
    ],
    ids=str,
)
def test_value_and_gate_rows_are_pruned_by_sparsegpt(recorded: blocks.Recorded, pattern: Any):
    found = layer.projections_of(recorded.block)
    rows = found.gate or found.value
    name = rows.name
    asked_for = dict.fromkeys(blocks.targets(recorded.block), pattern)
    patterns = given_masks(recorded.block, Unstructured(0.5, "row")) if pattern == "given" else asked_for
    result = prune(recorded, patterns)[name]
    hessian = Hessian(64)
    hessian.update(recorded.x[:-HELD_OUT])
    factor, _ = inverse_cholesky(hessian.matrix.float())
    asked = patterns[name]
    if isinstance(asked, FixedMask):
        asked = FixedMask(asked.keep[rows.index], asked.chosen_as)
    keep, weight = sweep(rows.weight, factor, Unstructured(0.637, "layer") if pattern == PATTERNS[0] else asked)
    assert torch.equal(result.keep[rows.index], keep)
    torch.testing.assert_close(result.weight[rows.index], weight, rtol=1e-4, atol=1e-5)
    assert (result.weight[rows.index] - rows.weight * keep).norm() > 0.1  # the survivors make up for the dropped


@pytest.mark.parametrize("architecture", ["llama", "opt", "gemma3", *blocks.CHECKED_FUSED, *blocks.BESIDE])
def test_the_model_with_the_new_weights_has_the_errors_that_were_reported(architecture: str):
    """Rows that went back to the wrong place, or errors of anything else, would show in the model's own matrices."""
    tokens, model = tiny_tokens(sequences=SEQUENCES), blocks.build(architecture)
    block, x, output = blocks.run_recorded(model, 1, tokens, output_attentions=True)
    dense_matrices, dense_outputs = output.attentions[-2][-HELD_OUT:], attended(model, block, tokens)
    results = prune(blocks.Recorded(block, x, dense_matrices), Unstructured(0.6, "joint"))
    others = [(rows, rows.weight.clone()) for rows in layer.projections_of(block).inward[2:]]
    for name, result in results.items():
        write(block.linears[name], result)
        for rows, dense in others:
            if rows.name == name:  # the errors are those of queries and keys alone
                block.linears[name].weight[rows.index] = dense
    matrices = blocks.run_recorded(model, 1, tokens, output_attentions=True)[2].attentions[-2][-HELD_OUT:]
    info = next(iter(results.values())).info
    measured = (matrices - dense_matrices).norm() ** 2 / dense_matrices.norm() ** 2
    assert info["attention_error"] == pytest.approx(measured.item(), rel=1e-3)
    outputs = attended(model, block, tokens)
    bias = layer.projections_of(block).output.bias
    without_bias = dense_outputs if bias is None else dense_outputs - bias
    measured = (outputs - dense_outputs).norm() ** 2 / without_bias.norm() ** 2
    assert info["output_error"] == pytest.approx(measured.item(), rel=1e-3)


def attended(model: Any, block: Block, tokens: Tensor) -> Tensor:
    """Return what the output projection of the block's attention gives on the held-out sequences."""
    seen: list[Tensor] = []
    module = layer.projections_of(block).output.module
    hook = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    with torch.no_grad():
        model(tokens, use_cache=False)
    hook.remove()
    return seen[0][-HELD_OUT:]


# --- asking again


@pytest.mark.parametrize(("architecture", "mode"), list(zip(["llama", "gpt2"], MODES, strict=True)))
def test_another_sparsity_of_the_same_block_measures_nothing_again(recorded, mode: str, monkeypatch):
    calls: list[str] = []
    for module, name in ((solver.gauss_newton, "measured_curvature"), (layer, "verify")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *x, of=original, name=name: calls.append(name) or of(*x))
    pruner = SPEC.build(SPEC.options(**OF_MODE[mode]))
    stats, kept = observed(recorded, pruner), {}
    for sparsity in (0.8, 0.4, 0.6):
        asked(pruner, recorded.block, dict.fromkeys(stats, Unstructured(sparsity, "joint")), stats, kept)
    assert calls == ["verify", *(["measured_curvature"] if mode != "mask" else [])], "masks need no curvature"


def test_weights_that_are_written_in_between_do_not_matter_and_the_pruner_holds_nothing_of_a_block(monkeypatch):
    """Allocation writes each result to see what it costs, and puts the dense weights back before the next.

    A block's sequences and curvature are copies, and would lie in memory beside the rest of the block and of the run.
    """
    needed: list[weakref.ref[Any]] = []
    original = solver.prune_layer
    monkeypatch.setattr(
        solver, "prune_layer", lambda of, *rest: needed.append(weakref.ref(of.text)) or original(of, *rest)
    )
    recorded = blocks.record("llama", sequences=SEQUENCES)
    pruner = SPEC.build(SPEC.options())
    stats, kept = observed(recorded, pruner), {}
    dense = {n: recorded.block.linears[n].weight.clone() for n in stats}
    first = asked(pruner, recorded.block, dict.fromkeys(stats, HALF), stats, kept)
    for name, result in first.items():
        write(recorded.block.linears[name], result)
        recorded.block.linears[name].weight.copy_(dense[name])
    second = asked(pruner, recorded.block, dict.fromkeys(stats, HALF), stats, kept)
    assert all(torch.equal(first[n].weight, second[n].weight) for n in stats)
    assert needed[0]() is not None
    kept.clear()
    assert needed[0]() is None


def test_a_sparsity_that_leaves_no_query_or_key_weight_of_a_fused_one_is_refused():
    told = r"c_attn: sparsity 0\.99999 leaves no query or key weight of a matrix of 12288"
    with pytest.raises(RecipeError, match=told):
        prune(of("gpt2"), Unstructured(0.99999, "joint"))
