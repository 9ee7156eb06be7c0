from __future__ import annotations

from typing import Any

import pytest
import torch

from compressx.models.generate import first_token, sample_sequences
from compressx.recipe.sources import Generate
from compressx.runtime.errors import CalibrationError
from compressx.testing import tiny_model


def settings(**values: Any) -> Generate:
    return Generate.model_validate({"samples": 6, "batch_size": 4} | values)


def test_sequences_are_sampled_from_the_models_own_probabilities() -> None:
    """The second of two tokens, drawn 4000 times, has the distribution that one forward pass gives it."""
    model = tiny_model("llama")
    drawn = sample_sequences(model, 1, settings(samples=4000, batch_size=4000), 2)
    with torch.no_grad():
        expected = (model(torch.tensor([[1]])).logits[0, -1]).softmax(-1)
    found = torch.bincount(drawn[:, 1], minlength=128) / 4000
    assert float((found - expected).abs().sum()) < 0.25


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_all_sequences_have_the_length_that_is_asked_for_and_begin_as_asked(architecture: str) -> None:
    model = tiny_model(architecture)
    own = model.generation_config
    own.eos_token_id = [*range(128)]  # each would end a text
    own.top_k = 1
    before = torch.get_rng_state()
    ids, again, other = (sample_sequences(model, 1, settings(seed=seed), 20) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ids, again)
    assert not torch.equal(ids, other)
    assert ids.shape == (6, 20)
    assert ids.dtype == torch.int64
    assert (ids[:, 0] == 1).all()
    assert len(ids[:, 1].unique()) > 1, "the model's own top-k is not used"
    assert model.generation_config is own


def test_the_first_token_is_the_tokenizers_else_the_configs() -> None:
    class Tokenizer:
        bos_token_id: int | None = 7

    model = tiny_model("llama")
    assert first_token(Tokenizer(), model) == 7
    Tokenizer.bos_token_id = None
    assert first_token(Tokenizer(), model) == 1
    model.config.bos_token_id = None
    with pytest.raises(CalibrationError, match="neither the tokenizer nor the model's config has one; name a dataset"):
        first_token(Tokenizer(), model)


def test_probabilities_that_are_not_finite_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(CalibrationError, match="not finite; check the model's weights"):
        sample_sequences(model, 1, settings(), 4)
