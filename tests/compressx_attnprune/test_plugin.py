"""The pruner as the host sees it: its options, what it tells, the text it uses, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.pruning import (
    HALF,
    MODES,
    OBJECTIVES,
    SEQUENCES,
    SPEC,
    asked,
    assert_as_asked,
    observed,
    prune,
)
from tests.pairs import pairs
from torch import Tensor

from compressx import NM, CalibrationError, Hessian, Pattern, SequenceSample, Unstructured
from compressx.blocks.observe import Observed
from compressx.numerics.obs import NotPositiveDefiniteError
from compressx.runtime.errors import RecipeError
from compressx_attnprune import baselines, layer, plugin, solver
from compressx_attnprune.attention import attention_matrices, queries_and_keys
from compressx_attnprune.losses import Loss, MatrixLoss, OutputLoss
from compressx_attnprune.training import Candidate

each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(scope="module")
def llama() -> blocks.Recorded:
    return blocks.record("llama", sequences=SEQUENCES)


# --- what a recipe can say


def test_the_spec_offers_joint_budgets_first_and_every_option_has_a_description_and_a_default():
    assert (SPEC.name, SPEC.groups, SPEC.nm, SPEC.reconstructs) == ("attnprune", ("joint", "layer", "row"), True, True)
    fields = SPEC.options.model_fields.values()
    assert all(field.description and not field.is_required() for field in fields)


@pytest.mark.parametrize(
    "wrong",
    [{"lambda_": 0.1}, {"mode": "refit"}, {"objective": "perplexity"},
     {"sequences": 1}, {"damping": 0}, {"steps": 0}, {"refit": -1}, {"regularization": 0}],
    ids=str,
)  # fmt: skip
def test_an_unknown_option_or_one_out_of_range_is_refused(wrong: dict[str, Any]):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SPEC.options(**wrong)


@pytest.mark.parametrize(
    ("idle", "reason"),
    [({"steps": 500}, "steps has no effect with mode: gauss-newton; it needs mode: mask"),
     ({"regularization": 0.3}, "regularization has no effect with mode: gauss-newton; it needs mode: mask"),
     ({"damping": 0.2, "mode": "mask"}, "damping has no effect with mode: mask; it needs mode: gauss-newton")],
    ids=str,
)  # fmt: skip
def test_an_option_that_would_change_nothing_is_refused(idle: dict[str, Any], reason: str):
    with pytest.raises(ValidationError, match=reason):
        SPEC.options(**idle)


# --- what is told


@pytest.mark.parametrize(("architecture", "objective"), list(zip(["llama", "phi3"], OBJECTIVES, strict=True)))
def test_a_mode_that_does_worse_gives_way_and_the_report_says_so(architecture, objective, monkeypatch):
    def upside_down(of: solver.QueryKeyLayer, budget: solver.Budget, **_: Any) -> Candidate:
        keeps = budget.choose((-of.dense[0].abs(), -of.dense[1].abs()))
        return solver.judge(of, [(keeps, (of.dense[0] * keeps[0], of.dense[1] * keeps[1]))])[0]

    recorded = blocks.record(architecture, sequences=SEQUENCES)
    monkeypatch.setattr(solver, "mask", upside_down)
    results = prune(recorded, HALF, mode="mask", objective=objective)
    info = next(iter(results.values())).info
    own = OBJECTIVES[objective]
    assert info["fell_back"] == 1.0
    assert info[own] == min(info[f"{own}.wanda"], info[f"{own}.sparsegpt"])
    assert_as_asked(recorded.block, dict.fromkeys(results, HALF), results)


def test_the_objective_is_what_weights_are_chosen_by_and_nothing_else_of_the_report(llama, monkeypatch):
    seen: list[type[Loss]] = []
    original = solver.solve
    monkeypatch.setattr(solver, "solve", lambda of, *rest: seen.append(type(of.loss)) or original(of, *rest))
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


def test_the_damping_that_is_asked_for_is_that_of_the_curvature(llama, monkeypatch):
    seen: list[float] = []
    original = solver.solve
    monkeypatch.setattr(solver, "solve", lambda of, *rest: seen.append(of.problem.damping) or original(of, *rest))
    default, heavy = (next(iter(prune(llama, HALF, **o).values())) for o in ({}, {"damping": 0.2}))
    assert seen == [0.003, 0.2]
    assert not torch.equal(default.weight, heavy.weight)


@pytest.mark.parametrize(("architecture", "length"), [("llama", 32), ("mistral", 80), ("gpt2", 80)])
def test_heat_maps_show_the_head_whose_attention_changed_most(architecture: str, length: int):
    recorded = blocks.record(architecture, sequences=6, length=length)
    results = prune(recorded, Unstructured(0.7, "joint"))
    images = next(iter(results.values())).images
    tokens = min(length, plugin.HEAT_MAP_TOKENS)
    projections, attention = layer.find_projections(recorded.block), layer.describe(recorded.block).first(tokens)
    x = recorded.x[-1:, :tokens]  # one of six is held out
    pruned = []
    for rows in (projections.query, projections.key):
        weight = results[rows.name].weight
        pruned.append(weight if rows.index is None else weight[rows.index])
    before, after = (
        attention_matrices(attention, *queries_and_keys(attention, x, *pair))[0]
        for pair in (blocks.weights(recorded.block), pruned)
    )
    head = (after - before).norm(dim=(1, 2)).argmax().item()
    assert list(images) == [f"head {head}, dense", f"head {head}, pruned"]
    for image, expected in zip(images.values(), (before[head], after[head]), strict=True):
        assert image.shape == (tokens, tokens)
        torch.testing.assert_close(image.sum(dim=1), torch.ones(tokens))
        assert not image.triu(1).any()
        torch.testing.assert_close(image, expected)
    torch.testing.assert_close(before[head], recorded.attentions[-1, head, :tokens, :tokens], atol=1e-5, rtol=1e-4)


# --- the text


def texts(recorded: blocks.Recorded, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the sequences that are learnt from, and those held out."""
    seen: list[solver.QueryKeyLayer] = []
    original = solver.solve
    monkeypatch.setattr(solver, "solve", lambda of, *rest: seen.append(of) or original(of, *rest))
    prune(recorded, HALF, **options)
    return seen[0].text.train, seen[0].text.held_out


