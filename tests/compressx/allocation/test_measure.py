"""Measuring what sparsity costs a block: by hand, and without a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.compressx.blocks.test_prune import Spy, answering, by_magnitude, spec_of
from tests.compressx.built_in import BUILT_IN

from compressx import PluginError, PrunerSpec
from compressx.allocation.measure import UnitCurve, measure, measure_outliers
from compressx.allocation.methods import chosen, split_batches
from compressx.allocation.methods import measured as measured_by
from compressx.allocation.units import units_of
from compressx.api.patterns import NM, Unstructured
from compressx.blocks.fisher import fisher_diagonal, gradients
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.recipe.sections import DivergenceAllocation
from compressx.runtime.errors import CalibrationError
from compressx.testing import tiny_model, tiny_tokens

SPECS = {name: BUILT_IN[name] for name in ("magnitude", "wanda", "sparsegpt", "attnprune")}
BATCHES = tiny_tokens(sequences=6).split(4)  # of four and of two


def rule(index: int, spec: PrunerSpec, reconstructor: PrunerSpec | None = None) -> PlannedRule:
    return PlannedRule(index, tuple((x, x.options()) for x in (spec, reconstructor) if x))


def plan(model: Any, *rules: tuple[PlannedRule, str, tuple[str, ...]]) -> Plan:
    """Plan rules, each with its group and the last parts of the names that it takes: all where there are none."""
    found = architecture_of(model)
    linears = tuple(
        PlannedLinear(n, found.block_of(n), (x.out_features, x.in_features), r, Unstructured(0.5, group))  # type: ignore[arg-type]
        for n, x in found.linears.items()
        for r, group, kinds in rules
        if not kinds or n.rsplit(".", 1)[-1] in kinds
    )
    return Plan(linears, {}, tuple(r for r, *_ in rules), needs_calibration=True)


ATTENTION = ("q_proj", "k_proj")
REST = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def one_rule(model: Any, spec: PrunerSpec | str, *kinds: str, group: str = "layer") -> Plan:
    return plan(model, (rule(0, SPECS[spec] if isinstance(spec, str) else spec), group, kinds))


def mixed(model: Any) -> Plan:
    attention = rule(0, SPECS["attnprune"])
    return plan(model, (attention, "joint", ATTENTION), (rule(1, SPECS["sparsegpt"]), "layer", REST))


def measured(model: Any, planned: Plan, *sparsities: float, kind: Any = "rule", fisher: Any = None) -> list[UnitCurve]:
    units, given = units_of(planned, kind), () if fisher is None else (fisher.linears,)
    return [m for block in measure(InMemory(model), units, BATCHES, BATCHES, sparsities, *given) for m in block]


def bits(model: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a model as integers, which also tell -0.0 from 0.0."""
    integers = {4: torch.int32, 2: torch.int16}
    return {n: t.clone().view(integers[t.element_size()]) for n, t in model.state_dict().items()}


def block_outputs(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run the whole model in float64 and return what enters and leaves each block."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        block.register_forward_hook(
            lambda m, a, k, out: seen.append((a[0] if a else k["hidden_states"], out)), with_kwargs=True
        )
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(torch.cat(BATCHES), use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def divergence(model: Any, index: int) -> float:
    """The mean over tokens of half of (change of a block's output . gradient)^2, by running the whole model twice."""
    dense, fqn = tiny_model("llama"), f"model.layers.{index}"
    at_output = torch.cat(gradients(InMemory(dense), architecture_of(dense), [fqn], BATCHES)[fqn])
    left = [block_outputs(m.double())[index][1] for m in (model, dense)]
    return float(((left[0] - left[1]) * at_output.double()).sum(dim=-1).square().mean() / 2)


def test_the_divergence_of_one_unit_is_that_of_a_whole_model_with_that_unit_alone_pruned() -> None:
    planned = one_rule(tiny_model("llama"), "magnitude", "up_proj", "down_proj")
    for index, unit in enumerate(measured(tiny_model("llama"), planned, 0.25, 0.75)):
        for i, sparsity in enumerate((0.25, 0.75)):
            model = tiny_model("llama")
            for linear in (model.model.layers[index].mlp.up_proj, model.model.layers[index].mlp.down_proj):
                weight = linear.weight.data
                smallest = weight.abs().flatten().argsort()[: round(sparsity * weight.numel())]
                weight.view(-1)[smallest] = 0.0
            assert unit.divergences[i] == pytest.approx(divergence(model, index), rel=1e-3), (index, sparsity)


def test_a_block_that_the_loss_reacts_to_more_keeps_more_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = one_rule(tiny_model("llama"), "magnitude", *REST)
    settings = DivergenceAllocation(method="divergence", target=0.5, sparsities=(0.3, 0.6))

    def sparsities(*factors: float) -> list[float]:
        def scaled(*given: Any) -> dict[str, list[torch.Tensor]]:
            return {fqn: [factors[int(fqn[-1])] * x for x in its] for fqn, its in gradients(*given).items()}

        monkeypatch.setattr("compressx.allocation.measure.gradients", scaled)
        found = measured_by(InMemory(tiny_model("llama")), planned, settings, BATCHES)
        _, report = chosen(planned, settings, found)
        return [unit.sparsity for unit in report.units]

    alike, more = sparsities(2.0, 2.0, 2.0), sparsities(2.0, 2.0, 6.0)
    assert alike == sparsities(1.0, 1.0, 1.0), "a factor that all share says nothing"
    assert more[0] > alike[0]
    assert more[1] > alike[1]
    assert more[2] < alike[2]


def test_blocks_without_units_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient of theirs is kept, and those before the first unit are not gone through backwards."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "compressx.allocation.measure.gradients", lambda *given: seen.append(gradients(*given)) or seen[0]
    )
    model = tiny_model("llama")
    planned = one_rule(model, "magnitude", "up_proj")
    (unit,) = (u for u in units_of(planned, "rule") if u.block == "model.layers.1")
    model.model.layers[0].register_full_backward_hook(lambda *_: pytest.fail("went back through block 0"))
    kept = [list(x) for x in measure(InMemory(model), [unit], BATCHES, BATCHES, (0.5,))]
    assert [m.unit.block for (m,) in kept] == ["model.layers.1"]
    assert seen == [{}], "popped when the block was measured"


