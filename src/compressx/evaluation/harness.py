"""lm-evaluation-harness on a model in memory: tasks by name, tasks by YAML file, and a recipe's own datasets."""

from __future__ import annotations

import contextlib
import copy
import difflib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from compressx.data.documents import as_dataset
from compressx.recipe.measuring import LmEval, RollingTask
from compressx.runtime.cache import cache_folder, cached
from compressx.runtime.errors import CalibrationError, RecipeError
from compressx.runtime.quiet import quiet_libraries

ROLLING_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""The metrics of a `loglikelihood_rolling` task, per whitespace-separated word and per UTF-8 byte."""

_BOOTSTRAP_DRAWS = 1000
"""Draws for standard errors without a closed form, accurate to 2%. The harness's default of 100,000 takes minutes."""


def check_tasks(settings: LmEval) -> None:
    """Check that every task exists and that names are unique, without loading a model or a dataset.

    The harness takes about 15 s to index its 14,000 files, so the index is cached for each version of it.

    Raises:
        RecipeError: an unknown task (with the nearest names), a file that defines no task, a repeated name, or a task
            that is also part of a listed group.
    """
    names = [task.name if isinstance(task, RollingTask) else check_name(task) for task in settings.tasks]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"lm_eval.tasks: {name!r} occurs {names.count(name)} times; each task needs its own name")
        if name == "token_perplexity" or name in ROLLING_METRICS:
            raise RecipeError(f"lm_eval.tasks: a task cannot be named {name!r}, which is a metric; choose another name")
    index = _task_index() if _reads_index(settings) else {}
    held: dict[str, str] = {}
    for name, task in zip(names, settings.tasks, strict=True):
        for single in index[name].tasks if isinstance(task, str) and not is_file(task) else (name,):
            if held.setdefault(single, name) != name:
                raise RecipeError(
                    f"lm_eval.tasks: {held[single]!r} and {name!r} both contain the task {single!r}, which the harness "
                    "cannot run twice; remove one of them"
                )


def run_tasks(
    model: Any, tokenizer: Any, settings: LmEval, rolling: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Run tasks through lm-evaluation-harness, quietly.

    Args:
        model: a transformers causal language model; left in evaluation mode.
        tokenizer: its tokenizer, which is not changed.
        settings: the tasks, as `check_tasks` accepts them.
        rolling: the documents of each `RollingTask`, by name; scored in windows of the model's maximum length.

    Returns:
        Metrics by task or group, with standard errors where available (`acc_stderr`).

    Raises:
        CalibrationError: a task's dataset cannot be fetched, or a perplexity is not finite.
    """
    with quiet_libraries(), _random_state_kept():
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        index = _task_index() if _reads_index(settings) else {}
        specs = [_spec(task, index, rolling) for task in settings.tasks]
        by_file = all(isinstance(spec, dict) or is_file(spec) for spec in specs)
        # The tasks of a group file are searched beside it and among the harness's own.
        beside = [str(_path(t).parent) for t in settings.tasks if isinstance(t, str) and _is_group_file(t)]
        try:
            with (
                # Bootstrap in this process: a pool would fork it while torch's threads run.
                patch.dict("os.environ", {"DISABLE_MULTIPROC": "1"}),
                # Only for unused metadata, and git prints an error outside a repository.
                patch("lm_eval.evaluator.get_git_commit_hash", lambda: None),
            ):
                results = simple_evaluate(
                    # A copy: the harness adds a padding token where there is none.
                    HFLM(pretrained=model, tokenizer=copy.deepcopy(tokenizer), batch_size=settings.batch_size),
                    tasks=specs,
                    limit=settings.limit,
                    log_samples=False,
                    bootstrap_iters=_BOOTSTRAP_DRAWS,
                    task_manager=TaskManager(include_defaults=not by_file, include_path=beside or None),
                )
        except OSError as error:
            raise CalibrationError(f"lm_eval.tasks: the dataset of a task could not be fetched: {error}") from error
        except OverflowError as error:
            raise CalibrationError("lm_eval.tasks: a perplexity overflows; the model's weights are broken") from error
    return {name: _numbers(name, metrics) for name, metrics in results["results"].items()}


def _numbers(task: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Extract the metrics: `acc,none` becomes `acc`; other filters stay in the name."""
    measured = {name.removesuffix(",none"): value for name, value in metrics.items() if "," in name}
    numbers = {name: float(value) for name, value in measured.items() if not isinstance(value, str)}
    for name in ROLLING_METRICS:
        if not math.isfinite(numbers.get(name, 0.0)):
            raise CalibrationError(f"task {task}: {name} is {numbers[name]}; the model's weights are broken")
    return numbers


def _spec(task: str | RollingTask, index: Mapping[str, _Indexed], rolling: Mapping[str, Sequence[str]]) -> Any:
    """Return a task as the harness takes it: a name, the path of a YAML file, or a configuration."""
    if isinstance(task, str):
        if is_file(task):
            return _name_in_file(_path(task)) if _is_group_file(task) else task
        return index[task].file or task
    dataset = as_dataset(rolling[task.name])
    return {
        "task": task.name,
        "custom_dataset": lambda **_: {"test": dataset},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": lambda document: document["text"],  # a string would be a template
    }


def check_name(task: str) -> str:
    """Return the name under which the harness reports a task.

    Raises:
        RecipeError: an unknown task (with the nearest names), or a file that defines no task.
    """
    if is_file(task):
        return _name_in_file(_path(task))
    if task not in (names := _task_index()):
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


def _path(task: str) -> Path:
    return Path(task).expanduser()


def _is_group_file(task: str) -> bool:
    """Return whether a task is the YAML file of a group."""
    return is_file(task) and "group" in _values_in_file(_path(task))


def _reads_index(settings: LmEval) -> bool:
    """Return whether any task is given by name."""
    return any(isinstance(task, str) and not is_file(task) for task in settings.tasks)


def _name_in_file(path: Path) -> str:
    """Read the name of a task or group from its YAML file; the file name if only an included file names the task."""
    values = _values_in_file(path)
    if not {"task", "group", "include"} & set(values):
        raise RecipeError(f"lm_eval.tasks: {path} names no task: expected the key task, group or include")
    name = values.get("group", values.get("task", path.stem))
    return name if isinstance(name, str) else path.stem


def _values_in_file(path: Path) -> dict[str, Any]:
    """Read the top-level keys of a harness YAML file."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not path.is_file():
        raise RecipeError(f"lm_eval.tasks: no such file: {path} (looked in {Path.cwd()})")
    try:
        node = YAML().compose(path)  # compose does not construct: `!function` would run code
        return {str(key.value): value.value for key, value in node.value}
    except (YAMLError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError(f"lm_eval.tasks: {path} is not a valid task file: {error}") from error


@dataclass(frozen=True)
class _Indexed:
    """An entry of the harness's index.

    Attributes:
        file: the YAML file of a task; None for a group or tag.
        tasks: all tasks of a group, nested groups and tags included; the name itself for a task or tag.
    """

    file: str | None
    tasks: tuple[str, ...]


def _task_index() -> dict[str, _Indexed]:
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
    index = cached(key, build, cache_folder() / "harness")
    return {name: _Indexed(file, tuple(tasks)) for name, (file, tasks) in index.items()}


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
