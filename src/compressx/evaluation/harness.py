"""lm-evaluation-harness on a model in memory."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from compressx.data.documents import as_dataset
from compressx.evaluation.tasks import (
    ROLLING_METRICS,
    Indexed,
    is_file,
    is_group_file,
    name_in_file,
    path_of,
    reads_index,
    task_index,
)
from compressx.models.generate import check_ids
from compressx.prompts.frame import frame
from compressx.prompts.selection import Selection
from compressx.recipe.document import shown
from compressx.recipe.measuring import LmEval, RollingTask
from compressx.runtime.errors import CalibrationError, CompressxError, RecipeError, did_you_mean, one_line
from compressx.runtime.quiet import quiet_libraries

_log = logging.getLogger(__name__)

_BOOTSTRAP_DRAWS = 1000
"""Draws for standard errors without a closed form, accurate to 2%. The harness's default of 100,000 takes minutes."""

_FOREIGN = {"dataset_path", "dataset_name", "dataset_kwargs", "metadata", "unsafe_code"}
"""What a group can change in a task of the harness, whose functions run what is in a dataset, or a tokenizer's code."""

_OF_A_TASK = "the text of a task of lm_eval"
_NAME_IT = "give bos_token and eos_token in its tokenizer_config.json"


def check_tokenizer(settings: LmEval, tokenizer: Any, model: Any) -> None:
    """Check that the tokenizer has what the harness needs; the model may be without weights.

    Its config often names BOS and EOS, too, but by the defaults of its class, which other tokenizers do not mean.

    Raises:
        RecipeError: neither BOS nor EOS, no chat template that is to be applied, or none of that name.
        CalibrationError: a template that writes tokens that the model does not know.
    """
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise RecipeError(f"lm_eval begins texts with BOS or EOS, and the tokenizer has neither; {_NAME_IT}")
    if (template := _chosen_template(settings.apply_chat_template, tokenizer)) is not None:
        copied = copy.copy(tokenizer)
        copied.chat_template = template
        check_ids(model, torch.cat(frame(copied, "a")), tokenizer, "lm_eval.apply_chat_template: a prompt")


def _chosen_template(asked: bool | str, tokenizer: Any) -> str | None:
    """Return the chat template to apply, or None for none.

    The harness passes a name on to nobody, and transformers then takes the template called `default`.
    """
    if asked is False:
        return None
    templates = tokenizer.chat_template
    if not templates:
        raise RecipeError(
            f"lm_eval.apply_chat_template is {shown(asked)}, but the model's tokenizer has no chat template: expected "
            "an instruct model; remove apply_chat_template, or set tokenizer.chat_template and save the tokenizer "
            "beside the model"
        )
    named: dict[str, str] = templates if isinstance(templates, dict) else {"default": templates}
    name = "default" if asked is True else asked
    if name not in named:
        raise RecipeError(
            f"lm_eval.apply_chat_template is {shown(asked)}, but the model's tokenizer has no chat template "
            f"named {name!r}; {did_you_mean(name, named)}"
        )
    return named[name]


