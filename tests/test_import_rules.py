"""Import rules that import-linter cannot hold: parts of external packages, and what is imported at start."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[1] / "src").rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Return every module that a file imports anywhere, `from a import b` as both `a` and `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def test_there_are_sources_to_look_at():
    assert len(SOURCES) > 30
    sparsifier = next(p for p in SOURCES if p.name == "sparsifier.py")
    assert any(m.startswith("torch.ao.pruning") for m in imports(sparsifier))


def test_torch_ao_is_imported_by_the_masks_alone():
    users = {p.name for p in SOURCES if any(m == "torch.ao" or m.startswith("torch.ao.") for m in imports(p))}
    assert users <= {"maskset.py", "sparsifier.py"}


def test_nothing_is_unpickled():
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        assert not imports(path) & {"pickle", "dill", "joblib", "cloudpickle"}, path
        assert "torch.load" not in source, path
        assert not re.search(r"(broadcast|gather|scatter|send|recv)_object", source), path  # these pickle


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import compressx", ["torch", "transformers", "datasets", "lm_eval", "pydantic", "rich"]),
        ("import compressx.cli", ["torch", "transformers", "datasets", "lm_eval"]),
        ("import compressx.pipeline.run", ["datasets", "lm_eval", "matplotlib", "torch.ao.pruning"]),
        ("import compressx_attnprune.plugin", ["transformers", "datasets", "lm_eval"]),
    ],
)
def test_heavy_libraries_are_imported_when_they_are_used(statement, absent):
    code = f"import sys; {statement}; print([m for m in {absent!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).strip() == "[]"


def test_every_public_name_resolves_and_an_unknown_one_is_an_attribute_error():
    import compressx

    for name in compressx.__all__:
        assert getattr(compressx, name) is not None
    assert set(compressx.__all__) <= set(dir(compressx))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compressx.nothing


@pytest.mark.slow
def test_no_module_hides_a_public_function_of_its_name():
    modules = "compressx, compressx.pipeline.run, compressx.planning.plan"
    code = f"import {modules}; print(callable(compressx.run), callable(compressx.plan))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120).split() == ["True", "True"]
    public = {p.stem for p in SOURCES if p.parent.name == "compressx"}
    import compressx

    assert not public & set(compressx.__all__)
