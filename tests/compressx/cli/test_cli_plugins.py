"""`compressx plugins new` and `check` on the command line; help and completion of all commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.compressx.cli.commands import invoke, printed, refused

from compressx.cli import cli


@pytest.fixture(autouse=True)
def _here(project: Path) -> None:
    """Work in an empty folder."""


def test_check_goes_through_what_a_token_selector_promises_and_says_what_it_is_refused():
    done = printed("plugins", "check", "snapkv", "--architecture", "llama", "--architecture", "mistral")
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in done.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["asks for scores that are there"] == ["ok", "refused"]
    assert rows["deterministic"] == ["ok", "refused"]
    assert "refused: asks for scores that are there (mistral): model.layers.0: its attention does not see" in done
    assert "0 failed, 1 architectures refused" in done


def test_check_of_a_plugin_checks_what_it_offers_of_every_kind_with_the_options_given():
    Path("both.py").write_text(
        """
import torch
from pydantic import BaseModel
from compressx import AttentionRows, PruneResult, PrunerSpec, TokenSelectorSpec, hookimpl, keep_masks

class Options(BaseModel):
    dice: bool = False

class Selector:
    def observe(self, facts):
        return AttentionRows()
    def select(self, scores, keep):
        return [*range(keep)]

class Pruner:
    def __init__(self, options):
        self.dice = options.dice
    def observe(self, block, name):
        return None
    def prune(self, block, patterns, stats):
        scores = {n: block.linears[n].weight.float().abs() for n in patterns}
        if self.dice:
            scores = {n: torch.rand_like(s) for n, s in scores.items()}
        return {n: PruneResult(k) for n, k in keep_masks(scores, patterns).items()}

@hookimpl
def compressx_pruners():
    return [PrunerSpec("cuts", "a test", Options, Pruner)]

@hookimpl
def compressx_token_selectors():
    return [TokenSelectorSpec("skips", "a test", Options, lambda options: Selector())]
"""
    )
    check = ("--plugin", "both", "plugins", "check")
    done = invoke(*check, "both", "--architecture", "llama", "--set", "dice=true")
    assert done.exit_code == 1
    assert "FAILED: deterministic (llama): model.layers.0.self_attn.q_proj" in done.stdout
    assert "FAILED: as many positions as asked, in order (llama): token selector 'skips': expected" in done.stdout
    assert "0 failed" in printed(*check, "cuts", "--architecture", "llama")


def test_a_plugin_that_fails_to_load_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plugins.toml").write_text('[[plugin]]\nname = "ears"\nmodule = "cx_ears"\npath = "."\n')
    Path("cx_ears.py").write_text("import wandb_missing\n")
    for arguments, warned in ((["plugins", "check", "recent", "--architecture", "llama"], True), (["plugins"], False)):
        done = invoke(*arguments)
        assert done.exit_code == 0, done.stderr
        warning = "warning: plugin 'ears' failed to load and is skipped: ModuleNotFoundError: No module named 'wandb"
        assert (warning in done.stderr) == warned
    assert "ears" not in invoke("-p", "no:ears", "plugins", "check", "recent", "--architecture", "llama").stderr


def test_the_shell_completes_commands_and_paths_of_recipes():
    Path("recipe.yaml").touch()
    for words, complete in (("inspec", "plain,inspect"), ("run rec", "file,rec")):
        asked = {"_COMPRESSX_COMPLETE": "bash_complete", "COMP_WORDS": f"compressx {words}",
                 "COMP_CWORD": str(len(words.split()))}  # fmt: skip
        done = CliRunner().invoke(cli, env=asked, prog_name="compressx")
        assert complete in done.stdout.splitlines(), done.output


def _below(command: click.Command, *names: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, command
    for name, inner in command.commands.items() if isinstance(command, click.Group) else ():
        yield from _below(inner, *names, name)


@pytest.mark.parametrize(("names", "command"), _below(cli), ids=lambda x: "_".join(x) if isinstance(x, tuple) else "")
def test_the_help_of_every_command_ends_with_an_example_that_parses(names, command, monkeypatch):
    example = " ".join(printed(*names, "--help").split()).partition("Example: ")[2].partition(" > ")[0]
    [program, *arguments] = shlex.split(example)
    assert program == "compressx"
    assert tuple(arguments[: len(names)]) == names
    ran = []
    command = cli.commands[arguments[0]] if command is cli else command
    monkeypatch.setattr(command, "callback", lambda *_, **given: ran.append(given))
    assert invoke(*arguments).exit_code == 0
    assert len(ran) == 1


@pytest.mark.parametrize("kind", [[], ["--kind", "selector"]])
def test_new_writes_a_package_once(kind):
    done = printed("plugins", "new", "my-own", "--folder", "below", *kind)
    assert "pip install -e ./below/compressx-my-own" in done
    assert {str(p.relative_to("below")) for p in Path("below").rglob("*") if p.is_file()} == {
        "compressx-my-own/pyproject.toml",
        "compressx-my-own/README.md",
        "compressx-my-own/src/compressx_my_own/__init__.py",
        "compressx-my-own/tests/test_my_own.py",
    }
    assert not any(re.search("@(?!hookimpl|score_pruner)", p.read_text()) for p in Path("below").rglob("*.py"))
    assert "exists already; choose another name or --folder" in refused("plugins", "new", "my-own", "--folder", "below")
