"""The tasks that lm-evaluation-harness knows, by name and by YAML file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import constr

from compressx.recipe.measuring import FIGURES, LmEval, RollingTask
from compressx.runtime.cache import cached
from compressx.runtime.errors import RecipeError
from compressx.runtime.quiet import quiet_libraries

ROLLING_METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
"""The metrics of a `loglikelihood_rolling` task, per whitespace-separated word and per UTF-8 byte."""


def check_tasks(settings: LmEval) -> None:
    """Check that every task exists and that names are unique, without loading a model or a dataset.

    The harness takes about 15 s to index its 14,000 files, so the index is cached for each version of it.

    Raises:
        RecipeError: an unknown task (with the nearest names), a file that defines no task or runs code, a repeated
            name, or a task that is also part of a listed group.
    """
    names = [task.name if isinstance(task, RollingTask) else check_name(task) for task in settings.tasks]
    for name in names:
        if names.count(name) > 1:
            raise RecipeError(f"lm_eval.tasks: {name!r} occurs {names.count(name)} times; each task needs its own name")
        if name in FIGURES:
            raise RecipeError(f"lm_eval.tasks: a task cannot be named {name!r}, which is a metric; choose another name")
    for task in settings.tasks:
        if isinstance(task, str) and is_file(task) and not settings.trust_task_code:
            _refuse_code(task)
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


def _values_in_file(path: Path, code: list[str] | None = None) -> dict[Any, Any]:
    """Read a harness YAML file with the harness's parser; append to `code` what makes the harness run any.

    That is not only `!function`: metrics that the harness lacks are fetched by `evaluate`, as scripts, and older
    versions of `datasets` read pickles.
    """
    import yaml
    from lm_eval.api import metrics, registry  # noqa: F401 - the first fills the registry

    found = [] if code is None else code

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = True) -> Any:  # noqa: ARG002 - values are looked at, too
            mapping = super().construct_mapping(node, deep=True)
            found.extend(key for key in ("custom_generate", "hf_evaluate") if mapping.get(key))
            found.extend(["dataset_path: pandas"] if mapping.get("dataset_path") == "pandas" else [])
            for one in mapping.get("metric_list") or ():
                found.extend([] if one["metric"] in registry.metric_registry else [f"the metric {one['metric']!r}"])
            return mapping

    Loader.add_multi_constructor("", lambda _loader, tag, _node: found.append(tag))
    if not path.is_file():
        raise RecipeError(f"lm_eval.tasks: no such file: {path} (looked in {Path.cwd()})")
    try:
        return {**yaml.load(path.read_bytes(), Loader)}  # noqa: S506 - a safe loader
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise RecipeError(f"lm_eval.tasks: {path} is not a valid task file: {why}") from error


def _refuse_code(task: str) -> None:
    """Refuse a task file that makes the harness run code, itself or by one that it includes or, as a group, may name.

    A group may name any task below its folder.
    """
    seen: set[Path] = set()
    left = [path_of(task), *(path_of(task).parent.rglob("*.yaml") if is_group_file(task) else ())]
    while left:
        if (path := left.pop().expanduser().resolve()) not in seen:
            seen.add(path)
            code: list[str] = []
            others = _values_in_file(path, code).get("include", [])
            if code:
                raise RecipeError(
                    f"lm_eval.tasks: {path} has {code[0]}, which runs Python code that comes with the task; if you "
                    "trust it, set lm_eval.trust_task_code: true, or give --trust-task-code"
                )
            left += [path.parent / str(other) for other in (others if isinstance(others, list) else [others])]


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
