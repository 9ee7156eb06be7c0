from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field

from compressx import load_plugins
from compressx.cli import cli
from compressx.recipe.document import read_yaml
from compressx.recipe.schema import json_schema, load_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
COMMITTED = RECIPES / "recipe.schema.json"
BASE = {"model": "a/b", "prune": [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}], "output": "out"}


@pytest.fixture(scope="module")
def committed() -> Draft202012Validator:
    schema = json.loads(COMMITTED.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_committed_schema_is_that_of_the_code_and_the_command_prints_it():
    offers = {key: {n: spec.options for n, spec in named.items()} for key, named in load_plugins().offers.items()}
    assert COMMITTED.read_text() == json.dumps(json_schema(offers), indent=1) + "\n", (
        "the recipe has changed; `make format` writes its schema anew"
    )
    assert CliRunner().invoke(cli, ["schema"]).stdout == COMMITTED.read_text()


def test_every_shipped_recipe_names_the_schema_and_obeys_it(committed):
    for path in sorted(RECIPES.glob("*.yaml")):
        assert path.read_text().startswith("# yaml-language-server: $schema=recipe.schema.json\n"), path
        committed.validate(read_yaml(path).value)


RULE = BASE["prune"][0]
ALLOWED = [
    {"model": {"path": "folder", "dtype": "bfloat16"}},
    {"calibration": {"dataset": {"text": "a.txt"}, "samples": 4, "memory_limit": "4GB"}},
    {"prune": [{"targets": ["*"], "pruner": "wanda", "pattern": "2:4"}, {**RULE, "reconstruct": "sparsegpt"}]},
    {"prune": [{**RULE, "reconstruct": {"pruner": "alps"}}, {**RULE, "pruner": "somebodys", "options": {"any": 1}}]},
    {"allocation": {"method": "owl", "target": 0.6}, "prune": [{"targets": ["*"], "pruner": "wanda"}]},
    {"select_tokens": {"selector": "snapkv", "keep": 0.125, "options": {"block": "auto"}}},
    {"select_tokens": {"selector": "recent", "keep": 64, "protect": {"first": 0}}},
    {"evaluate": {"lm_eval": {"tasks": ["wikitext"], "limit": 3}}},
]
REFUSED = [
    {"prnue": []},
    {"calibration": {"dataset": "wikitext", "sampels": 4}},
    *({"prune": [{**RULE, **wrong}]} for wrong in (
        {"sparsity": 1.5}, {"pattern": "two of four"}, {"targets": "*"},
        {"pruner": "attnprune", "options": {"modus": "joint"}}, {"pruner": "attnprune", "options": {"mode": "slow"}},
        {"reconstruct": {"pruner": "alps", "options": {"x": 1}}},
    )),
    {"select_tokens": {"selector": "snapkv", "keep": 0}},
    {"select_tokens": {"selector": "snapkv", "keep": 0.1, "options": {"blok": 1}}},
    {"allocation": {"method": "owl", "target": 0.6, "sread": 0.1}},
]  # fmt: skip


def test_the_schema_allows_what_a_recipe_may_say_and_nothing_else(committed):
    for change in ALLOWED:
        load_recipe({**BASE, **change})
        committed.validate({**BASE, **change})
    assert [change for change in REFUSED if committed.is_valid({**BASE, **change})] == []


class Inner(BaseModel):
    depth: int = Field(1, ge=1)


class Outer(BaseModel):
    inner: Inner = Inner()


def test_nested_options_of_different_pruners_do_not_mix():
    schema = Draft202012Validator(json_schema({"pruners": {"mine": Outer, "other": Inner}}))
    rule = {"targets": ["*"], "pruner": "mine", "sparsity": 0.5}
    assert schema.is_valid({**BASE, "prune": [{**rule, "options": {"inner": {"depth": 2}}}]})
    assert not schema.is_valid({**BASE, "prune": [{**rule, "options": {"inner": {"depth": 0}}}]})
    assert not schema.is_valid({**BASE, "prune": [{**rule, "options": {"depth": 2}}]})
    assert schema.is_valid({**BASE, "prune": [{**rule, "pruner": "other", "options": {"depth": 2}}]})
