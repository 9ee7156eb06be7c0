"""lm-evaluation-harness on a model in memory: tasks by name, tasks by YAML file, and datasets of ours."""

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
"""What a `loglikelihood_rolling` task measures: per whitespace-separated word, and per UTF-8 byte."""

_BOOTSTRAP_DRAWS = 1000
"""For standard errors that have no closed form; known to 2% then. The harness's own 100,000 take minutes."""


def check_tasks(settings: LmEval) -> None:
    """Check that every task exists and no name occurs twice, without loading a model or a dataset.

    The harness takes some 15 s to index its 14,000 files, so its names are cached, once for each version of it.

    Raises:
        RecipeError: an unknown task, with the nearest names, a file that is no task, a name that occurs twice, or a
            task that a group in the list has, too.
    """
    names = [task.name if isinstance(task, RollingTask) else _checked_name(task) for task in settings.tasks]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"lm_eval.tasks: {name!r} occurs {names.count(name)} times; each task needs its own name")
        if name == "token_perplexity" or name in ROLLING_METRICS:
            raise RecipeError(f"lm_eval.tasks: a task cannot be called {name!r}, the name of a figure; choose another")
    index = _task_index() if _reads_index(settings) else {}
    held: dict[str, str] = {}
    for name, task in zip(names, settings.tasks, strict=True):
        for single in index[name].tasks if isinstance(task, str) and not is_file(task) else (name,):
            if held.setdefault(single, name) != name:
                raise RecipeError(
                    f"lm_eval.tasks: {held[single]!r} and {name!r} both have the task {single!r}, which the harness "
                    "does not run twice; leave one of them out"
                )


def run_tasks(
    model: Any, tokenizer: Any, settings: LmEval, rolling: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Run tasks through lm-evaluation-harness, quietly.

    Args:
        model: a transformers causal language model; it is left in evaluation mode.
        tokenizer: its tokenizer, which is not changed.
        settings: the tasks, as `check_tasks` accepts them.
        rolling: the documents of each `RollingTask`, by its name; each is scored in windows as long as the model.

    Returns:
        By name of task or group, the metrics and, where there is one, the standard error (`acc_stderr`).

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
        # The tasks of a group that is given as a file are looked for beside it, and among the harness's own.
        beside = [str(_path(t).parent) for t in settings.tasks if isinstance(t, str) and _is_group_file(t)]
        try:
            with (
                # One process for bootstrapping: its pool would fork a process that runs torch's threads.
                patch.dict("os.environ", {"DISABLE_MULTIPROC": "1"}),
                # For records that nobody reads it would run git, which complains where there is no repository.
                patch("lm_eval.evaluator.get_git_commit_hash", lambda: None),
            ):
                results = simple_evaluate(
                    # the harness gives a tokenizer without a padding token one of its own
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
    """Keep what was measured: `acc,none` becomes `acc`; a filter other than none stays in the name."""
    measured = {name.removesuffix(",none"): value for name, value in metrics.items() if "," in name}
    numbers = {name: float(value) for name, value in measured.items() if not isinstance(value, str)}
    for name in ROLLING_METRICS:
        if not math.isfinite(numbers.get(name, 0.0)):
            raise CalibrationError(f"task {task}: {name} is {numbers[name]}; the model's weights are broken")
    return numbers


def _spec(task: str | RollingTask, index: Mapping[str, _Indexed], rolling: Mapping[str, Sequence[str]]) -> Any:
    """Return what the harness loads a task from: its name, the path of its YAML file, or a configuration."""
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
        "doc_to_target": lambda document: document["text"],  # as text it would be a template
    }


def _checked_name(task: str) -> str:
    """Return the name under which the harness reports a task."""
    if is_file(task):
        return _name_in_file(_path(task))
    if task not in (names := _task_index()):
        near = difflib.get_close_matches(task, names, n=5, cutoff=0.6)
        raise RecipeError(
            f"lm_eval.tasks: no task is called {task!r}; "
            + (f"the nearest are {', '.join(near)}" if near else "no name is near")
            + "; `lm-eval ls tasks` lists them all, and a task of your own is given as the path of its .yaml file"
        )
    return task


def is_file(task: str) -> bool:
    """Tell whether a task is given as the path of a YAML file rather than by name."""
    return task.endswith((".yaml", ".yml"))


def _path(task: str) -> Path:
    return Path(task).expanduser()


def _is_group_file(task: str) -> bool:
    """Tell whether a task is given as the YAML file of a group of tasks."""
    return is_file(task) and "group" in _values_in_file(_path(task))


def _reads_index(settings: LmEval) -> bool:
    """Tell whether a task is given by its name."""
    return any(isinstance(task, str) and not is_file(task) for task in settings.tasks)


def _name_in_file(path: Path) -> str:
    """Read the name of a task or group from its YAML file; the file's own where an included file names it."""
    values = _values_in_file(path)
    if not {"task", "group", "include"} & set(values):
        raise RecipeError(f"lm_eval.tasks: {path} names no task: expected the key task, group or include")
    name = values.get("group", values.get("task", path.stem))
    return name if isinstance(name, str) else path.stem


def _values_in_file(path: Path) -> dict[str, Any]:
    """Read the keys of a YAML file of the harness."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not path.is_file():
        raise RecipeError(f"lm_eval.tasks: no such file: {path} (looked in {Path.cwd()})")
    try:
        node = YAML().compose(path)  # composed, not constructed: `!function` would run code
        return {str(key.value): value.value for key, value in node.value}
    except (YAMLError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError(f"lm_eval.tasks: {path} is not the YAML of a task: {error}") from error


@dataclass(frozen=True)
class _Indexed:
    """A name that the harness knows.

    Attributes:
        file: the YAML file of a task; None for a group or tag.
        tasks: what a group has in it, through its groups and tags; the name alone for a task or tag.
    """

    file: str | None
    tasks: tuple[str, ...]


def _task_index() -> dict[str, _Indexed]:
    """Return every name that the harness knows."""
    import lm_eval.tasks

    def build() -> dict[str, tuple[str | None, list[str]]]:
        with quiet_libraries():
            manager = lm_eval.tasks.TaskManager()
        known, groups, single = manager.task_index, set(manager.all_groups), set(manager.all_subtasks)

        def tasks_of(member: str | dict[str, Any], group: str) -> Iterator[str]:
            """Yield the tasks of what a group lists: a name that is known, or one that only this group has."""
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
    told = cached(key, build, cache_folder() / "harness")
    return {name: _Indexed(file, tuple(tasks)) for name, (file, tasks) in told.items()}


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Put every global random state back: the harness seeds them all, and pruning must not depend on that."""
    import numpy as np

    python, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
