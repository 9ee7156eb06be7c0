"""Whole blocks are chosen by trial, and removed ones leave no trace in the hidden states."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from tests.compressx.blocks.test_handed_on import gemma4
from tests.compressx.depths import THIRD, planned
from tests.compressx.processes import in_two, joined
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from compressx import PluginError, PrunerSpec, UnsupportedModelError
from compressx.blocks.depth import Trials, choose_blocks, solved_beside
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of, find_blocks
from compressx.models.blockwise import BlockRun, replaced_forwards, skipped
from compressx.models.checkpoint import Checkpoint
from compressx.models.streaming import open_streamed
from compressx.planning.plan import Plan, PlannedDepth
from compressx.pruners.depth import Depth, Options
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens

TOKENS = tiny_tokens()
BATCHES = list(TOKENS.split(4))
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 128}


def dropped(model: Any, *rules: dict[str, Any], **sections: Any) -> Any:
    """Drop a block of a model in place; returns the plan and the blocks as they were pruned."""
    plan = planned(model, *rules, **sections)
    assert plan.depth is not None
    plan = plan.scored(*choose_blocks(InMemory(model), plan.depth, BATCHES))
    return plan, list(prune_model(InMemory(model), plan, BATCHES))


def hidden_states(model: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what enters and leaves each block, by hooks in a forward pass of the whole model."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        seen.append((before.double(), (out[0] if isinstance(out, tuple) else out).double()))

    hooks = [block.register_forward_hook(take, with_kwargs=True) for block in find_blocks(model).values()]
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


def plan_with(pruner: object, model: Any, sparsity: float = 0.34) -> PlannedDepth:
    """Plan with a pruner of one's own in the place of the built-in one."""

    class NoOptions(BaseModel):
        pass

    depth = planned(model, THIRD | {"sparsity": sparsity}).depth
    assert depth is not None
    spec = PrunerSpec("own", "for a test", NoOptions, lambda _: pruner, groups=(), nm=False, units=("blocks",))  # type: ignore[arg-type,return-value]
    return replace(depth, rule=replace(depth.rule, pruners=((spec, NoOptions()),)))


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_the_masked_model_is_the_model_without_the_block_in_every_architecture(architecture):
    model, dense = tiny_model(architecture), tiny_model(architecture)
    plan, blocks = dropped(model)
    (gone,) = plan.dropped
    skipped = find_blocks(dense)[gone]
    skip = replaced_forwards({gone: skipped}, lambda _fqn, hidden, _call: hidden)
    with torch.no_grad(), skip:
        expected = dense(TOKENS, use_cache=False).logits
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS, use_cache=False).logits, expected, rtol=0, atol=0)
    before, after = (architecture_of(x).linears for x in (dense, model))
    kept = {n: torch.equal(x.weight, before[n].weight) for n, x in after.items()}
    assert [n for n, same in kept.items() if not same] == [n for n in kept if n.startswith(f"{gone}.")]
    masks = {n: e.keep for b in blocks for n, e in b.masks.items()}
    assert {n: bool(m.any()) for n, m in masks.items()} == {n: bool(m.all()) for n, m in masks.items()} == kept
    told = {b.report.fqn: {layer.info.get("importance") for layer in b.report.layers} for b in blocks}
    assert told == {fqn: {plan.depth.scores.get(fqn)} for fqn in plan.depth.blocks}
    assert gone in plan.depth.scores


