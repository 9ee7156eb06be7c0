"""Sweeps over methods and sparsities by name: the rules that they stand for, and what runs share."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compressx.cli.commands import printed
from tests.compressx.pipeline.runs import recipe
from transformers import AutoModelForCausalLM

from compressx import CompressxError, RecipeError
from compressx.evaluation import token_perplexity
from compressx.pipeline.sweep import SweepRun, check_runs, rules_of, runs_by_name
from compressx.plugins.manager import Plugins, load_plugins
from compressx.recipe.document import read_plain
from compressx.testing import tiny_model

NAME = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
LLAMA, PLUGINS = tiny_model("llama"), load_plugins()
GLOB = st.from_regex(r"\*\.[a-z_]{1,8}", fullmatch=True)


def by_name(
    *methods: str, at: tuple[str, ...] = ("0.5",), seeds: int | None = None, overrides: tuple[str, ...] = (),
) -> list[SweepRun]:  # fmt: skip
    plugins = load_plugins()
    cells = runs_by_name(Path("r.yaml"), methods, at, seeds, overrides, None, plugins)
    check_runs(cells, plugins)
    return cells


@pytest.fixture(scope="session")
def made_once(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("named") / "r.yaml"
    path.write_text(json.dumps(recipe(model)))
    return path


@pytest.fixture
def asked(model: Path) -> dict[str, Any]:
    """A recipe with an allocation and fine-tuning, saved as `r.yaml`."""
    given = recipe(model, allocation={"method": "owl", "target": 0.5}, finetune={"steps": 1}, evaluated=True)
    del given["prune"][0]["sparsity"]
    Path("r.yaml").write_text(json.dumps(given))
    return given


# --- names


@given(parts=st.lists(st.tuples(NAME, st.lists(GLOB, min_size=1, max_size=3)), max_size=3), last=NAME)
def test_a_method_is_a_rule_for_each_pruner_in_their_order_the_last_of_which_takes_the_rest(parts, last):
    text = "+".join([*(f"{pruner}:{','.join(globs)}" for pruner, globs in parts), last])
    for level, key in ((0.5, "sparsity"), ("2:4", "pattern")):
        assert rules_of(text, level, LLAMA).value == [
            *({"targets": globs, "pruner": pruner, key: level} for pruner, globs in parts),
            {"targets": ["*"], "pruner": last, key: level},
        ]


@given(st.text(alphabet="ab:+,*q", max_size=12))
def test_whatever_is_no_method_is_refused_in_one_line_that_says_what_is_one(text):
    *narrow, last = text.split("+")
    if ":" in last or not all(part.partition(":")[2] for part in narrow):
        with pytest.raises(RecipeError, match=r"expected PRUNER, such as wanda, or PRUNER:TARGETS\+PRUNER") as told:
            rules_of(text, 0.5, LLAMA)
        assert "\n" not in str(told.value)
    else:
        assert len(rules_of(text, 0.5, LLAMA).value) == text.count("+") + 1


PAIRS = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda pair: f"{pair[0]}:{pair[1]}")


@settings(max_examples=50)
@given(st.floats().map(str) | st.integers().map(str) | st.text(max_size=6) | PAIRS)
def test_a_sparsity_is_a_fraction_between_0_and_1_or_n_m_and_all_else_is_refused(made_once, text):
    def rule() -> Any:
        (cell,) = runs_by_name(made_once, ["magnitude"], [text], None, (), None, PLUGINS)
        return cell.loaded.recipe.prune[0]

    level = read_plain(text)
    if isinstance(level, float) and 0 < level < 1:
        assert (rule().sparsity, rule().pattern) == (level, None)
    elif re.fullmatch("[0-9]:[0-9]", text) and 0 < int(text[0]) < int(text[2]):
        assert (rule().sparsity, str(rule().pattern)) == (None, text)
    else:
        with pytest.raises(RecipeError, match=r"^--(methods magnitude --)?sparsities .*: .*(expected|N:M keeps N of)"):
            rule()


@pytest.mark.parametrize(
    ("architecture", "names"),
    [("llama", ["*.q_proj", "*.k_proj"]), ("opt", ["*.q_proj", "*.k_proj"]), ("gpt2", ["*.c_attn"]),
     ("phi3", ["*.qkv_proj"]), ("gpt-neox", ["*.query_key_value"])],
)  # fmt: skip
def test_qk_stands_for_the_models_own_query_and_key_or_what_fuses_them(architecture, names):
    first, rest = rules_of("attnprune:qk+sparsegpt", 0.5, tiny_model(architecture)).value
    assert first == {"targets": names, "pruner": "attnprune", "sparsity": 0.5}
    assert rest["targets"] == ["*"]


def test_qk_names_linears_one_by_one_where_a_block_has_others_of_these_names():
    model = tiny_model("llama")
    other = torch.nn.Module()
    other.q_proj = torch.nn.Linear(64, 64)  # without keys: no attention that can be pruned
    model.model.layers[1].self_attn = other
    (first, _) = rules_of("attnprune:qk+sparsegpt", 0.5, model).value
    assert first["targets"] == [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 2) for x in "qk"]
    for block in model.model.layers:
        block.self_attn = other
    with pytest.raises(
        CompressxError, match=r"^--methods attnprune:qk\+wanda: qk: model\.layers\.0 has 0 q_proj and 0"
    ):
        rules_of("attnprune:qk+wanda", 0.5, model)


# --- recipes


def test_methods_take_the_place_of_prune_and_allocation_and_seeds_are_those_of_every_draw(asked):
    cells = by_name("wanda", "attnprune:qk+sparsegpt", at=("0.5", "2:4"), seeds=2)
    assert [cell.output.name for cell in cells] == [
        f"{method}_{level}_seed{seed}" for method in ("wanda", "attnprune-qk+sparsegpt") for level in ("0.5", "2-4")
        for seed in (0, 1)
    ]  # fmt: skip
    assert {cell.output.parent for cell in cells} == {Path("out-sweep")}
    last = cells[-1].loaded.recipe
    assert [(rule.pruner, rule.targets, str(rule.pattern)) for rule in last.prune] == [
        ("attnprune", ["*.q_proj", "*.k_proj"], "2:4"), ("sparsegpt", ["*"], "2:4")
    ]  # fmt: skip
    assert last.allocation is None
    assert (last.calibration.seed, last.finetune.seed, last.finetune.steps) == (1, 1, 1)
    (alone,) = by_name("wanda", overrides=("calibration.seed=7",))
    assert (alone.output.name, alone.loaded.recipe.calibration.seed) == ("wanda_0.5", 7)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("methods", "options", "told"),
    [(["wanda", "wnda"], {}, "--methods wnda --sparsities 0.5: no pruner 'wnda'; did you mean 'wanda'? valid: alps"),
     (["attnprune:qk+sparsgpt"], {}, "--methods attnprune:qk+sparsgpt --sparsities 0.5: no pruner 'sparsgpt'; did you"),
     (["wanda:kq+magnitude"], {}, "--methods wanda:kq+magnitude --sparsities 0.5: target 'kq' matches no linear"),
     (["attnprune:*.q_proj+wanda"], {}, "--methods attnprune:*.q_proj+wanda --sparsities 0.5: attnprune prunes the "),
     (["attnprune:qk"], {}, "--methods attnprune:qk: expected PRUNER, such as wanda, or PRUNER:TARGETS+PRUNER"),
     (["reap"], {}, "--methods reap --sparsities 0.5: reap prunes whole units only"),
     (["wanda"], {"at": ("0.5", "1.5")}, "--sparsities 1.5: expected a fraction of zeros between 0 and 1, such as 0.5"),
     (["wanda"], {"at": ("4:2",)}, "--methods wanda --sparsities 4:2: prune[0].pattern is '4:2'; N:M keeps N of"),
     (["wanda"], {"at": ("0.5", "0.50")}, "--sparsities 0.5: given twice; list it once"),
     (["wanda", "wanda"], {}, "--methods wanda: given twice; list it once"),
     (["wanda"], {"overrides": ("prune.0.sparsity=0.4",)}, "--set prune.0.sparsity=0.4: --methods also sets this key;"),
     (["wanda"], {"overrides": ("calibration.seed=4",), "seeds": 2}, "--set calibration.seed=4: --seeds also sets"),
     (["magnitude"], {"overrides": ("calibration=null", "finetune=null"), "seeds": 2}, "--seeds are those of cal"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_before_anything_runs(asked, methods, options, told):
    with pytest.raises(CompressxError) as refused:
        by_name(*methods, **options)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


# --- the dense model


@pytest.mark.slow
def test_the_dense_model_is_measured_once_for_all_runs_and_anew_if_model_text_settings_or_code_differ(
    model, asked, monkeypatch
):
    dense: list[float] = []
    real = token_perplexity.measure_tokens

    def counting(access: Any, *rest: Any, **options: Any) -> torch.Tensor:
        found = real(access, *rest, **options)
        if not (access.model.model.layers[0].mlp.up_proj.weight == 0).any():
            dense.append(float(found.mean().exp()))
        return found

    def measured(*overrides: str) -> int:
        before = len(dense)
        for number, cell in enumerate(by_name("magnitude", "wanda", overrides=("finetune=null", *overrides))):
            cell.run(load_plugins(), restart=True)
            found = json.loads((cell.output / "report.json").read_text())["evaluation"]
            assert found["dense"]["token_perplexity"] == dense[-1], f"the figure of run {number}"
        return len(dense) - before

    monkeypatch.setattr(token_perplexity, "measure_tokens", counting)
    assert measured("output=a") == 1
    assert measured("output=b") == 0, "another sweep of the same model, text and settings"
    Path("other.txt").write_text(model.with_name("text.txt").read_text()[400:])
    assert measured("output=c", 'evaluate.token_perplexity.dataset={"text": "other.txt"}') == 1
    assert measured("output=d", "evaluate.token_perplexity.samples=3") == 1
    changed = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        changed.model.norm.weight[0] += 1e-3
    changed.save_pretrained("changed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("changed", name).write_bytes((model / name).read_bytes())
    assert measured("output=e", "model.path=changed") == 1
    monkeypatch.setattr(Plugins, "code_of", lambda *_: "other code")
    assert measured("output=f") == 1


@pytest.mark.slow
def test_a_sweep_of_the_command_line_ends_with_its_table_which_compare_prints_again(model):
    Path("r.yaml").write_text(json.dumps(recipe(model, evaluated=True)))
    command = [sys.executable, "-m", "compressx", "sweep", "r.yaml", "-q", "--methods", "magnitude",
               "wanda:qk+magnitude", "--sparsities", "0.5", "2:4", "--seeds", "2"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in done.splitlines()]
    assert ["method", "50%", "2:4"] in rows
    (dense,) = [row[1:] for row in rows if row[:1] == ["dense"]]
    assert dense[0] == dense[1]
    assert [row[0] for row in rows[rows.index(["dense", *dense]) :][:3]] == ["dense", "magnitude", "wanda:qk+magnitude"]
    assert len([*Path("out-sweep").glob("*_seed?/report.json")]) == 8
    assert len([*Path("cache/evaluations").iterdir()]) == 1, "of the dense model"
    runs = sorted(map(str, Path("out-sweep").glob("*_seed?")))
    assert [*map(str.split, printed("compare", "--table", *runs).splitlines())][2:7] == rows[2:7]
    latex = printed("compare", "--table", *runs, "--format", "latex")
    assert latex.startswith("\\begin{tabular}{lrr}\n\\toprule\nmethod & 50\\% & 2:4 \\\\\n\\midrule\ndense & ")
