"""A saved tiny model, and the output of a run on it, which the tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.compressx.cli.commands import RECIPE, printed
from tests.compressx.saved import save_tiny

from compressx.testing import tiny_text


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a saved tiny model, its tokenizer of whole words, and a text of those words."""
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama").parent


@pytest.fixture(scope="session")
def finished(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model, a text, a prompt, a recipe and the output of its run."""
    folder = tmp_path_factory.mktemp("finished")
    for source in saved.iterdir():
        (folder / source.name).symlink_to(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        Path("prompt.txt").write_text(f"{tiny_text(words=80)}\n")
        Path("r.yaml").write_text(RECIPE)
        printed("run", "-q", "r.yaml")
    return folder


@pytest.fixture
def work(finished: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with what is finished."""
    for source in finished.iterdir():
        (project / source.name).symlink_to(source)
    monkeypatch.setenv("COMPRESSX_CACHE", str(finished / "cache"))
    return project
