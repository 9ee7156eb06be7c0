"""Measuring what sparsity costs a block: by hand, and without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from compressx import Block, Pattern, PluginError, PruneResult, PrunerSpec, Statistic
from compressx.allocation import methods as allocators
from compressx.allocation.measure import Measured, measure, measure_outliers
from compressx.allocation.units import units_of
from compressx.api.patterns import NM, Unstructured, keep_mask
from compressx.api.statistics import FeatureNorms
from compressx.blocks.fisher import fisher_diagonal, gradients
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.pruners import magnitude, sensitivity, sparsegpt, wanda
from compressx.recipe.methods import DivergenceAllocation
from compressx.runtime.errors import ArtifactError, CalibrationError, UnsupportedModelError
from compressx.testing import tiny_model, tiny_tokens
from compressx_attnprune import plugin as attnprune

SPECS = {s.name: s for m in (magnitude, wanda, sparsegpt, attnprune) for s in m.compressx_pruners()}
BATCHES = tiny_tokens(sequences=6).split(4)  # of four and of two


class NoOptions(BaseModel):
    pass


def rule(index: int, spec: PrunerSpec, reconstructor: PrunerSpec | None = None) -> PlannedRule:
    return PlannedRule(index, spec, spec.options(), reconstructor, reconstructor and reconstructor.options())


def plan(model: Any, *rules: tuple[PlannedRule, str, tuple[str, ...]]) -> Plan:
    """Plan rules, each with its group and the last parts of the names that it takes."""
    found = survey(model)
    linears = tuple(
        PlannedLinear(n, found.block_of(n), (x.out_features, x.in_features), r, Unstructured(0.5, group))  # type: ignore[arg-type]
        for n, x in found.linears.items()
        for r, group, kinds in rules
        if n.rsplit(".", 1)[-1] in kinds
    )
    return Plan(linears, {}, tuple(r for r, *_ in rules), needs_calibration=True)


ATTENTION = ("q_proj", "k_proj")
REST = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def mixed(model: Any) -> Plan:
    attention = rule(0, SPECS["attnprune"])
    return plan(model, (attention, "joint", ATTENTION), (rule(1, SPECS["sparsegpt"]), "layer", REST))


def measured(model: Any, planned: Plan, *sparsities: float, kind: Any = "rule") -> list[Measured]:
    units = units_of(planned, kind)
    return [m for block in measure(InMemory(model), units, BATCHES, BATCHES, sparsities) for m in block]


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
    at_output = torch.cat(gradients(InMemory(dense), survey(dense), [fqn], BATCHES)[fqn])
    left = [block_outputs(m.double())[index][1] for m in (model, dense)]
    return float(((left[0] - left[1]) * at_output.double()).sum(dim=-1).square().mean() / 2)


def test_the_divergence_of_one_unit_is_that_of_a_whole_model_with_that_unit_alone_pruned() -> None:
    planned = plan(tiny_model("llama"), (rule(0, SPECS["magnitude"]), "layer", ("up_proj", "down_proj")))
    for index, unit in enumerate(measured(tiny_model("llama"), planned, 0.25, 0.75)):
        for i, sparsity in enumerate((0.25, 0.75)):
            model = tiny_model("llama")
            for linear in (model.model.layers[index].mlp.up_proj, model.model.layers[index].mlp.down_proj):
                weight = linear.weight.data
                smallest = weight.abs().flatten().argsort()[: round(sparsity * weight.numel())]
                weight.view(-1)[smallest] = 0.0
            assert unit.divergences[i] == pytest.approx(divergence(model, index), rel=1e-3), (index, sparsity)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_what_is_measured_is_near_the_divergence_of_the_models_predictions(architecture: str) -> None:
    """Kullback-Leibler over the whole vocabulary, at a sparsity that changes little, on enough tokens for one draw."""
    model = tiny_model(architecture)
    tokens = tiny_tokens(sequences=96)
    kinds = tuple({n.rsplit(".", 1)[-1] for n in survey(model).linears})
    planned = plan(model, (rule(0, SPECS["magnitude"]), "layer", kinds))
    units = units_of(planned, "block")
    got = [m for (m,) in measure(InMemory(model), units, [tokens[:4]], tokens.split(32), (0.2,))]
    with torch.no_grad():
        dense = model(tokens, use_cache=False).logits.double().log_softmax(dim=-1)
        for unit in got:
            pruned = tiny_model(architecture)
            for linear in unit.unit.linears:
                weight = survey(pruned).linears[linear.name].weight
                weight.masked_fill_(~keep_mask(weight.abs(), Unstructured(0.2, "layer")), 0.0)
            now = pruned(tokens, use_cache=False).logits.double().log_softmax(dim=-1)
            expected = float((dense.exp() * (dense - now)).sum(dim=-1).mean())
            assert unit.divergences[0] == pytest.approx(expected, rel=0.25), unit.unit.block


def test_a_block_that_the_loss_reacts_to_more_keeps_more_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(tiny_model("llama"), (rule(0, SPECS["magnitude"]), "layer", REST))
    settings = DivergenceAllocation(method="divergence", target=0.5, sparsities=(0.3, 0.6), unit="block")

    def sparsities(*factors: float) -> list[float]:
        def scaled(*given: Any) -> dict[str, list[torch.Tensor]]:
            return {fqn: [factors[int(fqn[-1])] * x for x in its] for fqn, its in gradients(*given).items()}

        monkeypatch.setattr("compressx.allocation.measure.gradients", scaled)
        _, report = allocators.allocate(InMemory(tiny_model("llama")), planned, settings, BATCHES)
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
    planned = plan(model, (rule(0, SPECS["magnitude"]), "layer", ("up_proj",)))
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
        planned = plan(model, (rule(0, SPECS[pruner]), "row", REST))
        return [
            m.divergences[0] for (m,) in measure(InMemory(model), units_of(planned, "rule"), [seen], [held_out], (0.5,))
        ]

    for pruner, learns in (("wanda", True), ("magnitude", False)):
        assert (of_blocks(pruner, one, one) != of_blocks(pruner, two, one)) == learns
        assert of_blocks(pruner, one, one) != of_blocks(pruner, one, two)


@pytest.mark.parametrize(("samples", "seen", "held_out"), [(1, 1, 1), (2, 1, 1), (5, 3, 2), (6, 4, 2), (99, 4, 2)])
def test_the_last_quarter_of_the_windows_is_held_out(samples: int, seen: int, held_out: int) -> None:
    whole = torch.cat(BATCHES)
    learnt_from, measured_on = allocators._parts(BATCHES, samples)
    assert torch.equal(torch.cat(learnt_from), whole[:seen])
    assert torch.equal(torch.cat(measured_on), whole[min(samples, len(whole)) - held_out : min(samples, len(whole))])
    assert all(len(batch) <= len(BATCHES[0]) for batch in (*learnt_from, *measured_on))


def test_units_are_the_linears_of_one_rule_in_one_block() -> None:
    got = measured(tiny_model("llama"), mixed(tiny_model("llama")), 0.5, 0.7)
    assert [(m.unit.block, m.unit.label, m.unit.weights) for m in got] == [
        (f"model.layers.{i}", *values)
        for i in range(3)
        for values in (("attnprune", 96 * 64), ("sparsegpt", 96 * 64 + 3 * 96 * 64))
    ]


@pytest.mark.slow
def test_a_block_is_one_unit_whose_rules_prune_it_together_by_their_own_pruners() -> None:
    """`prune_model`, asked to prune one block alone to the same sparsity, leaves the same output."""
    from compressx.blocks.prune import prune_model

    got = measured(tiny_model("llama"), mixed(tiny_model("llama")), 0.5, 0.7, kind="block")
    assert [(m.unit.block, m.unit.label) for m in got] == [
        (f"model.layers.{i}", "attnprune, sparsegpt") for i in range(3)
    ]
    for index, unit in enumerate(got):
        model = tiny_model("llama")
        planned = mixed(model)
        alone = [x for x in planned.linears if x.block == f"model.layers.{index}"]
        for _ in prune_model(InMemory(model), replace(planned, linears=tuple(alone)), BATCHES):
            pass
        assert unit.divergences[0] == pytest.approx(divergence(model, index), rel=1e-3)


def test_a_pruner_that_reads_sensitivities_is_measured_with_those_that_are_given() -> None:
    from compressx.blocks.prune import prune_model

    (spec,) = sensitivity.compressx_pruners()
    model = tiny_model("llama")
    planned = plan(model, (rule(0, spec), "layer", REST))
    fisher = fisher_diagonal(InMemory(model), survey(model), planned.sensitive, BATCHES)
    units = units_of(planned, "rule")
    got = [m for block in measure(InMemory(model), units, BATCHES, BATCHES, [0.5], fisher.linears) for m in block]
    for index, unit in enumerate(got):
        model = tiny_model("llama")
        alone = tuple(x for x in planned.linears if x.block == f"model.layers.{index}")
        list(prune_model(InMemory(model), replace(planned, linears=alone), BATCHES, fisher=fisher))
        assert unit.divergences[0] == pytest.approx(divergence(model, index), rel=1e-3)


def test_every_linear_that_is_decided_apart_has_its_own_curve() -> None:
    got = measured(tiny_model("llama"), mixed(tiny_model("llama")), 0.5, 0.7, kind="linear")
    assert [[x.name.rsplit(".", 1)[-1] for x in m.unit.linears] for m in got[:6]] == [
        ["q_proj", "k_proj"], ["v_proj"], ["o_proj"], ["gate_proj"], ["up_proj"], ["down_proj"]
    ]  # fmt: skip
    assert len({m.divergences for m in got}) == len(got) == 18


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
    found = survey(model)
    kinds = tuple({n.rsplit(".", 1)[-1] for n in found.linears})
    planned = plan(model, (rule(0, SPECS["magnitude"]), "layer", kinds))
    got = dict(measure_outliers(InMemory(model), units_of(planned, "block"), BATCHES, 2.0))
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
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[3] = -model.model.layers[0].mlp.gate.weight[:3].sum(dim=0) * 100
        model.model.layers[0].post_attention_layernorm.weight.zero_()
    kinds = tuple({n.rsplit(".", 1)[-1] for n in survey(model).linears})
    planned = plan(model, (rule(0, SPECS["magnitude"]), "layer", kinds))
    with pytest.raises(CalibrationError, match=r"no calibration token reached model\.layers\.0\.mlp\.experts\."):
        list(measure_outliers(InMemory(model), units_of(planned, "block"), BATCHES, 2.0))


def test_outliers_of_a_weight_that_is_not_finite_name_it() -> None:
    model = tiny_model("llama")
    planned = plan(model, (rule(0, SPECS["magnitude"]), "layer", ("up_proj",)))
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(ArtifactError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has NaN or infinite"):
        list(measure_outliers(InMemory(model), units_of(planned, "block"), BATCHES, 2.0))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_divergences_grow_with_sparsity(architecture: str) -> None:
    model = tiny_model(architecture)
    units = units_of(mixed(model), "rule")
    tokens = tiny_tokens(sequences=64).split(16)  # many: of each one label is drawn
    for block in measure(InMemory(model), units, BATCHES, tokens, (0.2, 0.4, 0.6)):  # beyond, changes are not small
        for m in block:
            assert m.divergences[0] > 0
            assert all(a < b for a, b in pairwise(m.divergences)), m.unit.linears[0].name


def test_a_reconstructor_lowers_the_divergence() -> None:
    def of_blocks(reconstructor: PrunerSpec | None) -> list[float]:
        planned = plan(tiny_model("llama"), (rule(0, SPECS["wanda"], reconstructor), "row", REST))
        return [m.divergences[0] for m in measured(tiny_model("llama"), planned, 0.6)]

    assert all(a < b for a, b in zip(of_blocks(SPECS["sparsegpt"]), of_blocks(None), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral"])
def test_every_weight_is_restored_to_the_bit(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture, dtype=dtype)
    linears = survey(model).linears
    for linear in linears.values():
        linear.weight[0, :3] = torch.tensor([-0.0, 0.0, 1e-30])
    before = bits(model)
    kinds = tuple({n.rsplit(".", 1)[-1] for n in linears})
    assert len(measured(model, plan(model, (rule(0, SPECS["sparsegpt"]), "row", kinds)), 0.5, 0.9)) == 3
    after = bits(model)
    assert all(torch.equal(before[n], after[n]) for n in before)


class Failing:
    """Prunes by magnitude, and asks the block to run into an error after the second decision."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decisions = 0

    def observe(self, block: Block, name: str) -> FeatureNorms:
        return FeatureNorms(block.linears[name].in_features)

    def prune(
        self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
    ) -> dict[str, PruneResult]:
        self.decisions += 1
        if self.decisions == 2:
            block.module.register_forward_hook(self.fail)
        return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}

    def fail(self, module: Any, args: Any, output: Any) -> None:
        assert int((self.model.model.layers[0].mlp.up_proj.weight == 0).sum()) > 0, "it is pruned when this happens"
        raise KeyboardInterrupt


