"""The block loop: it computes what the model computes, holds the weights of one block at a time, and refuses others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import Counts, pretended_accelerator
from transformers.modeling_outputs import BaseModelOutputWithPast

from compressx.models.access import Access, InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import (
    StateFiles,
    advance,
    capture,
    capture_calls,
    check_calls,
    each_block,
    in_memory,
    passes,
    replay,
    run_around,
    shared_states,
)
from compressx.models.checkpoint import Checkpoint
from compressx.models.streaming import open_streamed
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model, tiny_tokens


def streamed(tmp_path: Path) -> Access:
    tiny_model("llama").save_pretrained(tmp_path)
    return open_streamed(Checkpoint(str(tmp_path)))


def held(access: Access) -> set[str]:
    """Return which blocks have their weights."""
    blocks = architecture_of(access.model).blocks.items()
    return {fqn for fqn, module in blocks if not any(p.is_meta for p in module.parameters())}


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_states_that_go_through_each_block_come_out_as_the_models_logits(architecture: str):
    access = InMemory(tiny_model(architecture))
    found, batches = architecture_of(access.model), tiny_tokens(sequences=3).split(2)
    states, calls = capture(access, found, batches)
    with torch.no_grad():
        for block, runs in each_block(access, found, calls):
            advance(block.fqn, runs, states)
        for ids, state in zip(batches, states, strict=True):
            logits = run_around(access.model, found.blocks, ids, state).logits
            assert torch.equal(logits, access.model(ids, use_cache=False).logits)


@pytest.mark.parametrize("memory", [True, False])
def test_a_block_comes_with_its_own_linears_and_calls_in_any_order_and_alone(memory: bool, tmp_path: Path):
    access = InMemory(tiny_model("llama")) if memory else streamed(tmp_path)
    found = architecture_of(access.model)
    _, calls = capture(access, found, tiny_tokens().split(4))
    order, given = list(found.blocks), []
    for block, _ in each_block(access, found, calls, reversed(order)):
        given.append((block.index, block.fqn))
        assert memory or held(access) == {block.fqn}
        assert set(block.linears) == {n for n in found.linears if found.block_of(n) == block.fqn}
        assert block.module is found.blocks[block.fqn]
        assert list(block.calls) == calls[block.fqn]
    assert given == [(2, order[2]), (1, order[1]), (0, order[0])]
    assert memory or held(access) == set()


def test_a_loop_that_is_left_early_gives_the_weights_back(tmp_path: Path):
    access = streamed(tmp_path)
    found = architecture_of(access.model)

    def left(error: type[Exception] | None) -> None:
        for _ in each_block(access, found, {fqn: [] for fqn in found.blocks}):
            if error is not None:
                raise error
            break

    left(None)
    assert held(access) == set()
    with pytest.raises(ZeroDivisionError):
        left(ZeroDivisionError)
    assert held(access) == set()


def test_what_leaves_a_block_goes_where_it_is_wanted_and_what_enters_it_stays():
    access = InMemory(tiny_model("llama"))
    found = architecture_of(access.model)
    states, calls = capture(access, found, tiny_tokens().split(4))
    before, room = [x.clone() for x in states], [torch.empty_like(x) for x in states]
    block, runs = next(each_block(access, found, calls))
    with torch.no_grad():
        advance(block.fqn, runs, states, room)
        expected = [run() for run in passes(runs, states)]
    assert all(torch.equal(a, b) for a, b in zip(states, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(room, expected, strict=True))


def test_an_output_that_is_not_finite_is_refused_by_the_blocks_name():
    access = InMemory(tiny_model("llama"))
    found = architecture_of(access.model)
    states, calls = capture(access, found, [tiny_tokens()])
    found.linears["model.layers.0.mlp.down_proj"].weight[0, 0] = torch.inf
    block, runs = next(each_block(access, found, calls))
    with torch.no_grad(), pytest.raises(UnsupportedModelError, match=r"^model\.layers\.0: its output has NaN or inf"):
        advance(block.fqn, runs, states)


def advanced(tmp_path: Path, batches: int, *, files: bool) -> tuple[Counts, list[torch.Tensor]]:
    """Run the second block on a pretended accelerator; return what was counted, and the states on the host."""
    with pretended_accelerator() as device:
        access = InMemory(tiny_model("llama").to("cuda"))
        found = architecture_of(access.model)
        ids = list(tiny_tokens(sequences=batches).split(1))
        states, calls = capture(access, found, ids, StateFiles(tmp_path) if files else in_memory)
        with torch.no_grad():
            block, runs = next(each_block(access, found, calls, [list(found.blocks)[1]]))
            with device.counted() as counts:
                advance(block.fqn, runs, states)
        return counts, [state.cpu() for state in states]


def test_an_accelerator_is_waited_for_once_a_block_and_once_a_batch_of_states_in_files(tmp_path):
    for batches in (2, 5):
        kept, on_device = advanced(tmp_path, batches, files=False)
        assert kept.synchronisations == 1, kept.places()
        assert (kept.to_host_bytes, kept.to_device_bytes) == (batches, 0), "a bool of each"
        counts, in_files = advanced(tmp_path, batches, files=True)
        assert counts.synchronisations == 1 + batches, counts.places()
        assert kept.pageable.total() == counts.pageable.total() == 1, counts.pageable
        assert all(torch.equal(a, b) for a, b in zip(in_files, on_device, strict=True))


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_products_are_narrow_where_access_says_so_and_states_stay_wide(architecture: str):
    access = InMemory(tiny_model(architecture), matmul_dtype=torch.bfloat16)
    if architecture == "gpt-oss":  # all experts, or rounding would choose others
        for block in access.model.model.layers:
            block.mlp.router.top_k = 4
    found, ids = architecture_of(access.model), tiny_tokens(sequences=2)
    (state,), calls = capture(access, found, [ids])
    with torch.no_grad():
        for block, runs in each_block(access, found, calls):
            (state,) = (run(state) for run in runs)
            assert state.dtype == torch.float32, block.fqn
        logits = run_around(access.model, found.blocks, ids, state).logits
        exact = access.model(ids, use_cache=False).logits
    assert not torch.equal(logits, exact)
    # Linear attention carries what was rounded from token to token.
    assert (logits - exact).norm() < (0.05 if architecture == "qwen3.5" else 0.03) * exact.norm()


# Whose blocks return a tuple, and one whose blocks return a list; of the tiny models some return their output alone.
_CONFIGS = {
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}


@pytest.mark.parametrize("model_type", _CONFIGS)
def test_blocks_run_one_at_a_time_give_the_models_own_logits_whatever_they_return(model_type: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {"vocab_size": 128, "hidden_size": 64, "bos_token_id": 1, "eos_token_id": 2, **_CONFIGS[model_type]}
    config = AutoConfig.for_model(model_type, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    blocks, ids = architecture_of(model).blocks, tiny_tokens(sequences=2)
    (state,), calls = capture_calls(model, blocks, [ids])
    with torch.no_grad():
        for fqn, block in blocks.items():
            state = replay(block, state, calls[fqn][0])
        expected = model(ids, use_cache=False).logits
    state.requires_grad_()
    logits = run_around(model, blocks, ids, state).logits
    assert type(logits) is torch.Tensor
    assert torch.equal(logits, expected)
    (gradient,) = torch.autograd.grad(logits.square().sum(), state)
    assert gradient.abs().max() > 0
    assert len(blocks) == 2


def hands_on(model: Any, take: str) -> Any:
    """Make a model's blocks return (hidden states, what `take` makes of them), which the next block is handed."""
    for layer in model.model.layers:
        plain = layer.forward

        def forward(hidden, handed=None, plain=plain, **kwargs):
            out = plain(hidden if handed is None else hidden + 0.1 * handed, **kwargs)
            return out, (out.roll(1, 1) if take == "states" else out.argmax(-1, keepdim=True) / 64)

        layer.forward = forward

    def outer(input_ids, **_):
        hidden, handed = model.model.embed_tokens(input_ids), None
        places = torch.arange(input_ids.shape[1])[None]
        turned = model.model.rotary_emb(hidden, places)
        for layer in model.model.layers:
            if take == "index":
                out = layer(hidden, handed, position_embeddings=turned)
                hidden, handed = out[0], out[1]
            else:
                hidden, handed = layer(hidden, handed=handed, position_embeddings=turned)
        return BaseModelOutputWithPast(last_hidden_state=model.model.norm(hidden))

    model.model.forward = outer
    return model


