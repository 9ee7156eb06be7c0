"""The wheel, installed into a fresh virtual environment whose only other packages are our dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT],
        check=True,
        timeout=300,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel. Dependencies are linked by path, which leaves our editable install out."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
         "--ignore-installed", wheel],
        check=True, timeout=120,
    )  # fmt: skip
    return folder / "bin"


def test_the_wheel_ships_both_packages_their_types_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("compressx/py.typed", "compressx_attnprune/py.typed", "compressx/pruners/wanda.py"):
        assert name in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not any(n.startswith(("tests", "recipes", "docs")) for n in names)


def test_every_built_in_plugin_arrives_through_its_entry_point(fresh, tmp_path):
    printed = subprocess.check_output([fresh / "compressx", "plugins", "--json"], text=True, cwd=tmp_path, timeout=120)
    records = {r["name"]: r for r in json.loads(printed)}
    assert set(records) == {"alps", "attnprune", "magnitude", "sensitivity", "sparsegpt", "wanda"}
    for name, record in records.items():
        assert (record["status"], record["source"], record["distribution"]) == ("loaded", "entry point", "compressx")
        assert record["pruners"] == [name]


def test_the_module_runs_and_comes_from_the_wheel(fresh, tmp_path):
    version = subprocess.check_output(
        [fresh / "python", "-m", "compressx", "--version"], text=True, cwd=tmp_path, timeout=120
    )
    assert version.startswith("compressx, version ")
    where = subprocess.check_output(
        [fresh / "python", "-c", "import compressx; print(compressx.__file__)"], text=True, cwd=tmp_path, timeout=120
    )
    assert str(fresh.parent) in where
