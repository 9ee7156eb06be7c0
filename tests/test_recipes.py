"""The recipes that come with the project: each loads, says what it is, and plans on the real model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from compressx.data.windows import read_calibration
from compressx.evaluation.evaluators import with_evaluators
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_model, load_tokenizer
from compressx.models.shards import save_model
from compressx.pipeline import stages
from compressx.pipeline.run import plan
from compressx.plugins.manager import load_plugins
from compressx.recipe.schema import load_recipe

_ROOT = Path(__file__).parents[1]
_RECIPES = sorted((_ROOT / "recipes").glob("*.yaml"))
_SELECT_ONLY = [path for path in _RECIPES if load_recipe(path).recipe.select_tokens is not None]


def test_a_recipe_loads_and_says_what_it_does_and_evaluates_on_the_kind_of_text_that_it_calibrates_on() -> None:
    assert len(_RECIPES) > 10
    plugins = load_plugins()
    for path in _RECIPES:
        recipe = with_evaluators(load_recipe(path), plugins).recipe
        assert recipe.output == Path("runs") / path.stem
        header = path.read_text(encoding="utf-8").partition("model:")[0].lower()
        described = {word for rule in recipe.prune for word in (rule.pruner, "baseline", "query and key")}
        assert header, path
        assert all(line.startswith("#") for line in header.strip().splitlines()), path
        assert recipe.evaluate is not None, path
        if path in _SELECT_ONLY:
            assert "needle" in recipe.evaluate, path
            continue
        assert any(word in header for word in described), path
        perplexity = recipe.evaluate["token_perplexity"]
        if recipe.calibration is not None:
            read = [recipe.calibration.dataset, *(recipe.calibration.datasets or ())]
            assert perplexity.dataset is not None, path
            assert perplexity.dataset.name in {x.name for x in read if x is not None}, path


@pytest.mark.slow
def test_a_recipe_plans_every_linear_of_the_real_model(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All name the same model, whose config and tokenizer take seconds to read: they are read once."""
    for name in ("load_skeleton", "load_tokenizer"):
        monkeypatch.setattr(stages, name, cache(getattr(stages, name)))
    plugins = load_plugins(toml=_ROOT / "plugins.toml")
    tuned = find_checkpoint(load_recipe(_ROOT / "recipes/tune.yaml").recipe.model)
    save_model(load_model(tuned), load_tokenizer(tuned), Path("tuned"))  # as what delta-90 begins with
    for path in _RECIPES:
        planned = plan(path, plugins=plugins, overrides=["model.path=tuned"] if path.stem == "delta-90" else [])
        if path in _SELECT_ONLY:
            assert not planned.linears, path
            continue
        alone = path.stem.startswith("qk-")  # query and key, and nothing else
        taken = 2 if alone else 3 if path.stem in ("shrink-20", "widths-20") else 7  # neurons alone
        assert len(planned.linears) == 30 * taken, path
        assert {rule.index for rule in planned.rules} == {linear.rule.index for linear in planned.linears}, path
        outside = {name for name in planned.skipped if not name.startswith("model.layers.")}
        assert outside == {"lm_head", "model.embed_tokens"}, path
        assert len(planned.skipped) - len(outside) == 30 * (7 - taken), path
        assert planned.needs_calibration == (path.stem not in ("magnitude-50", "tune")), path


@pytest.mark.slow
def test_pythons_documentation_is_enough_for_the_recipes_that_read_nothing_else() -> None:
    read = 0
    for path in _RECIPES:
        recipe = load_recipe(path).recipe
        if {source.name for source in recipe.datasets().values()} == {"python-docs"}:
            tokenizer = load_tokenizer(find_checkpoint(load_recipe(_ROOT / "recipes/tune.yaml").recipe.model))
            for draw in recipe.draws().values():
                assert len(read_calibration(draw, tokenizer)) == draw.samples, path
                read += 1
    assert read == 3
