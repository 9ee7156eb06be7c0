"""The evaluator `lm_eval`: tasks of lm-evaluation-harness, by name and by YAML file."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest.mock import patch

import torch
from pydantic import Field, StrictBool, StrictInt, constr

from compressx.api.evaluator import At, EvaluatedModel, EvaluatorSpec, Figures
from compressx.api.hooks import hookimpl
from compressx.models.blockwise import evaluation_mode
from compressx.models.generate import check_ids
from compressx.prompts.selection import ReadySelector
from compressx.prompts.templates import around_text
from compressx.recipe.validation import Strict
from compressx.report.flips import as_text, documents_key
from compressx.runtime.cache import cached
from compressx.runtime.errors import CalibrationError, RecipeError, one_line, suggestion
from compressx.runtime.quiet import quiet_libraries

_log = logging.getLogger(__name__)

_BOOTSTRAP_DRAWS = 1000
"""Draws for standard errors without a closed form, accurate to 2%. The harness's default of 100,000 takes minutes."""

_YAML = (".yaml", ".yml")
"""How the path of a task file ends; other tasks are named."""

_TASK_TEXT = "the text of a task of lm_eval"
_ADD_EOS = "give bos_token and eos_token in its tokenizer_config.json"


class LmEval(Strict):
    """Tasks of lm-evaluation-harness: by name, or by path of a task YAML."""

    tasks: list[str] = Field(
        min_length=1, description="names of tasks, and paths of task YAMLs", examples=[["wikitext"]]
    )
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

    @property
    def files(self) -> list[str]:
        """The tasks that are given as files."""
        return [task for task in self.tasks if task.endswith(_YAML)]


@dataclass(frozen=True)
class HarnessEvaluator:
    """Runs the tasks."""

    options: LmEval

    def check(self, model: Any | None, tokenizer: Any | None, at: At) -> None:
        for i, task in enumerate(self.options.tasks):
            with at("tasks", i):
                if task in self.options.files:
                    _check_file(task, trusted=self.options.trust_task_code)
                elif task not in (names := task_index()):
                    raise RecipeError(
                        f"lm_eval.tasks: no task is named {task!r}; {suggestion(task, names)}`lm-eval ls tasks` lists "
                        "them all, and a task of your own is given as the path of its .yaml file"
                    )
        if tokenizer is not None:
            check_tokenizer(self.options, tokenizer, model)

    def read(self, model: Any, tokenizer: Any) -> None:
        """Read nothing: the harness does."""

    def fingerprint(self, text: None) -> list[str] | None:  # noqa: ARG002 - the names of the tasks say all
        """Return the tasks; None if there is a file, since it may read whatever it likes."""
        return None if self.options.files else self.options.tasks

    def evaluate(self, model: EvaluatedModel) -> Figures:
        """Return the metrics of each task or group, such as `{"arc_easy": {"acc": 0.61, "acc_stderr": 0.01}}`."""
        with model.access.whole() as whole, evaluation_mode(whole):
            return run_tasks(whole, model.tokenizer, self.options, model.selection)


@hookimpl
def compressx_evaluators() -> list[EvaluatorSpec]:
    """Offer the evaluator to recipes."""
    summary = "tasks of lm-evaluation-harness"
    return [
        EvaluatorSpec("lm_eval", summary, LmEval, HarnessEvaluator, prompts=True, figures=lambda given: given.tasks)
    ]


