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
from tests.compressx.built_in import BUILT_IN
from tests.compressx.saved import save_tiny

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "compressx-plugin-random"
pytestmark = pytest.mark.slow


def built(project: Path, folder: Path) -> Path:
    """Build a project's wheel."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, project]
    subprocess.run(command, check=True, timeout=300)
    (path,) = folder.glob("*.whl")
    return path


def pip(python: Path, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "--quiet", *arguments], check=True, timeout=120)


def environment(folder: Path, *wheels: Path) -> Path:
    """A virtual environment with wheels. Dependencies are linked by path, which leaves our editable install out."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip(python, "install", "--no-deps", "--no-index", "--ignore-installed", *wheels)
    return folder / "bin"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment with our wheel and nothing else of ours."""
    return environment(tmp_path_factory.mktemp("venv"), wheel)


def test_the_wheel_ships_both_packages_their_types_and_the_licence(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("compressx/py.typed", "compressx_attnprune/py.typed", "compressx/pruners/wanda.py"):
        assert name in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not any(n.startswith(("tests", "recipes", "docs")) for n in names)


def test_every_built_in_plugin_arrives_through_its_entry_point(fresh, tmp_path):
    printed = subprocess.check_output([fresh / "compressx", "plugins", "--json"], text=True, cwd=tmp_path, timeout=120)
    records = {r["name"]: r for r in json.loads(printed)}
    assert set(records) == set(BUILT_IN)
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


def compressx(programs: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [programs / "compressx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)


def test_a_pruner_by_pip_runs_beside_wanda_is_blocked_by_name_and_missed_when_it_is_gone(wheel, tmp_path):
    programs = environment(tmp_path / "venv", wheel, built(EXAMPLE, tmp_path / "built"))
    save_tiny(tmp_path / "model", "llama")
    (tmp_path / "r.yaml").write_text(
        """
model: {path: model, dtype: float32}
calibration: {dataset: {text: text.txt}, samples: 4, sequence_length: 32}
prune:
  - {targets: ["*.v_proj", "*.o_proj"], pruner: random, sparsity: 0.25, options: {seed: 3}}
  - {targets: ["*"], pruner: wanda, pattern: "2:4"}
output: out
"""
    )
    shown = compressx(programs, tmp_path, "plugins")
    assert shown.returncode == 0, shown.stderr
    row = next(line.split("  ") for line in shown.stdout.splitlines() if line.startswith(" random"))
    cells = [cell.strip() for cell in row if cell.strip()]
    assert cells == ["random", "0.1.0", "entry point", "loaded", "random", "compressx-plugin-random"]

    done = compressx(programs, tmp_path, "run", "r.yaml")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    by_pruner = {layer["pruner"]: layer["sparsity"] for block in report["blocks"] for layer in block["layers"]}
    assert by_pruner == {"random": 0.25, "wanda": 0.5}
    assert {"name": "random", "version": "0.1.0", "source": "entry point"}.items() <= next(
        p for p in report["plugins"] if p["name"] == "random"
    ).items()

    blocked = compressx(programs, tmp_path, "-p", "no:random", "run", "r.yaml")
    assert blocked.returncode == 2
    assert "r.yaml:5" in blocked.stderr
    assert "no pruner 'random': plugin 'random' (entry point) is blocked; drop -p no:random" in blocked.stderr

    pip(programs / "python", "uninstall", "--yes", "compressx-plugin-random")
    gone = compressx(programs, tmp_path, "run", "r.yaml")
    assert gone.returncode == 2
    assert "r.yaml:5" in gone.stderr
    assert "no pruner 'random'; did you mean" in gone.stderr
    assert "valid: alps, attnprune, magnitude" in gone.stderr


def test_the_example_is_short_and_its_own_tests_pass(wheel, tmp_path):
    lines = sum(len(p.read_text().splitlines()) for p in EXAMPLE.rglob("*.py"))
    assert lines < 100
    programs = environment(tmp_path / "venv", wheel, built(EXAMPLE, tmp_path / "built"))
    run_tests(programs, EXAMPLE, tmp_path)


def test_a_new_plugin_installs_and_its_tests_pass_as_generated(wheel, fresh, tmp_path):
    done = compressx(fresh, tmp_path, "plugins", "new", "my-scores")
    assert done.returncode == 0, done.stderr
    assert "pip install -e ./compressx-my-scores" in done.stdout
    project = tmp_path / "compressx-my-scores"
    programs = environment(tmp_path / "venv", wheel, built(project, tmp_path / "built"))
    run_tests(programs, project, tmp_path)
    checked = compressx(programs, tmp_path, "plugins", "check", "my-scores", "--architecture", "llama")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "0 failed" in checked.stdout


def run_tests(programs: Path, project: Path, folder: Path) -> None:
    command = [
        programs / "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        project,
        project / "tests",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
