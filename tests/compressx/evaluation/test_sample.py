"""What a model writes after a prompt."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.evaluation.measuring import evaluators, measure, read

from compressx.api.evaluator import EvaluatedModel
from compressx.evaluation.sample import Sample, SampleEvaluator, prompt_ids
from compressx.models.access import InMemory
from compressx.runtime.errors import CalibrationError
from compressx.testing import tiny_model


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_likeliest_token_is_taken_each_time_whatever_the_model_is_set_to(architecture: str, tokenizer: Any) -> None:
    model = tiny_model(architecture).eval()
    model.generation_config.update(do_sample=True, repetition_penalty=9.0, eos_token_id=None)
    before = model.generation_config.to_dict()
    ids = expected = torch.tensor([[65, 66, 67]])
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    tokenizer.eos_token = None
    evaluator = SampleEvaluator(Sample(prompt="ABC", tokens=6))
    found: Any = evaluator.evaluate(EvaluatedModel(InMemory(model), tokenizer, ids))
    assert found["sample"]["text"] == "".join(
        c for c in tokenizer.decode(expected[0, 3:], skip_special_tokens=True) if c.isprintable() or c in "\n\t"
    )
    assert model.generation_config.to_dict() == before


def test_a_prompt_may_be_a_users_message_and_needs_a_template_a_token_and_room_for_the_answer(tokenizer: Any) -> None:
    plain = prompt_ids(Sample(prompt="ab"), tokenizer)
    assert plain.tolist() == [tokenizer("ab")["input_ids"]]
    chat = Sample(prompt="ab", apply_chat_template=True)
    tokenizer.chat_template = None
    with pytest.raises(CalibrationError, match="apply_chat_template is true, and the tokenizer has no chat template"):
        prompt_ids(chat, tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert tokenizer.decode(prompt_ids(chat, tokenizer)[0]) == "<user>ab"
    tokenizer.chat_template += "{% if add_generation_prompt %}<me>{% endif %}"
    assert tokenizer.decode(prompt_ids(chat, tokenizer)[0]) == "<user>ab<me>"
    for hostile in ("{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", 5):
        tokenizer.chat_template = hostile
        with pytest.raises(
            CalibrationError, match=r"^evaluate.sample \(roles user\): the tokenizer's chat template refuses"
        ):
            prompt_ids(chat, tokenizer)
    model = tiny_model("llama")
    model.config.max_position_embeddings = 8
    with pytest.raises(CalibrationError, match="2 tokens and 7 after it are more than the model's 8 positions"):
        SampleEvaluator(Sample(prompt="ab", tokens=7)).check(model, tokenizer, lambda *_: nullcontext())


def test_a_sample_is_measured_cached_and_is_no_number(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path))
    asked, model = evaluators(sample={"prompt": "ab", "tokens": 4}), InMemory(tiny_model("llama"))
    found = measure(model, tokenizer, asked, "model")
    assert found == measure(model, tokenizer, asked)
    monkeypatch.setattr("compressx.evaluation.sample.greedy", lambda *_: pytest.fail("it is cached"))
    assert measure(model, tokenizer, asked, "model") == found
    one, other = (read(x, tokenizer, model.model)[0] for x in (asked, evaluators(sample={"prompt": "abc"})))
    assert other.fingerprint() != one.fingerprint()
