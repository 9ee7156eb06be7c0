"""Models whose blocks cannot be run one at a time are refused, with what they do."""

from __future__ import annotations

import pytest

from compressx.architecture import survey
from compressx.errors import UnsupportedModelError
from compressx.models.capture import capture_calls
from compressx.testing import tiny_model, tiny_tokens


def test_blocks_that_return_tuples_are_named_as_such():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gptj", vocab_size=128, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(
        UnsupportedModelError, match=r"^transformer\.h\.1: .* blocks return tuples, and GPTJForCausalLM"
    ):
        capture_calls(model, survey(model).blocks, [tiny_tokens(sequences=2)])


def test_a_model_that_changes_hidden_states_between_blocks_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    with pytest.raises(
        UnsupportedModelError, match=r"changes the hidden states between model\.layers\.0 and this block"
    ):
        capture_calls(model, survey(model).blocks, [tiny_tokens(sequences=2)])


def test_a_block_that_is_not_called_is_refused():
    model = tiny_model("llama")
    blocks = survey(model).blocks
    model.model.layers = model.model.layers[:2]
    with pytest.raises(UnsupportedModelError, match="expected its 3 blocks to be called once each, in order; called: "):
        capture_calls(model, blocks, [tiny_tokens(sequences=2)])
