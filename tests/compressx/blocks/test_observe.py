"""Inputs of linears, watched without a wait for the device, and what statistics make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.mixtures import mixture
from tests.compressx.plans import plan_all, spec_of
from torch import Tensor, nn

from compressx import PluginError, PruneResult
from compressx.api.patterns import Unstructured, keep_mask
from compressx.api.pruner import Block, Linear
from compressx.api.statistics import Hessian
from compressx.blocks.observe import SharedStatistic, linears_watched, observe, routing_watched
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.arithmetic import matmuls_in
from compressx.models.blockwise import BlockRun, capture, each_block
from compressx.testing import tiny_model, tiny_tokens


class Recorded(Hessian):
    """A Hessian that keeps what it is given."""

    def update(self, x: Tensor) -> None:
        self.__dict__.setdefault("given", []).append(x.double().flatten(0, -2))
        super().update(x)


class Looking:
    """A pruner that compares each Hessian with the sum of its inputs' products in float64."""

    def __init__(self) -> None:
        self.deviations: list[float] = []

    def observe(self, block: Any, name: str) -> Recorded:
        return Recorded(block.linears[name].in_features)

    def prune(self, block: Any, patterns: Any, stats: Any) -> dict[str, PruneResult]:
        for name in patterns:
            x = torch.cat(stats[name].given)
            exact = x.T @ x
            self.deviations.append(float((stats[name].matrix - exact).abs().max() / exact.abs().max()))
        return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}


