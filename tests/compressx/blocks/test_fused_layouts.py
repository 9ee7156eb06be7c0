"""Experts in every fused layout of transformers: what their linears are given, against a slow loop over the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.compressx.mixtures import LAYOUTS, mixture
from torch import Tensor, nn
from torch.nn.functional import silu

from compressx.api.pruner import Linear
from compressx.api.statistics import Hessian
from compressx.blocks.observe import SharedStatistic, linears_watched, observe
from compressx.models.architecture import architecture_of, linears_of
from compressx.testing import tiny_tokens

TOKENS = tiny_tokens(sequences=4)
OWN = ("llama4", "jetmoe", "dbrx")
"""LongCat also has experts that compute nothing, of which a token has some or none."""
ROWS = dict[str, list[Tensor]]
"""By the name of a linear, the inputs that it should see, one for each token that the router sends it, float64."""


def best(logits: Tensor, count: int = 2) -> list[int]:
    return logits.argsort(descending=True)[:count].tolist()


def of_llama4(name: str, moe: Any, x: Tensor, rows: ROWS) -> None:
    """The router's score multiplies what enters an expert."""
    for token in x.double().flatten(0, -2):
        logits = moe.router.weight.double() @ token
        for e in best(logits):
            scaled = token * logits[e].sigmoid()
            gate, up = (scaled @ moe.experts.gate_up_proj[e].double()).chunk(2)
            rows.setdefault(f"{name}.experts.gate_up_proj.{e}", []).append(scaled)
            rows.setdefault(f"{name}.experts.down_proj.{e}", []).append(silu(gate) * up)


def of_jetmoe(name: str, moe: Any, x: Tensor, rows: ROWS) -> None:
    for token in x.double().flatten(0, -2):
        for e in best(moe.router.layer.weight.double() @ token):
            gate, up = (moe.input_linear.weight[e].double() @ token).chunk(2)
            rows.setdefault(f"{name}.input_linear.weight.{e}", []).append(token)
            rows.setdefault(f"{name}.output_linear.weight.{e}", []).append(silu(gate) * up)


def of_dbrx(name: str, moe: Any, x: Tensor, rows: ROWS) -> None:
    experts = moe.experts.mlp
    for token in x.double().flatten(0, -2):
        for e in best(moe.router.layer.weight.double() @ token):
            own = slice(48 * e, 48 * (e + 1))
            inner = silu(experts.w1[own].double() @ token) * (experts.v1[own].double() @ token)
            for parameter, given in (("w1", token), ("v1", token), ("w2", inner)):
                rows.setdefault(f"{name}.experts.mlp.{parameter}.{e}", []).append(given)


def of_others(name: str, moe: Any, x: Tensor, rows: ROWS) -> None:
    """Mixtral, and all that share its layout."""
    for token in x.double().flatten(0, -2):
        for e in best(moe.gate.weight.double() @ token):
            gate, up = (moe.experts.gate_up_proj[e].double() @ token).chunk(2)
            rows.setdefault(f"{name}.experts.gate_up_proj.{e}", []).append(token)
            rows.setdefault(f"{name}.experts.down_proj.{e}", []).append(silu(gate) * up)


SLOW: Mapping[str, tuple[str, Callable[[str, Any, Tensor, ROWS], None]]] = {
    "llama4": ("Llama4TextMoe", of_llama4),
    "jetmoe": ("JetMoeMoE", of_jetmoe),
    "dbrx": ("DbrxFFN", of_dbrx),
    "mixtral": ("MixtralSparseMoeBlock", of_others),
    "olmoe": ("OlmoeSparseMoeBlock", of_others),
    "qwen3-moe": ("Qwen3MoeSparseMoeBlock", of_others),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SLOW)
