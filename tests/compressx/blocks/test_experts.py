"""Removed experts: the router chooses among the kept ones, as that of the smaller model does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compressx.depths import planned
from tests.compressx.mixtures import MIXTURES, mixture
from transformers import AutoModelForCausalLM

from compressx.api.patterns import Structured
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.units import reinstate
from compressx.testing import tiny_tokens

TOKENS = tiny_tokens()
BATCHES = list(TOKENS.split(4))
HALF = {"targets": ["*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}


def pruned(model: Any, *rules: dict[str, Any], **sections: Any) -> dict[str, torch.Tensor]:
    """Prune a model in place; returns which experts of each mixture are kept, by its name."""
    plan = planned(model, *(rules or [HALF]), shrink=True, **sections)
    masks = {n: e.keep for b in prune_model(InMemory(model), plan, BATCHES) for n, e in b.masks.items()}
    units = {p.units.fqn: p.units for x in plan.linears if isinstance(p := x.pattern, Structured)}
    return {fqn: one.kept({n: masks[n] for n in one.owners}) for fqn, one in units.items()}


def smaller(model: Any, kept: dict[str, torch.Tensor]) -> Any:
    """Build the model of the experts that are kept, by hand."""
    config = type(model.config)(**model.config.to_dict())
    (left,) = {int(k.sum()) for k in kept.values()}
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):  # one in each architecture, with other names
        if hasattr(config, key):
            setattr(config, key, left)
    small = AutoModelForCausalLM.from_config(config).eval()
    state = {}
    for name, x in model.state_dict().items():
        home = next((fqn for fqn in kept if name.startswith((f"{fqn}.", f"{fqn.removesuffix('experts')}gate."))), None)
        state[name] = x if home is None or "shared" in name else x[kept[home]]
    small.load_state_dict(state)
    return small


def choices(model: Any) -> dict[str, list[tuple[torch.Tensor, ...]]]:
    """Return what enters each mixture's experts: hidden states, numbers of experts, weights."""
    seen: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _m, args, name=name: seen.setdefault(name, []).append(args))
        for name, module in model.named_modules()
        if name.endswith("experts") and "shared" not in name
    ]
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", MIXTURES)
def test_the_masked_model_is_the_model_with_fewer_experts(name):
    model = mixture(name)
    kept = pruned(model)
    assert {fqn: int(k.sum()) for fqn, k in kept.items()} == dict.fromkeys(kept, 2)
    with torch.no_grad():
        expected = smaller(model, kept)(TOKENS, use_cache=False).logits
        torch.testing.assert_close(model(TOKENS, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)
    for fqn, given in choices(model).items():
        assert {*torch.cat([numbers.flatten() for _, numbers, _ in given]).tolist()} <= {
            *torch.nonzero(kept[fqn]).flatten().tolist()
        }


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_the_score_is_the_mean_of_weight_times_norm_over_the_tokens_of_an_expert(name):
    """Of the first mixture, whose inputs no pruning has changed."""
    dense = mixture(name)
    home, given = next(iter(choices(dense).items()))
    linears = architecture_of(dense).linears
    ((hidden, numbers, weights),) = given  # of all sequences at once
    expected = []
    for expert in range(4):
        token, place = torch.where(numbers == expert)
        up, down = (linears[f"{home}.{kind}.{expert}"].weight.double() for kind in ("gate_up_proj", "down_proj"))
        gate, rest = (hidden[token].double() @ up.T).chunk(2, dim=-1)
        norms = ((torch.nn.functional.silu(gate) * rest) @ down.T).norm(dim=-1)
        expected.append((weights[token, place].double() * norms).mean().item())
    model = mixture(name)
    plan = planned(model, HALF, shrink=True)
    layers = {x.name: x for b in prune_model(InMemory(model), plan, BATCHES) for x in b.report.layers}
    found = [layers[f"{home}.down_proj.{expert}"].info["importance"] for expert in range(4)]
    assert found == pytest.approx(expected, rel=1e-5)
    dropped = [layers[f"{home}.down_proj.{expert}"].sparsity == 1.0 for expert in range(4)]
    assert [e for e in range(4) if dropped[e]] == sorted(sorted(range(4), key=expected.__getitem__)[:2])


@pytest.mark.parametrize(
    ("name", "renormalised", "changed"),
    [("mixtral", True, {}), ("qwen3-moe", True, {}), ("qwen3-moe", False, {"norm_topk_prob": False}),
     ("olmoe", False, {}), ("olmoe", True, {"norm_topk_prob": True})],
)  # fmt: skip
@torch.no_grad()
def test_the_routers_weights_sum_to_one_over_a_tokens_experts_where_the_model_makes_them(name, renormalised, changed):
    """By the definition, from the router's logits: as the paper's code has it since March 2026."""
    model = mixture(name, num_hidden_layers=1, **changed)
    home, ((hidden, _, _),) = next(iter(choices(model).items()))
    linears, gate = architecture_of(model).linears, model.get_submodule(f"{home.removesuffix('experts')}gate")
    scores, counts = [0.0] * 4, [0] * 4
    for x in hidden.double():
        shares = (gate.weight.double() @ x).softmax(dim=0)
        best = shares.argsort(descending=True)[:2].tolist()
        for expert in best:
            up, down = (linears[f"{home}.{kind}.{expert}"].weight.double() for kind in ("gate_up_proj", "down_proj"))
            inner, rest = (up @ x).chunk(2)
            norm = float((down @ (torch.nn.functional.silu(inner) * rest)).norm())
            scores[expert] += norm * float(shares[expert] / (shares[best].sum() if renormalised else 1.0))
            counts[expert] += 1
    plan = planned(model, HALF, shrink=True)
    layers = {x.name: x for b in prune_model(InMemory(model), plan, BATCHES) for x in b.report.layers}
    found = [layers[f"{home}.down_proj.{expert}"].info["importance"] for expert in range(4)]
    assert found == pytest.approx([score / count for score, count in zip(scores, counts, strict=True)], rel=1e-4)


def test_an_expert_that_no_token_reaches_goes_first():
    model = mixture("mixtral", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()  # all scores are equal: two experts get all tokens
    ((_, numbers, _),) = choices(model)["model.layers.0.mlp.experts"]
    reached = {*numbers.flatten().tolist()}
    assert len(reached) == 2
    (kept,) = pruned(model).values()
    assert {*torch.nonzero(kept).flatten().tolist()} == reached


def test_the_router_is_as_it_was_after_each_call_and_chooses_among_all_once_reinstated():
    model, dense = mixture("deepseek-v3"), mixture("deepseek-v3")
    pruned(model)
    model(TOKENS)
    state = dense.state_dict()
    gates = {n: x for n, x in model.state_dict().items() if ".gate." in n}
    assert all(torch.equal(x, state[n]) for n, x in gates.items())
    assert all(m.num_experts == 4 for n, m in model.named_modules() if n.endswith("gate"))
    reinstate(model)
    everywhere = {*torch.cat([g[1].flatten() for given in choices(model).values() for g in given]).tolist()}
    assert everywhere == {0, 1, 2, 3}


def test_a_router_that_fails_is_restored():
    model = mixture("mixtral")
    pruned(model)
    gate = model.model.layers[0].mlp.gate
    with pytest.raises((RuntimeError, AttributeError)):
        gate(torch.ones(3, 5))
    assert gate.weight.shape == (4, 64)


def test_reconstruction_trains_the_experts_that_are_left_and_keeps_the_others_zero():
    model, untrained = mixture("mixtral"), mixture("mixtral")
    kept = pruned(model, reconstruct_block={"passes": 2})
    pruned(untrained)
    before = architecture_of(untrained).linears
    for name, linear in architecture_of(model).linears.items():
        if linear.expert is not None:
            keep = bool(kept[name.rsplit(".", 2)[0]][linear.expert])
            assert (bool(linear.weight.any()), torch.equal(linear.weight, before[name].weight)) == (keep, not keep)
