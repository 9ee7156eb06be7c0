"""The evaluator `lm_eval`: tasks of lm-evaluation-harness, by name, by YAML file and from a dataset."""

from __future__ import annotations

import contextlib
import copy
import difflib
import glob
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import torch
from pydantic import Discriminator, Field, StrictBool, StrictInt, Tag, constr, model_validator

from compressx.api.evaluator import At, EvaluatedModel, EvaluatorSpec, Figures
from compressx.api.hooks import hookimpl
from compressx.data.documents import as_dataset, texts
from compressx.data.windows import token_ids
from compressx.evaluation.token_perplexity import FIGURES
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids
from compressx.prompts.selection import ReadySelector
from compressx.prompts.templates import around_text
from compressx.recipe.sources import DatasetField
from compressx.recipe.validation import Strict, conflict
from compressx.runtime.cache import cached
from compressx.runtime.errors import CalibrationError, CompressxError, RecipeError, one_line
from compressx.runtime.files import sha256_of
from compressx.runtime.quiet import quiet_libraries

_log = logging.getLogger(__name__)

_BOOTSTRAP_DRAWS = 1000
"""Draws for standard errors without a closed form, accurate to 2%. The harness's default of 100,000 takes minutes."""

_PATHS = {"dataset_path", "dataset_kwargs", "metric", "custom_generate"}
"""Keys of task files whose values may be paths of data and scripts."""

_OF_A_TASK = "the text of a task of lm_eval"
_NAME_IT = "give bos_token and eos_token in its tokenizer_config.json"

ROLLING_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""The metrics of a `loglikelihood_rolling` task, per whitespace-separated word and per UTF-8 byte."""


class RollingTask(Strict):
    """A dataset as an lm-eval `loglikelihood_rolling` task."""

    name: str = Field(min_length=1, description="its name in the report")
    dataset: DatasetField


def _kind_of_task(value: object) -> str | None:
    if isinstance(value, str):
        return "<name>"
    return "<dataset>" if isinstance(value, Mapping | RollingTask) else None


TaskField = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[RollingTask, Tag("<dataset>")],
    Discriminator(
        _kind_of_task,
        custom_error_type="task",
        custom_error_message="the name of an lm-eval task, the path of a task YAML, or {name, dataset}",
    ),
]


class LmEval(Strict):
    """Tasks of lm-evaluation-harness: by name, by path of a task YAML, or from a dataset."""

    tasks: list[TaskField] = Field(min_length=1, examples=[["wikitext"]])
    trust_task_code: StrictBool = Field(
        False, description="run task YAMLs, which can run code; only if you trust them and what they name"
    )
    limit: StrictInt | None = Field(None, ge=1, description="documents per task; all when absent")
    num_fewshot: StrictInt | None = Field(
        None, ge=0, description="solved examples before each question; as each task says when absent"
    )
    apply_chat_template: StrictBool = Field(
        False, description="prompt through the tokenizer's chat template, with examples as turns of the conversation"
    )
    batch_size: Literal["auto"] | Annotated[StrictInt, Field(ge=1)] = Field(
        4, description="requests per forward pass; auto: as many as the GPU's memory holds, 4 on the CPU"
    )

    @model_validator(mode="after")
    def _refuse_without_effect(self) -> LmEval:
        own = [task.name for task in self.tasks if isinstance(task, RollingTask)]
        if own and (given := [n for n in ("num_fewshot", "apply_chat_template") if getattr(self, n)]):
            raise conflict(
                f"{' and '.join(given)} cannot apply to the task {own[0]!r}, which is a dataset: its documents are "
                "scored as they are, without questions; remove the key, or measure the dataset by token_perplexity",
                given,
            )
        return self


class HarnessEvaluator:
    """Runs the tasks."""

    def __init__(self, options: LmEval) -> None:
        self.options = options

    def check(self, model: Any | None, tokenizer: Any | None, at: At) -> None:
        """Refuse tasks that the harness lacks or cannot run together, and a tokenizer without what it needs."""
        known = []
        for i, task in enumerate(self.options.tasks):
            with at("tasks", i):
                known.append(task if isinstance(task, RollingTask) else check_name(task, self.options))
        with at("tasks"):
            if len(known) == len(self.options.tasks):
                check_tasks(self.options)
        if tokenizer is not None:
            check_tokenizer(self.options, tokenizer, model)

    def read(self, model: Any, tokenizer: Any) -> dict[str, list[str]]:
        """Return the documents of each rolling task, by name."""
        tasks = [task for task in self.options.tasks if isinstance(task, RollingTask)]
        # The harness counts one word in a document without words.
        rolling = {t.name: [d for d in texts(t.dataset, "evaluation") if d.strip()] for t in tasks}
        for name, read in rolling.items():
            check_ids(model, token_ids(read, tokenizer), tokenizer, f"the text of task {name}")
        return rolling

    def fingerprint(self, text: Mapping[str, Sequence[str]]) -> list[str] | None:
        """Return a hash of each task's documents and files; None if code of a task may read whatever it likes."""
        read = [sha256(json.dumps([name, read]).encode()).hexdigest() for name, read in text.items()]
        for path in _files(self.options):
            if (made_of := _digests(path)) is None:
                return None
            read += made_of
        return read

    def evaluate(self, model: EvaluatedModel) -> Figures:
        """Return the metrics of each task or group, such as `{"arc_easy": {"acc": 0.61, "acc_stderr": 0.01}}`.

        If exactly one task has them, `word_perplexity`, `byte_perplexity` and `bits_per_byte` are there by themselves.
        """
        with model.access.whole() as whole, evaluation_mode(whole):
            tasks = run_tasks(whole, model.tokenizer, self.options, model.text, model.selection)
        rolling = [metrics for metrics in tasks.values() if "word_perplexity" in metrics]
        alone = rolling[0] if len(rolling) == 1 else {}
        return {**tasks, **{name: alone[name] for name in ROLLING_METRICS if name in alone}}


