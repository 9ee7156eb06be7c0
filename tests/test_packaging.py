"""The wheel and four plugins, in fresh virtual environments whose only other packages are our dependencies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.compressx.built_in import PLUGINS
from tests.compressx.cli.commands import invoke
from tests.compressx.saved import save_tiny

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "compressx-plugin-random"
pytestmark = pytest.mark.slow


def pip(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True, timeout=300)


def environment(folder: Path, *wheels: Path) -> Path:
    """A virtual environment with wheels. Dependencies are linked by path, which leaves our editable install out."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = subprocess.check_output([python, "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", python, "install", "--no-deps", "--no-index", "--ignore-installed", *wheels)
    return folder / "bin"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A new plugin of each kind as the command line writes it."""
    folder = tmp_path_factory.mktemp("new")
    for name, kind in (("my-scores", "pruner"), ("my-figures", "evaluator"), ("my-tokens", "selector")):
        assert invoke("plugins", "new", name, "--kind", kind, "--folder", str(folder)).exit_code == 0
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def wheels(generated: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of compressx, of the example and of the new plugins, by their distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    # Without isolation: hatchling is a dev dependency, and would be fetched anew for each of the five.
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder, ROOT, EXAMPLE, *generated)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def fresh(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment with these and nothing else of ours."""
    return environment(tmp_path_factory.mktemp("venv"), *wheels.values())


def compressx(programs: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [programs / "compressx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)


def test_what_builds_a_wheel_is_asked_for_by_the_project_itself(generated):
    for folder in (ROOT, EXAMPLE, *generated):
        asked = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
        assert asked["build-backend"] == "hatchling.build"
        assert [Requirement(one).name for one in asked["requires"]] == ["hatchling"]


def test_the_wheel_ships_both_packages_their_types_and_the_licence(wheels):
    names = zipfile.ZipFile(wheels["compressx"]).namelist()
    for name in ("compressx/py.typed", "compressx_attnprune/py.typed", "compressx/pruners/wanda.py"):
        assert name in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert not any(n.startswith(("tests", "recipes", "docs")) for n in names)


def test_every_plugin_arrives_through_its_entry_point(fresh, tmp_path):
    records = {r["name"]: r for r in json.loads(compressx(fresh, tmp_path, "plugins", "--json").stdout)}
    new = {name: f"compressx-{name}" for name in ("my-scores", "my-figures", "my-tokens")}
    expected = {**dict.fromkeys(PLUGINS, "compressx"), "random": "compressx-plugin-random", **new}
    assert {name: record["distribution"] for name, record in records.items()} == expected
    kinds = ("pruners", "token_selectors", "evaluators", "exporters")
    offered = {name: [x for kind in kinds for x in record[kind]] for name, record in records.items()}
    several = {"random-tokens": ["random"], "token_perplexity": ["token_perplexity", "fidelity"]}
    assert offered == {name: [name] for name in expected} | several
    for record in records.values():
        assert (record["status"], record["source"]) == ("loaded", "entry point")
    assert records["random"]["version"] == "0.1.0"


def test_the_module_runs_and_comes_from_the_wheel(fresh, tmp_path):
    code = "import compressx; print(compressx.__file__); import compressx.__main__"
    printed = subprocess.check_output([fresh / "python", "-c", code, "--version"], text=True, cwd=tmp_path, timeout=120)
    assert re.fullmatch(rf"{fresh.parent}/.*\ncompressx, version .*\n", printed)


def test_a_pruner_by_pip_runs_beside_wanda_and_is_missed_when_it_is_gone(wheels, tmp_path):
    programs = environment(tmp_path / "venv", wheels["compressx"], wheels["compressx_plugin_random"])
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
    done = compressx(programs, tmp_path, "run", "r.yaml")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    by_pruner = {layer["pruner"]: layer["sparsity"] for block in report["blocks"] for layer in block["layers"]}
    assert by_pruner == {"random": 0.25, "wanda": 0.5}
    assert {"name": "random", "version": "0.1.0", "source": "entry point"}.items() <= next(
        p for p in report["plugins"] if p["name"] == "random"
    ).items()

    pip("--python", programs / "python", "uninstall", "--yes", "compressx-plugin-random")
    gone = compressx(programs, tmp_path, "plan", "r.yaml")
    assert gone.returncode == 2
    assert "r.yaml:5" in gone.stderr
    assert "no pruner 'random'; did you mean" in gone.stderr
    assert "valid: alps, attnprune, dare, depth, magnitude" in gone.stderr


def test_the_example_is_short_and_its_own_tests_pass_as_do_those_of_new_plugins(fresh, generated, tmp_path):
    assert sum(len(p.read_text().splitlines()) for p in EXAMPLE.rglob("*.py")) < 100
    command = [fresh / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    command += [EXAMPLE / "tests", *(folder / "tests" for folder in generated)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