def test_every_weight_is_restored_to_the_bit_when_a_pruned_block_fails() -> None:
    model = tiny_model("llama")
    before = bits(model)
    spec = PrunerSpec("failing", "for a test", NoOptions, lambda _: Failing(model))
    with pytest.raises(KeyboardInterrupt):
        measured(model, plan(model, (rule(0, spec), "layer", REST)), 0.5, 0.7)
    after = bits(model)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_statistics_are_gathered_once_for_all_sparsities() -> None:
    updates: list[int] = []
    asked: list[FeatureNorms] = []

    class Counting(FeatureNorms):
        def update(self, x: torch.Tensor) -> None:
            updates.append(len(x))
            super().update(x)

    class Pruner:
        def observe(self, block: Block, name: str) -> FeatureNorms:
            return Counting(block.linears[name].in_features)

        def prune(
            self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Any]
        ) -> dict[str, PruneResult]:
            asked.extend(stats.values())
            return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}

    model = tiny_model("llama")
    spec = PrunerSpec("counting", "for a test", NoOptions, lambda _: Pruner())
    measured(model, plan(model, (rule(0, spec), "layer", ("down_proj",))), 0.3, 0.5, 0.7)
    assert updates == [4, 2] * 3  # blocks
    assert [id(x) for x in asked] == [id(x) for x in asked[::3] for _ in range(3)]


