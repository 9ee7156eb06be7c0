"""The recipes that come with the project: each loads, says what it is, and plans on the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from compressx.pipeline.run import plan
from compressx.plugins.manager import load_plugins
from compressx.recipe.schema import load_recipe

_ROOT = Path(__file__).parents[1]
_RECIPES = sorted((_ROOT / "recipes").glob("*.yaml"))

pytestmark = pytest.mark.parametrize("path", _RECIPES, ids=lambda path: path.stem)


def test_a_recipe_loads_and_writes_to_a_folder_of_its_own_name(path: Path) -> None:
    recipe = load_recipe(path).recipe

    assert recipe.output == Path("runs") / path.stem


def test_a_recipe_begins_by_saying_what_it_does(path: Path) -> None:
    header = path.read_text(encoding="utf-8").partition("model:")[0].lower()
    lines = header.strip().splitlines()
    described = {word for rule in load_recipe(path).recipe.prune for word in (rule.pruner, "baseline", "query and key")}

    assert lines
    assert all(line.startswith("#") for line in lines)
    assert any(word in header for word in described)


def test_a_recipe_evaluates_on_the_kind_of_text_that_it_calibrates_on(path: Path) -> None:
    recipe = load_recipe(path).recipe

    assert recipe.evaluate is not None
    assert recipe.evaluate.token_perplexity is not None
    if recipe.calibration is not None:
        assert recipe.calibration.dataset == recipe.evaluate.token_perplexity.dataset


@pytest.mark.slow
def test_a_recipe_plans_every_linear_of_the_real_model(path: Path, project: Path) -> None:
    planned = plan(path, plugins=load_plugins())

    alone = path.stem.startswith("qk-")  # query and key, and nothing else
    assert len(planned.linears) == 30 * (2 if alone else 7)
    assert {rule.index for rule in planned.rules} == {linear.rule.index for linear in planned.linears}
    outside = {name for name in planned.skipped if not name.startswith("model.layers.")}
    assert outside == {"lm_head", "model.embed_tokens"}
    assert len(planned.skipped) - len(outside) == (30 * 5 if alone else 0)
    assert planned.needs_calibration == (path.stem != "magnitude-50")