def test_only_blocks_that_the_rule_targets_are_tried_and_go():
    model = tiny_model("llama")
    plan = planned(model, {**THIRD, "targets": [{"layers": "1-2"}], "sparsity": 0.5})
    assert plan.depth is not None
    assert plan.depth.blocks == ("model.layers.1", "model.layers.2")
    assert plan.dropped == ()
    scores, chosen = choose_blocks(InMemory(model), plan.depth, BATCHES)
    assert [*scores] == ["model.layers.1", "model.layers.2"]
    assert plan.scored(scores, chosen).dropped == (min(scores, key=lambda fqn: scores[fqn]),)


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("opt", {"do_layer_norm_before": False}), ("bloom", {"apply_residual_connection_post_layernorm": True})],
)
def test_a_block_that_is_not_the_identity_without_its_linears_is_refused_and_restored(kind, changed):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY_CONFIGS[kind][1], **changed)).eval()
    dense = {n: x.clone() for n, x in model.state_dict().items()}
    depth = planned(model).depth
    assert depth is not None
    with pytest.raises(UnsupportedModelError, match=r"layers\.0: with all its linears zero it changes|h\.0: with all"):
        choose_blocks(InMemory(model), depth, BATCHES)
    assert all(torch.equal(x, dense[n]) for n, x in model.state_dict().items())


def test_other_rules_prune_the_blocks_that_stay_and_are_not_asked_about_the_others():
    model = tiny_model("llama")
    plan, blocks = dropped(model, {"targets": ["*.down_proj"], "pruner": "wanda", "sparsity": 0.5}, THIRD)
    pruners = {layer.name: (layer.pruner, layer.sparsity) for b in blocks for layer in b.report.layers}
    (gone,) = plan.dropped
    for name, (pruner, sparsity) in pruners.items():
        if name.startswith(f"{gone}."):
            assert (pruner, sparsity) == ("depth", 1.0)
        else:
            assert (pruner, sparsity) == (("wanda", 0.5) if name.endswith("down_proj") else ("depth", 0.0))


def test_reconstruction_trains_the_blocks_that_stay_towards_the_dense_stream():
    model = tiny_model("opt")
    plan = planned(model, reconstruct_block={"passes": 4})
    first = next(iter(find_blocks(model)))
    plan = plan.scored({}, {first: 0.0})
    blocks = list(prune_model(InMemory(model), plan, BATCHES))
    told = {b.report.fqn: b.report.reconstruction for b in blocks}
    assert told.pop(first) is None
    for trained in told.values():
        assert trained is not None
        assert trained.before > 0.1  # nothing but the first block's absence
        assert trained.after < 0.9 * trained.before
    left = [n for n, x in model.named_parameters() if n.startswith(f"{first}.") and "norm" not in n and x.any()]
    assert left == []


def test_a_pruner_that_declares_blocks_and_cannot_choose_is_refused():
    model = tiny_model("llama")
    with pytest.raises(PluginError, match=r"'own': what build returned, a object, has no choose and windows; see"):
        choose_blocks(InMemory(model), plan_with(object(), model), BATCHES)


# --- search


def subsets(names: Any) -> list[tuple[str, ...]]:
    return [*chain.from_iterable(combinations(names, n) for n in range(len(names)))]


@torch.no_grad()
def by_definition(model: Any, without: Any, base: Any = None) -> float:
    """Return KL(dense || without some blocks) from two whole forward passes in float64."""
    blocks, dense = find_blocks(model), model(TOKENS, use_cache=False).logits.double().log_softmax(dim=-1)
    own = {} if base is None else find_blocks(base)

    def forward(fqn: str, hidden: torch.Tensor, call: Any) -> torch.Tensor:
        output = own[fqn](hidden, *call.args, **call.kwargs)
        return output[0] if isinstance(output, tuple) else output

    gone = {fqn: blocks[fqn] for fqn in without}
    with skipped(gone) if base is None else replaced_forwards(gone, forward):
        other = model(TOKENS, use_cache=False).logits.double().log_softmax(dim=-1)
    return float((dense.exp() * (dense - other)).sum(dim=-1).mean())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma2", "gpt2", "opt"])
