"""Blocks that hand one another more than hidden states: the last of Gemma 4 use keys and values of earlier ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.built_in import BUILT_IN
from tests.compressx.plans import plan_all

from compressx.api.patterns import Unstructured
from compressx.blocks.fisher import drawn_labels, gradients
from compressx.blocks.prune import PrunedBlock, prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import HiddenStates, advance, capture, each_block, passes, run_around
from compressx.planning.plan import Plan
from compressx.recipe.sections import ReconstructBlock
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_tokens

SPEC = BUILT_IN["magnitude"]
BATCHES = tiny_tokens(sequences=4, length=16).split(1)


def gemma4(*, shared: int = 2) -> Any:
    """Return four blocks, of which so many, the last ones, have no key and value projections."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        **TINY_CONFIGS["llama"][1], "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": shared, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **values))
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def plan(model: Any, **planned: Any) -> Plan:
    return plan_all(model, SPEC, Unstructured(0.5, "layer"), **planned)


def pruned(model: Any, **planned: Any) -> list[PrunedBlock]:
    return list(prune_model(InMemory(model), plan(model, **planned), BATCHES))


@torch.no_grad()
def test_states_that_go_through_each_block_come_out_as_the_models_logits():
    access = InMemory(gemma4())
    found = architecture_of(access.model)
    assert not any("layers.2.self_attn.k_proj" in name for name in found.linears), "it uses those of another block"
    states, calls = capture(access, found, BATCHES)
    for block, runs in each_block(access, found, calls):
        advance(block.fqn, runs, states)
    for ids, state in zip(BATCHES, states, strict=True):
        logits = run_around(access.model, found.blocks, ids, state).logits
        torch.testing.assert_close(logits, access.model(ids, use_cache=False).logits)


@torch.no_grad()
def test_looking_at_a_block_changes_nothing_that_later_ones_are_handed():
    access = InMemory(gemma4())
    found = architecture_of(access.model)
    (state,), calls = capture(access, found, BATCHES[:1])
    outputs = []
    for block, (run,) in each_block(access, found, calls):
        state = run(state)
        outputs.append(state)
        if block.index == 1:  # whose keys and values the next two use
            weight = block.linears[f"{block.fqn}.self_attn.k_proj"].weight
            dense = weight.clone()
            weight.zero_()
            for look in passes([run], [state]):
                look()
            weight.copy_(dense)
    expected = access.model(BATCHES[0], use_cache=False).logits
    torch.testing.assert_close(run_around(access.model, found.blocks, BATCHES[0], state).logits, expected)


@torch.no_grad()
def test_the_targets_of_training_are_dense_where_keys_and_values_are_used_again():
    model, dense = gemma4(), gemma4()
    *_, last = pruned(model, block_training=ReconstructBlock(passes=1))
    blocks = architecture_of(dense).blocks
    for ids, state in zip(BATCHES, last.hidden.dense, strict=True):
        logits = run_around(dense, blocks, ids, state).logits
        torch.testing.assert_close(logits, dense(ids, use_cache=False).logits)


def test_training_a_block_leaves_no_graph_in_what_later_ones_are_handed():
    with pretended_accelerator():  # on which weights that a graph still holds cannot change their dtype
        *_, last = pruned(gemma4().to("cuda"), block_training=ReconstructBlock(passes=1))
    assert last.report.reconstruction is not None


@torch.no_grad()
def test_the_pruned_stream_is_that_of_the_pruned_model():
    model = gemma4()
    entering_last = pruned(model)[-1].hidden.pruned  # nothing goes on from the last block
    seen: list[torch.Tensor] = []
    blocks = architecture_of(model).blocks
    hook = [*blocks.values()][-1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    for ids in BATCHES:
        model(ids, use_cache=False)
    hook.remove()
    for ours, theirs in zip(entering_last, seen, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradients_go_back_through_what_is_handed_on():
    model = gemma4()
    found, blocks = architecture_of(model), architecture_of(model).blocks
    ids = BATCHES[0]
    got = gradients(InMemory(model), found, list(blocks), [ids])
    outputs: list[torch.Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _a, out: outputs.append(out) or out) for block in blocks.values()]
    logits = model(ids, use_cache=False).logits[0].float()
    for hook in hooks:
        hook.remove()
    labels = drawn_labels(logits.detach(), torch.Generator().manual_seed(0))
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    for fqn, expected in zip(blocks, torch.autograd.grad(loss, outputs), strict=True):
        torch.testing.assert_close(got[fqn][0], expected, rtol=1e-3, atol=1e-5)


def test_an_interrupted_run_is_not_resumed_without_what_was_handed_on():
    model = gemma4()
    finished = ("model.layers.1", HiddenStates([torch.zeros(1, 16, 64) for _ in BATCHES]))
    with pytest.raises(UnsupportedModelError, match=r"Gemma4ForCausalLM: .*cannot be resumed; start it anew"):
        next(prune_model(InMemory(model), plan(model), BATCHES, finished))


def test_an_interrupted_run_goes_on_where_every_block_has_keys_and_values_of_its_own():
    whole = pruned(gemma4(shared=0))
    model = gemma4(shared=0)
    before = prune_model(InMemory(model), plan(model), BATCHES)
    first = next(before)
    finished = (first.report.fqn, first.hidden)
    rest = list(prune_model(InMemory(model), plan(model), BATCHES, finished))
    assert [block.report.fqn for block in rest] == [block.report.fqn for block in whole[1:]]
    for ours, theirs in zip(rest[-1].hidden.pruned, whole[-1].hidden.pruned, strict=True):
        assert torch.equal(ours, theirs)