@hookimpl
def compressx_evaluators() -> list[EvaluatorSpec]:
    """Offer the evaluator to recipes."""
    return [EvaluatorSpec("lm_eval", "tasks of lm-evaluation-harness", LmEval, HarnessEvaluator, prompts=True)]


def check_tokenizer(settings: LmEval, tokenizer: Any, model: Any) -> None:
    """Check that the tokenizer has what the harness needs; the model may be without weights.

    Its config often names BOS and EOS, too, but by the defaults of its class, which other tokenizers do not mean.

    Raises:
        RecipeError: neither BOS nor EOS, or no chat template that is to be applied.
        CalibrationError: a template that writes tokens that the model does not know.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise RecipeError(f"lm_eval begins texts with BOS or EOS, and the tokenizer has neither; {_NAME_IT}")
    if not settings.apply_chat_template:
        return
    templates = tokenizer.chat_template
    if not templates or (isinstance(templates, dict) and "default" not in templates):  # which transformers takes
        named = " named 'default'" if templates else ""
        raise RecipeError(
            f"lm_eval.apply_chat_template is true, but the model's tokenizer has no chat template{named}: expected an "
            "instruct model; remove apply_chat_template, or set tokenizer.chat_template and save the tokenizer beside "
            "the model"
        )
    check_ids(model, torch.cat(around_text(tokenizer, "a")), tokenizer, "lm_eval.apply_chat_template: a prompt")


def run_tasks(
    model: Any, tokenizer: Any, settings: LmEval, rolling: Mapping[str, Sequence[str]],
    selection: Callable[[], ReadySelector] | None = None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Run tasks, as `check_tasks` accepts them, through lm-evaluation-harness, quietly, on a model in evaluation mode.

    `rolling` has the documents of each `RollingTask`, by name, which are scored in windows of the model's maximum
    length. `selection` returns what shortens the prompts of tasks that generate text; it is called if there are any.

    Returns:
        Metrics by task or group, with standard errors where available (`acc_stderr`).

    Raises:
        CalibrationError: a task's dataset cannot be fetched, or a perplexity is not finite.
        RecipeError: a task's template fails, or the harness cannot build a task.
    """
    on_cpu = model.device.type == "cpu"  # whose memory the harness would try out until the process is killed
    batch_size = 4 if settings.batch_size == "auto" and on_cpu else settings.batch_size
    copied = copy.deepcopy(tokenizer)  # the harness adds a padding token where there is none
    with quiet_libraries(), _random_states_restored():
        from jinja2 import TemplateError
        from lm_eval.evaluator import simple_evaluate

        index = task_index() if reads_index(settings) else {}
        specs = [_spec(task, index, rolling) for task in settings.tasks]
        by_file = all(isinstance(spec, dict) or is_file(spec) for spec in specs)
        try:
            with (
                # Bootstrap in this process: a pool would fork it while torch's threads run.
                patch.dict("os.environ", {"DISABLE_MULTIPROC": "1"}),
                # Only for unused metadata, and git prints an error outside a repository.
                patch("lm_eval.evaluator.get_git_commit_hash", lambda: None),
            ):
                results = simple_evaluate(
                    _language_model(selection)(pretrained=model, tokenizer=copied, batch_size=batch_size),
                    tasks=specs,
                    limit=settings.limit,
                    num_fewshot=settings.num_fewshot,
                    apply_chat_template=settings.apply_chat_template,
                    fewshot_as_multiturn=settings.apply_chat_template,
                    log_samples=False,
                    bootstrap_iters=_BOOTSTRAP_DRAWS,
                    task_manager=_task_manager(settings, include_defaults=not by_file),
                )
        except OSError as error:
            raise CalibrationError(f"lm_eval.tasks: the dataset of a task could not be fetched: {error}") from error
        except TemplateError as error:
            raise RecipeError(f"lm_eval.tasks: a template of a task fails: {one_line(str(error))[:300]}") from error
        except OverflowError as error:
            raise CalibrationError("lm_eval.tasks: a perplexity overflows; the model's weights are broken") from error
    _warn_of_fixed_examples(settings.num_fewshot, results["n-shot"])
    return {name: _numbers(name, metrics) for name, metrics in results["results"].items()}