def test_the_last_eighth_of_the_sequences_is_held_out(llama, monkeypatch):
    train, held_out = texts(llama, monkeypatch)
    assert torch.equal(train, llama.x[:-2])
    assert torch.equal(held_out, llama.x[-2:])


def test_only_the_first_sequences_are_used_and_a_single_one_is_learnt_from_and_measured_on(llama, monkeypatch):
    train, held_out = texts(llama, monkeypatch, sequences=3)
    assert torch.equal(train, llama.x[:2])
    assert torch.equal(held_out, llama.x[2:3])
    alone = replace(llama, x=llama.x[:1])
    assert all(torch.equal(text, alone.x) for text in texts(alone, monkeypatch))


# --- edges


@pytest.mark.parametrize(
    ("architecture", "mode", "pattern"),
    pairs(["llama", "gpt2"], MODES, [Unstructured(0.0, "joint"), Unstructured(0.0, "row"), NM(4, 4)]),
    ids=str,
)
def test_zero_sparsity_returns_the_dense_weights_bit_for_bit(architecture: str, mode: str, pattern: Pattern):
    recorded = blocks.record(architecture)
    for name, result in prune(recorded, pattern, mode=mode).items():
        assert result.keep.all()
        assert torch.equal(result.weight, recorded.block.linears[name].weight)
        assert {result.info[q] for q in OBJECTIVES.values()} == {0.0}


def test_a_bfloat16_model_is_pruned_in_float32():
    architecture = "gpt2"
    recorded = blocks.record(architecture, sequences=SEQUENCES, dtype=torch.bfloat16)
    assert recorded.x.dtype == torch.bfloat16
    results = prune(recorded, HALF)
    assert_as_asked(recorded.block, dict.fromkeys(results, HALF), results)
    single = prune(blocks.record(architecture, sequences=SEQUENCES), HALF)
    for name, result in results.items():
        assert recorded.block.linears[name].weight.dtype == torch.bfloat16
        assert result.info["output_error"] == pytest.approx(single[name].info["output_error"], rel=0.4)
        assert not torch.equal(result.weight, result.weight.bfloat16().float())


def test_missing_calibration_is_an_error_that_names_the_layer(llama: blocks.Recorded):
    query, key = blocks.targets(llama.block)
    pruner = SPEC.build(SPEC.options())
    patterns = dict.fromkeys((query, key), HALF)
    for kind in (None, SequenceSample, Hessian):
        stats = {n: Observed(kind(64)) for n in (query, key) if kind}
        with pytest.raises(CalibrationError, match=rf"{query}: attnprune needs calibration sequences"):
            asked(pruner, llama.block, patterns, stats)
    with pytest.raises(CalibrationError, match=rf"{key}: attnprune needs calibration sequences and got none"):
        asked(pruner, llama.block, patterns, {query: observed(llama, pruner)[query]})


def test_inputs_of_query_and_key_that_are_equal_in_two_samples_are_as_good_as_one_and_others_are_refused(llama):
    query, key = blocks.targets(llama.block)
    pruner = SPEC.build(SPEC.options())
    stats = {**observed(llama, pruner), key: Observed(SequenceSample(64))}
    stats[key].statistic.update(llama.x)
    results = asked(pruner, llama.block, dict.fromkeys((query, key), HALF), stats)
    assert torch.equal(results[key].weight, prune(llama, HALF)[key].weight)
    stats = {**observed(llama, pruner), key: Observed(SequenceSample(64))}
    stats[key].statistic.update(llama.x + 1)
    with pytest.raises(CalibrationError, match=f"{query} and {key} were handed different inputs"):
        asked(pruner, llama.block, dict.fromkeys((query, key), HALF), stats)


def test_wrong_targets_are_refused_while_pruning_too(llama: blocks.Recorded):
    query, _ = blocks.targets(llama.block)
    with pytest.raises(RecipeError, match="does not target"):
        asked(SPEC.build(SPEC.options()), llama.block, {query: HALF}, {})


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_activations_without_a_usable_hessian_name_the_layer(architecture: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise NotPositiveDefiniteError("no factor")

    recorded = blocks.record(architecture)
    monkeypatch.setattr(baselines, "inverse_cholesky", fail)
    with pytest.raises(CalibrationError, match=rf"{blocks.targets(recorded.block)[0]}: no factor"):
        prune(recorded, HALF)