@pytest.mark.parametrize("base", [False, True])
def test_a_trial_is_the_divergence_of_a_whole_forward_pass_without_the_blocks(architecture: str, base: bool) -> None:
    model = tiny_model(architecture).double()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    other = tiny_model(architecture, seed=1).double() if base else None
    access = InMemory(model, base=None if other is None else InMemory(other))
    blocks = [*find_blocks(model)]
    asked = subsets(blocks)
    expected = [by_definition(model, gone, other) for gone in asked]
    assert Trials(access, blocks, BATCHES)(asked) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    one_by_one = Trials(access, blocks, list(TOKENS.split([1, 5, 2])))
    assert [one_by_one([gone[::-1]])[0] for gone in asked] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())


def test_blocks_whose_keys_and_values_others_use_again_cannot_go_and_copies_of_those_are_each_trials_own() -> None:
    model = gemma4().double()
    blocks = [*find_blocks(model)]
    trials = Trials(InMemory(model), blocks, BATCHES)
    asked = subsets(blocks)
    possible = [gone for gone in asked if blocks[1] not in gone or {*blocks[2:]} <= {*gone}]
    expected = [by_definition(model, gone) if gone in possible else float("inf") for gone in asked]
    assert trials(asked) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_block_runs_once_for_each_different_beginning_and_nothing_for_what_is_known(monkeypatch: Any) -> None:
    model = tiny_model("llama")
    first, second, third = find_blocks(model)
    trials, ran = Trials(InMemory(model), [first, second, third], BATCHES), list[str]()
    names, own = {block: fqn for fqn, block in find_blocks(model).items()}, BlockRun.__call__
    monkeypatch.setattr(BlockRun, "__call__", lambda run, state: (ran.append(names[run.module]), own(run, state))[1])
    trials._unchecked.clear()  # of which each runs its block once more
    found = trials([[second], [first], [second]])
    assert found[0] == found[2]
    assert {fqn: ran.count(fqn) for fqn in (first, second, third)} == {first: 2, second: 4, third: 6}  # of two batches
    ran.clear()
    assert trials([[first], [second]]) == found[1::-1]
    assert ran == []


def test_a_streamed_models_trials_are_those_of_the_loaded_one_and_read_it_once_a_call(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    streamed, blocks = open_streamed(Checkpoint(str(tmp_path))), [*find_blocks(model)]
    read = list[str]()
    own = streamed.materialise
    object.__setattr__(streamed, "materialise", lambda fqn: (read.append(fqn), own(fqn))[1])
    asked = [[x] for x in blocks]
    assert Trials(streamed, blocks, BATCHES)(asked) == Trials(InMemory(model), blocks, BATCHES)(asked)
    assert [read.count(fqn) for fqn in blocks] == [1, 1, 1]


def test_a_search_takes_the_best_of_each_step_of_those_that_cost_least_when_last_tried(monkeypatch: Any) -> None:
    price = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "ab": 9.0, "ac": 8.0, "ad": 7.0}
    asked = list[str]()

    def divergences(trials: Any) -> list[float]:
        asked.extend("".join(sorted(x)) for x in trials)
        return [price.get("".join(sorted(x)), 0.0) for x in trials]

    search = Depth(Options())
    assert search.choose("abcd", 2, divergences) == ["a", "d"]
    assert asked == ["", "a", "b", "c", "d", "a", "ab", "ac", "ad"]
    monkeypatch.setattr("compressx.pruners.depth._WIDTH", 2)
    assert search.choose("abcd", 2, divergences) == ["a", "c"]


def test_of_a_models_blocks_those_go_that_brute_force_finds_one_after_the_other() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **TINY_CONFIGS["llama"][1] | {"num_hidden_layers": 6})
        model = AutoModelForCausalLM.from_config(config).eval()
    depth = planned(model).depth
    assert depth is not None
    scores, chosen = choose_blocks(InMemory(model), depth, BATCHES)
    assert scores == pytest.approx({fqn: by_definition(model, [fqn]) for fqn in depth.blocks}, rel=1e-4)
    assert len(chosen) == depth.pattern.dropped == 2
    assert [*chosen.values()] == pytest.approx([by_definition(model, [*chosen][: n + 1]) for n in range(2)], rel=1e-4)
    for step in range(2):
        *before, own = [*chosen][: step + 1]
        every = {fqn: by_definition(model, [*before, fqn]) for fqn in depth.blocks if fqn not in before}
        assert own == min(every, key=lambda fqn: every[fqn])
    assert planned(model).scored(scores, chosen).dropped == tuple(chosen)