def _task_manager(settings: LmEval, *, include_defaults: bool) -> Any:
    """Return what finds and builds tasks for the harness; those of a group file beside it and among its own."""
    from jinja2 import TemplateError
    from lm_eval.tasks import TaskManager

    beside = [str(path.parent) for path in _files(settings) if is_group_file(path)]
    manager: Any = TaskManager(include_defaults=include_defaults, include_path=beside or None)
    load = manager.load

    def explained(specs: Any) -> Any:
        try:
            return load(specs)
        except (CompressxError, OSError, TemplateError):
            raise
        except Exception as error:  # whatever a wrong value leads to
            told = one_line(f"{type(error).__name__}: {error}")[:300]
            raise RecipeError(f"lm_eval.tasks: the harness cannot build a task ({told}); mend its file") from error

    manager.load = explained
    return manager


def _language_model(selection: Callable[[], ReadySelector] | None) -> Any:
    """Return the harness's class of models, with prompts shortened before text is generated."""
    from lm_eval.models.huggingface import HFLM

    class Checking(HFLM):  # type: ignore[misc]
        def tok_encode(self, *given: Any, **more: Any) -> Any:
            check_ids(self.model, torch.tensor(ids := super().tok_encode(*given, **more)), self.tokenizer, _OF_A_TASK)
            return ids

        def tok_batch_encode(self, *given: Any, **more: Any) -> Any:
            check_ids(self.model, (padded := super().tok_batch_encode(*given, **more))[0], self.tokenizer, _OF_A_TASK)
            return padded

        @property
        def eot_token_id(self) -> Any:
            if (end := super().eot_token_id) is None:
                raise CalibrationError(f"lm_eval ends texts that it has written at EOS, and there is none; {_NAME_IT}")
            return end

        def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Any:
            if selection is None:
                return super()._model_generate(context, max_length, stop, **kwargs)
            selected = selection().select(context, kwargs.pop("attention_mask", None))
            kept = selected.input_ids.shape[1]
            written = super()._model_generate(
                selected.input_ids, max_length - context.shape[1] + kept, stop,
                attention_mask=selected.attention_mask, **kwargs,
            )  # fmt: skip
            return torch.cat([context, written[:, kept:]], dim=1)  # the harness cuts the whole prompt off

    return Checking


def _warn_of_fixed_examples(asked: int | None, used: Mapping[str, int]) -> None:
    """Say which tasks keep their own number of examples: the harness never changes one that is 0."""
    if asked and (fixed := [name for name, number in used.items() if number == 0]):
        _log.warning("lm_eval.num_fewshot is %d, but without examples ran %s, which sets 0", asked, ", ".join(fixed))


