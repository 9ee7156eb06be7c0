from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from pydantic import BaseModel
from tests.compressx.references import mean_error
from tests.pairs import pairs

from compressx import Linear, PluginError, PruneResult, PrunerSpec, UnsupportedModelError
from compressx.api.patterns import NM, FixedMask, Pattern, Unstructured, keep_mask
from compressx.api.statistics import FeatureNorms, Hessian
from compressx.blocks import prune
from compressx.blocks.prune import prune_model
from compressx.masks.maskset import MaskSet
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.models.capture import capture_calls, replay
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.pruners import alps, magnitude, sparsegpt, wanda
from compressx.runtime.errors import CalibrationError
from compressx.runtime.ranks import Ranks
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

SPECS = {s.name: s for m in (magnitude, wanda, sparsegpt, alps) for s in m.compressx_pruners()}


class NoOptions(BaseModel):
    pass


def spec_of(pruner: object, name: str = "other", **fields: object) -> PrunerSpec:
    return PrunerSpec(name, "for a test", NoOptions, lambda _: pruner, **fields)  # type: ignore[arg-type]


class Spy:
    """Asks for norms, keeps what it is given, and prunes by magnitude."""

    def __init__(self):
        self.given = {}

    def observe(self, block, name):
        return FeatureNorms(block.linears[name].in_features)

    def prune(self, block, patterns, stats):
        self.given |= stats
        return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}


def plan_all(model, spec, pattern, *, only="", reconstructor=None, outside=False) -> Plan:
    """Plan one rule over every linear whose name contains `only`."""
    found = survey(model)
    rule = PlannedRule(0, spec, spec.options(), reconstructor, reconstructor and reconstructor.options())
    every = {**found.linears, **(found.outside if outside else {})}
    linears = tuple(
        PlannedLinear(n, found.block_of(n) if n in found.linears else "", tuple(x.weight.shape), rule, pattern)
        for n, x in every.items()
        if only in n
    )
    return Plan(linears, {}, (rule,), needs_calibration=True)


