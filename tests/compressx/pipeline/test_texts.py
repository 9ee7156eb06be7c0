"""Calibration text in whole runs: what is refused early, and text that the model writes."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.compressx.evaluation.measuring import evaluators, plugins
from tests.compressx.pipeline.runs import artifacts, recipe, same
from tests.compressx.processes import in_two
from tests.compressx.saved import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

import compressx
from compressx.evaluation.saved import evaluate_saved
from compressx.masks.maskset import MaskSet
from compressx.models import streaming
from compressx.pipeline.run import plan, run
from compressx.pipeline.sweep import check_runs, runs_of
from compressx.plugins.manager import load_plugins
from compressx.prompts.answer import answer_saved
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import CalibrationError, CompressxError, RecipeError
from compressx.testing import tiny_model, tiny_text


def with_text(model: Path, dataset: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return the recipe with another dataset, and other values of its calibration."""
    given = recipe(model)
    del given["calibration"]["dataset"]
    given["calibration"] |= ({"datasets": dataset} if isinstance(dataset, list) else {"dataset": dataset}) | values
    return given


@pytest.mark.parametrize(
    ("dataset", "values", "message"),
    [
        ({"json": "chats.json"}, {}, r"dataset: .* chats, but the tokenizer has no chat template"),
        ({"json": "chats.json", "field": "mesages"}, {},
         r"dataset: chats\.json\[0\]: no field 'mesages'; did you mean 'messages'\?"),
        ([{"name": "c4", "weight": 0.01}, {"name": "wikitext"}], {},
         r"datasets\[0\]: weight 0\.01 gives this dataset 0 of 8 sequences; raise its weight"),
        ({"generate": {"samples": 7}}, {},
         r"dataset\.generate: 8 sequences are drawn from 7 generated .*samples of 8 or more"),
        ({"generate": {"prompts": {"json": "chats.json"}}}, {}, "dataset: .* chats, but the tokenizer has no chat tem"),
        ({"generate": {"prompts": "promts"}}, {}, r"dataset: no dataset 'promts'; did you mean 'prompts'\?"),
        ({"generate": {"prompts": {"generate": {}}}}, {}, r"dataset\.generate\.prompts: .*prompts cannot be generated"),
        ({"generate": {"tokens": 8}}, {}, r"dataset\.generate\.tokens: .*tokens only goes with prompts"),
        ({"name": "prompts", "split": "train"}, {}, "dataset: dataset 'prompts' takes no split: the program writes it"),
        ([{"generate": {"samples": 5}}, {"name": "c4", "weight": 3.0}], {"samples": 24},
         r"datasets\[0\]\.generate: 6 sequences are drawn from 5"),
        *(({"name": x}, {}, f"dataset: (no )?dataset '{x}'") for x in ("wiki", "./docs.txt", "docs.jsonl", "imdb")),
    ],
)  # fmt: skip
def test_text_that_cannot_be_used_is_refused_by_a_plan(model, project, dataset, values, message) -> None:
    Path("chats.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "w1 w2"}]}]))
    with pytest.raises(CompressxError, match=rf"^<dict>:calibration\.{message}"):
        plan(with_text(model, dataset, **values))
    with pytest.raises(RecipeError, match="generate only goes with calibration and finetune"):
        plan(recipe(model, evaluate={"token_perplexity": {"dataset": {"generate": {}}}}))


@pytest.mark.parametrize("method", ["divergence", "attention-aware"])
def test_an_allocation_does_not_measure_on_the_only_window_that_pruners_see(model, method) -> None:
    rule = {"targets": ["*"], "pruner": "wanda"}
    given = recipe(model, rule, allocation={"method": method, "target": 0.5})
    plan(given)
    given["calibration"]["samples"] = 1
    told = rf"^<dict>:calibration\.samples: calibration\.samples is 1, but {method} at <dict>:allocation .* at least 2$"
    with pytest.raises(RecipeError, match=told):
        plan(given)
    given["calibration"]["samples"] = 8
    given["allocation"]["samples"] = 1
    with pytest.raises(RecipeError, match=r"allocation\.samples is 1; expected at least 2"):
        plan(given)
    plan(given | {"allocation": {"method": "owl", "target": 0.5, "samples": 1}})


@pytest.mark.parametrize("name", ["wikitext", "org/nothing"])
def test_a_hub_that_cannot_be_reached_is_told_once_and_before_weights_are_loaded(
    model, unloaded, monkeypatch, name
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", Path("datasets"))
    given = with_text(model, {"name": name})
    given["evaluate"] = {"token_perplexity": {"dataset": name, "sequence_length": 32}}
    given["finetune"] = {"steps": 2, "dataset": name, "samples": 4, "sequence_length": 16}
    plan(given)
    with pytest.raises(CalibrationError, match=f"^<dict>:evaluate: dataset '{name}' .*the hub cannot be") as caught:
        run(given)
    assert str(caught.value).count("cannot be reached") == 1
    assert "\n" not in str(caught.value)


class TestTokensBeyondTheEmbedding:
    """A tokenizer to which tokens were added, without `resize_token_embeddings`: what reads one is refused in time."""

    ADDED = ("<|im_start|>", "<|im_end|>")
    CHAT = "{% for m in messages %}<|im_start|> {{ m.content }} <|im_end|>{% endfor %}"

    @pytest.fixture
    def beyond(self, tmp_path: Path) -> Path:
        """The folder of such a model; beside it chats, and text with and without an added token."""
        folder = save_tiny(tmp_path / "beyond" / "model", "llama")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        small = tiny_model("llama")
        small.resize_token_embeddings(len(tokenizer))
        small.save_pretrained(folder)
        tokenizer.add_tokens(list(self.ADDED), special_tokens=True)
        tokenizer.chat_template = self.CHAT
        tokenizer.save_pretrained(folder)
        chat = {"messages": [{"role": "user", "content": tiny_text(words=40)}]}
        Path("chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 20)
        Path("ended.txt").write_text(f"{tiny_text(words=40)} <|im_end|> " * 20)
        return folder

    @pytest.mark.parametrize(
        "sections",
        [
            {"calibration": {"dataset": {"json": "chats.jsonl"}, "samples": 8, "sequence_length": 32}},
            {"calibration": {"datasets": ["python-docs", {"text": "ended.txt"}], "samples": 8, "sequence_length": 64}},
            {"finetune": {"steps": 2, "dataset": {"json": "chats.jsonl"}, "samples": 4, "sequence_length": 16}},
            {"evaluate": {"token_perplexity": {"dataset": {"text": "ended.txt"}, "sequence_length": 64}}},
            {"evaluate": {"sample": {"prompt": "w1", "tokens": 4, "apply_chat_template": True}}},
            {"evaluate": {"needle": {"dataset": "python-docs", "lengths": [64], "needles": 1}}},
            {"evaluate": {"lm_eval": {"tasks": ["mine.yaml"], "trust_task_code": True, "apply_chat_template": True}}},
            {"select_tokens": {"selector": "retrieval-heads", "keep": 0.5},
             "evaluate": {"sample": {"prompt": "w1", "tokens": 4}}},
        ],
        ids=str,
    )  # fmt: skip
    def test_every_text_of_a_recipe_is_checked_before_weights_are_loaded(self, beyond, unloaded, sections) -> None:
        Path("mine.yaml").write_text("task: mine\n")
        with pytest.raises(CalibrationError) as caught:
            run(recipe(beyond) | sections)
        told = str(caught.value)
        assert next(iter(sections)) in told.partition(" has ")[0]
        assert any(f"has the token id {21 + i} ('{self.ADDED[i]}'), and LlamaForCausalLM knows 0 to 20; " in told
                   for i in range(2))  # fmt: skip
        assert "\n" not in told

    def test_text_without_them_and_rows_that_no_token_has_are_fine(self, beyond, model) -> None:
        for folder in (beyond, model):  # the other one has 128 rows for 21 tokens
            assert run(recipe(folder, output=f"out-{folder.parent.name}")).sparsity > 0.4

    def test_a_model_in_memory_refuses_them_before_it_is_changed(self, beyond) -> None:
        dense, tokenizer = AutoModelForCausalLM.from_pretrained(beyond), AutoTokenizer.from_pretrained(beyond)
        before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
        wanda = {"prune": [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]}
        drawn = {"calibration": {"samples": 4, "sequence_length": 16}}
        chats = [[{"role": "user", "content": tiny_text(words=40)}]] * 4
        for text, settings in ((chats, drawn), (torch.full((2, 8), 21), {})):
            with pytest.raises(CalibrationError, match=r"has the token id 2[12].* knows 0 to 20"):
                compressx.prune(dense, tokenizer, wanda | settings, calibration=text)
        assert same(dict(dense.state_dict()), before)

    def test_generate_and_eval_refuse_them_before_weights_are_loaded(self, beyond, monkeypatch) -> None:
        monkeypatch.setattr("compressx.prompts.answer.load_model", lambda *_: pytest.fail("weights were loaded"))
        monkeypatch.setattr("compressx.evaluation.saved.open_model", lambda *_: pytest.fail("weights were loaded"))
        source = ModelSource(path=beyond)
        asked = evaluators(token_perplexity={"dataset": {"text": "ended.txt"}, "sequence_length": 64})
        for ask in (
            lambda: answer_saved(source, "w1 w2", "", 4, selecting=None),
            lambda: evaluate_saved(source, asked, plugins()),
        ):
            with pytest.raises(CalibrationError, match=r"has the token id 2[12] .* knows 0 to 20"):
                ask()


class TestGenerated:
    GENERATE = {"generate": {"samples": 8, "seed": 3}}  # noqa: RUF012 - not changed

    def test_text_is_generated_once_and_then_read_from_the_cache_unless_it_is_not_what_is_asked_for(
        self, model, monkeypatch
    ) -> None:
        """Every setting gives other text; what has another shape or vocabulary is written anew."""
        given = with_text(model, self.GENERATE)
        run(given)
        before = artifacts("out")
        (kept,) = Path("cache/generated").glob("*.json")
        whole = json.loads(kept.read_text())
        ids = torch.tensor(whole["value"])
        assert ids.shape == (8, 32)
        assert (ids[:, 0] == 1).all()
        with monkeypatch.context() as patch:
            patch.setattr("compressx.pipeline.inputs.sample_texts", Mock(side_effect=ZeroDivisionError))
            run(given)
            assert artifacts("out") == before
            for forged in ([[1] * 31] * 8, [["1"] * 32] * 8, [[10**6] * 32] * 8):
                kept.write_text(json.dumps(whole | {"value": forged}))
                with pytest.raises(ZeroDivisionError):
                    run(given)
        kept.write_text(json.dumps(whole))
        for changed in ({"seed": 4}, {"batch_size": 3}):
            run(with_text(model, {"generate": self.GENERATE["generate"] | changed}), replace=True)
        assert len({json.dumps(json.loads(p.read_text())["value"]) for p in Path("cache/generated").iterdir()}) == 3

    def test_other_weights_write_their_own_text(self, model) -> None:
        run(with_text(model, self.GENERATE))
        other = Path(shutil.copytree(model, "other"))
        tiny_model("llama", seed=1).save_pretrained(other)
        run(with_text(other, self.GENERATE) | {"output": "of-the-other"})
        first, other = (json.loads(path.read_text()) for path in Path("cache/generated").iterdir())
        assert first["value"] != other["value"]

    def test_other_text_is_read_before_anything_is_generated(self, model, unloaded) -> None:
        given = with_text(model, self.GENERATE) | {"evaluate": recipe(model, evaluated=True)["evaluate"]}
        given["evaluate"]["token_perplexity"]["samples"] = 1000
        with pytest.raises(CalibrationError, match="evaluation needs 1000 sequences"):
            run(given)

    @pytest.mark.parametrize(
        ("what", "asked"), [("generating text", True), ("generating text", "auto"), ("fine-tuning", "auto")]
    )
    def test_streamed_weights_are_refused_with_what_to_do(self, model, monkeypatch, what, asked) -> None:
        monkeypatch.setattr(streaming, "free_memory", lambda *_: 1000)
        monkeypatch.setattr("compressx.pipeline.inputs.sample_texts", lambda *_, **__: pytest.fail("generated"))
        given = with_text(model, self.GENERATE) if "text" in what else recipe(model, finetune={"steps": 1})
        place = r"calibration\.dataset\.generate" if "text" in what else "finetune"
        told = rf"{place}: {what} needs all weights in memory, and model\.streaming is {str(asked).lower()} at "
        with pytest.raises(RecipeError, match=rf"{told}.*set it to false, or remove (generate|finetune)$"):
            (run if asked == "auto" else plan)(given | {"model": {"path": str(model), "streaming": asked}})

    def test_a_sweep_counts_it_without_a_model(self, model, unloaded) -> None:
        Path("recipe.yaml").write_text(json.dumps(with_text(model, self.GENERATE)))
        check_runs(runs_of(Path("recipe.yaml"), ["prune.0.sparsity=0.4,0.5"], (), None, plugins()), load_plugins())

    def test_an_error_of_one_run_of_a_sweep_names_its_values(self, model, monkeypatch) -> None:
        Path("recipe.yaml").write_text(json.dumps(recipe(model)))
        monkeypatch.setattr("compressx.pipeline.sweep.run", Mock(side_effect=CalibrationError("no statistic")))
        (_, second) = runs_of(Path("recipe.yaml"), ["prune.0.sparsity=0.4,0.5"], (), None, plugins())
        with pytest.raises(CalibrationError, match=r"^prune\.0\.sparsity=0\.5: no statistic$"):
            second.run(load_plugins())

    def test_it_is_a_dataset_of_fine_tuning_and_of_a_mixture_too(self, model) -> None:
        text = {"text": str(model.with_name("text.txt"))}
        tuned = {"steps": 2, "datasets": [self.GENERATE, text], "samples": 4, "sequence_length": 16}
        report = run(with_text(model, [self.GENERATE, text]) | {"finetune": tuned})
        assert report.finetune is not None
        assert report.finetune.windows == (4, 16)
        assert len(list(Path("cache/generated").iterdir())) == 2  # of 32 and of 16 tokens

    @pytest.fixture
    def chatting(self, model) -> Path:
        """A model with a chat template, and chats whose last answer is `w17`."""
        folder = Path(shutil.copytree(model, "chatting/model"))
        shutil.copy(model.with_name("text.txt"), "chatting/text.txt")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        asks = "{% if add_generation_prompt %}w10{% endif %}"
        tokenizer.chat_template = f"{{% for m in messages %}}w9 {{{{ m.content }}}} {{% endfor %}}{asks}"
        tokenizer.save_pretrained(folder)
        chats = [
            [{"role": "user", "content": f"w{i % 9} w1"}, {"role": "assistant", "content": "w17"}] for i in range(99)
        ]
        Path("chats.json").write_text(json.dumps([{"messages": chat} for chat in chats]))
        return folder

    ANSWERED = {"generate": {"prompts": {"json": "chats.json"}, "samples": 8, "tokens": 9}}  # noqa: RUF012 - not changed

    def test_windows_are_full_of_prompts_each_with_its_answer_up_to_the_end_token(self, chatting) -> None:
        run(with_text(chatting, self.ANSWERED))
        (kept,) = Path("cache/generated").iterdir()
        windows = json.loads(kept.read_text())["value"]
        assert [len(window) for window in windows] == [32] * 8
        text, answers = [token for window in windows for token in window], []
        while len(text) >= 4:
            (begins, asked, w1, turn), text = text[:4], text[4:]
            assert (begins, w1, turn) == (12, 4, 13)  # w9, w1, w10
            assert 3 <= asked < 12
            answers.append(text[: text.index(2) + 1 if 2 in text[:9] else 9])
            text = text[len(answers[-1]) :]
        assert len({*map(tuple, answers)}) > 10
        assert {len(answer) for answer in answers[:-1]} >= {9}

    def test_answers_are_cached_until_the_prompts_or_what_is_asked_of_the_model_change(
        self, chatting, monkeypatch
    ) -> None:
        run(with_text(chatting, self.ANSWERED))
        with monkeypatch.context() as patch:
            patch.setattr("compressx.pipeline.inputs.sample_texts", Mock(side_effect=ZeroDivisionError))
            run(with_text(chatting, self.ANSWERED))
            for changed in ({"seed": 4}, {"tokens": 8}):
                with pytest.raises(ZeroDivisionError):
                    run(with_text(chatting, {"generate": self.ANSWERED["generate"] | changed}), replace=True)
            chats = Path("chats.json")
            chats.write_text(chats.read_text().replace("w8 w1", "w7 w1"))  # the same file, with other text
            with pytest.raises(ZeroDivisionError):
                run(with_text(chatting, self.ANSWERED), replace=True)

    @pytest.mark.parametrize(
        ("asked", "message"),
        [({"prompts": "prompts"}, r"generate\.prompts: a prompt of \d+ tokens and 256 after it are more than the mod"),
         ({"prompts": {"json": "few.json"}, "tokens": 9}, "generate needs 128 sequences of 32 tokens; the text h")],
        ids=["long", "few"],
    )  # fmt: skip
    def test_prompts_that_the_model_cannot_answer_or_that_are_too_few_are_refused(
        self, chatting, asked, message
    ) -> None:
        Path("few.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "w1"}]}] * 3))
        with pytest.raises(CalibrationError, match=f"^<dict>:calibration: {message}"):
            run(with_text(chatting, {"generate": asked}))

    @pytest.mark.parametrize("template", [True, False])
    def test_a_model_answers_what_the_program_writes_as_a_chat_where_it_can(self, models, template) -> None:
        folder = Path(shutil.copytree(models("llama-yarn"), "long/model"))  # of 1024 positions
        shutil.copy(models("llama-yarn").with_name("text.txt"), "long/text.txt")
        if template:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.chat_template = "{% for m in messages %}w9 {{ m.content }}{% endfor %} w10"
            tokenizer.save_pretrained(folder)
        run(with_text(folder, {"generate": {"prompts": "prompts", "samples": 8, "tokens": 8}}))
        (kept,) = Path("cache/generated").iterdir()
        ids = torch.tensor(json.loads(kept.read_text())["value"])
        assert ids.shape == (8, 32)
        assert (int(ids[0, 0]) == 12) == template

    def test_prompts_are_a_share_of_a_mixture_and_a_probe(self, model) -> None:
        text = {"text": str(model.with_name("text.txt"))}
        mixed = with_text(model, [text, {"name": "prompts", "weight": 0.25}], samples=10)
        mixed["evaluate"] = {"token_perplexity": {"dataset": "prompts", "sequence_length": 32, "samples": 4}}
        plan(mixed)
        report = run(mixed)
        assert report.sparsity > 0.4
        alone = run(mixed | with_text(model, text, samples=10) | {"output": "alone"})
        assert report.evaluation["dense"] == alone.evaluation["dense"]
        assert report.evaluation["pruned"] != alone.evaluation["pruned"]

    @pytest.mark.slow
    def test_the_first_of_two_processes_generates_what_both_prune_with(self, model, tmp_path) -> None:
        given = with_text(model, self.GENERATE)
        alone = run(given | {"output": str(tmp_path / "alone")})
        for kept in Path("cache/generated").iterdir():
            kept.unlink()
        in_two(partial(_run, given | {"output": str(tmp_path / "out")}), tmp_path)
        assert len(list(Path("cache/generated").iterdir())) == 1
        one, two = (MaskSet.load(tmp_path / folder / "masks.safetensors") for folder in ("alone", "out"))
        differing = sum(int((one[n].keep != two[n].keep).sum()) for n in one) / sum(one[n].keep.numel() for n in one)
        assert differing < 1e-4
        assert alone.sparsity > 0


def _run(given: dict[str, Any]) -> str:
    return run(given).to_json()
