"""A third party's evaluator and exporter: generated, checked, used in a recipe, blocked, named."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compressx.cli.commands import printed, refused
from tests.compressx.pipeline.runs import recipe
from tests.compressx.saved import save_tiny

from compressx.masks import MaskSet
from compressx.models.packed_folder import is_packed, unpack_folder
from compressx.pipeline.run import plan, run
from compressx.plugins.scaffold import new_plugin
from compressx.recipe.document import dump_yaml
from compressx.runtime.errors import CompressxError, PluginError, RecipeError

HALF = {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}
TOML = '[[plugin]]\nname = "my-own"\nmodule = "compressx_my_own"\npath = "compressx-my-own/src"\n'


@pytest.fixture
def model(project: Path) -> Path:
    return save_tiny(project / "model", "llama")


@pytest.fixture
def package(project: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new package `my-own` of a kind, listed in the plugins.toml of the working folder."""
    folder = new_plugin("my-own", project, request.param)
    (project / "plugins.toml").write_text(TOML)
    yield folder / "src/compressx_my_own/__init__.py"
    sys.modules.pop("compressx_my_own", None)


evaluator: Any = pytest.mark.parametrize("package", ["evaluator"], indirect=True)
exporter: Any = pytest.mark.parametrize("package", ["exporter"], indirect=True)


@evaluator
def test_a_recipe_measures_by_an_evaluator_that_a_plugin_offers(package: Path, model: Path) -> None:
    report = run(recipe(model, HALF, evaluate={"my-own": {"text": "all of this is a text"}}))
    assert {of: {*values} for of, values in report.evaluation.items()} == {"dense": {"my-own"}, "pruned": {"my-own"}}
    assert "my-own accuracy" in Path("out/report.md").read_text()
    assert run(recipe(model, HALF, evaluate={"my-own": {}}, output="o")).evaluation["dense"]["my-own"]["accuracy"] >= 0
    assert "text: all of this is a text" in Path("out/recipe.yaml").read_text()
    assert json.loads(printed("eval", "out", "--recipe", "out/recipe.yaml", "--json")) == report.evaluation["pruned"]


READS = """\
    def check(self, model, tokenizer, at):
        pass

    def read(self, model, tokenizer):
        return None

    def fingerprint(self, text):
        return "text"

    def evaluate(self, model):
        return {"my-own": {"version": VERSION}}

    def once("""