def test_pruners_learn_from_one_text_and_are_measured_on_another() -> None:
    """Wanda's masks change with what it learns from and magnitude's do not; the divergences of both with the other."""
    one, two = BATCHES[0], tiny_tokens(sequences=4, seed=9)

    def of_blocks(pruner: str, seen: torch.Tensor, held_out: torch.Tensor) -> list[float]:
        model = tiny_model("llama")
        units = units_of(one_rule(model, pruner, *REST, group="row"), "rule")
        return [m.divergences[0] for (m,) in measure(InMemory(model), units, [seen], [held_out], (0.5,))]

    for pruner, learns in (("wanda", True), ("magnitude", False)):
        assert (of_blocks(pruner, one, one) != of_blocks(pruner, two, one)) == learns
        assert of_blocks(pruner, one, one) != of_blocks(pruner, one, two)


@pytest.mark.parametrize(("samples", "seen", "held_out"), [(2, 1, 1), (5, 3, 2), (6, 4, 2), (99, 4, 2)])
def test_the_last_quarter_of_the_windows_is_held_out(samples: int, seen: int, held_out: int) -> None:
    whole = torch.cat(BATCHES)
    learnt_from, measured_on = split_batches(BATCHES, samples)
    assert torch.equal(torch.cat(learnt_from), whole[:seen])
    assert torch.equal(torch.cat(measured_on), whole[min(samples, len(whole)) - held_out : min(samples, len(whole))])
    assert all(len(batch) <= len(BATCHES[0]) for batch in (*learnt_from, *measured_on))


def assert_divergences_of_blocks_pruned_alone(got: list[UnitCurve], planned: Plan, fisher: Any = None) -> None:
    """Compare with what `prune_model` leaves, asked to prune one block alone to the same sparsity."""
    for index, unit in enumerate(got):
        model = tiny_model("llama")
        alone = replace(planned, linears=tuple(x for x in planned.linears if x.block == f"model.layers.{index}"))
        list(prune_model(InMemory(model), alone, BATCHES, fisher=fisher))
        assert unit.divergences[0] == pytest.approx(divergence(model, index), rel=1e-3)


@pytest.mark.slow
def test_a_block_is_one_unit_whose_rules_prune_it_together_by_their_own_pruners() -> None:
    planned = mixed(tiny_model("llama"))
    got = measured(tiny_model("llama"), planned, 0.5, 0.7, kind="block")
    assert [(m.unit.block, m.unit.label) for m in got] == [
        (f"model.layers.{i}", "attnprune, sparsegpt") for i in range(3)
    ]
    assert_divergences_of_blocks_pruned_alone(got, planned)


def test_a_pruner_that_reads_sensitivities_is_measured_with_those_that_are_given() -> None:
    model = tiny_model("llama")
    planned = one_rule(model, BUILT_IN["sensitivity"], *REST)
    fisher = fisher_diagonal(InMemory(model), architecture_of(model), planned.sensitive, BATCHES)
    assert_divergences_of_blocks_pruned_alone(measured(model, planned, 0.5, fisher=fisher), planned, fisher)


