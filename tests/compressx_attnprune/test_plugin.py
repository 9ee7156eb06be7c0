"""The pruner as the host sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.compressx_attnprune import blocks

from compressx import NM, CalibrationError, Hessian, Pattern, PruneResult, SequenceSample, Unstructured
from compressx.errors import RecipeError
from compressx.pruner import Statistic, sparsity_of
from compressx_attnprune import layer, plugin, solver

SPEC = plugin.compressx_pruners()[0]
MODES = ("gauss-newton", "mask")


def observed(recorded: blocks.Recorded, pruner: Any) -> dict[str, Statistic]:
    """Fill what the pruner asks for, one sample shared by both projections as the host does."""
    names = blocks.targets(recorded.block)
    sample = pruner.observe(recorded.block, names[0])
    assert sample == pruner.observe(recorded.block, names[1])  # equal when fresh, so the host shares it
    for batch in recorded.x.split(2):
        sample.update(batch)
    return dict.fromkeys(names, sample)


def prune(recorded: blocks.Recorded, pattern: Pattern, **options: Any) -> dict[str, PruneResult]:
    pruner = SPEC.build(SPEC.options(**{"steps": 5, **options}))
    patterns = dict.fromkeys(blocks.targets(recorded.block), pattern)
    return dict(pruner.prune(recorded.block, patterns, observed(recorded, pruner)))


@pytest.fixture(scope="module")
def llama() -> blocks.Recorded:
    return blocks.record("llama")


def test_the_spec_offers_joint_budgets_first():
    assert (SPEC.name, SPEC.groups, SPEC.nm, SPEC.reconstructs) == ("attnprune", ("joint", "layer", "row"), True, False)
    assert SPEC.check is layer.check


def test_every_option_is_described_and_an_unknown_one_is_refused():
    assert all(field.description for field in SPEC.options.model_fields.values())
    with pytest.raises(ValidationError):
        SPEC.options(lambda_=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_a_joint_budget_is_exact_over_query_and_key_together(llama: blocks.Recorded, mode: str):
    results = prune(llama, Unstructured(0.637, "joint"), mode=mode).values()
    zeros = sum(int((~r.keep).sum()) for r in results)
    assert zeros == round(0.637 * sum(r.keep.numel() for r in results))
    assert len({round(sparsity_of(r.keep), 3) for r in results}) == 2  # one threshold, two sparsities


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", ["layer", "row"])
def test_layer_and_row_budgets_are_exact(llama: blocks.Recorded, mode: str, group: Any):
    for result in prune(llama, Unstructured(0.637, group), mode=mode).values():
        if group == "row":
            assert set((~result.keep).sum(dim=1).tolist()) == {round(0.637 * 64)}
        else:
            assert int((~result.keep).sum()) == round(0.637 * result.keep.numel())


@pytest.mark.parametrize("mode", MODES)
def test_n_m_patterns_hold_in_every_group_of_m(llama: blocks.Recorded, mode: str):
    for result in prune(llama, NM(2, 4), mode=mode).values():
        assert (result.keep.view(-1, 4).sum(dim=1) == 2).all()


@pytest.mark.parametrize("architecture", blocks.CHECKED)
def test_gauss_newton_returns_new_values_for_survivors_and_zeros_elsewhere(architecture: str):
    recorded = blocks.record(architecture)
    for name, result in prune(recorded, Unstructured(0.5, "joint")).items():
        assert result.weight is not None
        assert result.weight.dtype == torch.float32
        assert (result.weight[~result.keep] == 0).all()
        assert not torch.equal(result.weight, recorded.block.linears[name].weight * result.keep)


def test_mask_mode_leaves_the_survivors_values(llama: blocks.Recorded):
    assert [r.weight for r in prune(llama, Unstructured(0.5, "joint"), mode="mask").values()] == [None, None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", [Unstructured(0.0, "joint"), Unstructured(0.0, "row"), NM(4, 4)], ids=str)
def test_zero_sparsity_changes_nothing(llama: blocks.Recorded, mode: str, pattern: Pattern):
    for result in prune(llama, pattern, mode=mode).values():
        assert result.keep.all()
        assert result.weight is None
        assert result.info["attention_error"] == 0.0


def test_the_reported_errors_are_those_of_the_mask_and_of_the_updated_weights(llama: blocks.Recorded):
    query, key = prune(llama, Unstructured(0.5, "joint")).values()
    attention, dense = layer.describe(llama.block), blocks.weights(llama.block)
    updated = solver.relative_error(attention, llama.x, dense, (query.weight, key.weight))
    masked = solver.relative_error(attention, llama.x, dense, (dense[0] * query.keep, dense[1] * key.keep))
    assert query.info == key.info
    assert query.info["attention_error"] == pytest.approx(updated)
    assert query.info["attention_error_mask_only"] == pytest.approx(masked)
    assert 0 < updated < masked


def test_only_the_asked_for_sequences_are_kept(llama: blocks.Recorded):
    pruner = SPEC.build(SPEC.options(sequences=3))
    sample = next(iter(observed(llama, pruner).values()))
    assert sample.sequences.shape == (3, 32, 64)


def test_the_same_calibration_gives_the_same_masks(llama: blocks.Recorded):
    for mode in MODES:
        first, second = (prune(llama, Unstructured(0.5, "joint"), mode=mode) for _ in range(2))
        assert all(torch.equal(first[n].keep, second[n].keep) for n in first)


def test_the_regularization_option_reaches_the_solver(llama: blocks.Recorded):
    default, chosen = (
        prune(llama, Unstructured(0.75, "joint"), mode="mask", **o) for o in ({}, {"regularization": 3.0})
    )
    assert next(iter(default.values())).info["regularization"] == pytest.approx(0.3)
    assert next(iter(chosen.values())).info["regularization"] == 3.0
    assert any(not torch.equal(default[n].keep, chosen[n].keep) for n in default)


def test_a_bfloat16_model_is_pruned_in_float32():
    recorded = blocks.record("qwen3", dtype=torch.bfloat16)
    for name, result in prune(recorded, Unstructured(0.5, "joint")).items():
        assert recorded.block.linears[name].weight.dtype == torch.bfloat16
        assert result.weight is not None
        assert result.weight.dtype == torch.float32
        assert 0 < result.info["attention_error"] < result.info["attention_error_mask_only"]


def test_missing_calibration_is_an_error_that_names_the_layer(llama: blocks.Recorded):
    query, key = blocks.targets(llama.block)
    pruner = SPEC.build(SPEC.options())
    patterns = dict.fromkeys((query, key), Unstructured(0.5, "joint"))
    for stats in ({}, {query: SequenceSample(64), key: SequenceSample(64)}, {query: Hessian(64), key: Hessian(64)}):
        with pytest.raises(CalibrationError, match=rf"{query}: attnprune needs calibration sequences"):
            pruner.prune(llama.block, patterns, stats)


def test_different_inputs_of_query_and_key_are_refused(llama: blocks.Recorded):
    query, key = blocks.targets(llama.block)
    pruner = SPEC.build(SPEC.options())
    stats = {**observed(llama, pruner), key: SequenceSample(64)}
    stats[key].update(llama.x + 1)
    with pytest.raises(CalibrationError, match=f"{query} and {key} were handed different inputs"):
        pruner.prune(llama.block, dict.fromkeys((query, key), Unstructured(0.5, "joint")), stats)


def test_wrong_targets_are_refused_while_pruning_too(llama: blocks.Recorded):
    query, _ = blocks.targets(llama.block)
    with pytest.raises(RecipeError, match="does not take"):
        SPEC.build(SPEC.options()).prune(llama.block, {query: Unstructured(0.5, "joint")}, {})


def test_activations_without_a_usable_hessian_name_the_layer(llama: blocks.Recorded, monkeypatch: pytest.MonkeyPatch):
    from compressx.obs import NotPositiveDefiniteError

    def fail(*_: Any) -> Any:
        raise NotPositiveDefiniteError("no factor")

    monkeypatch.setattr(solver, "inverse_cholesky", fail)
    with pytest.raises(CalibrationError, match=r"q_proj: no factor"):
        prune(llama, Unstructured(0.5, "joint"))
