"""`compressx plugins new` and `check` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.compressx.cli.commands import invoke, printed, refused


@pytest.fixture(autouse=True)
def _here(project: Path) -> None:
    """Work in an empty folder."""


@pytest.mark.slow
def test_check_prints_a_row_for_each_check_and_a_column_for_each_architecture():
    done = printed("plugins", "check", "wanda", "--architecture", "llama", "--architecture", "gpt2")
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in done.splitlines()]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["exact sparsity for every pattern"] == ["ok", "ok"]
    assert rows["reconstructs"] == ["-", "-"]
    assert rows["inputs that are always zero"] == ["ok", "-"]
    assert "0 failed" in done


@pytest.mark.slow
def test_check_of_a_plugin_checks_all_of_its_pruners_with_the_options_given():
    Path("mine.py").write_text(
        """
import torch
from pydantic import BaseModel
from compressx import PruneResult, PrunerSpec, hookimpl, keep_masks

class Options(BaseModel):
    dice: bool = False

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
    return [PrunerSpec(name, "a test", Options, Pruner) for name in ("one", "two")]
"""
    )
    fine = invoke("--plugin", "mine", "plugins", "check", "mine", "--architecture", "llama")
    assert fine.exit_code == 0, fine.output
    assert "one:" in fine.stdout
    assert "two:" in fine.stdout
    broken = invoke("--plugin", "mine", "plugins", "check", "two", "--architecture", "llama", "--set", "dice=true")
    assert broken.exit_code == 1
    assert "FAILED: deterministic (llama): model.layers.0.self_attn.q_proj" in broken.stdout


def test_a_plugin_that_fails_to_load_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plugins.toml").write_text('[[plugin]]\nname = "ears"\nmodule = "cx_ears"\npath = "."\n')
    Path("cx_ears.py").write_text("import wandb_missing\n")
    for arguments, warned in ((["plugins", "check", "wanda", "--architecture", "llama"], True), (["plugins"], False)):
        done = invoke(*arguments)
        assert done.exit_code == 0, done.stderr
        warning = "warning: plugin 'ears' failed to load and is skipped: ModuleNotFoundError: No module named 'wandb"
        assert (warning in done.stderr) == warned
    assert "ears" not in invoke("-p", "no:ears", "plugins", "check", "wanda", "--architecture", "llama").stderr


def test_a_mistake_is_named():
    for arguments, complaint in (
        (["check", "wnda"], "did you mean 'wanda'?"),
        (["check", "wanda", "--architecture", "lama"], "no tiny model 'lama'; did you mean 'llama'?"),
        (["check", "attnprune", "--set", "modus=joint"], "--set modus: unknown option 'modus'; did you mean 'mode'?"),
        (["check", "attnprune", "--set", "mode"], "expected KEY"),
        (["new", "Not A Name"], "invalid plugin name 'Not A Name'"),
        (["new", "wanda"], "a plugin or pruner 'wanda' exists already"),
    ):
        assert complaint in refused("plugins", *arguments)
        assert list(Path().iterdir()) == []


def test_new_writes_a_package_once():
    done = printed("plugins", "new", "my-own", "--folder", "below")
    assert "pip install -e ./below/compressx-my-own" in done
    assert {str(p.relative_to("below")) for p in Path("below").rglob("*") if p.is_file()} == {
        "compressx-my-own/pyproject.toml",
        "compressx-my-own/README.md",
        "compressx-my-own/src/compressx_my_own/__init__.py",
        "compressx-my-own/tests/test_my_own.py",
    }
    assert not any("@" in p.read_text().replace("@hookimpl", "") for p in Path("below").rglob("*.py"))
    assert "exists already; choose another name or --folder" in refused("plugins", "new", "my-own", "--folder", "below")
