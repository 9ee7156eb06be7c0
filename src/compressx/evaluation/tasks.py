"""The tasks that lm-evaluation-harness knows, by name and by YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from compressx.recipe.measuring import FIGURES, LmEval, RollingTask
from compressx.runtime.cache import cache_folder, cached
from compressx.runtime.errors import RecipeError
from compressx.runtime.quiet import quiet_libraries

ROLLING_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""The metrics of a `loglikelihood_rolling` task, per whitespace-separated word and per UTF-8 byte."""


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
        if name in FIGURES:
            raise RecipeError(f"lm_eval.tasks: a task cannot be named {name!r}, which is a metric; choose another name")
    index = task_index() if reads_index(settings) else {}
    held: dict[str, str] = {}
    for name, task in zip(names, settings.tasks, strict=True):
        for single in index[name].tasks if isinstance(task, str) and not is_file(task) else (name,):
            if held.setdefault(single, name) != name:
                raise RecipeError(
                    f"lm_eval.tasks: {held[single]!r} and {name!r} both contain the task {single!r}, which the harness "
                    "cannot run twice; remove one of them"
                )


def check_name(task: str) -> str:
    """Return the name under which the harness reports a task.

    Raises:
        RecipeError: an unknown task (with the nearest names), or a file that defines no task.
    """
    if is_file(task):
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


def is_group_file(task: str) -> bool:
    """Return whether a task is the YAML file of a group."""
    return is_file(task) and "group" in _values_in_file(path_of(task))


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
    index = cached(key, build, cache_folder() / "harness")
    return {name: Indexed(file, tuple(tasks)) for name, (file, tasks) in index.items()}
