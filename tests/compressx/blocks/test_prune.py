from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.built_in import BUILT_IN
from tests.compressx.plans import NoOptions, plan_all, spec_of
from tests.compressx.references import mean_error
from tests.pairs import pairs

from compressx import Linear, PluginError, PruneResult, PrunerSpec, UnsupportedModelError
from compressx.api.patterns import NM, Unstructured, keep_mask
from compressx.api.statistics import FeatureNorms, Hessian
from compressx.blocks import prune
from compressx.blocks.observe import SharedStatistic, observe
from compressx.blocks.prune import prune_model
from compressx.masks.maskset import MaskSet
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import capture_calls, replay
from compressx.planning.plan import Plan, PlannedRule
from compressx.runtime.errors import CalibrationError
from compressx.runtime.ranks import Ranks
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

SPECS = {name: BUILT_IN[name] for name in ("magnitude", "wanda", "sparsegpt", "alps")}
HALF, ROW = Unstructured(0.5, "layer"), Unstructured(0.5, "row")


def by_magnitude(linear, pattern, **shown):
    return PruneResult(keep_mask(linear.weight.abs(), pattern), **shown)


class Spy:
    """Asks for a statistic, keeps what it is given, and answers with what `make` makes: magnitude's mask."""

    def __init__(self, statistic=FeatureNorms, make=by_magnitude):
        self.statistic, self.make, self.given = statistic, make, {}

    def observe(self, block, name):
        return self.statistic and self.statistic(block.linears[name].in_features)

    def prune(self, block, patterns, stats):
        self.given |= stats
        return {n: self.make(block.linears[n], p) for n, p in patterns.items()}


def plan_two(model, attention: PrunerSpec, mlp: PrunerSpec) -> Plan:
    """Plan a rule over the attention of the first block and another over its MLP."""
    rules = tuple(PlannedRule(i, ((spec, NoOptions()),)) for i, spec in enumerate((attention, mlp)))
    linears = plan_all(model, attention, Unstructured(0.5), only="layers.0.").linears
    return Plan(tuple(replace(x, rule=rules["mlp" in x.name]) for x in linears), {}, rules, needs_calibration=True)


def batches(size: int = 4) -> tuple[torch.Tensor, ...]:
    return tiny_tokens().split(size)


def pruned(model, spec, pattern=HALF, given=None, **planned):
    """Prune every linear whose name contains `only` and return the blocks."""
    given = batches() if given is None else given
    return list(prune_model(InMemory(model), plan_all(model, spec, pattern, **planned), given))


def first(output):
    """Return a block's hidden states: some blocks return them alone, others in a tuple."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def inputs_of(modules: dict[str, torch.nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Keep the last input of every module that the block calls."""
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, n=n: seen.__setitem__(n, args[0].detach()))
        for n, m in modules.items()
    ]
    with torch.no_grad():
        yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("architecture", "dtype"), list(zip(TINY_CONFIGS, cycle([torch.float32, torch.bfloat16]))), ids=str
)
def test_replaying_the_blocks_one_by_one_gives_what_the_model_computes(architecture, dtype):
    model = tiny_model(architecture, dtype=dtype)
    blocks = architecture_of(model).blocks
    tokens = tiny_tokens(sequences=3)
    seen = {}
    handle = list(blocks.values())[-1].register_forward_hook(lambda m, a, out: seen.__setitem__("out", out))
    with torch.no_grad():
        model(tokens, use_cache=False)
        handle.remove()
        (state,), calls = capture_calls(model, blocks, [tokens])
        for fqn, module in blocks.items():
            state = replay(module, state, calls[fqn][0])
    assert torch.equal(state, first(seen["out"]))


WALKS = pairs(SPECS, [ROW, NM(2, 4)], [torch.float32, torch.bfloat16])


@pytest.mark.parametrize(
    ("architecture", "pruner", "pattern", "dtype"),
    [(architecture, *walk) for architecture, walk in zip(TINY_CONFIGS, cycle(WALKS))],
    ids=str,
)
def test_every_architecture_is_pruned_to_the_exact_count_and_keeps_its_dtype(architecture, pruner, pattern, dtype):
    model = tiny_model(architecture, dtype=dtype)
    blocks = pruned(model, SPECS[pruner], pattern)
    assert len(blocks) == 3
    found = architecture_of(model).linears
    for block in blocks:
        for layer in block.report.layers:
            weight = found[layer.name].weight
            assert weight.dtype == dtype
            assert layer.sparsity == 0.5
            assert torch.equal(weight != 0, block.masks[layer.name].keep)
            assert not torch.signbit(weight[weight == 0]).any()
    with torch.no_grad():
        assert torch.isfinite(model(tiny_tokens(), use_cache=False).logits).all()


