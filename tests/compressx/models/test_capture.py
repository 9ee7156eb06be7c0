"""Blocks that run one at a time compute what the model computes; models that do not allow it are refused."""

from __future__ import annotations

import pytest
import torch

from compressx.models.architecture import survey
from compressx.models.blockwise import capture_calls, replay, run_around
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing import tiny_model, tiny_tokens

# Whose blocks return a tuple, one whose blocks return their output alone, and one whose blocks return a list.
_CONFIGS = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "falcon": {"num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4},
    "llama": {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
_ONE_LAYER = {"num_hidden_layers": 1, "n_layer": 1, "n_layers": 1, "num_layers": 1, "attention_types": [[["local"], 1]]}


@pytest.mark.parametrize(("model_type", "layers"), list(zip(_CONFIGS, [1, 2, 1, 2, 1, 2, 2, 2], strict=True)))
def test_blocks_run_one_at_a_time_give_the_models_own_logits_whatever_they_return(model_type: str, layers: int):
    from transformers import AutoConfig, AutoModelForCausalLM

    values = _CONFIGS[model_type]
    if layers == 1:
        values = {key: _ONE_LAYER.get(key, value) for key, value in values.items()}
    config = AutoConfig.for_model(model_type, vocab_size=128, hidden_size=64, bos_token_id=1, eos_token_id=2, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    blocks, ids = survey(model).blocks, tiny_tokens(sequences=2)
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
    assert len(blocks) == layers


def test_a_model_that_changes_hidden_states_between_blocks_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    with pytest.raises(
        UnsupportedModelError, match=r"changes the hidden states between model\.layers\.0 and this block"
    ):
        capture_calls(model, survey(model).blocks, [tiny_tokens(sequences=2)])


def test_a_model_that_unpacks_what_its_blocks_return_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("llama")

    def forward(input_ids, **_):
        hidden = model.model.embed_tokens(input_ids)
        for layer in model.model.layers:
            hidden, _ = layer(hidden)
        return hidden

    monkeypatch.setattr(model.model, "forward", forward)
    for sequences in (2, 3):
        with pytest.raises(UnsupportedModelError, match="the model unpacks the output of its blocks"):
            capture_calls(model, survey(model).blocks, [tiny_tokens(sequences=sequences)])


def test_several_residual_streams_are_refused(monkeypatch):
    model = tiny_model("llama")
    streams = model.model.embed_tokens(tiny_tokens(sequences=2, length=16)).expand(4, -1, -1, -1)
    monkeypatch.setattr(model.model, "forward", lambda input_ids, **_: model.model.layers[0](streams))
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0 takes hidden states \[4, 2, 16, \d+\], expected \[batch"
    ):
        capture_calls(model, survey(model).blocks, [tiny_tokens(sequences=2, length=16)])


def test_a_forward_that_is_a_blocks_own_is_put_back():
    model = tiny_model("llama")
    blocks, ids = survey(model).blocks, tiny_tokens(sequences=2)
    block = model.model.layers[1]
    plain = block.forward
    block.forward = lambda *args, **kwargs: 2 * plain(*args, **kwargs)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        capture_calls(model, blocks, [ids])
        assert torch.equal(model(ids, use_cache=False).logits, expected)


def test_a_block_that_is_not_called_is_refused():
    model = tiny_model("llama")
    blocks = survey(model).blocks
    model.model.layers = model.model.layers[:2]
    with pytest.raises(UnsupportedModelError, match="expected its 3 blocks to be called once each, in order; called: "):
        capture_calls(model, blocks, [tiny_tokens(sequences=2)])