@pytest.mark.parametrize(
    ("choose", "said"),
    [
        (lambda blocks, _count, _trials: blocks[:2], r"must return 1 different names of the 3 blocks, got \['model"),
        (lambda _blocks, _count, _trials: ["lm_head"], r"must return 1 different names .*got \['lm_head'\]"),
        (lambda blocks, _count, trials: trials([[blocks[0], "lm_head"]]), r"a trial without 'lm_head'; expected names"),
        (lambda _blocks, _count, _trials: 1 / 0, r"choose of pruner 'own' failed: ZeroDivisionError"),
    ],
)
def test_what_a_search_does_wrong_names_it(choose: Any, said: str) -> None:
    model = tiny_model("llama")
    own = type("Own", (), {"choose": staticmethod(choose), "windows": 8})()
    with pytest.raises(PluginError, match=said):
        choose_blocks(InMemory(model), plan_with(own, model), BATCHES)


def asking_for(*places: int, windows: int = 8) -> Any:
    """Return a pruner that chooses blocks by their places."""
    choose = staticmethod(lambda blocks, _count, _trials: [blocks[i] for i in places])
    return type("Own", (), {"choose": choose, "windows": windows})()


def test_as_many_windows_are_tried_as_the_pruner_asks_for() -> None:
    model = tiny_model("llama")
    found, _ = choose_blocks(InMemory(model), plan_with(asking_for(0, windows=3), model), BATCHES)
    trials = Trials(InMemory(model), [*find_blocks(model)], [TOKENS[:3]])
    assert [*found.values()] == pytest.approx(trials([[x] for x in find_blocks(model)]), rel=1e-6)


def test_a_block_that_cannot_go_before_others_has_the_divergence_of_the_first_step_that_is_possible() -> None:
    model = gemma4()
    _, *gone = find_blocks(model)  # of which the first has the keys and values of the others
    found, chosen = choose_blocks(InMemory(model), plan_with(asking_for(1, 2, 3), model, 0.75), BATCHES)
    assert gone[0] not in found
    assert chosen == pytest.approx(dict.fromkeys(gone, by_definition(model, gone)), rel=1e-4)


def _chosen_by_two() -> Any:
    model = tiny_model("llama")
    depth = planned(model).depth
    assert depth is not None
    return joined(lambda ranks: choose_blocks(InMemory(model), depth, list(ranks.share(TOKENS).split(2)), ranks=ranks))


def test_two_processes_choose_by_the_text_of_both(tmp_path: Path) -> None:
    model = tiny_model("llama")
    depth = planned(model).depth
    assert depth is not None
    one, other = in_two(_chosen_by_two, tmp_path, start="fork")
    scores, chosen = choose_blocks(InMemory(model), depth, BATCHES)
    assert one == other == (pytest.approx(scores, rel=1e-6), pytest.approx(chosen, rel=1e-6))


def without(model: Any, *gone: str) -> Plan:
    """Return a plan in which these blocks of a model go."""
    plan = planned(model, THIRD | {"sparsity": len(gone) / 3})
    return plan.scored({}, dict.fromkeys(gone, 0.0))


