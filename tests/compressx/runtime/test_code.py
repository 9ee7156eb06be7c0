"""Digests of code, by which caches and interrupted runs see that it changed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from compressx import __version__
from compressx.runtime.code import code_digest, code_versions


def test_the_digest_of_a_packages_code_is_of_all_its_files_and_says_which_state_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "digested" / "inner"
    inner.mkdir(parents=True)
    for file in (inner.parent / "__init__.py", inner / "__init__.py", inner / "solver.py"):
        file.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = code_digest("digested")
    (inner / "solver.py").write_text("steps = 3\n")
    second = code_digest("digested")
    (inner / "notes.txt").write_text("no code")
    assert first != second == code_digest("digested")
    (inner / "solver.py").write_text("")
    assert code_digest("digested") == first


def test_the_versions_that_decide_a_result_name_our_code_and_the_libraries() -> None:
    found = code_versions("lm_eval")
    assert found["compressx"] == f"{__version__}, code {code_digest('compressx')}"
    libraries = ("torch", "transformers", "numpy", "lm_eval")
    assert {name: found[name] for name in libraries} == {name: metadata.version(name) for name in libraries}
