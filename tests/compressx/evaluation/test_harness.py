"""Tasks of lm-evaluation-harness: their names, their figures, and the silence around them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import json
import math
import random
import re
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval.tasks as lm_eval_tasks
import numpy as np
import pytest
import torch
from tests.compressx.cli.commands import printed, refused
from tests.compressx.evaluation.measuring import evaluators, measure
from tests.compressx.saved import save_tiny

from compressx.data.documents import rendered
from compressx.evaluation.lm_eval import HarnessEvaluator, LmEval, check_tokenizer, run_tasks, task_index
from compressx.models.access import InMemory
from compressx.plugins.manager import load_plugins
from compressx.prompts.selection import SelectorSettings
from compressx.prompts.templates import around_text
from compressx.recipe.sections import SelectTokens
from compressx.report.flips import as_text
from compressx.runtime.errors import CalibrationError, CompressxError, PluginError, RecipeError
from compressx.testing import tiny_model

CHAT = (
    "{% for m in messages %}{{ m.role + ' w1 ' + m.content + ' w2 ' }}{% endfor %}"
    "{% if add_generation_prompt %}w3 w4 {% endif %}"
)
THEIR_COMMAND = """
import json, sys
from functools import partial
import lm_eval.tasks as tasks
tasks.TaskManager = partial(tasks.TaskManager, include_defaults=False)  # whose index takes many seconds
from lm_eval.__main__ import cli_evaluate
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
"""


def settings(*tasks: Any, **values: Any) -> LmEval:
    return LmEval.model_validate({"tasks": list(tasks), **values})


trusted = partial(settings, trust_task_code=True)


def check(asked: LmEval) -> None:
    HarnessEvaluator(asked).check(None, None, lambda *_: contextlib.nullcontext())


@pytest.fixture
def few_tasks(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A harness that knows two tasks and a group, and a cache of its own."""
    from lm_eval.tasks import TaskManager

    folder = project / "tasks"
    folder.mkdir()
    rows = [{"q": "a", "options": ["b", "c"], "gold": i % 2} for i in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    body = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: options\ndoc_to_target: gold\n'
        "metric_list:\n  - metric: acc\n"
    )
    for name in ("letters_easy", "letters_hard"):
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{body}")
    (folder / "letters.yaml").write_text(
        "group: letters\ntask: [letters_easy, letters_hard]\n"
        "aggregate_metric_list:\n  - {metric: acc, aggregation: mean, weight_by_size: true}\n"
    )
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", project / "datasets")
    monkeypatch.setattr("lm_eval.tasks.__file__", str(folder / "__init__.py"))
    here = partial(TaskManager, include_path=str(folder))
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: here(include_defaults=False))
    return folder