def seen_by(model: Any, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what enters a linear, and what leaves each block, [tokens, width]."""
    seen: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    states = [leaving.flatten(0, 1) for _, leaving in hidden_states(model)]
    hook.remove()
    return seen, states


def least_squares(
    weight: torch.Tensor, x: torch.Tensor, missing: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Return the weight that adds what is missing, relative to what is wanted, and the share that it leaves."""
    counts = 1 / wanted.norm(dim=1, keepdim=True)
    x, missing = x * counts, missing * counts
    power = (x.T @ x).diagonal()
    damping = 0.01 * power[power > 0].mean()  # some neurons of a ReLU are never on
    change = torch.linalg.solve(x.T @ x + damping * torch.eye(x.shape[1]), x.T @ missing).T
    return weight + change, float((missing - x @ change.T).square().sum() / missing.square().sum())


@pytest.mark.parametrize(("architecture", "last"), [("llama", "mlp.down_proj"), ("gpt2", "mlp.c_proj"), ("opt", "fc2")])
@pytest.mark.parametrize("first", [1, 2])
def test_the_block_before_those_that_go_adds_what_least_squares_says_they_would_have_added(architecture, last, first):
    model = tiny_model(architecture).double()
    blocks, dense = find_blocks(model), {n: x.clone() for n, x in model.state_dict().items()}
    home, gone = [*blocks][first - 1], [*blocks][first : first + 2]
    (name, (weight, share)), *others = solved_beside(InMemory(model), without(model, *gone), BATCHES).items()
    assert (name, others) == (f"{home}.{last}", [])
    assert all(torch.equal(x, dense[n]) for n, x in model.state_dict().items())
    (x,), states = seen_by(model, name)
    wanted = states[first + len(gone) - 1]
    expected, left = least_squares(architecture_of(model).linears[name].held, x, wanted - states[first - 1], wanted)
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8)
    assert share == pytest.approx(left, rel=1e-6)
    assert share < 1


def test_beside_a_second_gap_what_is_left_after_the_first_is_brought_to_the_dense_hidden_states():
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **SMALL)).eval().double()
    blocks, plan = find_blocks(model), planned(model).scored({}, {f"model.layers.{i}": 0.0 for i in (2, 4, 5)})
    (before, (solved, _)), (name, (weight, share)) = solved_beside(InMemory(model), plan, BATCHES).items()
    _, dense = seen_by(model, name)
    model.get_submodule(before).weight.data.copy_(solved)
    with skipped({"model.layers.2": blocks["model.layers.2"]}):
        (x,), left = seen_by(model, name)
    expected, rest = least_squares(model.get_submodule(name).weight.data, x, dense[5] - left[3], dense[5])
    torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8)
    assert share == pytest.approx(rest, rel=1e-6)


def test_of_a_streamed_model_the_same_linears_are_solved_beside_two_gaps(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **SMALL)).eval()
    model.save_pretrained(tmp_path)
    plan = planned(model).scored({}, {f"model.layers.{i}": 0.0 for i in (2, 4, 5)})
    found = solved_beside(InMemory(model), plan, BATCHES)
    assert [*found] == ["model.layers.1.mlp.down_proj", "model.layers.3.mlp.down_proj"]
    again = solved_beside(open_streamed(Checkpoint(str(tmp_path))), plan, BATCHES)
    assert all(torch.equal(x, again[n][0]) and share == again[n][1] for n, (x, share) in found.items())


def test_no_linear_is_solved_that_is_not_added_as_it_is_or_that_another_rule_prunes():
    assert solved_beside(InMemory(model := tiny_model("gemma3")), without(model, "model.layers.1"), BATCHES) == {}
    assert solved_beside(InMemory(model := tiny_model("mixtral")), without(model, "model.layers.1"), BATCHES) == {}
    assert solved_beside(InMemory(model := gemma4()), without(model, [*find_blocks(model)][1]), BATCHES) == {}
    model = tiny_model("llama")
    assert solved_beside(InMemory(model), without(model, "model.layers.0"), BATCHES) == {}  # there is none before it
    magnitude = {"targets": ["*.down_proj"], "pruner": "magnitude", "sparsity": 0.5}
    plan = planned(model, THIRD, magnitude).scored({}, {"model.layers.1": 0.0})
    assert solved_beside(InMemory(model), plan, BATCHES) == {}