def _numbers(task: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Extract the metrics: `acc,none` becomes `acc`; other filters stay in the name."""
    measured = {name.removesuffix(",none"): value for name, value in metrics.items() if "," in name}
    numbers = {name: float(value) for name, value in measured.items() if not isinstance(value, str)}
    for name in ROLLING_METRICS:
        if not math.isfinite(numbers.get(name, 0.0)):
            raise CalibrationError(f"task {task}: {name} is {numbers[name]}; the model's weights are broken")
    return numbers


def _spec(task: str | RollingTask, index: Mapping[str, Indexed], rolling: Mapping[str, Sequence[str]]) -> Any:
    """Return a task as the harness takes it: a name, the path of a YAML file, or a configuration."""
    if isinstance(task, str):
        if is_file(task):
            return name_in_file(path) if is_group_file(path := path_of(task)) else task
        return index[task].file or task
    dataset = as_dataset([{"text": document} for document in rolling[task.name]])
    return {
        "task": task.name,
        "custom_dataset": lambda **_: {"test": dataset},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": lambda document: document["text"],  # a string would be a template
    }


@contextlib.contextmanager
def _random_states_restored() -> Iterator[None]:
    """Restore every global random state: the harness seeds them all, and pruning must not depend on that."""
    import numpy as np

    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)


def check_tasks(settings: LmEval) -> None:
    """Check that every task exists and that names are unique, without loading a model or a dataset.

    The harness takes about 15 s to index its 14,000 files, so the index is cached for each version of it.

    Raises:
        RecipeError: an unknown task (with the nearest names), a file that is not trusted or defines no task, a
            repeated name, or a task that is also part of a listed group.
    """
    names = [task.name if isinstance(task, RollingTask) else check_name(task, settings) for task in settings.tasks]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"lm_eval.tasks: {name!r} occurs {names.count(name)} times; each task needs its own name")
        if name in FIGURES:
            raise RecipeError(f"lm_eval.tasks: a task cannot be named {name!r}, which is a metric; choose another name")
    for path in _files(settings):
        _with_included(path)  # which refuses one that is absent
    index = task_index() if reads_index(settings) else {}
    held: dict[str, str] = {}
    for name, task in zip(names, settings.tasks, strict=True):
        for single in index[name].tasks if isinstance(task, str) and not is_file(task) else (name,):
            if held.setdefault(single, name) != name:
                raise RecipeError(
                    f"lm_eval.tasks: {held[single]!r} and {name!r} both contain the task {single!r}, which the harness "
                    "cannot run twice; remove one of them"
                )


def check_name(task: str, settings: LmEval) -> str:
    """Return the name under which the harness reports a task.

    Raises:
        RecipeError: an unknown task (with the nearest names), or a file that is not trusted or defines no task.
    """
    if is_file(task):
        if path_of(task).is_file() and not settings.trust_task_code:
            raise RecipeError(
                f"lm_eval.tasks: the task file {task!r} can run code (!function, templates, metrics, scripts that load "
                "data); if you trust it and what it names, set lm_eval.trust_task_code: true (eval: --trust-task-code)"
            )
        return name_in_file(path_of(task))
    if task not in (names := task_index()):
        near = difflib.get_close_matches(task, names, n=5, cutoff=0.6)
        raise RecipeError(
            f"lm_eval.tasks: no task is named {task!r}; "
            + (f"the nearest are {', '.join(near)}" if near else "no name is near")
            + "; `lm-eval ls tasks` lists them all, and a task of your own is given as the path of its .yaml file"
        )
    return task


def is_file(task: str) -> bool:
    """Return whether a task is given as the path of a YAML file rather than by name."""
    return task.endswith((".yaml", ".yml"))


def path_of(task: str) -> Path:
    """Return the path of a task that `is_file`."""
    return Path(task).expanduser()


def _files(settings: LmEval) -> list[Path]:
    """Return the paths of the tasks that are given as YAML files."""
    return [path_of(task) for task in settings.tasks if isinstance(task, str) and is_file(task)]


def is_group_file(path: Path) -> bool:
    """Return whether a YAML file is that of a group."""
    return "group" in _values_in_file(path)


def reads_index(settings: LmEval) -> bool:
    """Return whether any task is given by name."""
    return any(isinstance(task, str) and not is_file(task) for task in settings.tasks)


def name_in_file(path: Path) -> str:
    """Read the name of a task or group from its YAML file; the file name if only an included file names the task."""
    values = _values_in_file(path)
    if not {"task", "group", "include"} & set(values):
        raise RecipeError(f"lm_eval.tasks: {path} names no task: expected the key task, group or include")
    name = values.get("group", values.get("task", path.stem))
    return name if isinstance(name, str) else path.stem


def _values_in_file(path: Path) -> dict[Any, Any]:
    """Read a harness YAML file with the harness's parser; functions are read as their names."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        pass  # so that the constructor is its own

    Loader.add_constructor("!function", Loader.construct_scalar)
    if not path.is_file():
        raise RecipeError(f"lm_eval.tasks: no such file: {path} (looked in {Path.cwd()})")
    try:
        return {**yaml.load(path.read_bytes(), Loader)}  # noqa: S506 - a safe loader
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise RecipeError(f"lm_eval.tasks: {path} is not a valid task file: {why}") from error


def _with_included(path: Path) -> dict[Path, dict[Any, Any]]:
    """Return the values of a task file and of those that it includes, by their paths."""
    read: dict[Path, dict[Any, Any]] = {}
    left = [path]
    while left:
        if (path := left.pop().resolve()) not in read:
            read[path] = _values_in_file(path)
            others = read[path].get("include", [])
            left += [path.parent / str(other) for other in (others if isinstance(others, list) else [others])]
    return read


def _digests(path: Path) -> list[str] | None:
    """Hash a task file, those that it includes or, as a group, may name, and the local data that they name.

    A group may name any task below its folder.

    Returns:
        None if a file has functions, or cannot be read.
    """
    read: dict[Path, dict[Any, Any]] = {}
    try:
        for one in (path, *(path.parent.rglob("*.yaml") if is_group_file(path) else ())):
            read |= _with_included(one)
    except RecipeError:
        return None
    if any(b"!function" in one.read_bytes() for one in read):
        return None
    texts_in = [text for values in read.values() for text in _data_in(values)]
    named = [Path(found) for text in texts_in for found in glob.glob(text, recursive=True)]  # noqa: PTH207
    all_of = {*read, *named, *(p for folder in named if folder.is_dir() for p in folder.rglob("*"))}
    return [f"{one.resolve()} {sha256_of(one)}" for one in sorted(all_of) if one.is_file()]


def _data_in(value: Any, *, named: bool = False) -> Iterator[str]:
    """Yield the texts in a task's file that may name its data, or scripts beside it."""
    if isinstance(value, str) and named:
        yield value
    inside = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    for key, other in inside:
        yield from _data_in(other, named=named or key in _PATHS)


@dataclass(frozen=True)
class Indexed:
    """An entry of the harness's index.

    Attributes:
        file: the YAML file of a task; None for a group or tag.
        tasks: all tasks of a group, nested groups and tags included; the name itself for a task or tag.
    """

    file: str | None
    tasks: tuple[str, ...]


def task_index() -> dict[str, Indexed]:
    """Return the harness's index of tasks, groups and tags, by name."""
    import lm_eval.tasks

    def build() -> dict[str, tuple[str | None, list[str]]]:
        with quiet_libraries():
            manager = lm_eval.tasks.TaskManager()
        known, groups, single = manager.task_index, set(manager.all_groups), set(manager.all_subtasks)

        def tasks_of(member: str | dict[str, Any], group: str) -> Iterator[str]:
            """Yield the tasks of a group's member: an indexed name, or a task defined inside the group."""
            name = member if isinstance(member, str) else str(member.get("group", member.get("task")))
            if name in groups:
                yield from (task for listed in known[name].cfg["task"] for task in tasks_of(listed, name))
            elif isinstance(member, dict) and isinstance(member.get("task"), list):
                yield from (task for listed in member["task"] for task in tasks_of(listed, f"{group}::{name}"))
            elif name in known:
                yield from (name,) if name in single else known[name].tags
            else:
                yield f"{group}::{name}"

        return {
            name: (str(entry.yaml_path) if name in single else None,
                   sorted({*tasks_of(name, name)}) if name in groups else [name])
            for name, entry in known.items()
        }  # fmt: skip

    folder = str(Path(lm_eval.tasks.__file__).parent)
    key = {"lm_eval": metadata.version("lm_eval"), "folder": folder, "of each": ["file", "tasks"]}
    # The files that it names can run code: they are the harness's own.
    inside = constr(pattern=rf"^{re.escape(folder)}([/\\][^/\\.][^/\\]*)+$")
    index = cached(key, build, "harness", dict[str, tuple[inside | None, list[str]]])  # type: ignore[valid-type]
    return {name: Indexed(file, tuple(tasks)) for name, (file, tasks) in index.items()}