@pytest.mark.parametrize("take", ["states", "indices", "index"])
def test_what_a_block_returns_beside_hidden_states_reaches_the_next_one(take: str):
    model = hands_on(tiny_model("llama"), take)
    found, batches = architecture_of(model), [tiny_tokens(sequences=2), tiny_tokens(sequences=3, seed=1)]
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for ids in batches]
        states, calls = capture(access := InMemory(model), found, batches)
        for block, runs in each_block(access, found, calls):
            alone = [run.isolated(x) for run, x in zip(runs, states, strict=True)]
            advance(block.fqn, runs, states)
            assert all(map(torch.equal, alone, states))
        for ids, state, logits in zip(batches, states, expected, strict=True):
            assert torch.equal(run_around(model, found.blocks, ids, state).logits, logits)
    assert all(not handed for call in calls["model.layers.2"] for handed in shared_states(call))  # nothing is held
    assert check_calls(model, found) == (True, set())


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        ("hidden, *_ = layer(hidden)", "the model iterates over the output of this block"),
        ("hidden = list(layer(hidden))[0]", "the model iterates over the output of this block"),
        ("hidden = layer(hidden).states", "the model reads states of the output of this block"),
        ("hidden, rest = layer(hidden); hidden = hidden + rest", "the model computes add of what a block returns"),
        ("hidden, rest = layer(hidden); rest.scale", "reads scale of what this block returns at 1, which can only"),
        ("layer(layer(hidden)[0])", "changes the hidden states|called: "),
        ("hidden = layer(2 * hidden)", r"changes the hidden states between model\.layers\.0 and this block"),
        (
            "hidden = layer(hidden.expand(4, *hidden.shape))",
            r"layers\.0 takes hidden states \[4, 2, 16, \d+\], expected",
        ),
    ],
)
def test_what_cannot_be_run_one_block_at_a_time_is_refused_without_weights_too(loop: str, told: str):
    model = tiny_model("llama")
    source = f"def forward(input_ids, **_):\n hidden = embed(input_ids)\n for layer in layers:\n  {loop}"
    space: dict[str, Any] = {"embed": model.model.embed_tokens, "layers": model.model.layers}
    exec(source, space)  # noqa: S102 - the test's own
    model.model.forward = space["forward"]
    found = architecture_of(model)
    with pytest.raises(UnsupportedModelError, match=told):
        capture_calls(model, found.blocks, [tiny_tokens(sequences=2, length=16)])
    with pytest.raises(UnsupportedModelError, match=told.replace("4, 2", "4, 1")):
        check_calls(model.to("meta"), found)


def test_a_forward_that_is_a_blocks_own_is_put_back():
    model = tiny_model("llama")
    blocks, ids = architecture_of(model).blocks, tiny_tokens(sequences=2)
    block = model.model.layers[1]
    plain = block.forward
    block.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        capture_calls(model, blocks, [ids])
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_a_block_that_is_not_called_is_refused():
    model = tiny_model("llama")
    blocks = architecture_of(model).blocks
    model.model.layers = model.model.layers[:2]
    with pytest.raises(UnsupportedModelError, match="expected its 3 blocks to be called once each, in order; called: "):
        capture_calls(model, blocks, [tiny_tokens(sequences=2)])