@pytest.mark.parametrize(("pruner", "dtype"), list(zip(SPECS, cycle([torch.bfloat16, torch.float32]))), ids=str)
def test_sparsity_zero_changes_no_bit(pruner, dtype):
    model, untouched = tiny_model("qwen2", dtype=dtype), tiny_model("qwen2", dtype=dtype)
    pruned(model, SPECS[pruner], Unstructured(0.0))
    for (name, now), before in zip(model.state_dict().items(), untouched.state_dict().values(), strict=True):
        assert torch.equal(now, before), name


def test_masks_hold_the_digests_of_the_weights_from_before():
    model, dense = tiny_model("llama"), tiny_model("llama")
    masks = {n: mask for block in pruned(model, SPECS["wanda"]) for n, mask in block.masks.items()}
    MaskSet(masks).apply(dense, original=True)  # refuses weights of another digest
    before, after = (architecture_of(x).linears for x in (dense, model))
    assert all(torch.equal(x.weight, after[n].weight) for n, x in before.items())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_wandas_masks_equal_those_of_a_float64_reading_of_the_paper(architecture):
    model, dense = tiny_model(architecture), tiny_model(architecture).double()
    block = next(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], ROW), batches()))
    linears = {n: x for n, x in architecture_of(dense).linears.items() if n in block.masks}
    with inputs_of({n: x.module for n, x in linears.items()}) as inputs:
        dense(tiny_tokens(), use_cache=False)
    for name, linear in linears.items():
        scores = linear.weight.abs() * inputs[name].flatten(0, -2).norm(dim=0)
        dropped = scores.argsort(dim=1)[:, : linear.in_features // 2]
        expected = torch.ones_like(scores, dtype=torch.bool).scatter(1, dropped, value=False)
        same = (expected == block.masks[name].keep).all(dim=1).double().mean()
        assert same > 0.97, name  # float32 may swap two nearly equal scores


def test_the_hessian_that_a_pruner_is_given_is_that_of_the_inputs_under_pruned_predecessors():
    model, expected = tiny_model("llama"), tiny_model("llama")
    spy = Spy(Hessian)
    plan = plan_all(model, spec_of(spy), Unstructured(0.6, "layer"))
    list(prune_model(InMemory(model), plan, batches()))
    # Rebuild the state before block 2 was pruned: blocks 0 and 1 pruned, block 2 dense.
    two = replace(plan, linears=tuple(x for x in plan.linears if ".2." not in x.name))
    list(prune_model(InMemory(expected), two, batches()))
    name = "model.layers.2.mlp.down_proj"
    with inputs_of({name: expected.get_submodule(name)}) as inputs:
        expected(tiny_tokens(), use_cache=False)
    x = inputs[name].flatten(0, 1).double()
    torch.testing.assert_close(spy.given[name].matrix.double(), x.T @ x, rtol=1e-4, atol=1e-3)


def test_batches_of_any_size_give_the_same_masks():
    masks = []
    for size in (4, 1, 3, 8):
        blocks = pruned(tiny_model("qwen3"), SPECS["sparsegpt"], ROW, batches(size))
        masks.append(torch.cat([mask.keep.flatten() for block in blocks for mask in block.masks.values()]))
        assert (masks[0] != masks[-1]).double().mean() < 2e-3, size


@pytest.mark.parametrize(
    ("architecture", "tokens"), [("llama", 10**6), ("gpt2", 100), ("gemma3", 10**6), ("mixtral", 100)]
)
def test_a_blocks_error_is_that_of_its_output_on_the_pruned_stream(architecture, tokens, monkeypatch):
    monkeypatch.setattr(prune, "MEASURED_TOKENS", tokens)  # of all batches, or of the first alone
    dense, model = tiny_model(architecture), tiny_model(architecture)
    reports = [block.report for block in pruned(model, SPECS["wanda"], ROW)]
    seen: dict[str, list[tuple]] = {}

    def record(fqn):
        return lambda _module, args, kwargs, output: seen.setdefault(fqn, []).append((args, kwargs, output))

    for fqn in architecture_of(model).blocks:
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
    plan = plan_all(whole, SPECS["sparsegpt"], ROW)
    expected = [block.report.fqn for block in prune_model(InMemory(whole), plan, batches())]
    stopped = prune_model(InMemory(parted), plan, batches())
    first = next(stopped)
    stopped.close()
    reached = (first.report.fqn, first.hidden)
    rest = prune_model(InMemory(parted), plan, batches(), reached)
    assert [first.report.fqn, *(block.report.fqn for block in rest)] == expected
    assert all(torch.equal(now, parted.state_dict()[name]) for name, now in whole.state_dict().items())


def test_without_calibration_a_block_has_no_error_and_a_pruner_that_shows_nothing_shares_nothing():
    for block in pruned(tiny_model("llama"), SPECS["magnitude"], ROW, []):
        assert block.report.output_error is None
        assert not any(x.info or x.history or block.images[x.name] for x in block.report.layers)


def test_linears_with_the_same_input_share_one_statistic_and_others_do_not():
    spy = Spy()
    pruned(tiny_model("llama"), spec_of(spy), given=batches(2))
    assert all(s.count == 8 * 32 for s in spy.given.values())
    at = "model.layers.1."
    q, k, v, o = (spy.given[f"{at}self_attn.{n}_proj"] for n in "qkvo")
    gate, up = (spy.given[f"{at}mlp.{n}_proj"] for n in ("gate", "up"))
    assert q is k is v
    assert gate is up
    assert len({id(x) for x in (q, o, gate, spy.given["model.layers.0.self_attn.q_proj"])}) == 4


def test_a_linear_that_a_block_calls_twice_is_observed_twice_on_every_batch():
    model, spy = tiny_model("llama"), Spy()
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output + module.gate_proj(2.0 * args[0])[..., :64])
    pruned(model, spec_of(spy), given=batches(2), only="layers.0.mlp.gate_proj")
    assert spy.given["model.layers.0.mlp.gate_proj"].count == 2 * 8 * 32


