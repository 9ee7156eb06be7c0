"""What a model answers of which it reads the selected tokens only."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from tests.compressx.prompts.selectors import EARLY
from torch import Tensor

import compressx
from compressx.prompts import answer as module
from compressx.prompts.templates import around_text, prompt_of
from compressx.runtime.errors import CalibrationError, UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model

TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps under a tree"
OWN_ATTENTION = ("mistral", "falcon", "bloom", "gptj")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<me>{% endif %}"
)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Collects what the model reads and writes, as token ids."""
    seen: list[tuple[Tensor, Tensor]] = []
    own = module.greedy

    def spy(model: Any, tokenizer: Any, ids: Tensor, *given: Any, **more: Any) -> Tensor:
        written = own(model, tokenizer, ids, *given, **more)
        seen.append((ids[0], written[0]))
        return written

    monkeypatch.setattr(module, "greedy", spy)
    return seen


def endless(architecture: str = "llama") -> Any:
    """Return a tiny model whose text no token ends."""
    model = tiny_model(architecture)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def likeliest(model: Any, ids: Tensor, count: int) -> list[int]:
    """Write the likeliest token each time, reading everything anew."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
    return ids[-count:].tolist()


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_a_prompt_of_which_all_is_kept_is_continued_as_by_the_model_itself(architecture, tokenizer, read) -> None:
    model = endless(architecture)
    tokenizer.eos_token = None
    selecting = {"selector": "recent"} if architecture in OWN_ATTENTION else {**EARLY, "protect": {}}
    found = compressx.generate(model, tokenizer, TEXT, keep=len(TEXT), max_new_tokens=5, **selecting)
    plain = compressx.generate(model, tokenizer, TEXT, selector=None, max_new_tokens=5)
    [(ids, written), (whole, again)] = read
    assert ids.tolist() == whole.tolist() == tokenizer(TEXT)["input_ids"]
    assert written.tolist() == again.tolist() == likeliest(model, ids, 5)
    assert (found.text, found.kept_text) == (plain.text, TEXT)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_model_reads_the_selected_tokens_as_if_they_were_the_prompt(architecture, tokenizer, read) -> None:
    model = endless(architecture)
    tokenizer.eos_token = None
    found = compressx.generate(model, tokenizer, TEXT, keep=30, max_new_tokens=4, **EARLY)
    [(ids, written)] = read
    kept = compressx.select_tokens(model, torch.tensor(tokenizer(TEXT)["input_ids"]), keep=30, **EARLY)
    assert ids.tolist() == kept.input_ids[0].tolist()
    assert written.tolist() == likeliest(model, ids, 4)
    assert found.kept_text.replace(" ... ", "") == tokenizer.decode(ids)
    assert (found.prompt_tokens, found.kept_tokens, found.new_tokens) == (len(TEXT), 30, 4)
    assert [*found.seconds] == ["select", "prefill", "generate"]
    assert min(found.seconds.values()) > 0
    assert [*found.peak_memory_bytes] == ["select", "generate"]
    assert min(found.peak_memory_bytes.values()) > 2**20
    assert json.loads(json.dumps(dataclasses.asdict(found)))["kept_tokens"] == 30


def test_a_text_ends_where_the_model_says(tokenizer: Any, read: Any) -> None:
    model = endless()
    first = likeliest(model, torch.tensor(tokenizer(TEXT)["input_ids"]), 3)
    model.generation_config.eos_token_id = first[1]
    found = compressx.generate(model, tokenizer, TEXT, selector=None, max_new_tokens=9)
    assert read[0][1].tolist() == first[: first.index(first[1]) + 1]
    assert found.new_tokens == len(read[0][1])


def test_the_question_is_kept_whole_and_the_text_is_shortened_around_it(tokenizer: Any, read: Any) -> None:
    given = {**EARLY, "protect": {"first": 0, "last": 0}}
    compressx.generate(endless(), tokenizer, TEXT, question="who sleeps?", keep=50, max_new_tokens=1, **given)
    assert tokenizer.decode(read[0][0]).endswith("\n\nQuestion: who sleeps?\nAnswer:")
    assert len(read[0][0]) == 50
    tokenizer.chat_template = TEMPLATE
    compressx.generate(endless(), tokenizer, TEXT, question="who sleeps?", keep=60, max_new_tokens=1, **given)
    shown = tokenizer.decode(read[1][0])
    assert shown.startswith("<user>")
    assert shown.endswith("\n\nwho sleeps?</><me>")
    with pytest.raises(
        CalibrationError, match="keep is 20, but 26 tokens of the prompt are protected: what surrounds "
    ):
        compressx.generate(endless(), tokenizer, TEXT, question="who sleeps?", keep=20, **given)


def test_a_text_begins_and_does_not_end_with_the_tokenizers_special_tokens(tokenizer: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    special = [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    assert tokenizer("ab")["input_ids"] == [1, 97, 98, 2]
    assert prompt_of(tokenizer, "ab")[0].tolist() == [1, 97, 98]
    before, after = around_text(tokenizer, "")
    assert (before.tolist(), after.tolist()) == ([1], [])


@pytest.mark.parametrize(
    ("prompt", "template", "said"),
    [
        ("", "", "the prompt is empty; expected a text"),
        (TEXT, "{{ raise_exception('no users') }}",
         r"template refuses the prompt \(TemplateError: no users\); give token ids to compressx.select_tokens instead"),
        (TEXT, "{% for m in messages %}{{ m.content * 2 }}{% endfor %}", "writes the long text 2 times, expected once"),
        (TEXT, "{{ 'nothing' }}", "writes the long text 0 times, expected once"),
    ],
)  # fmt: skip
def test_a_prompt_that_is_empty_or_that_the_template_takes_is_refused(
    prompt: Any, template: str, said: str, tokenizer: Any
) -> None:
    tokenizer.chat_template = template or None
    with pytest.raises(CalibrationError, match=said):
        compressx.generate(tiny_model("llama"), tokenizer, prompt, keep=20, **EARLY)


def test_what_cannot_be_answered_is_refused_before_the_model_runs(tokenizer: Any) -> None:
    from transformers import BertConfig, BertForMaskedLM

    model = endless()
    model.resize_token_embeddings(127)
    model.forward = lambda *_, **__: pytest.fail("it runs")
    tokenizer.chat_template = TEMPLATE
    bert = BertForMaskedLM(BertConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    for subject, prompt, given, said in (
        (model, TEXT, {"max_new_tokens": 0}, "max_new_tokens is 0; expected at least 1"),
        (model, TEXT, {"selector": None, "max_new_tokens": 100}, "and 100 after it are more than the model's 128 posi"),
        (bert, TEXT, {"selector": None}, "BertForMaskedLM is an encoder"),
        (model, TEXT.replace("fox", "\x7f"), {}, r"has the token id 127 \(.*\), and Llama.* knows 0 to 126; use"),
    ):
        with pytest.raises((CalibrationError, UnsupportedModelError), match=said):
            compressx.generate(subject, tokenizer, prompt, **{"keep": 20, **EARLY, **given})


def test_a_model_in_training_answers_without_dropout_and_goes_on_training(tokenizer: Any) -> None:
    model = endless("gpt2").train()
    found = {compressx.generate(model, tokenizer, TEXT, keep=30, max_new_tokens=6, **EARLY).text for _ in range(3)}
    assert found == {compressx.generate(model.eval(), tokenizer, TEXT, keep=30, max_new_tokens=6, **EARLY).text}
    assert not model.training
    compressx.generate(model.train(), tokenizer, TEXT, keep=30, max_new_tokens=1, **EARLY)
    assert all(module.training for module in model.modules())


@pytest.mark.slow
def test_a_model_with_adapters_and_a_compiled_one_answer(tokenizer: Any, read: Any) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted, compiled = peft.get_peft_model(endless(), lora).eval(), torch.compile(endless())
    for model, plain in ((adapted, adapted), (compiled, compiled._orig_mod)):
        compressx.generate(model, tokenizer, TEXT, keep=30, max_new_tokens=4, **EARLY)
        ids, written = read[-1]
        assert written.tolist() == likeliest(plain, ids, 4)