@pytest.mark.parametrize(
    ("weights", "products"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_a_hessian_is_summed_in_float32_whatever_dtype_the_block_multiplies_in(weights, products):
    model, pruner = tiny_model("llama").to(weights), Looking()
    plan = plan_all(model, spec_of(pruner), Unstructured(0.5))
    for _ in prune_model(InMemory(model, products), plan, [tiny_tokens()] * 2):
        pass
    assert len(pruner.deviations) == len(plan.linears)
    assert max(pruner.deviations) < 1e-5, "rounded to bfloat16 they would be .002 off"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_statistic_that_changes_its_input_in_place_is_refused(device: str):
    """Others of the same input, and all linears after it, would be pruned by numbers that the model never had."""

    class Centred(Recorded):
        def update(self, x: Tensor) -> None:
            flat = x.reshape(-1, self.in_features).float()  # of a float32 model these are views
            flat -= flat.mean(dim=0)
            super().update(flat)

    class Centring(Looking):
        def observe(self, block: Any, name: str) -> Recorded:
            return Centred(block.linears[name].in_features)

    spec = spec_of(Centring(), "centring")
    message = r"statistic of pruner 'centring' changed its input on model\.layers\.0\.self_attn\.q_proj in place"
    with pretended_accelerator():
        model = tiny_model("llama").to(device)
        with pytest.raises(PluginError, match=message):
            list(prune_model(InMemory(model), plan_all(model, spec, Unstructured(0.5)), [tiny_tokens()]))


@pytest.mark.parametrize("products", [None, torch.float32, torch.float16], ids=str)
def test_a_hessian_on_a_gpu_is_not_rounded_to_16_bits_where_the_block_multiplies_in_another_dtype(products):
    x = (torch.randn(2, 64, 48, generator=torch.Generator().manual_seed(0)) + 3.0).bfloat16()
    flat = x.double().flatten(0, 1)
    exact = flat.T @ flat
    with pretended_accelerator():
        linear, hessian = torch.nn.Linear(48, 48).to("cuda", torch.bfloat16), Hessian(48)
        linear.register_forward_pre_hook(lambda _, args: hessian.update(args[0]))
        with torch.no_grad(), matmuls_in(products, linear, torch.device("cuda")):
            assert linear(x.to("cuda")).dtype == torch.bfloat16
        matrix = hessian.matrix.cpu().double()
    assert float((matrix - exact).norm() / exact.norm()) < 1e-6, "rounded to bfloat16 it would be .002 off"


KINDS = ["mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "deepseek-v3"]
WAITS_OF_AN_EXPERT = 5
"""Of transformers' eager loop: is it a sentinel, its row of the mask and its two weights (`item`), its tokens
(`nonzero`). One more finds the experts that have tokens."""


@contextmanager
def second_block(name: str, device: str) -> Iterator[tuple[Block, BlockRun, Tensor]]:
    """Yield the second block of a mixture, what runs it, and its hidden states."""
    access = InMemory(mixture(name).to(device))
    found = architecture_of(access.model)
    (state,), calls = capture(access, found, [tiny_tokens().to(device)])
    with torch.no_grad():
        block, (run,) = next(each_block(access, found, calls, [list(found.blocks)[1]]))
        yield block, run, state


def experts_of(block: Block) -> Mapping[str, Linear]:
    return {name: linear for name, linear in block.linears.items() if linear.expert is not None}


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss"])
@torch.no_grad()
def test_what_comes_out_of_an_expert_is_the_product_of_what_goes_in_with_its_linears_weight(kind):
    model = tiny_model(kind)
    experts = {name: linear for name, linear in architecture_of(model).linears.items() if linear.expert is not None}
    given: dict[str, Tensor] = {}
    gave: dict[str, Tensor] = {}
    with linears_watched(experts, given.__setitem__), linears_watched(experts, after=gave.__setitem__):
        model(tiny_tokens())
    assert given.keys() == gave.keys()
    assert len(gave) > len(experts) / 2
    for name, output in gave.items():
        torch.testing.assert_close(output, given[name] @ experts[name].weight.T)


@pytest.mark.parametrize("name", KINDS)
def test_watching_experts_and_their_routing_adds_no_wait_to_those_of_the_loop_over_experts(name):
    with pretended_accelerator() as device, second_block(name, "cuda") as (block, run, state):
        experts = experts_of(block)
        config: Any = next(iter(experts.values())).module.config
        config._experts_implementation = "eager"
        with device.counted() as alone:
            run(state)
        seen: list[str] = []

        def take(name: str, x: Tensor) -> None:
            seen.append(name)
            if name in experts:
                assert weights(name, len(x)).shape == x.shape[:1]

        with routing_watched(experts) as weights, linears_watched(block.linears, take), device.counted() as counts:
            run(state)
    reached = {experts[name].expert for name in seen if name in experts}
    assert len(reached) > 1
    assert counts.synchronisations == alone.synchronisations, counts.places()
    assert alone.synchronisations == 1 + WAITS_OF_AN_EXPERT * len(reached), alone.places()


@pytest.mark.parametrize("name", KINDS)
def test_the_weights_of_an_experts_tokens_are_those_that_the_router_gave_them(name):
    with second_block(name, "cpu") as (block, run, state):
        experts = experts_of(block)
        routed: list[tuple[Tensor, Tensor]] = []
        handle = next(iter(experts.values())).module.register_forward_pre_hook(lambda _, args: routed.append(args[1:]))
        found: dict[str, Tensor] = {}
        with routing_watched(experts) as weights:

            def take(name: str, x: Tensor) -> None:
                found[name] = weights(name, len(x))

            with linears_watched(experts, take):
                run(state)
        handle.remove()
    ((numbers, by),) = routed
    assert found
    for linear, got in found.items():
        place, token = torch.where(torch.eq(numbers.T, experts[linear].expert))
        assert torch.equal(got, by[token, place])


class _Mixed(nn.Module):
    """Three linears of one input, of which one is there for its weight alone, and one is called with zeros as well."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.twice, self.alone = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        both = self.plain(x) + self.twice(x) + self.twice(torch.zeros_like(x[:, :1]))
        return (self.alone.weight @ both.transpose(1, 2)).transpose(1, 2)


def test_a_weight_that_is_multiplied_by_without_a_call_of_its_module_is_observed_and_has_sensitivities():
    """As Mamba's dt_proj: `weight @ x`, x [batch, features, tokens]."""
    module, batches = _Mixed(), [torch.randn(2, 5, 8), torch.randn(3, 5, 8)]
    linears = {name: Linear(name, x) for name, x in module.named_children()}
    wanted = {name: {"selects": SharedStatistic(Recorded(8), "for a test")} for name in linears}
    passes = [partial(module, x) for x in batches]
    with torch.no_grad():
        assert observe(linears, wanted, passes) == {"plain", "twice", "alone"}
        given = [module.plain(x) + module.twice(x) for x in batches]
    exact = torch.cat([x.flatten(0, 1) for x in given]).double()
    assert torch.allclose(wanted["alone"]["selects"].statistic.matrix.double(), exact.T @ exact, rtol=1e-4)
    outputs: dict[str, list[Tensor]] = {}
    with linears_watched(linears, after=lambda name, y: outputs.setdefault(name, []).append(y)):
        out = module(batches[0])
    (watched,) = outputs["alone"]
    (gradient,) = torch.autograd.grad(out.square().sum(), watched)
    assert torch.allclose(gradient, 2 * out)
    assert len(outputs["twice"]) == 2


def test_a_linear_that_is_called_again_with_an_input_of_its_own_parts_from_those_it_shared_one_with():
    """As Zaya's v_proj_delayed, which zeros go through as well."""
    module, batches = _Mixed(), [torch.randn(2, 5, 8), torch.randn(3, 5, 8)]
    linears = {name: Linear(name, x) for name, x in module.named_children() if name != "alone"}
    wanted = {name: {"selects": SharedStatistic(Hessian(8), "for a test")} for name in linears}
    with torch.no_grad():
        observe(linears, wanted, [partial(module, x) for x in batches])
    plain, twice = (wanted[name]["selects"].statistic for name in linears)
    assert torch.equal(plain.matrix, twice.matrix)
    assert (plain.count, twice.count) == (25, 30)