class TestCheck:
    def test_names_and_files_pass_and_the_index_is_built_once_and_for_names_alone(self, few_tasks, monkeypatch):
        build, _ = lm_eval_tasks.TaskManager, monkeypatch.delattr("lm_eval.tasks.TaskManager")
        check(trusted("tasks/letters.yaml"))
        monkeypatch.setattr("lm_eval.tasks.TaskManager", build, raising=False)
        check(trusted("letters_easy", "tasks/letters_hard.yaml"))
        monkeypatch.delattr("lm_eval.tasks.TaskManager")
        check(settings("letters"))

    @pytest.mark.parametrize("forged", ["/evil.yaml", "{folder}/../evil.yaml", 3])
    def test_a_cached_index_that_names_a_file_elsewhere_is_built_anew(self, few_tasks: Path, forged: Any) -> None:
        check(settings("letters_easy"))
        (entry,) = (few_tasks.parent / "cache" / "harness").iterdir()
        index = json.loads(entry.read_text())
        index["value"]["letters_easy"] = forged if forged == 3 else forged.format(folder=few_tasks)
        entry.write_text(json.dumps(index))
        assert task_index()["letters_easy"] == str(few_tasks / "letters_easy.yaml")

    def test_a_cached_name_that_the_harness_lacks_is_no_path(self, few_tasks: Path, tokenizer: Any) -> None:
        check(settings("letters_easy"))
        (entry,) = (few_tasks.parent / "cache" / "harness").iterdir()
        index = json.loads(entry.read_text())
        index["value"]["evil"] = None
        entry.write_text(json.dumps(index))
        Path("evil").write_text(f"task: evil\ninclude: {few_tasks}/letters_easy.yaml\n")
        check(settings("evil"))
        with pytest.raises(RecipeError, match="the harness has no task 'evil'"):
            run_tasks(tiny_model("llama"), tokenizer, settings("evil"))

    @pytest.mark.parametrize(
        ("asked", "told"),
        [("leters_easy", r"no task is named 'leters_easy'; did you mean 'letters_easy'\? `lm-eval ls tasks` lists"),
         ("qqqqq", r"'qqqqq'; `lm-eval.* as the path of its \.yaml file$"),
         ("mine.yaml", r"no such file: mine\.yaml \(looked in ")],
    )  # fmt: skip
    def test_a_task_that_is_not_there_is_told(self, few_tasks: Path, asked: str, told: str) -> None:
        with pytest.raises(RecipeError, match=told):
            check(trusted(asked))

    def test_the_real_harness_knows_wikitext(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of its thousands of tasks, whose index takes seconds, only the folder with this one is read."""
        import lm_eval.tasks as harness

        here = partial(harness.TaskManager, include_defaults=False)
        monkeypatch.setattr(harness, "TaskManager", lambda: here(include_path=f"{harness.__path__[0]}/wikitext"))
        monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
        check(settings("wikitext"))
        with pytest.raises(RecipeError, match="no task is named 'wikitxt'; did you mean 'wikitext'"):
            check(settings("wikitxt"))


EASY = "include: {tasks}/letters_easy.yaml"
EVIL = "process_docs: !function evil.run"
RUN = "from pathlib import Path\n\ndef run(rows):\n    Path('ran').touch()\n    return rows\n"
TASK_FILES = {
    "without any code": {"mine.yaml": f"task: mine\n{EASY}"},
    "of the other ending, by its whole path": {"{project}/deep/mine.yml": f"task: mine\n{EASY}\n{EVIL}"},
    "of a group": {"tasks/mine.yaml": f"group: mine\ntask: [letters_easy]\n{EVIL}"},
    "of the harness itself": {"tasks/letters_easy.yaml": ""},
}


class TestTrust:
    """A task file runs only if it is trusted, whatever is in it and in what it names."""

    @pytest.fixture(params=TASK_FILES.values(), ids=TASK_FILES)
    def task(self, request: pytest.FixtureRequest, few_tasks: Path, project: Path) -> str:
        for name, text in request.param.items():
            path = Path(name.format(project=project))
            path.parent.mkdir(exist_ok=True)
            path.with_name("evil.py").write_text(RUN)
            with path.open("a") as file:
                file.write(text.format(tasks=few_tasks))
        return next(iter(request.param)).format(project=project)

    def test_it_is_not_run_if_it_is_not_trusted(self, task: str, project: Path) -> None:
        told = (
            f"lm_eval.tasks: the task file {task!r} can run code (!function, templates, metrics, scripts that load "
            "data); if you trust it and what it names, set lm_eval.trust_task_code: true (eval: --trust-task-code)\n"
        )
        assert refused("eval", "m", "--tasks", task).endswith(f": {told}")
        assert not (project / "ran").exists()

    @pytest.fixture
    def commands(self, few_tasks: Path, project: Path) -> list[list[str]]:
        """The commands that measure by a recipe, which names a task file with code."""
        save_tiny(project / "m", "llama")
        (project / "evil.py").write_text(RUN)
        (project / "mine.yaml").write_text(f"task: mine\n{EASY.format(tasks=few_tasks)}\n{EVIL}")
        (project / "r.yaml").write_text(
            "model: ./m\nprune: [{targets: ['*'], pruner: magnitude, sparsity: 0.5}]\noutput: out\n"
            "evaluate: {lm_eval: {tasks: [mine.yaml]}}\n"
        )
        return [["run", "r.yaml"], ["sweep", "r.yaml", "--grid", "prune.0.sparsity=0.4,0.5"],
                ["eval", "m", "--recipe", "r.yaml"]]  # fmt: skip

    def test_no_command_runs_it(self, commands: list[list[str]], project: Path) -> None:
        for command in (["plan", "r.yaml"], *commands):
            told = "error: r.yaml:4:30: lm_eval.tasks: the task file 'mine.yaml' can run code"
            assert told in refused(*command)
        assert not {"ran", "out", "out-sweep"} & {path.name for path in project.iterdir()}

    @pytest.mark.slow
    def test_it_runs_if_it_is_trusted(self, task: str, tokenizer: Any, project: Path, request: Any) -> None:
        check(asked := trusted(task))
        assert not (project / "ran").exists()
        measured = run_tasks(tiny_model("llama"), tokenizer, asked)
        assert {figures["acc"] for figures in measured.values() if figures} == {0.5}
        code = any(EVIL in text for text in request.node.callspec.params["task"].values())
        assert (project / "ran").exists() == code

    def test_a_name_is_the_harness_own_task_whatever_is_called_so_here(self, few_tasks: Path, tokenizer: Any) -> None:
        for shadow in ("letters_easy", "letters_easy.yaml"):
            Path(shadow).write_text(f"task: letters_easy\ninclude: {few_tasks}/letters_easy.yaml\n{EVIL}")
        check(settings("letters_easy"))
        assert run_tasks(tiny_model("llama"), tokenizer, settings("letters_easy"))["letters_easy"]["acc"] == 0.5


def test_tasks_that_the_harness_cannot_run_are_told_in_one_line(few_tasks: Path, tokenizer: Any) -> None:
    asked = {"lm_eval": {"tasks": ["letters", "letters_hard"], "trust_task_code": True}}
    with pytest.raises(PluginError, match=r"^evaluator 'lm_eval': ValueError: Duplicate task") as refused:
        measure(InMemory(tiny_model("llama")), tokenizer, evaluators(**asked))
    assert "\n" not in str(refused.value)


def test_a_chat_template_forges_no_line_of_a_message(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('\\x1b[31m\\nerror: forged') }}"
    for read in (
        lambda: around_text(tokenizer, "a"),
        lambda: rendered([[{"role": "user", "content": "a"}]], tokenizer),
    ):
        with pytest.raises(CalibrationError, match=re.escape(r"TemplateError: \x1b[31m\nerror: forged")) as refused:
            read()
        assert "\n" not in str(refused.value)


class TestSettings:
    @pytest.mark.parametrize(
        ("changes", "told"),
        [({}, r"^lm_eval.apply_chat_template is true, but the model's tokenizer has no chat template: expected an in"),
         ({"chat_template": {"tools": CHAT}}, r"has no chat template named 'default': expected an instruct model"),
         ({"chat_template": CHAT, "bos_token": None}, r"^lm_eval begins texts with BOS or EOS, and the tokenizer has "),
         ({"chat_template": CHAT}, r"apply_chat_template: a prompt has the token id 128 \('w1'\), ")],
    )  # fmt: skip
    def test_a_tokenizer_that_cannot_write_the_prompts_is_refused(self, tokenizer, changes, told) -> None:
        """The config names BOS and EOS, too, but by the defaults of its class."""
        model, asked = tiny_model("llama"), settings("arc_easy", apply_chat_template=True)
        for good in ({"chat_template": {"default": CHAT, "tools": CHAT}}, {"bos_token": None, "eos_token": "</s>"}):
            changed = copy.deepcopy(tokenizer)
            changed.chat_template = CHAT
            for key, value in good.items():
                setattr(changed, key, value)
            check_tokenizer(asked, changed, model)
        tokenizer.add_tokens(["w1"], special_tokens=True)
        for key, value in changes.items():
            setattr(tokenizer, key, value)
        with pytest.raises(CompressxError, match=told):
            check_tokenizer(asked, tokenizer, model)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the harness was asked, which runs `fixed` without examples."""
    calls: list[dict[str, Any]] = []

    def answer(model: Any, **values: Any) -> dict[str, Any]:
        calls.append({"batch_size": model.batch_size, **values})
        results = {"mine": {"acc,none": 0.5, "acc_stderr,none": 0.1}}
        return {"results": results, "samples": {}, "n-shot": {"mine": 5, "fixed": 0}}

    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", answer)
    return calls


@pytest.mark.parametrize(
    ("given", "passed"),
    [({}, (None, False, False)),
     ({"num_fewshot": 5, "apply_chat_template": True, "batch_size": "auto"}, (5, True, True))],
)  # fmt: skip
def test_what_the_harness_is_asked_is_what_is_set(few_tasks, tokenizer, asked, caplog, given, passed) -> None:
    tokenizer.chat_template = CHAT
    run_tasks(tiny_model("llama"), tokenizer, settings("tasks/letters_easy.yaml", **given))
    assert tuple(asked[0][key] for key in ("num_fewshot", "apply_chat_template", "fewshot_as_multiturn")) == passed
    assert asked[0]["batch_size"] == 4, "on the CPU nothing tries out how much memory there is"
    told = "num_fewshot is 5, but fixed set 0 and ran without"
    assert (told in caplog.text) == bool(given), "a task that allows no examples is named"


PYTHON_DOCS = Path(__file__).parents[3] / "recipes/tasks/python_docs.yaml"


@pytest.mark.slow
def test_the_harness_own_command_line_gives_the_same_figures(project: Path, tokenizer: Any) -> None:
    """To the last digit, with examples and chat template on and off."""
    model = tiny_model("llama")
    model.config.max_position_embeddings = 4096  # what is longer would be cut off, the examples first
    model.save_pretrained("model")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained("model")
    common = f"--tasks python_docs --include_path {PYTHON_DOCS.parent} --limit 12 --batch_size 4 --device cpu".split()
    cases = [(shots, chat) for shots in ("0", "2") for chat in (True, False)]
    asked = [
        ["run", "--model", "hf", "--model_args", "pretrained=model", *common, "--num_fewshot", shots,
         *(["--apply_chat_template"] if chat else []), "--output_path", f"their{number}.json"]
        for number, (shots, chat) in enumerate(cases)
    ]  # fmt: skip
    # All in one process, because its imports take most of the time.
    subprocess.run([sys.executable, "-c", THEIR_COMMAND, json.dumps(asked)], check=True, capture_output=True)
    figures = []
    for number, (shots, chat) in enumerate(cases):
        (written,) = project.glob(f"their{number}*.json")
        theirs = json.loads(written.read_text())["results"]["python_docs"]
        values = {"num_fewshot": shots, "apply_chat_template": str(chat).lower()}
        options = ["--tasks", str(PYTHON_DOCS), "--trust-task-code", "--limit", "12", "--device", "cpu", "--json"]
        for key, value in values.items():
            options += ["--set", f"evaluate.lm_eval.{key}={value}"]
        told = json.loads(printed("eval", "model", *options))
        right = f"{int(told['python_docs'].pop('acc_documents'), 16):b}"[1:]
        assert told == {"python_docs": {name: theirs[f"{name},none"] for name in ("acc", "acc_stderr")}}
        assert (len(right), right.count("1") / 12) == (12, theirs["acc,none"])
        figures.append(theirs["acc,none"])
    assert len({*figures}) > 1, "the settings do something"


IN_CONTEXT = PYTHON_DOCS.with_name("in_context.yaml")
VARIANTS = ("16_examples", "no_examples", "flipped_examples")


def accuracies(model: Any, tokenizer: Any, **values: Any) -> list[float]:
    """Run the task and return what share each of its variants answers right."""
    asked = settings(str(IN_CONTEXT), trust_task_code=True, **values)
    figures = run_tasks(model, tokenizer, asked)
    return [figures[f"in_context::{variant}"]["acc"] for variant in VARIANTS]


@pytest.fixture
def without_defaults(few_tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness's own tasks, where members of a group in a file may be, take many seconds to index."""
    from lm_eval.tasks.manager import TaskManager

    def made(include_path: list[str] | None, include_defaults: bool) -> Any:
        assert include_defaults
        return TaskManager(include_path=include_path, include_defaults=False)

    monkeypatch.setattr("lm_eval.tasks.TaskManager", made)


@pytest.mark.usefixtures("without_defaults")
class TestInContext:
    @pytest.fixture
    def module(self) -> Any:
        spec = importlib.util.spec_from_file_location("in_context", IN_CONTEXT.with_suffix(".py"))
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        return module

    def test_documents_are_the_same_everywhere(self, module: Any) -> None:
        """Figures of other machines and other days are of the same words: what changes them is another version."""
        random.seed(1)
        rows = module.documents()["test"].to_list()
        assert rows == module.documents()["test"].to_list()
        told = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        assert told == "105c08358211250f1d985340506c16be22a5935de1b38ce5f3fedf84e3f2f766"

    def test_each_word_is_asked_about_beside_examples_of_either_rule(self, module: Any) -> None:
        """Of two neighbours exactly one is right for whoever does not read the examples."""
        kinds = {word: number for number, kind in enumerate(module.KINDS) for word in kind.split()}
        rows = module.documents()["test"].to_list()
        assert len(kinds) == sum(len(kind.split()) for kind in module.KINDS), "no word is of two kinds"
        assert sorted(row["word"] for row in rows[::2]) == sorted(kinds)
        assert [row["word"] for row in rows[::2]] == [row["word"] for row in rows[1::2]]
        assert all(first["answer"] == 1 - second["answer"] for first, second in zip(rows[::2], rows[1::2], strict=True))
        for row in rows:
            shown = {example["word"]: example["label"] for example in row["examples"]}
            assert len(shown) == module.SHOTS
            assert row["word"] not in shown
            alike = [word for word in shown if kinds[word] == kinds[row["word"]]]
            others = [word for word in shown if word not in alike]
            assert {kinds[word] for word in others} != {kinds[row["word"]]}
            assert len({kinds[word] for word in others}) == 1
            assert len(alike) == len(others) == module.SHOTS // 2
            assert {shown[word] for word in alike} == {row["answer"]}
            assert {shown[word] for word in others} == {1 - row["answer"]}

    def test_who_follows_the_examples_is_always_right_and_with_flipped_labels_always_wrong(
        self, module: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kinds = {word: number for number, kind in enumerate(module.KINDS) for word in kind.split()}
        prompts: dict[str, list[str]] = {}

        def follow(self: Any, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            answers = []
            for request in requests:
                prompt, label = request.args
                prompts.setdefault(request.task_name, []).append(prompt)
                *examples, asked = prompt.split("\n")
                of = {kinds[word]: shown for word, shown in (example.split(":") for example in examples)}
                answers.append((float(label == of.get(kinds[asked.removesuffix(":")], " A")), False))
            return answers

        monkeypatch.setattr("lm_eval.models.huggingface.HFLM.loglikelihood", follow)
        assert accuracies(tiny_model("llama"), tokenizer, limit=40) == [1.0, 0.5, 0.0]
        shown, none, flipped = (prompts[f"in_context::{variant}"] for variant in VARIANTS)
        assert flipped == [re.sub(": ([AB])", lambda m: ": " + "BA"["AB".index(m[1])], prompt) for prompt in shown]
        assert none == [prompt.rsplit("\n", 1)[-1] for prompt in shown]
        assert re.fullmatch(r"(\w+: [AB]\n){16}\w+:", shown[0])

    @pytest.mark.slow
    def test_a_real_model_follows_the_examples(self, smollm2: Any) -> None:
        """Of 40 documents 0.95 and 0.1. Chance is right about 17 or more of 20 once in 800 times."""
        with_examples, without, flipped = accuracies(smollm2.model, smollm2.tokenizer, limit=20)
        assert without == 0.5
        assert with_examples > 0.8
        assert flipped < 0.2


class TestRunTasks:
    def test_tasks_run_in_silence_and_without_a_trace_in_random_states_or_the_tokenizer(
        self, few_tasks: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measured = run_tasks(tiny_model("llama"), tokenizer, settings("letters", limit=2))
        sys.stdout.write("afterwards\n")
        assert capfd.readouterr() == ("afterwards\n", "")
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
        assert tokenizer.pad_token is None
        assert {name: figures["acc"] for name, figures in measured.items()} == dict.fromkeys(
            ("letters", "letters_easy", "letters_hard"), 0.5
        )

    @pytest.mark.slow
    def test_a_group_from_a_file_finds_its_tasks_beside_it(self, few_tasks, tokenizer, without_defaults):
        measured = run_tasks(tiny_model("llama"), tokenizer, settings("tasks/letters.yaml"))
        assert {name: metrics["acc"] for name, metrics in measured.items()} == {
            "letters": 0.5, "letters_easy": 0.5, "letters_hard": 0.5
        }  # fmt: skip

    def test_a_dataset_that_cannot_be_fetched_is_an_error_of_the_text(self, few_tasks: Path, tokenizer: Any) -> None:
        (few_tasks / "rows.jsonl").unlink()
        with pytest.raises(CalibrationError, match="dataset of a task could not be fetched"):
            run_tasks(tiny_model("llama"), tokenizer, settings("tasks/letters_easy.yaml"))

    @pytest.mark.parametrize("factor", [math.nan, 1e5])
    def test_a_broken_model_is_named_as_such(self, few_tasks: Path, tokenizer: Any, factor: float) -> None:
        model = tiny_model("llama")
        model.lm_head.weight.data.mul_(factor)
        (few_tasks / "whole.yaml").write_text(
            f"task: whole\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {few_tasks}/rows.jsonl}}}}\n"
            'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "a text"\n'
        )
        with pytest.raises(CalibrationError, match="weights are broken"):
            run_tasks(model, tokenizer, settings("tasks/whole.yaml"))

    def test_which_documents_are_right_stands_beside_a_metric_of_ones_and_zeros(self, few_tasks, tokenizer) -> None:
        figures = run_tasks(tiny_model("llama"), tokenizer, settings("letters"))
        for name in ("letters_easy", "letters_hard"):  # of which one answer is right for every other document
            assert figures[name]["acc_documents"] in {as_text(x) for x in ([1, 0, 1, 0], [0, 1, 0, 1])}
            assert figures[name]["acc"] == 0.5
        assert [key for key in figures["letters"] if "documents" in key] == [], "a group has none of its own"

    def test_a_token_that_the_model_does_not_know_is_named(self, few_tasks: Path, tokenizer: Any) -> None:
        model = tiny_model("llama")
        model.resize_token_embeddings(99)
        told = r"^the text of a task of lm_eval has the token id 99 \('c'\), and LlamaForCausalLM knows 0 to 98; use"
        with pytest.raises(CalibrationError, match=told):
            run_tasks(model, tokenizer, settings("letters_easy"))


class TestSelection:
    @pytest.fixture
    def written(self, few_tasks: Path) -> LmEval:
        rows = [{"q": "abcdefghij" * n, "a": "x"} for n in (1, 3)]
        (few_tasks / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (few_tasks / "copying.yaml").write_text(
            f"task: copying\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {few_tasks}/long.jsonl}}}}\n"
            'test_split: test\noutput_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: a\n'
            "generation_kwargs: {until: ['z'], max_gen_toks: 3}\nmetric_list:\n  - metric: exact_match\n"
        )
        return settings("tasks/copying.yaml", batch_size=2)

    def read(self, written: LmEval, tokenizer: Any, keep: int | None) -> tuple[list[list[list[int]]], Any]:
        """Return the prompts without padding that the model was given, and the figures."""
        model, seen = tiny_model("llama"), []

        def generate(input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            mask = kwargs["attention_mask"].bool()
            seen.append([row[there].tolist() for row, there in zip(input_ids, mask, strict=True)])
            assert kwargs["max_length"] - input_ids.shape[1] == 3
            return torch.cat([input_ids, torch.tensor([[ord("x"), ord("z")]] * len(input_ids))], dim=1)

        model.generate = generate
        given = {"selector": "recent", "keep": keep, "protect": {"first": 0, "last": 0}}
        select = None
        if keep is not None:
            select = SelectorSettings(SelectTokens.model_validate(given), load_plugins()).prepare(
                InMemory(model), tokenizer
            )
        tokenizer.model_max_length, tokenizer.eos_token, tokenizer.pad_token = 128, "</s>", "<s>"
        return seen, run_tasks(model, tokenizer, written, select and (lambda: select))

    def test_a_task_that_generates_text_needs_an_end_and_padding_that_the_model_knows(self, written, tokenizer) -> None:
        """Often a `[PAD]` was added to a tokenizer and not to the model; rows of other lengths are filled with it."""
        tokenizer.model_max_length = 128
        with pytest.raises(CalibrationError, match=r"^lm_eval ends texts that it has written at EOS, and there "):
            run_tasks(tiny_model("llama"), tokenizer, written)
        tokenizer.eos_token = "</s>"  # noqa: S105 - no secret
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        with pytest.raises(CalibrationError, match=r"of lm_eval has the token id 128 \('\[PAD\]'\), and Llama"):
            run_tasks(tiny_model("llama"), tokenizer, written)

    def test_a_task_that_generates_text_reads_the_selected_tokens_only(self, written: LmEval, tokenizer: Any) -> None:
        (whole,), _ = self.read(written, tokenizer, None)
        (kept,), figures = self.read(written, tokenizer, 12)
        assert sorted(map(len, whole)) == [10, 30]
        assert kept == [row[-12:] for row in whole]
        assert figures["copying"]["exact_match"] == 1.0  # of what follows the prompt, and nothing else