def first(output):
    """Return a block's hidden states: some blocks return them alone, others in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def batches(size: int = 4) -> tuple[torch.Tensor, ...]:
    return tiny_tokens().split(size)


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replaying_the_blocks_one_by_one_gives_what_the_model_computes(architecture, dtype):
    model = tiny_model(architecture, dtype=dtype)
    blocks = survey(model).blocks
    tokens = tiny_tokens(sequences=3)
    seen = {}
    last = list(blocks)[-1]
    handle = blocks[last].register_forward_hook(lambda m, a, out: seen.__setitem__("out", out))
    with torch.no_grad():
        model(tokens, use_cache=False)
        handle.remove()
        (state,), calls = capture_calls(model, blocks, [tokens])
        for fqn, module in blocks.items():
            state = replay(module, state, calls[fqn][0])
    assert torch.equal(state, first(seen["out"]))


@pytest.mark.parametrize(
    ("architecture", "pruner", "pattern", "dtype"),
    pairs(TINY_CONFIGS, SPECS, [Unstructured(0.5, "row"), NM(2, 4)], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_every_architecture_is_pruned_to_the_exact_count_and_keeps_its_dtype(architecture, pruner, pattern, dtype):
    model = tiny_model(architecture, dtype=dtype)
    plan = plan_all(model, SPECS[pruner], pattern)
    pruned = list(prune_model(InMemory(model), plan, batches()))
    assert len(pruned) == 3
    found = survey(model).linears
    for block in pruned:
        for layer in block.report.layers:
            weight = found[layer.name].weight
            assert weight.dtype == dtype
            assert layer.sparsity == 0.5
            assert torch.equal(weight != 0, block.masks[layer.name].keep)
            assert not torch.signbit(weight[weight == 0]).any()
    with torch.no_grad():
        assert torch.isfinite(model(tiny_tokens(), use_cache=False).logits).all()


@pytest.mark.parametrize("pruner", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_sparsity_zero_changes_no_bit(pruner, dtype):
    model, untouched = tiny_model("qwen2", dtype=dtype), tiny_model("qwen2", dtype=dtype)
    list(prune_model(InMemory(model), plan_all(model, SPECS[pruner], Unstructured(0.0)), batches()))
    for (name, now), before in zip(model.state_dict().items(), untouched.state_dict().values(), strict=True):
        assert torch.equal(now, before), name


def test_masks_hold_the_digests_of_the_weights_from_before():
    model, dense = tiny_model("llama"), tiny_model("llama")
    masks = {}
    for block in prune_model(InMemory(model), plan_all(model, SPECS["wanda"], Unstructured(0.5)), batches()):
        masks |= block.masks
    MaskSet(masks).apply(dense, original=True)  # refuses weights of another digest
    assert all(torch.equal(x.weight, survey(model).linears[n].weight) for n, x in survey(dense).linears.items())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_wandas_masks_equal_those_of_a_slow_float64_reading_of_the_paper(architecture):
    model, dense = tiny_model(architecture), tiny_model(architecture).double()
    plan = plan_all(model, SPECS["wanda"], Unstructured(0.5, "row"))
    first = next(iter(prune_model(InMemory(model), plan, batches())))
    inputs: dict[str, torch.Tensor] = {}
    linears = {n: x for n, x in survey(dense).linears.items() if n in first.masks}
    hooks = [
        x.module.register_forward_pre_hook(lambda m, args, n=n: inputs.__setitem__(n, args[0]))
        for n, x in linears.items()
    ]
    with torch.no_grad():
        dense(tiny_tokens(), use_cache=False)
    for hook in hooks:
        hook.remove()
    for name, linear in linears.items():
        x = inputs[name].reshape(-1, linear.in_features)
        agree = 0
        for row in range(linear.out_features):
            score = torch.tensor([abs(linear.weight[row, j]) * x[:, j].norm() for j in range(linear.in_features)])
            dropped = set(score.argsort()[: linear.in_features // 2].tolist())
            agree += dropped == set((~first.masks[name].keep[row]).nonzero().flatten().tolist())
        assert agree / linear.out_features > 0.97, name  # float32 may swap two nearly equal scores


def test_the_hessian_that_a_pruner_is_given_is_that_of_the_inputs_under_pruned_predecessors():
    model = tiny_model("llama")
    seen: dict[str, torch.Tensor] = {}

    class Spy:
        def observe(self, block, name):
            return Hessian(block.linears[name].in_features)

        def prune(self, block, patterns, stats):
            seen.update({n: s.matrix.clone() for n, s in stats.items()})
            return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}

    plan = plan_all(model, spec_of(Spy()), Unstructured(0.6, "layer"))
    list(prune_model(InMemory(model), plan, batches()))
    # Rebuild the state before block 2 was pruned: blocks 0 and 1 pruned, block 2 dense.
    expected_model = tiny_model("llama")
    two = Plan(tuple(x for x in plan.linears if ".2." not in x.name), {}, plan.rules, needs_calibration=True)
    list(prune_model(InMemory(expected_model), two, batches()))
    caught = []
    target = expected_model.model.layers[2].mlp.down_proj
    hook = target.register_forward_pre_hook(lambda m, args: caught.append(args[0]))
    with torch.no_grad():
        expected_model(tiny_tokens(), use_cache=False)
    hook.remove()
    x = caught[0].reshape(-1, 96).double()
    torch.testing.assert_close(seen["model.layers.2.mlp.down_proj"].double(), x.T @ x, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_batches_of_any_size_give_the_same_masks(size):
    masks = {}
    for s in (size, 4):
        model = tiny_model("qwen3")
        for block in prune_model(
            InMemory(model), plan_all(model, SPECS["sparsegpt"], Unstructured(0.5, "row")), batches(s)
        ):
            masks.setdefault(s, {}).update(block.masks)
    bits = [(a.keep, masks[4][n].keep) for n, a in masks[size].items()]
    differing = sum(int((a != b).sum()) for a, b in bits) / sum(a.numel() for a, _ in bits)
    assert differing < 2e-3


@pytest.mark.parametrize("tokens", [10**6, 100], ids=["all", "first-batch"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mixtral"])
def test_a_blocks_error_is_that_of_its_output_on_the_pruned_stream(architecture, tokens, monkeypatch):
    monkeypatch.setattr(prune, "_MEASURED_TOKENS", tokens)
    dense, model = tiny_model(architecture), tiny_model(architecture)
    plan = plan_all(model, wanda.compressx_pruners()[0], Unstructured(0.5, "row"))
    reports = [block.report for block in prune_model(InMemory(model), plan, batches())]
    seen: dict[str, list[tuple]] = {}

    def record(fqn):
        return lambda _module, args, kwargs, output: seen.setdefault(fqn, []).append((args, kwargs, output))

    for fqn in survey(model).blocks:
        model.get_submodule(fqn).register_forward_hook(record(fqn), with_kwargs=True)
    given = batches() if tokens > 1000 else batches()[:1]
    with torch.no_grad():
        for ids in given:
            model(ids, use_cache=False)
        for report in reports:
            module = dense.get_submodule(report.fqn)
            before = torch.cat([first(module(*args, **kwargs)) for args, kwargs, _ in seen[report.fqn]])
            after = torch.cat([first(output) for *_, output in seen[report.fqn]])
            assert report.output_error == pytest.approx(mean_error(after, before), rel=1e-3)
    assert all(report.output_error > 0 for report in reports)


def test_pruning_goes_on_after_the_last_finished_block():
    whole, parted = tiny_model("llama"), tiny_model("llama")
    plan = plan_all(whole, SPECS["sparsegpt"], Unstructured(0.5, "row"))
    expected = [block.report.fqn for block in prune_model(InMemory(whole), plan, batches())]
    stopped = prune_model(InMemory(parted), plan, batches())
    first = next(stopped)
    stopped.close()
    reached = prune.Finished(first.report.fqn, first.streams)
    rest = prune_model(InMemory(parted), plan, batches(), reached)
    assert [first.report.fqn, *(block.report.fqn for block in rest)] == expected
    assert all(torch.equal(now, parted.state_dict()[name]) for name, now in whole.state_dict().items())


def test_without_calibration_a_block_has_no_error():
    model = tiny_model("llama")
    plan = plan_all(model, magnitude.compressx_pruners()[0], Unstructured(0.5, "row"))
    assert {block.report.output_error for block in prune_model(InMemory(model), plan, [])} == {None}


def test_linears_with_the_same_input_share_one_statistic_and_others_do_not():
    model, spy = tiny_model("llama"), Spy()
    list(prune_model(InMemory(model), plan_all(model, spec_of(spy), Unstructured(0.5)), batches(2)))
    assert all(s.tokens == 8 * 32 for s in spy.given.values())
    at = "model.layers.1."
    q, k, v, o = (spy.given[f"{at}self_attn.{n}_proj"] for n in "qkvo")
    assert q is k is v
    assert o is not q
    assert spy.given[f"{at}mlp.gate_proj"] is spy.given[f"{at}mlp.up_proj"]
    assert spy.given[f"{at}mlp.gate_proj"] is not q
    assert spy.given["model.layers.0.self_attn.q_proj"] is not q


def test_a_linear_that_a_block_calls_twice_is_observed_twice_on_every_batch():
    model, spy = tiny_model("llama"), Spy()
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output + module.gate_proj(2.0 * args[0])[..., :64])
    plan = plan_all(model, spec_of(spy), Unstructured(0.5), only="layers.0.mlp.gate_proj")
    list(prune_model(InMemory(model), plan, batches(2)))
    assert spy.given["model.layers.0.mlp.gate_proj"].tokens == 2 * 8 * 32


def test_a_block_is_observed_only_as_far_as_the_last_linear_that_is_asked_about():
    model = tiny_model("llama")
    ran: list[str] = []
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        module = model.get_submodule(f"model.layers.0.{name}")
        module.register_forward_pre_hook(lambda _module, _args, name=name: ran.append(name))
    plan = plan_all(model, SPECS["wanda"], Unstructured(0.5), only="0.self_attn.q_proj")
    list(prune_model(InMemory(model), plan, batches(2)))
    # The first batch tells in what order they are called; the block's error is measured before and after on all four.
    assert ran == ["self_attn.o_proj", "mlp.down_proj"] * (1 + 2 * 4)


def test_separable_linears_are_written_one_by_one_and_only_after_what_has_to_see_the_block_whole():
    model = tiny_model("llama")
    dense = {n: x.weight.clone() for n, x in survey(model).linears.items()}
    asked: list[tuple[str, set[str]]] = []

    class Spy:
        def __init__(self, name: str) -> None:
            self.name = name

        def observe(self, block, name):
            return FeatureNorms(block.linears[name].in_features)

        def prune(self, block, patterns, stats):
            changed = {n for n, x in block.linears.items() if not torch.equal(x.weight, dense[n])}
            asked.append((f"{self.name} {' '.join(n.rpartition('.')[2] for n in patterns)}", changed))
            return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}

    at = "model.layers.0."
    rules = [
        PlannedRule(0, spec_of(Spy("apart"), separable=True), NoOptions(), None, None),
        PlannedRule(1, spec_of(Spy("whole")), NoOptions(), None, None),
    ]
    linears = tuple(
        PlannedLinear(n, "model.layers.0", tuple(x.weight.shape), rules["mlp" in n], Unstructured(0.5))
        for n, x in survey(model).linears.items()
        if n.startswith(at)
    )
    (block,) = prune_model(InMemory(model), Plan(linears, {}, tuple(rules), needs_calibration=True), batches())
    mlp = {f"{at}mlp.{n}_proj" for n in ("gate", "up", "down")}
    qkv = {f"{at}self_attn.{n}_proj" for n in "qkv"}
    assert asked == [
        ("whole gate_proj up_proj down_proj", set()),
        ("apart q_proj k_proj v_proj", mlp),
        ("apart o_proj", mlp | qkv),
    ]
    assert [x.name for x in block.report.layers] == [x.name for x in linears]


def test_a_failure_of_an_installed_plugin_says_where_its_own_code_was(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    (site / "cx_installed").mkdir(parents=True)
    (site / "cx_installed/__init__.py").write_text(
        "import json\n\ndef observe(block, name):\n    return None\n\n"
        "def prune(block, patterns, stats):\n    return json.loads('{')\n"
    )
    monkeypatch.syspath_prepend(site)
    pruner = importlib.import_module("cx_installed")
    model = tiny_model("llama")
    with pytest.raises(PluginError, match=r"JSONDecodeError: .* \(.*cx_installed/__init__\.py, line 7\)$"):
        list(prune_model(InMemory(model), plan_all(model, spec_of(pruner), Unstructured(0.5)), ()))


def test_no_hook_and_no_replaced_forward_is_left_even_when_a_pruner_fails():
    model = tiny_model("llama")

    class Broken:
        def observe(self, block, name):
            return FeatureNorms(block.linears[name].in_features)

        def prune(self, block, patterns, stats):
            raise RuntimeError("boom")

    with pytest.raises(PluginError, match=r"on model\.layers\.0: RuntimeError: boom \(.*test_prune\.py, line \d+\)$"):
        list(prune_model(InMemory(model), plan_all(model, spec_of(Broken()), Unstructured(0.5)), batches()))
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)


def answering(result: Mapping[str, PruneResult] | None = None, make=None) -> PrunerSpec:
    class Answer:
        def observe(self, block, name):
            return None

        def prune(self, block, patterns, stats):
            return {n: make(block.linears[n], p) for n, p in patterns.items()} if make else result

    return spec_of(Answer())


HALF = Unstructured(0.5, "layer")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, p: PruneResult(torch.ones(2, 2) > 0), r"keep must be torch.bool \[64, 64\], got .*bool \[2, 2\]"),
        (lambda x, p: PruneResult(torch.ones(64, 64)), r"keep must be torch.bool \[64, 64\], got torch.float32"),
        (lambda x, p: PruneResult(torch.ones(64, 64, dtype=torch.bool)), r"means 2048 zeros of 4096, got 0"),
        (lambda x, p: PruneResult(keep_mask(x.weight, p), x.weight[:1]), r"weight must be a float tensor \[64, 64\]"),
        (lambda x, p: PruneResult(keep_mask(x.weight, p), x.weight * float("nan")), "NaN or infinite"),
    ],
)  # fmt: skip
def test_a_pruner_that_breaks_its_contract_is_named_with_the_layer_and_both_values(make, message):
    model = tiny_model("llama")
    with pytest.raises(PluginError, match=r"pruner 'other' on model\.layers\.0\.self_attn\.q_proj: .*" + message):
        list(prune_model(InMemory(model), plan_all(model, answering(make=make), HALF, only="q_proj"), ()))


@pytest.mark.parametrize(("result", "message"), [
    ([], r"on model\.layers\.0: prune must return a mapping .*, got list"),
    ({"model.layers.0.self_attn.q_proj": torch.ones(64, 64) > 0},
     r"on model\.layers\.0\.self_attn\.q_proj: expected a PruneResult, got Tensor; write PruneResult\(mask\)$"),
])  # fmt: skip
def test_an_answer_of_another_kind_is_refused(result, message):
    model = tiny_model("llama")
    with pytest.raises(PluginError, match="pruner 'other' " + message):
        list(prune_model(InMemory(model), plan_all(model, answering(result=result), HALF, only="q_proj"), ()))


@pytest.mark.parametrize("which", ["up_proj", "post_attention_layernorm"])
@pytest.mark.parametrize("through", ["view", "data"])
def test_a_pruner_that_writes_weights_itself_is_refused(which: str, through: str):
    model = tiny_model("llama")

    def meddle(linear: Linear, pattern: Unstructured) -> PruneResult:
        layer = model.model.layers[0]
        weight = (layer.mlp.up_proj if which == "up_proj" else layer.post_attention_layernorm).weight
        (weight.detach() if through == "view" else weight.data).view(-1)[3] += 1e-3
        return PruneResult(keep_mask(linear.weight, pattern))

    with pytest.raises(PluginError, match=rf"pruner 'other' changed .*{which}\.weight of model\.layers\.0 itself"):
        list(prune_model(InMemory(model), plan_all(model, answering(make=meddle), HALF, only="q_proj"), ()))


@pytest.mark.parametrize("moment", [0, 1, 6])
def test_a_pruner_that_writes_weights_which_others_decide_is_refused(moment: int):
    """When the first linear of a block is asked for, the last, or what was decided already."""
    model = tiny_model("llama")
    asked: list[str] = []

    def meddle(linear: Linear, pattern: Unstructured) -> PruneResult:
        mlp = model.model.layers[0].mlp
        if len(asked) == moment:
            (mlp.up_proj if moment < 6 else model.model.layers[0].self_attn.q_proj).weight.data[1, 3] += 1e-3
        asked.append(linear.name)
        return PruneResult(keep_mask(linear.weight, pattern))

    spec = replace(answering(make=meddle), separable=True)
    with pytest.raises(PluginError, match=r"pruner 'other' changed \S+_proj\.weight of model\.layers\.0 itself"):
        list(prune_model(InMemory(model), plan_all(model, spec, HALF), ()))
    assert {name.split(".")[2] for name in asked} == {"0"}


def test_a_pruner_is_not_asked_about_weights_that_another_changed():
    """Both see their linears of the block whole; which of the two it was cannot be told."""
    model = tiny_model("llama")
    asked: list[str] = []

    class Writes(Spy):
        def prune(self, block, patterns, stats):
            asked.extend(patterns)
            model.model.layers[0].mlp.up_proj.weight.data[1, 3] += 1e-3
            return super().prune(block, patterns, stats)

    rules = [PlannedRule(i, spec_of(Writes(), name), NoOptions(), None, None) for i, name in enumerate(("one", "two"))]
    linears = tuple(
        PlannedLinear(n, "model.layers.0", tuple(x.weight.shape), rules["mlp" in n], Unstructured(0.5))
        for n, x in survey(model).linears.items()
        if n.startswith("model.layers.0.")
    )
    with pytest.raises(
        PluginError, match=r"pruner 'one' or 'two' changed mlp\.up_proj\.weight of model\.layers\.0 itself"
    ):
        list(prune_model(InMemory(model), Plan(linears, {}, tuple(rules), needs_calibration=True), batches()))
    assert not any("mlp" in name for name in asked)


def test_a_pruner_that_forgets_a_linear_is_refused():
    model = tiny_model("llama")
    with pytest.raises(PluginError, match=r"expected results for .*q_proj.*, got \[\]"):
        list(prune_model(InMemory(model), plan_all(model, answering(result={}), HALF, only="q_proj"), ()))


def test_a_joint_budget_that_is_not_met_in_total_is_refused():
    model = tiny_model("llama")
    spec = answering(make=lambda x, p: PruneResult(torch.ones_like(x.weight, dtype=torch.bool)))
    with pytest.raises(PluginError, match=r"50% joint means 6144 zeros over .*, got 0"):
        list(prune_model(InMemory(model), plan_all(model, spec, Unstructured(0.5, "joint"), only=".0.self_attn."), ()))


def test_one_pruner_selects_and_another_reconstructs():
    selected, rebuilt = tiny_model("llama"), tiny_model("llama")
    masks = [
        {n: e.keep for block in prune_model(InMemory(m), plan, batches()) for n, e in block.masks.items() if ".0." in n}
        for m, plan in (
            (selected, plan_all(selected, SPECS["wanda"], HALF, only=".0.")),
            (rebuilt, plan_all(rebuilt, SPECS["wanda"], HALF, only=".0.", reconstructor=SPECS["sparsegpt"])),
        )
    ]
    assert all(torch.equal(masks[0][n], masks[1][n]) for n in masks[0])
    name = "model.layers.0.mlp.down_proj"
    weights = [survey(m).linears[name].weight for m in (selected, rebuilt)]
    assert not torch.equal(*weights)
    assert torch.equal(weights[0] == 0, weights[1] == 0)


@pytest.mark.parametrize("of", [1, 4])
def test_a_selector_and_a_reconstructor_that_ask_for_the_same_statistic_are_given_one(of):
    model = tiny_model("llama")
    plan = plan_all(model, SPECS["sparsegpt"], HALF, reconstructor=SPECS["alps"])
    reports = [block.report for block in prune_model(InMemory(model), plan, batches(of))]
    assert sum(len(r.layers) for r in reports) == 21
    assert all({"damping", "linear_error"} <= x.info.keys() for r in reports for x in r.layers)


def test_a_reconstructor_that_changes_the_mask_is_refused():
    class Stubborn:
        def observe(self, block, name):
            return None

        def prune(self, block, patterns: Mapping[str, Pattern], stats):
            assert all(isinstance(p, FixedMask) for p in patterns.values())
            return {n: PruneResult(p.keep.flip(0)) for n, p in patterns.items()}

    model = tiny_model("llama")
    plan = plan_all(
        model, SPECS["magnitude"], HALF, only="q_proj", reconstructor=spec_of(Stubborn(), reconstructs=True)
    )
    with pytest.raises(PluginError, match="must return the mask that it was given"):
        list(prune_model(InMemory(model), plan, ()))


def test_an_untied_head_is_pruned_on_the_states_that_reach_it():
    model = tiny_model("llama")
    plan = plan_all(model, SPECS["wanda"], Unstructured(0.5, "row"), outside=True)
    *_, head = prune_model(InMemory(model), plan, batches())
    assert head.report.fqn == ""
    assert [x.name for x in head.report.layers] == ["lm_head"]
    expected_model = tiny_model("llama")
    blocks_only = Plan(tuple(x for x in plan.linears if x.block), {}, plan.rules, needs_calibration=True)
    list(prune_model(InMemory(expected_model), blocks_only, batches()))
    caught = []
    expected_model.lm_head.register_forward_pre_hook(lambda m, args: caught.append(args[0]))
    with torch.no_grad():
        expected_model(tiny_tokens(), use_cache=False)
    scores = expected_model.lm_head.weight.abs() * caught[0].reshape(-1, 64).norm(dim=0)
    expected = keep_mask(scores.detach(), Unstructured(0.5, "row"))
    assert (expected != head.masks["lm_head"].keep).float().mean() < 2e-3


def test_a_module_that_no_token_reaches_is_an_error_that_names_it():
    model = tiny_model("llama")
    model.model.layers[1].mlp.unused = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(CalibrationError, match=r"no calibration token reached model\.layers\.1\.mlp\.unused"):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF), batches()))


def test_activations_that_are_not_finite_name_the_layer():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.fill_(3e38)
    with pytest.raises(CalibrationError, match=r"input of model\.layers\.1\.mlp\.down_proj has NaN or infinite"):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF, only="proj"), batches()))


def test_a_model_that_changes_states_between_blocks_is_refused():
    model = tiny_model("llama")
    block = model.model.layers[1]
    block.register_forward_pre_hook(lambda m, args: (args[0] * 1.0, *args[1:]))
    with pytest.raises(UnsupportedModelError, match=r"between model\.layers\.0 and this block"):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF), batches()))


def test_each_fused_expert_is_pruned_on_the_tokens_that_its_router_sends_it():
    model, dense = tiny_model("mixtral"), tiny_model("mixtral")
    plan = plan_all(model, SPECS["wanda"], Unstructured(0.5, "row"), only=".0.mlp.experts.")
    (pruned,) = prune_model(InMemory(model), plan, batches())
    caught = []
    mlp = dense.model.layers[0].mlp
    hook = mlp.register_forward_pre_hook(lambda m, args: caught.append(args[0]))
    with torch.no_grad():
        dense(tiny_tokens(), use_cache=False)
        hook.remove()
        hidden = caught[0].reshape(-1, 64)
        _, _, chosen = mlp.gate(hidden)  # [tokens, 2]
        for expert in range(4):
            mine = hidden[(chosen == expert).any(dim=1)]
            assert 0 < len(mine) < len(hidden)
            gate, up = (mine @ mlp.experts.gate_up_proj[expert].T).chunk(2, dim=1)
            for parameter, x in (("gate_up_proj", mine), ("down_proj", mlp.experts.act_fn(gate) * up)):
                scores = getattr(mlp.experts, parameter)[expert].abs() * x.norm(dim=0)
                got = pruned.masks[f"model.layers.0.mlp.experts.{parameter}.{expert}"].keep
                differing = (keep_mask(scores, Unstructured(0.5, "row")) != got).float().mean()
                assert differing < 2e-3, (parameter, expert)
    assert model.model.layers[0].mlp.experts.config._experts_implementation == dense.config._experts_implementation


def test_an_expert_that_no_token_reaches_is_an_error_that_names_it():
    model = tiny_model("mixtral")
    with torch.no_grad():
        gate = model.model.layers[1].mlp.gate.weight
        gate[3] = -gate[:3].sum(dim=0) * 100
        model.model.layers[1].post_attention_layernorm.weight.zero_()
    with pytest.raises(CalibrationError, match=r"no calibration token reached model\.layers\.1\.mlp\.experts\."):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF), batches()))


def test_a_linear_that_shares_its_input_on_some_batches_only_is_refused_instead_of_summed_with_another():
    model = tiny_model("llama")

    def copy_later(module, args):
        return args if len(args[0]) == 5 else (args[0].clone(),)

    # Runs before the host's own hook, so that hook sees the copy.
    model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(copy_later)
    with pytest.raises(
        UnsupportedModelError, match=r"self_attn\.k_proj shared its input with another linear on the first"
    ):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF), batches(5)))


def test_a_linear_that_shares_its_input_only_later_keeps_a_statistic_of_its_own():
    model, spy = tiny_model("llama"), Spy()
    model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(
        lambda module, args: (args[0].clone(),) if len(args[0]) == 5 else args
    )
    plan = plan_all(model, spec_of(spy), HALF, only=".0.self_attn.")
    list(prune_model(InMemory(model), plan, batches(5)))
    query, key = (spy.given[f"model.layers.0.self_attn.{n}_proj"] for n in "qk")
    assert query is not key
    assert query.tokens == key.tokens == 8 * 32
    torch.testing.assert_close(query.squares, key.squares)


def test_linears_that_share_their_input_in_one_process_only_are_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(Ranks, "all_gather", lambda self, told: [told, told[:1]])
    with pytest.raises(UnsupportedModelError, match="share inputs in one process and not in another"):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF), batches(), ranks=Ranks(0, 2)))


def showing(**shown: object) -> PrunerSpec:
    """Make a pruner that gives the same objects to all linears of a block."""
    return answering(make=lambda x, p: PruneResult(keep_mask(x.weight.abs(), p), **shown))  # type: ignore[arg-type]


def test_matrices_and_curves_come_out_of_the_walk_and_what_linears_share_they_still_share():
    model = tiny_model("llama")
    info, images, history = {"error": 0.5}, {"dense": torch.eye(4)}, {"loss": [3, 2.5]}
    plan = plan_all(model, showing(info=info, images=images, history=history), HALF, only=".0.self_attn.")
    (block,) = prune_model(InMemory(model), plan, ())
    first, *others = block.report.layers
    assert (first.info, first.history) == ({"error": 0.5}, {"loss": (3.0, 2.5)})
    assert first.info is not info, "what a plugin goes on using is copied"
    assert len(others) == 3
    assert all(x.info is first.info and x.history is first.history for x in others)
    assert all(block.images[x.name] is images for x in block.report.layers)


def test_a_pruner_that_shows_nothing_shares_nothing():
    model = tiny_model("llama")
    (block,) = prune_model(InMemory(model), plan_all(model, SPECS["magnitude"], HALF, only=".0.self_attn."), ())
    assert not any(x.info or x.history or block.images[x.name] for x in block.report.layers)


def test_what_the_selector_showed_stays_beside_what_the_reconstructor_shows():
    class Rebuild:
        info, history = {"damping": 0.1}, {"residual": [1.0]}

        def observe(self, block, name):
            return None

        def prune(self, block, patterns, stats):
            return {n: PruneResult(p.keep, None, self.info, {}, self.history) for n, p in patterns.items()}

    model = tiny_model("llama")
    images = {"dense": torch.eye(4)}
    selector = showing(info={"error": 0.5}, images=images, history={"loss": [2.0]})
    rebuilding = spec_of(Rebuild(), "rebuild", reconstructs=True)
    (block,) = prune_model(
        InMemory(model), plan_all(model, selector, HALF, only=".0.self_attn.", reconstructor=rebuilding), ()
    )
    first, second, *_ = block.report.layers
    assert first.info == {"error": 0.5, "damping": 0.1}
    assert first.history == {"loss": (2.0,), "residual": (1.0,)}
    assert first.info is second.info
    assert first.history is second.history
    assert block.images[first.name] is block.images[second.name] is images


@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ({"images": {"p": torch.ones(2, 3)[0]}}, r"image 'p' must be a real tensor \[rows, columns\], got .*32 \[3\]"),
        ({"images": {"p": torch.ones(0, 3)}}, r"image 'p' must be .*, got torch.float32 \[0, 3\]"),
        ({"images": {"p": [[1.0]]}}, r"image 'p' must be .*, got list"),
        ({"images": {"p": torch.full((2, 2), float("nan"))}}, r"image 'p' has entries that are NaN or infinite"),
        ({"history": {"loss": []}}, r"history 'loss' is empty"),
        ({"history": {"loss": 3.0}}, r"history 'loss' must be a sequence of numbers, got 3.0"),
        ({"info": {"e": "half"}}, r"info 'e' must be a finite number, got 'half'$"),
        ({"info": {"e": float("nan")}}, r"info 'e' must be a finite number, got nan"),
        ({"info": {"e": torch.tensor(0.5)}}, r"info 'e' must be a finite number, got tensor\(0.5000\); write float"),
        ({"history": {"loss": [1.0, float("inf")]}}, r"history 'loss' must be finite numbers, got inf at step 2"),
        ({"history": {"loss": ["1.0"]}}, r"history 'loss' must be finite numbers, got '1.0' at step 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_with_plugin_and_layer(shown, message):
    model = tiny_model("llama")
    with pytest.raises(PluginError, match=r"pruner 'other' on model\.layers\.0\.self_attn\.q_proj: " + message):
        list(prune_model(InMemory(model), plan_all(model, showing(**shown), HALF, only="q_proj"), ()))