def test_separable_linears_are_written_one_by_one_and_only_after_what_has_to_see_the_block_whole():
    model = tiny_model("llama")
    dense = {n: x.weight.clone() for n, x in architecture_of(model).linears.items()}
    asked: list[tuple[str, set[str]]] = []

    class RulePattern(Spy):
        def prune(self, block, patterns, stats):
            changed = {n for n, x in block.linears.items() if not torch.equal(x.weight, dense[n])}
            asked.append((" ".join(n.rpartition(".")[2] for n in patterns), changed))
            return super().prune(block, patterns, stats)

    plan = plan_two(model, spec_of(RulePattern(), separable=True), spec_of(RulePattern()))
    (block,) = prune_model(InMemory(model), plan, batches())
    mlp = {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")}
    qkv = {f"model.layers.0.self_attn.{n}_proj" for n in "qkv"}
    assert asked == [("gate_proj up_proj down_proj", set()), ("q_proj k_proj v_proj", mlp), ("o_proj", mlp | qkv)]
    assert [x.name for x in block.report.layers] == [x.name for x in plan.linears]


def test_a_failure_of_an_installed_plugin_says_where_its_own_code_was(tmp_path, monkeypatch):
    site = tmp_path / "site-packages"
    (site / "cx_installed").mkdir(parents=True)
    (site / "cx_installed/__init__.py").write_text(
        "import json\n\ndef observe(block, name):\n    return None\n\n"
        "def prune(block, patterns, stats):\n    return json.loads('{')\n"
    )
    monkeypatch.syspath_prepend(site)
    pruner = importlib.import_module("cx_installed")
    with pytest.raises(PluginError, match=r"JSONDecodeError: .* \(.*cx_installed/__init__\.py, line 7\)$"):
        pruned(tiny_model("llama"), spec_of(pruner), given=())


def test_no_hook_and_no_replaced_forward_is_left_even_when_a_pruner_fails():
    def boom(linear, pattern):
        raise RuntimeError("boom")

    model = tiny_model("llama")
    with pytest.raises(PluginError, match=r"on model\.layers\.0: RuntimeError: boom \(.*test_prune\.py, line \d+\)$"):
        pruned(model, spec_of(Spy(make=boom)))
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)


def made(make: Callable[..., Any]) -> PrunerSpec:
    """Make a pruner that observes nothing and gives each linear and pattern to `make`."""
    return spec_of(Spy(None, make))


def answering(result: object) -> PrunerSpec:
    spy = Spy(None)
    spy.prune = lambda block, patterns, stats: result
    return spec_of(spy)


def showing(**shown: object) -> PrunerSpec:
    """Make a pruner that gives the same objects to all linears of a block."""
    return made(lambda x, p: by_magnitude(x, p, **shown))


