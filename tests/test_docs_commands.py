"""Every command that a page shows is one that the programs take, with recipes that are valid."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
import pytest
from click.testing import CliRunner

from compressx import cli
from compressx.pipeline.sweep import grid
from compressx.plugins.manager import load_plugins
from compressx.recipe.schema import load_recipe

_ROOT = Path(__file__).parents[1]
_PAGES = [
    path for path in (
        _ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")), *sorted((_ROOT / "examples").rglob("*.md")),
        *sorted((_ROOT / "recipes").rglob("*.yaml")), *sorted((_ROOT / "benchmarks").rglob("*.py")),
    )
    if re.search(r"compressx [a-z]+ |python benchmarks/", path.read_text(encoding="utf-8"))
]  # fmt: skip
_SLOW = {_ROOT / "docs/results.md": pytest.mark.slow}
_STUBS = """
PATH=/nonexistent
command_not_found_handle() { printf '%s\\0' "$@" >> "$TOLD"; printf '\\n\\0' >> "$TOLD"; }
cd() { :; }; eval() { :; }
"""
"""For bash: write down what would be run, with functions, loops and variables resolved, and run nothing."""
Command: TypeAlias = list[str]
_OTHERS = {"cat", "cmp", "cp", "diff", "hf", "llama-quantize", "make", "pip", "pytest", "python3"}
"""Programs that are not ours, whose options are not looked at; any other name is a function that the page lacks."""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the pages are for bash")


def _fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page, flags=re.MULTILINE | re.DOTALL)


def _in_blocks(page: str, folder: Path) -> Iterator[Command]:
    told = folder / "told"
    script = _STUBS + "\n".join(_fenced(page, "sh"))
    subprocess.run(["bash", "-c", script], cwd=folder, env={"TOLD": str(told)}, stdin=subprocess.DEVNULL,
                   capture_output=True, check=False)  # fmt: skip
    for command in told.read_text(encoding="utf-8").split("\n\0") if told.exists() else ():
        if command:
            words = command.split("\0")[:-1]
            yield words[words.index("-m") + 1 :] if words[0] == "torchrun" else words


def _in_prose(page: str) -> Iterator[Command]:
    prose = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`((?:compressx|python benchmarks)[^`\n]* --[^`\n]*)`", prose):
        yield shlex.split(re.sub(r"\bN\b", "2", span))


def _in_comments(page: str) -> Iterator[Command]:
    """Yield the commands in the comments of a recipe and in the docstring of a benchmark."""
    shown = re.findall(
        r"^(?:#|   )\s+(?:\w+=\S+ )?((?:compressx [a-z]|python benchmarks/).*)$", page, flags=re.MULTILINE
    )
    for command in shown:
        yield shlex.split(command.replace("...", ""))


def _pages_recipes(page: str) -> dict[str, str]:
    """Return the recipes that a page says to save, by name."""
    named = re.findall(r"[Ss]ave (?:this )?as `(\w+\.yaml)`:?\n+```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return dict(named)


class _Taken(Exception):  # noqa: N818 - no error: the arguments were taken
    pass


def _benchmark(words: Command, patch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, arguments: Any = None, _: Any = None) -> None:
        raise _Taken(parse(self, arguments))

    patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    patch.setattr(sys, "argv", words)
    program = Path(words[0])
    module = importlib.import_module(program.stem if program.suffix else f"{program.name}.__main__")
    with pytest.raises(_Taken):
        module.main()


def _leaves(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from _leaves(command)


def _taken(group: click.Group, words: Command, patch: pytest.MonkeyPatch, *, whole: bool) -> dict[str, Any]:
    """Parse a command without running it, and return its parameters; in prose, arguments may be missing."""
    seen: dict[str, Any] = {}
    for command in _leaves(group):
        patch.setattr(command, "callback", seen.update)
    done = CliRunner().invoke(group, words, catch_exceptions=False)
    assert done.exit_code == 0 or (not whole and "Missing argument" in done.output), (words, done.output)
    return seen


def _check(words: Command, patch: pytest.MonkeyPatch, *, whole: bool) -> None:
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        _benchmark(words[1:], patch)
    if words[0] != "compressx" or len(words) == 1:
        assert words[0] in _OTHERS | {"python", "compressx"}, words
        return
    seen = _taken(cli.cli, words[1:], patch, whole=whole)
    recipe = seen.get("recipe")
    path = next((p for p in (Path(recipe or ""), _ROOT / (recipe or "")) if p.is_file()), None)
    if path is not None and seen.get("axes"):
        grid(path, seen["axes"], seen["overrides"], None, load_plugins())
    elif path is not None and "masks" not in seen:  # that of `eval` is overridden otherwise
        load_recipe(path, seen["overrides"])


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=_SLOW.get(p, ()), id=str(p.relative_to(_ROOT))) for p in _PAGES]
)
def test_every_command_of_a_page_is_one_that_the_programs_take(page: Path, project: Path, monkeypatch) -> None:
    text = page.read_text(encoding="utf-8")
    for name, recipe in _pages_recipes(text).items():
        Path(name).write_text(recipe, encoding="utf-8")
    found: list[tuple[Callable[[str], Iterator[Command]], bool]] = [(_in_comments, True)]
    if page.suffix == ".md":
        found = [(partial(_in_blocks, folder=project), True), (_in_prose, False)]
    for commands, whole in found:
        for words in commands(text):
            with monkeypatch.context() as patch:
                _check(words, patch, whole=whole)


def test_functions_and_loops_of_a_page_are_resolved_and_what_is_wrong_is_found(project: Path, monkeypatch) -> None:
    page = '```sh\nq() { compressx run a.yaml "$@"; }\nfor s in 1 2; do q --set output=$s; done\nq --sett x=1\n```\n'
    first, second, wrong = _in_blocks(page, project)
    assert (first, second) == (["compressx", "run", "a.yaml", "--set", "output=1"], [*first[:-1], "output=2"])
    _check(first, monkeypatch, whole=True)
    with pytest.raises(AssertionError, match="No such option"):
        _check(wrong, monkeypatch, whole=True)
    with pytest.raises(SystemExit):
        _check(
            ["python", "benchmarks/layer_error.py", "--model", "x", "--text", "x", "--width", "3"],
            monkeypatch,
            whole=True,
        )