@evaluator
def test_figures_are_cached_until_the_code_or_the_options_of_their_evaluator_change(
    package: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", "cache")
    template = package.read_text()

    def measured(version: int, **options: str) -> object:
        given = recipe(model, HALF, evaluate={"my-own": options})
        package.write_text(template.replace("    def evaluate(", READS.replace("VERSION", str(version))))
        sys.modules.pop("compressx_my_own", None)
        return run(given, replace=True).evaluation["dense"]["my-own"]["version"]

    assert measured(1) == 1
    (entry,) = Path("cache/evaluations").iterdir()
    entry.write_text(entry.read_text().replace('"version": 1', '"version": 9'))
    assert measured(1) == 9, "it is taken from the cache"
    assert measured(2) == 2
    assert measured(1, text="other") == 1


@evaluator
def test_mistakes_of_an_evaluator_are_named_in_one_line_with_their_place(package: Path, model: Path) -> None:
    def said(*arguments: str, **evaluate: object) -> str:
        Path("r.yaml").write_text(dump_yaml(recipe(model, HALF, evaluate=evaluate)))
        return refused(*arguments, "plan", "r.yaml")

    assert "no evaluator 'my-onw'; did you mean 'my-own'? valid: " in said(**{"my-onw": {}})
    assert "unknown option 'txt'; did you mean 'text'?" in said(**{"my-own": {"txt": "a"}})
    Path("plugins.toml").write_text(f'[load]\ndisabled = ["my-own"]\n{TOML}')
    assert "no evaluator 'my-own': plugin 'my-own' (plugins.toml) is disabled; drop its name" in said(**{"my-own": {}})
    assert "no evaluator 'needle': plugin 'needle' (entry point) is blocked; drop -p no:needle" in said(
        "-p", "no:needle", needle={"dataset": "wikitext"}
    )


@pytest.mark.parametrize(
    ("returned", "told"),
    [("1 / 0", r"evaluator 'my-own': ZeroDivisionError: division by zero \(.*__init__.py, line \d+\)"),
     ("{'a': object()}", r"evaluator 'my-own' returned <object object at .*> under a; expected figures by name"),
     ("{'token_perplexity': 3.0}", "evaluator 'my-own' returned 'token_perplexity', which is measured already"),
     ("{'sample': {'text': 'x'}}", "evaluator 'my-own' returned 'sample', which is measured already; leave one")],
)  # fmt: skip
@evaluator
def test_an_evaluator_that_fails_or_returns_no_figures_is_blamed(
    package: Path, model: Path, returned: str, told: str
) -> None:
    code = package.read_text()
    package.write_text(code.replace("        ids = model", f"        return {returned}\n        ids = model"))
    given = recipe(model, HALF, evaluated=True)
    sample = {"sample": {"prompt": "w1 w2", "tokens": 2}}
    with pytest.raises(PluginError, match=told):
        run({**given, "evaluate": {**given["evaluate"], **sample, "my-own": {}}})


def strict(text: str) -> Any:
    """Read JSON as other programs do, which know neither NaN nor Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@evaluator
def test_nan_and_infinity_from_an_evaluator_are_texts_in_every_json(package, model, project, monkeypatch) -> None:
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    figures = "{'x': float('nan'), 'y': {'up': float('inf'), 'grid': [{'down': -float('inf')}]}}"
    package.write_text(
        package.read_text().replace("        ids = model", f"        return {figures}\n        ids = model")
    )
    given = recipe(model, HALF, evaluate={"my-own": {}}, export=["safetensors", "packed"])
    written = {"x": "NaN", "y": {"up": "Infinity", "grid": [{"down": "-Infinity"}]}}
    report = run(given)
    assert report.evaluation["dense"]["y"]["up"] == float("inf")
    assert strict(Path("out/report.json").read_text())["evaluation"] == {"dense": written, "pruned": written}
    assert run(given, resume=True).evaluation["pruned"] == written
    for command in (["eval", "out", "--recipe", "out/recipe.yaml"], ["inspect", "out"], ["plan", "out/recipe.yaml"]):
        strict(printed(*command, "--json"))
    for path in (*project.rglob("*.json"), *Path("cache").rglob("*.json")):
        strict(path.read_text())


@exporter
def test_a_recipe_writes_the_formats_that_it_names_and_the_report_lists_them(package: Path, model: Path) -> None:
    given = recipe(model, HALF, export=["safetensors", {"format": "my-own", "options": {"config": False}}])
    run(given)
    report = run(given)  # what an earlier run has written is nobody's own
    masks = MaskSet.load("out/masks.safetensors")
    name = "model.layers.0.mlp.up_proj"
    assert np.array_equal(np.load(f"out/exports/my-own/{name}.npy"), masks[name].keep.numpy())
    assert {path.stem for path in Path("out/exports/my-own").iterdir()} == {*masks}
    assert [(x["format"], x["folder"]) for x in report.exports] == [
        ("safetensors", "model"), ("my-own", "exports/my-own"),
    ]  # fmt: skip
    assert "exports/my-own (my-own, " in Path("out/report.md").read_text()
    run(recipe(model, HALF), replace=True)
    assert not Path("out/exports").exists()


def test_the_packed_format_alone_is_what_pack_writes(model: Path) -> None:
    run(recipe(model, HALF, output="dense"))
    run(recipe(model, HALF, export=["packed"]))
    assert not Path("out/model").exists()
    assert is_packed(Path("out/exports/packed"))
    unpack_folder(Path("out/exports/packed"), Path("unpacked"))
    files = {path.name for path in Path("dense/model").iterdir()}
    assert {path.name for path in Path("unpacked").iterdir()} == files
    for name in files - {"README.md"}:  # which has the date and the seconds
        assert Path("unpacked", name).read_bytes() == Path("dense/model", name).read_bytes(), name


@exporter
def test_mistakes_of_an_exporter_are_named_in_one_line_with_their_place(package: Path, model: Path) -> None:
    broken = [{"format": "packed", "options": {"compres": True}}]
    for export, told in (
        (["my-onw"], r"<dict>:export\[0\]: no exporter 'my-onw'; did you mean 'my-own'\?"),
        (broken, r"export\[0\].options.compres: unknown option 'compres'"),
        (["packed", "packed"], r"<dict>:export\[1\]: format 'packed' is there already; write each once"),
    ):
        with pytest.raises((PluginError, RecipeError), match=told):
            plan(recipe(model, HALF, export=export))
    del sys.modules["compressx_my_own"]
    package.write_text(package.read_text().replace("        for name", "        1 / 0\n        for name"))
    with pytest.raises(CompressxError, match=r"<dict>:export\[0\]: exporter 'my-own': ZeroDivisionError: division by"):
        run(recipe(model, HALF, export=["my-own"]))