@pytest.mark.parametrize("kind", ["linear", "rule"])
def test_each_hessian_is_factored_once_for_all_sparsities_and_units(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    factored: list[str] = []
    factor = sparsegpt.factored

    def spy(name: str, *given: Any) -> Any:
        factored.append(name.rpartition(".")[2])
        return factor(name, *given)

    monkeypatch.setattr(sparsegpt, "factored", spy)
    model = tiny_model("llama")
    measured(model, plan(model, (rule(0, SPECS["sparsegpt"]), "layer", (*ATTENTION, *REST))), 0.3, 0.5, 0.7, kind=kind)
    assert factored == ["q_proj", "o_proj", "gate_proj", "down_proj"] * 3  # blocks


def test_two_rules_that_share_a_hessian_each_prepare_their_own() -> None:
    model = tiny_model("llama")
    strong = PlannedRule(1, SPECS["sparsegpt"], SPECS["sparsegpt"].options(damping=10.0), None, None)
    both = plan(model, (rule(0, SPECS["sparsegpt"]), "layer", ("q_proj",)), (strong, "layer", ("v_proj",)))
    alone = plan(model, (strong, "layer", ("v_proj",)))
    together = [m for m in measured(model, both, 0.5) if m.unit.linears[0].rule is strong]
    assert [m.divergences for m in together] == [m.divergences for m in measured(model, alone, 0.5)]


def test_a_unit_outside_the_blocks_is_not_measured() -> None:
    model = tiny_model("llama")
    planned = plan(model, (rule(0, SPECS["magnitude"]), "layer", ("down_proj",)))
    head = replace(planned.linears[0], name="lm_head", block="", shape=(128, 64))
    with_head = replace(planned, linears=(*planned.linears, head))
    assert len(units_of(with_head, "rule")) == 4
    assert [m.unit.block for m in measured(model, with_head, 0.5)] == [f"model.layers.{i}" for i in range(3)]


def test_an_output_that_is_not_finite_names_the_block_the_linears_and_the_sparsity() -> None:
    class Huge:
        def observe(self, block: Block, name: str) -> None:
            return None

        def prune(
            self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
        ) -> dict[str, PruneResult]:
            return {
                n: PruneResult(keep_mask(block.linears[n].weight.abs(), p), torch.full((64, 96), 1e38))
                for n, p in patterns.items()
            }

    model = tiny_model("llama")
    spec = PrunerSpec("huge", "for a test", NoOptions, lambda _: Huge())
    before = bits(model)
    with pytest.raises(
        CalibrationError, match=r"model\.layers\.0: with .*down_proj at sparsity 0\.5 \(huge\) the divergence"
    ):
        measured(model, plan(model, (rule(0, spec), "layer", ("down_proj",))), 0.5)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), bits(model).values(), strict=True))


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(float("inf"), ArtifactError, r"model\.layers\.1\.mlp\.down_proj\.weight has NaN or infinite"),
     (3e38, UnsupportedModelError, r"model\.layers\.1: its output has NaN or infinite")],
)  # fmt: skip
def test_a_dense_model_that_is_not_finite_is_refused(value: float, error: type[Exception], message: str) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj.weight.data[:] = value
    model.model.layers[1].mlp.up_proj.weight.data[:] = 1e3
    with pytest.raises(error, match=message):
        measured(model, plan(model, (rule(0, SPECS["magnitude"]), "layer", ("q_proj",))), 0.5)


def test_a_pruner_that_breaks_its_contract_is_named() -> None:
    class Silent:
        def observe(self, block: Block, name: str) -> None:
            return None

        def prune(
            self, block: Block, patterns: Mapping[str, Pattern], stats: Mapping[str, Statistic]
        ) -> dict[str, PruneResult]:
            return {}

    model = tiny_model("llama")
    spec = PrunerSpec("silent", "for a test", NoOptions, lambda _: Silent())
    with pytest.raises(PluginError, match=r"'silent' on model\.layers\.0: expected results"):
        measured(model, plan(model, (rule(0, spec), "layer", ("q_proj",))), 0.5)