def run_tasks(
    model: Any, tokenizer: Any, settings: LmEval, rolling: Mapping[str, Sequence[str]],
    selection: Callable[[], Selection] | None = None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Run tasks through lm-evaluation-harness, quietly.

    Args:
        model: a transformers causal language model; left in evaluation mode.
        tokenizer: its tokenizer, which is not changed.
        settings: the tasks, as `check_tasks` accepts them.
        rolling: the documents of each `RollingTask`, by name; scored in windows of the model's maximum length.
        selection: returns what shortens the prompts of tasks that generate text; called if there are any.

    Returns:
        Metrics by task or group, with standard errors where available (`acc_stderr`).

    Raises:
        CalibrationError: a task's dataset cannot be fetched, or a perplexity is not finite.
        RecipeError: the tokenizer has no such chat template.
    """
    seeds: Sequence[int | None] = [None] if settings.seeds is None else settings.seeds
    drawn = [_run_once(model, tokenizer, settings, rolling, seed, selection) for seed in seeds]
    return drawn[0] if len(drawn) == 1 else {name: _mean([each[name] for each in drawn]) for name in drawn[0]}


def _mean(drawn: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the seeds, and `acc_seed_std`, the standard deviation between them."""
    means = {name: statistics.fmean(each[name] for each in drawn) for name in drawn[0]}
    spreads = {
        f"{name}_seed_std": statistics.stdev(each[name] for each in drawn) for name in means if "_stderr" not in name
    }
    return means | spreads


def _run_once(
    model: Any, tokenizer: Any, settings: LmEval, rolling: Mapping[str, Sequence[str]], seed: int | None,
    selection: Callable[[], Selection] | None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Run all tasks once; `seed` is as `lm_eval --seed`, None for the harness's own."""
    on_cpu = model.device.type == "cpu"  # whose memory the harness would try out until the process is killed
    batch_size = 4 if settings.batch_size == "auto" and on_cpu else settings.batch_size
    copied = copy.deepcopy(tokenizer)  # the harness adds a padding token where there is none
    if (template := _chosen_template(settings.apply_chat_template, tokenizer)) is not None:
        copied.chat_template = template
    multiturn = settings.fewshot_as_multiturn
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    with quiet_libraries(), _random_state_kept():
        from jinja2 import StrictUndefined, TemplateError
        from jinja2.sandbox import SandboxedEnvironment
        from lm_eval import utils
        from lm_eval.evaluator import simple_evaluate

        index = task_index() if reads_index(settings) else {}
        specs = [_spec(task, index, rolling) for task in settings.tasks]
        by_file = all(isinstance(spec, dict) or is_file(spec) for spec in specs)
        # The harness's own environment lets a template call whatever Python has.
        templates = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
        templates.filters |= utils.env.filters
        try:
            with (
                patch.object(utils, "env", utils.env if settings.trust_task_code else templates),
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
                    apply_chat_template=template is not None,
                    fewshot_as_multiturn=template is not None if multiturn is None else multiturn,
                    log_samples=False,
                    bootstrap_iters=_BOOTSTRAP_DRAWS,
                    task_manager=_task_manager(settings, include_defaults=not by_file),
                    **({} if seed is None else dict.fromkeys(seeds, seed)),
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

    beside = [str(path_of(t).parent) for t in settings.tasks if isinstance(t, str) and is_group_file(t)]
    manager: Any = TaskManager(include_defaults=include_defaults, include_path=beside or None)
    if beside and not settings.trust_task_code:
        manager._factory = _careful_factory()
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


def _careful_factory() -> Any:
    """Return what builds tasks for the harness, and gives none of its own other data than they are written for."""
    import lm_eval.tasks
    from lm_eval.tasks._factory import TaskFactory

    own = Path(lm_eval.tasks.__file__).parent

    class Careful(TaskFactory):  # type: ignore[misc]
        def _load_full_config(self, entry: Any, overrides: Mapping[str, Any] | None = None) -> Any:
            if (given := _FOREIGN & {*(overrides or {})}) and entry.yaml_path and own in entry.yaml_path.parents:
                raise RecipeError(
                    f"lm_eval.tasks: a group gives {min(given)} to the task {entry.name!r} of the harness, which can "
                    "run code with it; if you trust the group, set lm_eval.trust_task_code: true, or give "
                    "--trust-task-code"
                )
            return super()._load_full_config(entry, overrides)

    return Careful()


def _language_model(selection: Callable[[], Selection] | None) -> Any:
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

    if selection is None:
        return Checking
    prepared = selection

    class Selecting(Checking):
        def _model_generate(
            self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any
        ) -> torch.Tensor:
            selected = prepared().select(context, kwargs.pop("attention_mask", None))
            kept = selected.input_ids.shape[1]
            written = super()._model_generate(
                selected.input_ids, max_length - context.shape[1] + kept, stop,
                attention_mask=selected.attention_mask, **kwargs,
            )  # fmt: skip
            return torch.cat([context, written[:, kept:]], dim=1)  # the harness cuts the whole prompt off

    return Selecting


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
            return name_in_file(path_of(task)) if is_group_file(task) else task
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
def _random_state_kept() -> Iterator[None]:
    """Restore every global random state: the harness seeds them all, and pruning must not depend on that."""
    import numpy as np

    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
