"""Fused experts are watched without a wait for the device beyond those of transformers' own loop over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.mixtures import mixture
from torch import Tensor

from compressx.api.pruner import Block, Linear
from compressx.blocks.observe import inputs_watched, outputs_watched, routing_watched
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.models.blockwise import Run, capture, each_block
from compressx.testing import tiny_model, tiny_tokens

KINDS = ["mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "deepseek-v3"]
WAITS_OF_AN_EXPERT = 5
"""Of transformers' eager loop: is it a sentinel, its row of the mask and its two weights (`item`), its tokens
(`nonzero`). One more finds the experts that have tokens."""


@contextmanager
def second_block(name: str, device: str) -> Iterator[tuple[Block, Run, Tensor]]:
    """Yield the second block of a mixture, what runs it, and its hidden states."""
    access = InMemory(mixture(name).to(device))
    found = survey(access.model)
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
    experts = {name: linear for name, linear in survey(model).linears.items() if linear.expert is not None}
    given: dict[str, Tensor] = {}
    gave: dict[str, Tensor] = {}
    with inputs_watched(experts, given.__setitem__), outputs_watched(experts, gave.__setitem__):
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

        with routing_watched(experts) as weights, inputs_watched(block.linears, take), device.counted() as watched:
            run(state)
    reached = {experts[name].expert for name in seen if name in experts}
    assert len(reached) > 1
    assert watched.synchronisations == alone.synchronisations, watched.places()
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

            with inputs_watched(experts, take):
                run(state)
        handle.remove()
    ((numbers, by),) = routed
    assert found
    for linear, got in found.items():
        place, token = torch.where(torch.eq(numbers.T, experts[linear].expert))
        assert torch.equal(got, by[token, place])
