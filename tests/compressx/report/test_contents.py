"""What a run's report shows, by its sections and by the Markdown made of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.report.reports import ALLOCATION, LAYERS, layer, report

from compressx.api.record import BlockReport, FinetuneReport, HeldOutLoss, RunReport
from compressx.cli import terminal
from compressx.pipeline import stages
from compressx.pipeline.stages import sections
from compressx.report.html import to_html
from compressx.report.markdown import to_markdown
from compressx.report.section import Column, Section, table
from compressx.stages.state import Stage


def shown(report: RunReport) -> str:
    return to_markdown(sections(report))


def rows(report: RunReport, title: str) -> list[list[str]]:
    """Return what the table of one section shows."""
    return next((section.table.texts for section in sections(report) if section.title == title), [])


def test_the_modules_have_a_row_for_each_kind_pruner_and_pattern_and_one_for_allocated_sparsities() -> None:
    found = next(section.table for section in sections(report()) if section.title == "By module")
    assert found.names == ["module", "pruner", "pattern", "layers", "sparsity", "seconds"]
    assert found.texts == [
        ["q_proj", "attnprune", "70% joint", "1", "75.00%", "1.0"],
        ["up_proj", "wanda", "50% row", "2", "31.25%", "0.8"],
    ]
    other = layer("b.q_proj", pruner="sparsegpt")
    assert [r[1] for r in rows(report((LAYERS[0], other)), "By module")] == ["attnprune", "sparsegpt"]
    experts = tuple(layer(f"m.layers.{b}.mlp.experts.down_proj.{e}") for b in range(2) for e in range(11))
    assert [(r[0], r[3]) for r in rows(report(experts), "By module")] == [("down_proj", "22")]
    layers = (layer("a.up_proj", pattern="41.5% row"), layer("b.up_proj", pattern="58.5% row"))
    allocated = report(layers, allocation=ALLOCATION)
    assert [r[2:4] for r in rows(allocated, "By module")] == [["allocated row", "2"]]
    assert [r[2:4] for r in rows(report(layers), "By module")] == [["41.5% row", "1"], ["58.5% row", "1"]]


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({}, []),
        (  # a change from zero is left blank, and a number of the dense model only out
            {"dense": {"acc": 0.0, "only": 1.0, "f1": 0.5}, "pruned": {"acc": 0.5, "f1": 0.25, "new": 2.0}},
            [["measure", "dense", "pruned", "change"], ["acc", "0", "0.5", ""], ["f1", "0.5", "0.25", "-50.0%"],
             ["new", "", "2", ""]],
        ),
        (
            {"dense": {"token_perplexity": 10.0, "arc": {"acc": 0.5}}, "pruned": {"token_perplexity": 15.0},
             "finetuned": {"token_perplexity": 12.0, "arc": {"acc": 0.4}}},
            [["measure", "dense", "finetuned", "change", "pruned", "change"],
             ["token_perplexity", "10", "12", "+20.0%", "15", "+50.0%"]],
        ),
        (
            {"dense": {"arc": {"acc": 0.5, "acc_documents": "1c"}},
             "pruned": {"arc": {"acc": 0.5, "acc_documents": "1a"}}},
            [["measure", "dense", "pruned", "change", "flips"],
             ["arc acc", "0.5", "0.5", "+0.0%", "1 right to wrong, 1 wrong to right, p = 1"]],
        ),
    ],
    ids=["none", "unmatched", "finetuned", "flips"],
)  # fmt: skip
def test_evaluation_rows_give_the_change_relative_to_the_dense_model(evaluation: Any, expected: Any) -> None:
    found = [s.table for s in sections(report(evaluation=evaluation)) if s.title == "Dense against pruned"]
    assert [row for table in found for row in (table.names, *table.texts)] == expected


def test_the_head_has_the_parameters_of_a_smaller_model_and_the_result_of_fine_tuning() -> None:
    measured = {"dense": {"ppl": 10.0}, "pruned": {"ppl": 15.0}, "finetuned": {"ppl": 12.0}}
    shrunk = {"parameters": [4_000_000, 3_000_000], "config": {"intermediate_size": [96, 72]}}
    head, *_ = sections(report(evaluation=measured, shrink=shrunk))
    assert head.table.texts[:3] == [
        ["parameters", "3 M", "dense 4 M, intermediate_size 96 -> 72"],
        ["sparsity", "40.00%", "of 3 linears"],
        ["ppl", "12", "dense 10, +20.0%"],
    ]
    assert next(iter(sections(report()))).table.texts[0] == ["sparsity", "40.00%", "of 3 linears"]


@pytest.mark.parametrize("count", [1, 30])
def test_what_is_the_same_everywhere_is_a_sentence_and_no_heat_map(count: int, tmp_path: Path) -> None:
    title = "Sparsity by layer and module"
    alike = tuple(layer(f"m.layers.0.mlp.up_proj.{i}") for i in range(count))
    blocks = tuple(BlockReport(i, f"m.layers.{i}", alike, 1.0, 0.0) for i in range(30))
    same = next(s for s in sections(report(blocks=blocks)) if s.title == title)
    assert (same.note, same.table.rows) == ("All are 50.0%.", ())
    assert 'class="heat"' not in to_html(sections(report(blocks=blocks)), tmp_path)
    other = BlockReport(30, "m.layers.30", (layer("m.layers.30.mlp.up_proj", sparsity=0.6),), 1.0, 0.0)
    assert len(rows(report(blocks=(*blocks, other)), title)) == 31


def test_markdown_shows_evaluation_modules_layers_and_what_was_not_pruned_and_nothing_that_there_is_not() -> None:
    text = {"samples": 32, "sequence_length": 512, "seed": 7}
    lines = shown(report(date="2026-03-01T12:00:07+01:00", calibration=text)).splitlines()
    assert {"| date | 2026-03-01 12:00:07+01:00 |", "| calibration | 32 sequences of 512 tokens, seed 7 |"} <= {*lines}
    assert lines[0] == "# Pruned org/model"
    assert lines[2] == "compressx 1.2"
    assert lines[4:7] == ["| measure | value | note |", "| --- | --- | --- |", "| sparsity | 40.00% | of 3 linears |"]
    assert "| token_perplexity | 10 | 12.5 | +25.0% |" in lines
    assert "| up_proj | wanda | 50% row | 2 | 31.25% | 0.8 |" in lines
    assert "| total | 6.0 |" in lines
    assert "| 0 | 3 | 40.00% | 0.0123 | 3.0 |" in lines
    wanted = "| model.layers.0.self_attn.q_proj | attnprune | 70% joint | 0.7500 | 1.00 | attention_error 0.0123 |"
    assert wanted in lines
    assert "| lm_head | outside the decoder blocks |" in lines
    assert "| arc acc | 0.5 ± 0.01 | 0.4 ± 0.01 | -20.0% |" in lines
    for line, after in pairwise(lines):
        assert not (line[:1] == after[:1] == "|") or line.count("|") == after.count("|"), after
    alone = shown(report(evaluation={}, skipped=()))
    for heading in ("dense", "Not pruned", "Allocation", "Fine-tuning", "Matrices", "curves"):
        assert heading not in alone


def test_markdown_shows_figures_and_what_each_unit_was_given() -> None:
    drawn = [{"file": f"plots/{name}", "caption": f"What {name} shows."} for name in ("a.svg", "b.png")]
    text = shown(report(figures=tuple(drawn), allocation=ALLOCATION))
    assert "\n## Errors and curves\n\nWhat a.svg shows.\n\n![What a.svg shows.](plots/a.svg)\n\n## " in text
    assert "\n## Matrices, dense and pruned\n\nWhat b.png shows.\n\n![What b.png shows.](plots/b.png)\n\n## " in text
    assert "\nattention-aware, by rule, target 40.00%: 64 of 160 weights are zero." in text
    assert "\n| model.layers.0 | q_proj, k_proj | attnprune | 75.00% | 0.0123 |\n" in text
    assert "\n| outside | lm_head | magnitude | 31.25% |  |\n" in text


def test_what_each_model_wrote_stands_side_by_side_and_is_no_markup(capsys, tmp_path) -> None:
    written = {"dense": "It is *blue*.\n<b>", "pruned": "a|b"}
    evaluation = {of: {"sample": {"prompt": "Why is\nthe sky blue?", "text": text}} for of, text in written.items()}
    made = sections(report(evaluation=evaluation))
    page = to_markdown(made)
    assert '\n## Sample\n\nWhat each model writes after "Why is the sky blue?", ' in page
    assert "\n| dense | pruned |\n| --- | --- |\n| It is \\*blue\\*.<br>\\<b\\> | a\\|b |\n" in page
    web = to_html(made, tmp_path)
    assert '<td class="prose">It is *blue*.\n&lt;b&gt;</td><td class="prose">a|b</td>' in web
    terminal.show(*made)
    assert "It is *blue*." in capsys.readouterr().out


def test_a_sentence_says_how_the_kept_weights_were_trained_and_a_table_what_that_changed() -> None:
    text = shown(report(finetune=FinetuneReport("dense", 2_500_000, 2, (8, 512), (0.75, 0.5))))
    assert "\n## Fine-tuning\n\n2 steps on 8 sequences of 512 tokens, 2.5 M numbers trained: " in text
    assert "divergence from the dense model 0.75 at the first, 0.5 at the last.\n" in text
    held_out = (HeldOutLoss(0, 0.75, 0.0), HeldOutLoss(4, 0.5, 60.0), HeldOutLoss(8, 0.625, 120.0))
    made = report(finetune=FinetuneReport("none", 1, 8, (8, 512), (0.7, 0.4), held_out))
    assert "next-token loss" in shown(made)
    assert "on held-out sequences 0.75 before, 0.5 after 4 steps." in shown(made)
    assert rows(made, "Fine-tuning") == [["0", "0.0", "0.75"], ["4", "1.0", "0.5"], ["8", "2.0", "0.625"]]


def test_a_stages_section_stands_in_every_form_of_the_report(monkeypatch, capsys, tmp_path) -> None:
    class Toys(Stage):
        def sections(self, report: RunReport) -> Iterator[Section]:
            found = table(["toy", Column("weight", ".1f", "bar")], [("bear", 2.0), ("duck", 0.5), ("owl", None)])
            yield Section("Toys", f"Those of {report.model['id']}.", found)

    monkeypatch.setattr(stages, "STAGES", (*stages.STAGES, Toys()))
    made = sections(report())
    terminal.show(*made)
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"Toys", "Those of org/model.", "toy weight", "bear 2.0", "duck 0.5", "owl"} <= set(told)
    lines = ["## Toys", "", "Those of org/model.", "", "| toy | weight |", "| --- | --- |", "| bear | 2.0 |"]
    assert "\n".join([*lines, "| duck | 0.5 |", "| owl |  |", ""]) in to_markdown(made)
    page = to_html(made, tmp_path)
    assert '<th scope="row">bear</th><td class="bar" style="--share: 100.0">2.0</td>' in page
    assert '<th scope="row">duck</th><td class="bar" style="--share: 25.0">0.5</td>' in page


def test_the_terminal_names_what_is_for_reference_and_shows_the_rest(capsys) -> None:
    terminal.show(*sections(report(), recipe="model: m\nprune: []\n"))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Pruned org/model"
    assert "token_perplexity 10 12.5 +25.0%" in lines
    assert not any("model.layers" in line for line in lines)
    assert lines[-1] == (
        "in the report: sparsity by layer and module (1 block); by block (1 block); layers (3 pruned linears); "
        "not pruned (1 weight); recipe (2 lines)"
    )