def test_n_m_is_measured_at_sparsities_that_it_has() -> None:
    model = tiny_model("llama")
    planned = plan(model, (rule(0, SPECS["wanda"]), "row", REST), (rule(1, SPECS["wanda"]), "row", ATTENTION))
    patterned = [replace(x, pattern=NM(2, 4)) if x.rule.index == 0 else x for x in planned.linears]
    planned = replace(planned, linears=tuple(patterned))
    by_rule = measured(model, planned, 0.1, 0.3, 0.5, 0.7, 0.9)
    assert {m.sparsities for m in by_rule} == {(0.25, 0.5, 0.75), (0.1, 0.3, 0.5, 0.7, 0.9)}
    for m in measured(model, planned, 0.1, 0.3, 0.5, 0.7, 0.9, kind="block"):
        share = 96 * 64 / (96 * 64 * 5)  # of query and key, which are not N:M
        assert m.sparsities == pytest.approx(
            [share * s + (1 - share) * n for s, n in ((0.1, 0.25), (0.3, 0.25), (0.5, 0.5), (0.7, 0.75), (0.9, 0.75))]
        )


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_outliers_are_counted_over_the_planned_linears_of_a_block_on_the_dense_stream(architecture: str) -> None:
    model = tiny_model(architecture)
    found = architecture_of(model)
    got = dict(measure_outliers(InMemory(model), units_of(one_rule(model, "magnitude"), "block"), BATCHES, 2.0))
    assert [u.block for u in got] == list(found.blocks)
    if architecture == "mixtral":  # its fused experts are no modules with inputs of their own
        assert all(0 < ratio < 0.5 for ratio in got.values())
        return
    inputs: dict[str, torch.Tensor] = {}
    for linear in found.linears.values():
        linear.module.register_forward_pre_hook(lambda _m, a, name=linear.name: inputs.update({name: a[0].detach()}))
    with torch.no_grad():
        model(torch.cat(BATCHES), use_cache=False)
    for unit, ratio in got.items():
        scores = torch.cat([
            (found.linears[x.name].weight.double().abs() * inputs[x.name].double().flatten(0, 1).norm(dim=0)).flatten()
            for x in unit.linears
        ])  # fmt: skip
        assert ratio == pytest.approx(float((scores > 2 * scores.mean()).double().mean()), abs=1e-4)
        assert 0 < ratio < 0.5


def test_outliers_of_an_expert_that_no_token_reached_are_not_counted_as_none() -> None:
    model = tiny_model("mixtral")
    layer = model.model.layers[0]
    layer.mlp.gate.weight.data[3] = -layer.mlp.gate.weight.data[:3].sum(dim=0) * 100
    layer.post_attention_layernorm.weight.data.zero_()
    with pytest.raises(CalibrationError, match=r"no calibration token reached model\.layers\.0\.mlp\.experts\."):
        list(measure_outliers(InMemory(model), units_of(one_rule(model, "magnitude"), "block"), BATCHES, 2.0))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("llama", torch.float32), ("gpt2", torch.bfloat16), ("mixtral", torch.bfloat16)],
    ids=str,
)
def test_every_weight_is_restored_to_the_bit(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture, dtype=dtype)
    for linear in architecture_of(model).linears.values():
        linear.weight[0, :3] = torch.tensor([-0.0, 0.0, 1e-30])
    before = bits(model)
    assert len(measured(model, one_rule(model, "sparsegpt", group="row"), 0.5, 0.9)) == 3
    after = bits(model)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_biases_that_a_pruner_changes_are_restored_too() -> None:
    model = tiny_model("opt")
    shifting = spec_of(Spy(None, lambda x, p: by_magnitude(x, p, bias=x.bias + 1.0)), groups=("layer",))
    before = bits(model)
    measured(model, one_rule(model, shifting), 0.25, 0.5)
    after = bits(model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_two_rules_that_share_a_hessian_each_prepare_their_own() -> None:
    model = tiny_model("llama")
    strong = PlannedRule(1, ((SPECS["sparsegpt"], SPECS["sparsegpt"].options(damping=10.0)),))
    both = plan(model, (rule(0, SPECS["sparsegpt"]), "layer", ("q_proj",)), (strong, "layer", ("v_proj",)))
    alone = plan(model, (strong, "layer", ("v_proj",)))
    together = [m for m in measured(model, both, 0.5) if m.unit.linears[0].rule is strong]
    assert [m.divergences for m in together] == [m.divergences for m in measured(model, alone, 0.5)]


def test_a_unit_outside_the_blocks_is_not_measured() -> None:
    model = tiny_model("llama")
    planned = one_rule(model, "magnitude", "down_proj")
    head = replace(planned.linears[0], name="lm_head", block="", shape=(128, 64))
    with_head = replace(planned, linears=(*planned.linears, head))
    assert len(units_of(with_head, "rule")) == 4
    assert [m.unit.block for m in measured(model, with_head, 0.5)] == [f"model.layers.{i}" for i in range(3)]


def test_an_output_that_is_not_finite_names_the_block_the_linears_and_the_sparsity() -> None:
    model = tiny_model("llama")
    huge = spec_of(Spy(None, lambda x, p: by_magnitude(x, p, weight=torch.full((64, 96), 1e38))), "huge")
    before = bits(model)
    with pytest.raises(
        CalibrationError, match=r"model\.layers\.0: with .*down_proj at sparsity 0\.5 \(huge\) the divergence"
    ):
        measured(model, one_rule(model, huge, "down_proj"), 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), bits(model).values(), strict=True))
    with pytest.raises(PluginError, match=r"'other' on model\.layers\.0: expected results"):
        measured(model, one_rule(model, answering({}), "q_proj"), 0.5)
