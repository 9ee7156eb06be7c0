from __future__ import annotations

from typing import Any

import pytest
import torch

from compressx.models.generate import end_tokens, first_token, sample_texts
from compressx.recipe.sources import Generate
from compressx.runtime.errors import CalibrationError
from compressx.testing import tiny_model


def settings(**values: Any) -> Generate:
    return Generate.model_validate({"samples": 6, "batch_size": 4} | values)


def sampled(model: Any, settings: Generate, length: int) -> torch.Tensor:
    """Return the model's own sequences, int64 [samples, length]."""
    total = settings.samples * length
    return sample_texts(model, [[1]] * settings.samples, length - 1, total, settings).view(-1, length)


def test_sequences_are_sampled_from_the_models_own_probabilities() -> None:
    """The second of two tokens, drawn 4000 times, has the distribution that one forward pass gives it."""
    model = tiny_model("llama")
    drawn = sampled(model, settings(samples=4000, batch_size=4000), 2)
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
    ids, again, other = (sampled(model, settings(seed=seed), 20) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(ids, again)
    assert not torch.equal(ids, other)
    assert ids.shape == (6, 20)
    assert ids.dtype == torch.int64
    assert (ids[:, 0] == 1).all()
    assert len(ids[:, 1].unique()) > 1, "the model's own top-k is not used"
    assert model.generation_config is own


PROMPTS = [[1, 5, 9], [1, 7], [1, *range(10, 24)], [1, 3, 8, 30]]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_answers_are_the_same_in_a_batch_and_alone_and_stop_at_the_first_end(architecture: str) -> None:
    """Of a model whose likeliest token has all the probability, so that both draw the same."""
    model = tiny_model(architecture)
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda _module, _inputs, logits: logits * 1000)
    with torch.no_grad():
        expected = []
        for prompt in PROMPTS:
            ids = list(prompt)
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            expected.append(ids)
    ends = (expected[0][len(PROMPTS[0]) + 4], expected[2][len(PROMPTS[2]) + 2])
    stopped = []
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        last = next((i for i in range(len(prompt), len(ids)) if ids[i] in ends), len(ids))
        stopped += ids[: last + 1]
    for size in (1, 3, 4):
        given = settings(batch_size=size)
        assert sample_texts(model, PROMPTS, 12, 1000, given, ends=ends).tolist() == stopped
        assert sample_texts(model, PROMPTS, 12, 1000, given).tolist() == [x for ids in expected for x in ids]


def test_no_more_prompts_are_answered_than_are_needed() -> None:
    model, told = tiny_model("llama"), []
    ids = sample_texts(model, PROMPTS * 8, 3, 20, settings(), progress=lambda i, n: told.append((i, n)))
    assert len(ids) == 3 + 2 + 15 + 4 + 4 * 3
    assert told == [(0, 20), (36, 20)]


def test_what_ends_an_answer_is_in_the_generation_settings_else_the_tokenizers() -> None:
    class Tokenizer:
        eos_token_id: int | None = 7

    model = tiny_model("llama")
    for given, ends in (([3, 4], [3, 4]), (3, [3]), (None, [7])):
        model.generation_config.eos_token_id = given
        assert end_tokens(model, Tokenizer()) == ends
    Tokenizer.eos_token_id = None
    assert end_tokens(model, Tokenizer()) == []


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
        sampled(model, settings(), 4)
