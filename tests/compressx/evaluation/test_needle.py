"""Needles in hay: what is asked, how answers are counted, and that a selection changes what is read."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.evaluation.measuring import evaluators, plugins, read
from tests.compressx.pipeline.runs import recipe, weights
from tests.compressx.saved import save_tiny

from compressx.evaluation import needle
from compressx.evaluation.needle import NeedleGrid, grid_prompts, needle_figures
from compressx.evaluation.saved import evaluate_saved, source_of
from compressx.models.access import InMemory
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import load_plugins
from compressx.prompts.needles import MEASURING
from compressx.prompts.selection import SelectorSettings
from compressx.recipe.sections import SelectTokens
from compressx.runtime.errors import CalibrationError, CompressxError
from compressx.testing import tiny_model

LENGTHS = [150, 200]


@pytest.fixture
def hay() -> torch.Tensor:
    return torch.tensor([ord(c) for c in "All of this is about nothing much. " * 20])


def settings(**given: Any) -> NeedleGrid:
    return NeedleGrid.model_validate({"dataset": "python-docs", "lengths": LENGTHS, "depths": 3, "needles": 2, **given})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("saved") / "model", "llama")


def model() -> InMemory:
    found = tiny_model("llama")
    found.config.max_position_embeddings = 256
    return InMemory(found)


def test_a_grid_has_every_length_depth_and_sentence_once(tokenizer: Any, hay: torch.Tensor) -> None:
    asked = list(grid_prompts(tokenizer, hay, settings()))
    assert len(asked) == 2 * 3 * 2
    assert {(len(x.ids), x.depth) for x in asked} == {(n, d) for n in LENGTHS for d in (0.0, 0.5, 1.0)}
    for x in asked:
        assert tokenizer.decode(x.ids[x.places]).strip() in {fact.sentence for fact in MEASURING}
        assert not x.protected[x.places].any()
    places = [int(x.places[0]) for x in asked if len(x.ids) == LENGTHS[0]][::2]
    assert places == sorted(places)
    assert places[0] < 10
    assert {x.depth for x in grid_prompts(tokenizer, hay, settings(depths=1))} == {0.5}


@pytest.mark.parametrize("right", [True, False])
def test_an_answer_counts_if_it_contains_the_hidden_word_in_any_case(
    right: bool, tokenizer: Any, hay: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {fact.question: fact.answer for fact in MEASURING}

    def says(_model: Any, tokenizer: Any, ids: torch.Tensor, _tokens: int) -> torch.Tensor:
        question = tokenizer.decode(ids[0]).rpartition("Question: ")[2].partition("\n")[0]
        said = f"It is {answers[question].upper()}, I think" if right else "no idea"
        return torch.tensor([[ord(c) for c in said]])

    monkeypatch.setattr(needle, "greedy", says)
    figures = needle_figures(model(), tokenizer, hay, settings())
    assert figures["answered"] == float(right)
    assert [cell["answered"] for cell in figures["grid"]] == [float(right)] * 6


def test_with_a_selection_the_model_reads_the_kept_tokens_only(
    tokenizer: Any, hay: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(_model: Any, _tokenizer: Any, ids: torch.Tensor, _tokens: int) -> torch.Tensor:
        read.append(ids.shape[1])
        return torch.tensor([[65]])

    monkeypatch.setattr(needle, "greedy", counted)
    select = SelectTokens.model_validate({"selector": "recent", "keep": 100, "protect": {"first": 0, "last": 0}})
    selection = SelectorSettings(select, load_plugins()).prepare(model(), tokenizer)
    told: list[tuple[int, int]] = []
    figures = needle_figures(
        model(), tokenizer, hay, settings(needles=1), selection, progress=lambda i, n: told.append((i, n))
    )
    assert read == [150] * 3 + [200] * 3 + [100] * 6
    assert told == [(i + 1, 12) for i in range(12)]
    kept = {(cell["length"], cell["depth"]): cell["kept, selected"] for cell in figures["grid"]}
    assert kept[200, 0.0] == 0.0  # recent forgets the beginning
    assert kept[150, 1.0] > 0.5
    assert figures["kept, selected"] == pytest.approx(sum(kept.values()) / 6)


def test_a_prompt_longer_than_the_model_or_the_text_is_refused(tokenizer: Any, hay: torch.Tensor) -> None:
    said = r"evaluate.needle: a prompt of 250 tokens and 16 after it .* 256 posit"
    with pytest.raises(CalibrationError, match=said):
        needle.NeedleEvaluator(settings(lengths=[250])).check(model().model, tokenizer, lambda *_: nullcontext())
    with pytest.raises(CalibrationError, match=r"takes .* tokens of hay, and the text has 700"):
        list(grid_prompts(tokenizer, hay, settings(lengths=[150, 2000])))
    with pytest.raises(CalibrationError, match=r"takes .* tokens of hay, and the text has"):  # before weights are read
        read({"needle": settings(lengths=[10**8])}, tokenizer, model().model)


NEEDLE = {"dataset": "python-docs", "lengths": [80, 110], "depths": 2, "needles": 1}
SELECT = {"selector": "gemfilter", "keep": 0.5, "options": {"block": 1}, "protect": {"first": 1, "last": 4}}


def test_a_run_measures_needles_with_and_without_selection_and_the_report_has_the_grid(
    saved: Path, project: Path
) -> None:
    given = recipe(saved, {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5},
                   evaluate={"needle": NEEDLE}, select_tokens=SELECT)  # fmt: skip
    report = run(given)
    assert set(report.evaluation) == {"dense", "pruned"}
    for measured in report.evaluation.values():
        assert set(measured["needle"]) == {"answered", "answered, selected", "kept, selected", "grid"}
        assert len(measured["needle"]["grid"]) == 4
    page = (project / "out" / "report.md").read_text()
    assert "Needles, pruned: answered, selected" in page
    assert "| 110 tokens" in page
    assert "needle kept, selected" in page
    assert json.loads((project / "out" / "report.json").read_text())["evaluation"] == report.evaluation


def test_a_recipe_without_prune_measures_and_saves_the_model_as_it_is(saved: Path, project: Path) -> None:
    given = recipe(saved, evaluate={"needle": NEEDLE}, select_tokens=SELECT)
    del given["prune"], given["calibration"]
    assert plan(given).linears == ()
    report = run(given)
    assert set(report.evaluation) == {"dense"}
    assert (report.sparsity, report.layers) == (0.0, ())
    page = (project / "out" / "report.md").read_text()
    assert page.startswith("# Measured")
    assert "## Measured" in page
    assert "By module" not in page
    assert "sparsity" not in page.partition("## Run")[0]
    told = (project / "out" / "model" / "README.md").read_text()
    assert "Nothing is pruned." in told
    assert "sparse" not in told
    for name, before in weights(saved).items():
        assert torch.equal(weights("out/model")[name], before)


def test_no_selection_is_prepared_where_nothing_reads_a_prompt(
    saved: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelectorSettings, "prepare", lambda *_: pytest.fail("it takes a run of the whole model"))
    report = run(recipe(saved, evaluated=True, select_tokens={"selector": "retrieval-heads", "keep": 0.5}))
    assert set(report.evaluation["pruned"]) == {"token_perplexity"}


PROMPTS = {"evaluate": {"needle": NEEDLE}, "select_tokens": SELECT}


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"select_tokens": {**SELECT, "selector": "gemfliter"}}, "<dict>:select_tokens.selector: no token selector"),
     ({"select_tokens": {**SELECT, "options": {"blok": 1}}}, "<dict>:select_tokens.options.blok: unknown option"),
     ({"select_tokens": {**SELECT, "options": {"block": 99}}}, "has no block 99; expected 0 to 2"),
     ({"select_tokens": {**SELECT, "keep": 1.5}}, "<dict>:select_tokens.keep: .*expected a number of tokens"),
     ({"evaluate": {"needle": {**NEEDLE, "lengths": [64, 4096]}}},
      r"<dict>:evaluate.needle.lengths\[1\]: evaluate.needle: a prompt of 4096"),
     ({"evaluate": {"needle": {**NEEDLE, "lengths": [100, 100]}}}, "expected different ones, of 64 or more"),
     ({"evaluate": {"needle": {**NEEDLE, "lengths": [10]}}}, "expected different ones, of 64 or more"),
     ({"evaluate": {"needle": NEEDLE, "token_perplexity": {"datasets": {"needle": "python-docs"}}}},
      "<dict>:evaluate.token_perplexity: needle and token_perplexity both name what they measure 'needle'; choose an"),
     ({"evaluate": {"sample": {"prompt": "ab", "tokens": 200}}}, r"evaluate\.sample: a prompt of 1 tokens and 200"),
     ({"prune": None, "select_tokens": None}, "<dict>: missing key 'prune', a list of rules, such as"),
     ({"prune": None}, "<dict>:calibration: calibration is there, but nothing is pruned; add prune")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_by_the_plan_with_its_place(
    saved: Path, changes: dict[str, Any], told: str
) -> None:
    given = {key: value for key, value in recipe(saved, **{**PROMPTS, **changes}).items() if value is not None}
    with pytest.raises(CompressxError, match=told):
        plan(given)


def test_eval_refuses_prompts_that_the_model_has_no_room_for_before_it_loads_weights(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressx.evaluation.saved.open_model", lambda *_: pytest.fail("weights were loaded"))
    asked = evaluators(needle={"dataset": "python-docs", "lengths": [200]})
    with pytest.raises(CalibrationError, match=r"evaluate\.needle: a prompt of 200 tokens and 16"):
        evaluate_saved(source_of(str(saved)), asked, plugins())