def check_tokenizer(settings: LmEval, tokenizer: Any, model: Any) -> None:
    """Check that the tokenizer has what the harness needs; the model may be without weights.

    The model's config often has BOS and EOS, too, but as defaults of its class, which may be other tokens here.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise RecipeError(f"lm_eval begins texts with BOS or EOS, and the tokenizer has neither; {_ADD_EOS}")
    if not settings.apply_chat_template:
        return
    templates = tokenizer.chat_template
    if not templates or (isinstance(templates, dict) and "default" not in templates):  # the one that transformers uses
        named = " named 'default'" if templates else ""
        raise RecipeError(
            f"lm_eval.apply_chat_template is true, but the model's tokenizer has no chat template{named}: expected an "
            "instruct model; remove apply_chat_template, or set tokenizer.chat_template and save the tokenizer beside "
            "the model"
        )
    check_ids(model, torch.cat(around_text(tokenizer, "a")), tokenizer, "lm_eval.apply_chat_template: a prompt")


def run_tasks(
    model: Any, tokenizer: Any, settings: LmEval, selection: Callable[[], ReadySelector] | None = None
) -> dict[str, dict[str, float | str]]:
    """Run tasks through lm-evaluation-harness, quietly, on a model in evaluation mode.

    `selection` returns what shortens the prompts of tasks that generate text; it is called if there are any. Metrics by
    task or group are returned, some with standard errors (`acc_stderr`) and the right documents (`acc_documents`).
    """
    on_cpu = model.device.type == "cpu"  # where the harness would try larger batches until the process is killed
    batch_size = 4 if settings.batch_size == "auto" and on_cpu else settings.batch_size
    copied = copy.deepcopy(tokenizer)  # the harness adds a padding token where there is none
    with quiet_libraries(), _random_states_restored():
        from lm_eval.evaluator import simple_evaluate

        specs, manager = _harness_tasks(settings)
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
                    log_samples=True,
                    bootstrap_iters=_BOOTSTRAP_DRAWS,
                    task_manager=manager,
                )
        except OSError as error:
            raise CalibrationError(
                f"lm_eval.tasks: the dataset of a task could not be fetched: {one_line(str(error))}"
            ) from error
        except OverflowError as error:
            raise CalibrationError("lm_eval.tasks: a perplexity overflows; the model's weights are broken") from error
    # The harness never changes a number of examples that a task sets to 0.
    if settings.num_fewshot and (fixed := [name for name, number in results["n-shot"].items() if number == 0]):
        asked = settings.num_fewshot
        _log.warning("lm_eval.num_fewshot is %d, but %s set 0 and ran without examples", asked, ", ".join(fixed))
    return {
        name: {**_metrics(name, metrics), **_documents(results["samples"].get(name, ()))}
        for name, metrics in results["results"].items()
    }


def _harness_tasks(settings: LmEval) -> tuple[list[str], Any]:
    """Return the tasks as the harness takes them, and its manager of tasks: many seconds where it indexes its own."""
    from lm_eval.tasks import TaskManager

    groups = {file: name for file in settings.files if (name := _group_in(file))}
    # A group in a file is named, another file is given as its path, and a name is the file that has the task.
    specs = [groups.get(t) or (t if t.endswith(_YAML) else task_index()[t] or t) for t in settings.tasks]
    names = [spec for spec in specs if not spec.endswith(_YAML)]
    folders = [str(Path(file).expanduser().parent) for file in groups]  # may hold tasks of the group
    manager = TaskManager(include_defaults=bool(names), include_path=folders or None)
    if absent := [name for name in names if name not in manager.task_index]:  # the harness would take these for paths
        raise RecipeError(f"lm_eval.tasks: the harness has no task {absent[0]!r}; empty the cache of compressx")
    return specs, manager


def _language_model(selection: Callable[[], ReadySelector] | None) -> Any:
    """Return the harness's class of models, with prompts shortened before text is generated."""
    from lm_eval.models.huggingface import HFLM

    class CheckedHFLM(HFLM):  # type: ignore[misc]
        def tok_encode(self, *given: Any, **more: Any) -> Any:
            check_ids(self.model, torch.tensor(ids := super().tok_encode(*given, **more)), self.tokenizer, _TASK_TEXT)
            return ids

        def tok_batch_encode(self, *given: Any, **more: Any) -> Any:
            check_ids(self.model, (padded := super().tok_batch_encode(*given, **more))[0], self.tokenizer, _TASK_TEXT)
            return padded

        @property
        def eot_token_id(self) -> Any:
            if (end := super().eot_token_id) is None:
                raise CalibrationError(f"lm_eval ends texts that it has written at EOS, and there is none; {_ADD_EOS}")
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

    return CheckedHFLM


def _metrics(task: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Extract the metrics: `acc,none` becomes `acc`; other filters stay in the name."""
    measured = {name.removesuffix(",none"): value for name, value in metrics.items() if "," in name}
    numbers = {name: float(value) for name, value in measured.items() if not isinstance(value, str)}
    for name in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        if not math.isfinite(numbers.get(name, 0.0)):
            raise CalibrationError(f"task {task}: {name} is {numbers[name]}; the model's weights are broken")
    return numbers


def _documents(samples: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return which documents are answered right, in the order of the task, by each metric that is 0 or 1."""
    values: dict[str, list[Any]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            values.setdefault(f"{metric},{sample['filter']}".removesuffix(",none"), []).append(sample[metric])
    return {
        documents_key(name): as_text(given)
        for name, given in values.items()
        if all(isinstance(x, Real) and float(x) in (0.0, 1.0) for x in given)
    }


def _group_in(file: str) -> str | None:
    """Return the name of the group that a task file defines, which the harness does not read from a path."""
    import yaml

    root: Any = yaml.compose(Path(file).expanduser().read_bytes(), yaml.SafeLoader)
    return next((value.value for key, value in root.value if key.value == "group"), None)


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


def _check_file(file: str, *, trusted: bool) -> None:
    """Refuse a task file that is absent or not trusted, whatever is in it."""
    if not Path(file).expanduser().is_file():
        raise RecipeError(f"lm_eval.tasks: no such file: {file} (looked in {Path.cwd()})")
    if not trusted:
        raise RecipeError(
            f"lm_eval.tasks: the task file {file!r} can run code (!function, templates, metrics, scripts that load "
            "data); if you trust it and what it names, set lm_eval.trust_task_code: true (eval: --trust-task-code)"
        )


def task_index() -> dict[str, str | None]:
    """Return the file of each of the harness's tasks by name, None of a group or tag.

    The harness takes about 15 s to index its 14,000 files, so the index is cached for each version of it.
    """
    import lm_eval.tasks

    def build() -> dict[str, str | None]:
        with quiet_libraries():
            manager = lm_eval.tasks.TaskManager()
        single = {*manager.all_subtasks}
        return {name: str(entry.yaml_path) if name in single else None for name, entry in manager.task_index.items()}

    folder = str(Path(lm_eval.tasks.__file__).parent)
    key = {"lm_eval": metadata.version("lm_eval"), "folder": folder, "of each": "file"}
    # The cached paths are of files that can run code: only files in the harness's own folder are valid.
    inside = constr(pattern=rf"^{re.escape(folder)}([/\\][^/\\.][^/\\]*)+$")
    return cached(key, build, "harness", dict[str, inside | None])  # type: ignore[valid-type]