QUERY = r"\.self_attn\.q_proj: .*"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (made(lambda x, p: PruneResult(torch.ones(2, 2) > 0)),
         QUERY + r"keep must be torch.bool \[64, 64\], got .*bool \[2, 2\]"),
        (made(lambda x, p: PruneResult(torch.ones(64, 64))),
         QUERY + r"keep must be torch.bool \[64, 64\], got torch.float32"),
        (made(lambda x, p: PruneResult([[True]])), QUERY + r"keep must be a torch.Tensor, got list$"),
        (made(lambda x, p: PruneResult(None)), QUERY + r"keep must be a torch.Tensor, got NoneType$"),
        (made(lambda x, p: by_magnitude(x, p, weight=x.weight.numpy())),
         QUERY + r"weight must be a torch.Tensor, got ndarray$"),
        (made(lambda x, p: by_magnitude(x, p, bias=[0.0])), QUERY + r"bias must be a torch.Tensor, got list$"),
        (showing(info=["e"]), QUERY + r"info must be a mapping from names, got list$"),
        (showing(images=None), QUERY + r"images must be a mapping from names, got NoneType$"),
        (showing(history=[1.0]), QUERY + r"history must be a mapping from names, got list$"),
        (made(lambda x, p: PruneResult(x.weight == x.weight)), QUERY + r"means 2048 zeros of 4096, got 0"),
        (made(lambda x, p: by_magnitude(x, p, weight=x.weight[:1])),
         QUERY + r"weight must be a float tensor \[64, 64\]"),
        (made(lambda x, p: by_magnitude(x, p, weight=x.weight * float("nan"))), QUERY + "NaN or infinite"),
        (answering([]), r": prune must return a mapping .*, got list"),
        (answering({"model.layers.0.self_attn.q_proj": torch.ones(64, 64) > 0}),
         QUERY + r"expected a PruneResult, got Tensor; write PruneResult\(mask\)$"),
        (answering({}), r": expected results for .*q_proj.*, got \[\]"),
        (showing(images={"p": torch.ones(2, 3)[0]}),
         QUERY + r"image 'p' must be a real tensor \[rows, columns\], got .*32 \[3\]"),
        (showing(images={"p": torch.ones(0, 3)}), QUERY + r"image 'p' must be .*, got torch.float32 \[0, 3\]"),
        (showing(images={"p": [[1.0]]}), QUERY + r"image 'p' must be .*, got list"),
        (showing(images={"p": torch.full((2, 2), float("nan"))}),
         QUERY + r"image 'p' has entries that are NaN or infinite"),
        (showing(history={"loss": []}), QUERY + r"history 'loss' is empty"),
        (showing(history={"loss": 3.0}), QUERY + r"history 'loss' must be a sequence of numbers, got 3.0"),
        (showing(info={"e": "half"}), QUERY + r"info 'e' must be a finite number, got 'half'$"),
        (showing(info={"e": float("nan")}), QUERY + r"info 'e' must be a finite number, got nan"),
        (showing(info={"e": torch.tensor(0.5)}),
         QUERY + r"info 'e' must be a finite number, got tensor\(0.5000\); write float"),
        (showing(history={"loss": [1.0, float("inf")]}),
         QUERY + r"history 'loss' must be finite numbers, got inf at step 2"),
        (showing(history={"loss": ["1.0"]}), QUERY + r"history 'loss' must be finite numbers, got '1.0' at step 1"),
    ],
)  # fmt: skip
def test_a_pruner_that_breaks_its_contract_is_named_with_the_layer_and_both_values(spec, message):
    with pytest.raises(PluginError, match=rf"pruner 'other' on model\.layers\.0{message}"):
        pruned(tiny_model("llama"), spec, given=(), only="q_proj")


@pytest.mark.parametrize("part", ["keep", "weight"])
def test_a_part_of_an_answer_that_is_left_on_the_host_is_refused(part):
    def make(linear, pattern):
        answer = by_magnitude(linear, pattern, weight=linear.weight.clone())
        return replace(answer, **{part: getattr(answer, part).cpu()})

    message = rf"q_proj: {part} is on cpu, expected the weight's device, cuda:0; make"
    with pretended_accelerator(), pytest.raises(PluginError, match=message):
        pruned(tiny_model("llama").to("cuda"), made(make), given=(), only="q_proj")


