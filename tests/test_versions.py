"""The interpreters that `make versions` tries are the oldest and the newest that work."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from tests.versions import ROOT, interpreters, supported, tomllib

VERSIONS = ["3.11", "3.12", "3.13", "3.14"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any Python."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", f"{tmp_path}/pyenv")
    monkeypatch.setattr("shutil.which", lambda name: str(path) if (path := tmp_path / "bin" / name).exists() else None)
    return tmp_path


def python(path: Path, says: str, status: int = 0) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {says}\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_what_pyproject_allows_is_what_it_names() -> None:
    asked = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    assert supported() == VERSIONS
    assert VERSIONS[0] in asked
    assert "3.10" not in asked


def test_the_oldest_and_the_newest_interpreter_are_found(machine: Path) -> None:
    python(machine / "bin/python3.12", "3.12.4")
    oldest = python(machine / "pyenv/versions/3.11.7/bin/python", "3.11.7")
    newest = python(machine / "bin/python3.13", "3.13.0")
    python(machine / "pyenv/versions/3.10.1/bin/python", "3.10.1")
    assert interpreters(VERSIONS) == [oldest, newest]


def test_one_interpreter_is_tried_once(machine: Path) -> None:
    only = python(machine / "bin/python3.12", "3.12.4")
    assert interpreters(VERSIONS) == [only]


def test_an_interpreter_that_does_not_start_or_is_another_is_passed_over(machine: Path) -> None:
    python(machine / "bin/python3.11", "nothing", status=127)  # pyenv's stand-in of a version that is not chosen
    python(machine / "bin/python3.14", "3.1.4")
    python(machine / "pyenv/versions/3.12.1/bin/python", "3.12.1", status=1)  # without ensurepip
    right = python(machine / "pyenv/versions/3.11.9/bin/python", "3.11.9")
    assert interpreters(VERSIONS) == [right]
