"""The packages that `compressx plugins new` writes, used without being installed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.compressx.cli.commands import invoke, printed, refused
from tests.compressx.pipeline.runs import recipe
from tests.compressx.saved import save_tiny

import compressx
from compressx import PluginError, load_plugins, select_tokens
from compressx.cli.plugins import plugins_new
from compressx.pipeline.run import plan
from compressx.plugins.kinds import TOKEN_SELECTOR
from compressx.plugins.scaffold import KINDS, new_plugin
from compressx.runtime.errors import ArtifactError, RecipeError
from compressx.testing import check_plugin, tiny_model, tiny_tokens

GUIDE = Path(__file__).parents[3] / "docs/write-a-selector.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of package that there is a template of."""
    return str(request.param)


@pytest.fixture
def package(project: Path, kind: str) -> Iterator[Path]:
    """A new package `my-own`, listed in the plugins.toml of the working folder."""
    folder = new_plugin("my-own", project, kind)
    (project / "plugins.toml").write_text(
        '[[plugin]]\nname = "my-own"\nmodule = "compressx_my_own"\npath = "compressx-my-own/src"\n'
    )
    yield folder
    sys.modules.pop("compressx_my_own", None)


def test_a_new_package_offers_one_thing_of_its_name_and_says_so_in_its_metadata(package: Path, kind: str) -> None:
    (record,) = [r for r in load_plugins().records if r.name == "my-own"]
    offered = KINDS[kind][0]
    assert {key: names for key, names in record.offers.items() if names} == {offered.key: ("my-own",)}
    text = "".join(path.read_text() for path in package.rglob("*") if path.is_file())
    assert not re.search(r"@(?!hookimpl|score_pruner)\w+@?", text), "nothing of the template is left"
    metadata = (package / "pyproject.toml").read_text()
    assert f'description = "compressx plugin: the {offered.name} my-own"' in metadata
    assert '\nmy-own = "compressx_my_own"\n' in metadata


def test_a_new_packages_readme_shows_how_a_recipe_names_it(package: Path, project: Path, kind: str) -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", (package / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    given = recipe(save_tiny(project / "model", "llama"), **yaml.safe_load(shown))
    assert plan(given).linears
    blocked = load_plugins(blocked=["my-own"])
    with pytest.raises((PluginError, RecipeError), match=f"no {KINDS[kind][0].name} 'my-own'"):
        plan(given, plugins=blocked)


@pytest.mark.usefixtures("package")
def test_a_new_package_keeps_every_promise(kind: str) -> None:
    assert ", 0 failed" in printed("plugins", "check", "my-own", "--architecture", "gpt2")
    assert list(next(x for x in plugins_new.params if x.name == "kind").type.choices) == [*KINDS]


@pytest.mark.parametrize("kind", ["selector"], indirect=True)
@pytest.mark.usefixtures("package")
def test_a_new_selector_shortens_prompts_with_its_options_until_it_is_blocked() -> None:
    model, ids = tiny_model("llama"), tiny_tokens(sequences=2, length=40)
    few = {"selector": "my-own", "keep": 20, "protect": {"first": 2, "last": 8}}
    selected = select_tokens(model, ids, **few)
    assert selected.input_ids.shape == (2, 20)
    first = select_tokens(model, ids, **few, options={"block": 0, "queries": 2}).places
    assert any(a.tolist() != b.tolist() for a, b in zip(first, selected.places, strict=True))
    blocked = "plugin 'my-own' (plugins.toml) is blocked; drop -p no:my-own"
    with pytest.raises(PluginError, match=re.escape(f"no token selector 'my-own': {blocked}")):
        select_tokens(model, ids, **few, plugins=load_plugins(blocked=["my-own"]))
    assert blocked in refused("-p", "no:my-own", "plugins", "check", "my-own")
    records = {r["name"]: r for r in json.loads(invoke("-p", "no:my-own", "plugins", "--json").stdout)}
    assert (records["my-own"]["status"], records["my-own"]["token_selectors"]) == ("blocked", [])


@pytest.mark.parametrize("kind", ["selector"], indirect=True)
def test_the_guide_shows_the_selector_that_a_new_package_has(package: Path) -> None:
    written = (package / "src/compressx_my_own/__init__.py").read_text()
    (shown,) = _blocks("python")
    assert shown == written
    assert len(written.splitlines()) <= 45


@pytest.mark.parametrize("kind", ["selector"], indirect=True)
def test_the_other_programs_of_the_guide_run_and_what_they_define_keeps_every_promise(package: Path) -> None:
    module = sys.modules[load_plugins().find(TOKEN_SELECTOR, "my-own").build.__module__]
    model, ids = tiny_model("llama"), tiny_tokens(sequences=2, length=64)
    names: dict[str, Any] = {**vars(module), "compressx": compressx, "model": model, "input_ids": ids}
    programs = _blocks("py")
    assert len(programs) == 2
    for program in programs:
        exec(program, names)  # noqa: S102 - our own page
    assert names["short"].input_ids.shape == (2, 36), "by default the first four and the last 32 tokens are kept"
    check_plugin(names["spec"], architectures=["llama"])


def test_a_package_that_cannot_be_written_leaves_nothing(project: Path, kind: str, monkeypatch) -> None:
    written = []

    def full(path: Path, data: bytes) -> None:
        if written:
            raise ArtifactError(f"{path}: no space left")
        written.append(path)
        path.parent.mkdir(parents=True)
        path.write_bytes(data)

    monkeypatch.setattr("compressx.plugins.scaffold.atomic_write", full)
    with pytest.raises(ArtifactError, match="no space left"):
        new_plugin("my-own", project, kind)
    assert written
    assert list(project.iterdir()) == []