def test_a_joint_budget_that_is_not_met_in_total_is_refused():
    spec = made(lambda x, p: PruneResult(x.weight == x.weight))
    with pytest.raises(PluginError, match=r"50% joint means 6144 zeros over .*, got 0"):
        pruned(tiny_model("llama"), spec, Unstructured(0.5, "joint"), (), only=".0.self_attn.")


@pytest.mark.parametrize("which", ["mlp.up_proj", "post_attention_layernorm"])
def test_a_pruner_that_writes_weights_itself_is_refused(which: str):
    model = tiny_model("llama")

    def meddle(linear: Linear, pattern: Unstructured) -> PruneResult:
        model.model.layers[0].get_submodule(which).weight.detach().view(-1)[3] += 1e-3
        return by_magnitude(linear, pattern)

    with pytest.raises(PluginError, match=rf"pruner 'other' changed .*{which}\.weight of model\.layers\.0 itself"):
        pruned(model, made(meddle), given=(), only="q_proj")


def test_one_pruner_selects_and_another_reconstructs():
    models = tiny_model("llama"), tiny_model("llama")
    (selected,), (rebuilt,) = (
        pruned(model, SPECS["wanda"], only=".0.", reconstructor=reconstructor)
        for model, reconstructor in zip(models, (None, SPECS["sparsegpt"]), strict=True)
    )
    assert all(torch.equal(mask.keep, rebuilt.masks[n].keep) for n, mask in selected.masks.items())
    weights = [architecture_of(m).linears["model.layers.0.mlp.down_proj"].weight for m in models]
    assert not torch.equal(*weights)
    assert torch.equal(weights[0] == 0, weights[1] == 0)


def test_an_untied_head_is_pruned_on_the_states_that_reach_it():
    model, expected_model = tiny_model("llama"), tiny_model("llama")
    *_, head = pruned(model, SPECS["wanda"], ROW, outside=True)
    assert head.report.fqn == ""
    assert [x.name for x in head.report.layers] == ["lm_head"]
    pruned(expected_model, SPECS["wanda"], ROW)
    with inputs_of({"lm_head": expected_model.lm_head}) as inputs:
        expected_model(tiny_tokens(), use_cache=False)
    scores = expected_model.lm_head.weight.abs() * inputs["lm_head"].reshape(-1, 64).norm(dim=0)
    assert (keep_mask(scores.detach(), ROW) != head.masks["lm_head"].keep).float().mean() < 2e-3


def unused(model):
    model.model.layers[1].mlp.unused = torch.nn.Linear(64, 64, bias=False)


def overflowing(model):
    model.model.layers[1].mlp.up_proj.weight.data.fill_(3e38)


def changing_states(model):
    model.model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] * 1.0, *args[1:]))


def sharing_first(model):
    """Copy an input of the second batch. The hook runs before the host's own, so that hook sees the copy."""
    key = model.model.layers[0].self_attn.k_proj
    key.register_forward_pre_hook(lambda m, args: args if len(args[0]) == 5 else (args[0].clone(),))


def never_routing(model):
    gate = model.model.layers[1].mlp.gate.weight.data
    gate[3] = -gate[:3].sum(dim=0) * 100
    model.model.layers[1].post_attention_layernorm.weight.data.zero_()


@pytest.mark.parametrize(
    ("architecture", "spoil", "error", "message"),
    [
        ("llama", unused, CalibrationError, r"no calibration token reached model\.layers\.1\.mlp\.unused"),
        ("llama", overflowing, CalibrationError, r"input of model\.layers\.1\.mlp\.down_proj has NaN or infinite"),
        ("llama", changing_states, UnsupportedModelError, r"between model\.layers\.0 and this block"),
        ("llama", sharing_first, UnsupportedModelError,
         r"self_attn\.k_proj shared its input with another linear on the first"),
        ("mixtral", never_routing, CalibrationError, r"no calibration token reached model\.layers\.1\.mlp\.experts\."),
    ],
)  # fmt: skip
def test_a_model_whose_inputs_cannot_be_observed_is_refused_with_the_layer(architecture, spoil, error, message):
    model = tiny_model(architecture)
    spoil(model)
    with pytest.raises(error, match=message):
        pruned(model, SPECS["wanda"], given=batches(5))


def test_a_statistic_that_fails_is_blamed_on_the_pruner_that_asked_for_it():
    class Asks:
        def observe(self, block, name):
            return FeatureNorms(3)

        def prune(self, block, patterns, stats):
            raise AssertionError("asked without statistics")

    told = (
        r"update of the statistic of pruner 'mine' failed on model\.layers\.0\.self_attn\.q_proj: RuntimeError: shape"
    )
    with pytest.raises(PluginError, match=told):
        pruned(tiny_model("llama"), spec_of(Asks(), "mine"))