@torch.no_grad()
def test_each_expert_is_observed_on_the_tokens_that_its_router_sends_it_as_they_enter_it(name, dtype):
    model, (kind, slow) = mixture(name).to(dtype), SLOW[name]
    expected: ROWS = {}
    hooks = [
        moe.register_forward_pre_hook(lambda moe, args, fqn=fqn: slow(fqn, moe, args[0], expected))
        for fqn, moe in model.named_modules()
        if type(moe).__name__ == kind
    ]
    linears = {n: x for n, x in architecture_of(model).linears.items() if x.expert is not None}
    given: ROWS = {}
    with linears_watched(linears, lambda name, x: given.setdefault(name, []).append(x.double())):
        model(TOKENS, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(expected) == sum(".self_attention." not in n for n in linears), "all experts are reached"
    for fqn, rows in expected.items():
        want, have = torch.stack(rows), torch.cat(given[fqn])
        if dtype == torch.float32:
            assert len(have) == len(want)
            torch.testing.assert_close(have.T @ have, want.T @ want, rtol=1e-4, atol=1e-4)
        else:  # rounding sends some tokens to other experts
            assert abs(len(have) - len(want)) <= 0.1 * len(want)
            assert float((have.T @ have - want.T @ want).norm() / (want.T @ want).norm()) < 0.2


@torch.no_grad()
def test_experts_of_an_attention_are_observed_on_what_its_router_sends_them():
    """JetMoE's queries and outputs are mixtures, too."""
    model = mixture("jetmoe")
    home = "model.layers.0.self_attention.experts"
    experts = model.get_submodule(home)
    numbers, mixed = [], []
    hook = experts.router.register_forward_hook(lambda r, args, _: numbers.append(r.layer(args[0]).topk(2, dim=1)[1]))
    reduce = experts.reduce
    experts.reduce = lambda x, topo: (mixed.append(x.flatten(0, 1)), reduce(x, topo))[1]  # [tokens, 2, features]
    linears = {n: x for n, x in architecture_of(model).inside(home).items() if x.expert is not None}
    given: dict[str, Tensor] = {}
    with linears_watched(linears, given.__setitem__):
        model(TOKENS, use_cache=False)
    hook.remove()
    assert len(given) == len(linears) == 8
    for expert in range(4):
        want = mixed[0][numbers[0] == expert].double()
        have = given[f"{home}.output_linear.weight.{expert}"].double()
        assert len(have) == len(want) == len(given[f"{home}.input_linear.weight.{expert}"])
        torch.testing.assert_close(have.T @ have, want.T @ want, rtol=1e-5, atol=1e-6)


def alone(kind: str) -> tuple[Any, int]:
    """Return experts of classes whose models have blocks that compressx does not find; and how many are computed."""
    if kind == "longcat_flash":
        from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts

        config = {"expert_ffn_hidden_size": 8, "hidden_size": 16, "n_routed_experts": 3, "zero_expert_num": 2}
        module: Any = LongcatFlashExperts(SimpleNamespace(**config, hidden_act="silu"))
        count = 5
    else:
        step = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
        config = {"num_local_experts": 3, "moe_intermediate_size": 8, "hidden_size": 16}
        module, count = step.Step3p7Experts(SimpleNamespace(**config, hidden_act="silu")), 3
    for x in module.parameters():
        nn.init.normal_(x, std=0.3)
    return module, count


@pytest.mark.parametrize("kind", ["longcat_flash", "step3p7"])
@torch.no_grad()
def test_the_layout_is_read_from_the_shapes_where_transformers_kernels_do_not_say_it(kind):
    module, count = alone(kind)
    linears = {x.name: x for x in linears_of("experts", module)}
    assert [*linears] == [f"experts.{p}.{e}" for p in ("gate_up_proj", "down_proj") for e in range(3)]
    assert [x.weight.shape for x in linears.values()] == [(16, 16)] * 3 + [(16, 8)] * 3
    x = torch.randn(20, 16)
    numbers = torch.stack([torch.randperm(count)[:2] for _ in x])
    given: dict[str, Tensor] = {}
    gave: dict[str, Tensor] = {}
    with linears_watched(linears, given.__setitem__), linears_watched(linears, after=gave.__setitem__):
        module(x, numbers, torch.rand(20, 2))
    assert given.keys() == linears.keys()
    for name, linear in linears.items():
        torch.testing.assert_close(gave[name], given[name] @ linear.weight.T)
        sent = (numbers == linear.expert).any(dim=1)
        assert len(given[name]) == int(sent.sum())
        if "gate_up" in name:
            assert torch.equal(given[name].sort(dim=0)[0], x[sent].sort(dim=0)[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_at_an_experts_output_are_those_of_its_weight(name):
    model = mixture(name)
    linears = {n: x for n, x in architecture_of(model).linears.items() if x.expert is not None}
    given: dict[str, Tensor] = {}
    at: dict[str, Tensor] = {}

    def watch(name: str, output: Tensor) -> None:
        output.register_hook(lambda gradient: at.__setitem__(name, gradient))

    plain = model(TOKENS, use_cache=False).logits
    with linears_watched(linears, lambda n, x: given.__setitem__(n, x.detach())), linears_watched(linears, after=watch):
        logits = model(TOKENS, use_cache=False).logits
    assert torch.equal(logits, plain)
    logits.square().sum().backward()
    assert at.keys() == given.keys() == linears.keys()
    for fqn, linear in linears.items():
        assert at[fqn].any()
        stored = linear.part(getattr(linear.module, linear.parameter).grad)
        torch.testing.assert_close(at[fqn].T @ given[fqn], stored, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", OWN)
@torch.no_grad()
def test_an_expert_without_tokens_is_not_reached(name):
    model = mixture(name)
    linears = {n: x for n, x in architecture_of(model).linears.items() if x.expert is not None}
    wanted = {n: {"": SharedStatistic(Hessian(x.in_features))} for n, x in linears.items()}
    one = TOKENS[:1, :1]  # a token goes to two experts of four
    reached = observe(linears, wanted, [lambda: model(one, use_cache=False)])
    assert len(reached) == len(linears) / 2


def halved(linears: Mapping[str, Linear]) -> None:
    for linear in linears.values():
        linear.held[:, ::2] = 0


@pytest.mark.parametrize("name", [*OWN, "mixtral"])
@torch.no_grad()
def test_what_is_written_to_every_expert_is_written_to_the_whole_parameter(name):
    """Every expert's weights are some of the parameter's, and no weight is two experts'."""
    model = mixture(name)
    linears = {n: x for n, x in architecture_of(model).linears.items() if x.expert is not None}
    parameters = {id(p): p for x in linears.values() for p in [getattr(x.module, x.parameter)]}
    assert sum(x.weight.numel() for x in linears.values()) == sum(p.numel() for p in parameters.values())
    halved(linears)
    assert all(2 * int((p == 0).sum()) == p.numel() for p in parameters.values())


def other(**held: tuple[int, ...]) -> Any:
    module: Any = nn.Module()
    for name, shape in held.items():
        setattr(module, name, nn.Parameter(torch.zeros(shape)))
    return module


@pytest.mark.parametrize(
    "module",
    [
        other(gate_up_proj=(2, 8, 8), down_proj=(2, 8, 8)),
        other(gate_up_proj=(2, 16, 8), down_proj=(2, 16, 8)),
        other(gate_proj=(2, 8, 4), up_proj=(2, 8, 4), down_proj=(2, 4, 8)),
        other(gate_up_proj=(2, 16, 4), down_proj=(2, 4, 8), extra=(2, 4)),
        other(down_proj=(2, 4, 8)),
        other(weight=(2, 4, 8)),
        other(w1=(8, 4), v1=(8, 4), w2=(8, 4)),
        other(weight=(4, 8)),
    ],
    ids=lambda module: ", ".join(f"{n} {[*p.shape]}" for n, p in module.named_parameters()),
)
def test_what_cannot_be_told_from_attributes_and_shapes_is_left_alone(module):
    """Square experts, gate and up apart, the width of DBRX's experts: no layout is guessed."""
    assert linears_of("experts", module) == []