def test_an_input_that_is_not_finite_is_told_also_where_the_block_fails_because_of_it():
    linear = torch.nn.Linear(4, 2)

    def run(x):
        if not linear(x).isfinite().all():
            raise IndexError("as a router's indices are out of range")

    def observed(*inputs):
        wanted = {"fc": {"selects": SharedStatistic(FeatureNorms(4))}}
        return observe({"fc": Linear("fc", linear)}, wanted, [partial(run, x) for x in inputs])

    fine = torch.ones(1, 3, 4)
    assert observed(fine, fine) == {"fc"}
    with pytest.raises(CalibrationError, match="the input of fc has NaN"):
        observed(fine.index_fill(1, torch.tensor(2), torch.nan))
    linear.weight.data.fill_(torch.nan)
    with pytest.raises(IndexError, match="router"):
        observed(fine)


def test_each_fused_expert_is_pruned_on_the_tokens_that_its_router_sends_it():
    model, dense = tiny_model("mixtral"), tiny_model("mixtral")
    (block,) = pruned(model, SPECS["wanda"], ROW, only=".0.mlp.experts.")
    mlp = dense.model.layers[0].mlp
    with inputs_of({"mlp": mlp}) as inputs:
        dense(tiny_tokens(), use_cache=False)
        hidden = inputs["mlp"].reshape(-1, 64)
        _, _, chosen = mlp.gate(hidden)  # [tokens, 2]
        for expert in range(4):
            mine = hidden[(chosen == expert).any(dim=1)]
            assert 0 < len(mine) < len(hidden)
            gate, up = (mine @ mlp.experts.gate_up_proj[expert].T).chunk(2, dim=1)
            for parameter, x in (("gate_up_proj", mine), ("down_proj", mlp.experts.act_fn(gate) * up)):
                scores = getattr(mlp.experts, parameter)[expert].abs() * x.norm(dim=0)
                got = block.masks[f"model.layers.0.mlp.experts.{parameter}.{expert}"].keep
                assert (keep_mask(scores, ROW) != got).float().mean() < 2e-3, (parameter, expert)
    assert model.model.layers[0].mlp.experts.config._experts_implementation == dense.config._experts_implementation


def test_a_linear_that_shares_its_input_only_later_keeps_a_statistic_of_its_own():
    model, spy = tiny_model("llama"), Spy()
    model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(
        lambda module, args: (args[0].clone(),) if len(args[0]) == 5 else args
    )
    pruned(model, spec_of(spy), given=batches(5), only=".0.self_attn.")
    query, key = (spy.given[f"model.layers.0.self_attn.{n}_proj"] for n in "qk")
    assert query is not key
    assert query.count == key.count == 8 * 32
    torch.testing.assert_close(query.squares, key.squares)


def test_linears_that_share_their_input_in_one_process_only_are_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(Ranks, "all_gather", lambda self, told: [told, told[:1] if isinstance(told, list) else told])
    with pytest.raises(UnsupportedModelError, match="share inputs in one process and not in another"):
        list(prune_model(InMemory(model), plan_all(model, SPECS["wanda"], HALF), batches(), ranks=Ranks(0, 2)))


def test_what_linears_are_shown_with_comes_out_for_their_group_and_beside_what_the_reconstructor_shows():
    info, images, history = {"error": 0.5}, {"dense": torch.eye(4)}, {"loss": [3, 2.5]}
    selector = showing(info=info, images=images, history=history, group="attention")
    shown = {"info": {"damping": 0.1}, "history": {"residual": [1.0]}}
    rebuilding = replace(made(lambda x, p: PruneResult(p.keep, **shown)), reconstructs=True)
    for reconstructor, more, residual in ((None, {}, {}), (rebuilding, {"damping": 0.1}, {"residual": (1.0,)})):
        (block,) = pruned(tiny_model("llama"), selector, given=(), only=".0.self_attn.", reconstructor=reconstructor)
        first, *others = block.report.layers
        assert (first.info, first.history) == ({"error": 0.5} | more, {"loss": (3.0, 2.5)} | residual)
        assert first.info is not info, "what a plugin goes on using is copied"
        assert len(others) == 3
        assert all((x.info, x.history) == (first.info, first.history) for x in others)
        assert {x.group for x in block.report.layers} == {"" if more else first.name}, (
            "of this reconstructor each is one"
        )
        assert all(block.images[x.name] == images for x in block.report.layers)
