"""The report's JSON, its Markdown, and the rows of its summary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compressx.report import SUMMARY_COLUMNS, LayerReport, RunReport, total_sparsity


def layer(name: str, *, pruner: str = "wanda", pattern: str = "50% row", rows: int = 4, sparsity: float = 0.5,
          seconds: float = 1.0, **info: float) -> LayerReport:  # fmt: skip
    return LayerReport(name, pruner, pattern, (rows, 8), 0.5, sparsity, seconds, info)


LAYERS = (
    layer("model.layers.0.self_attn.q_proj", pruner="attnprune", pattern="70% joint", sparsity=0.75,
          attention_error=0.0123),
    layer("model.layers.0.mlp.up_proj", rows=12, sparsity=0.25, seconds=0.5),
    layer("model.layers.1.mlp.up_proj", rows=4, sparsity=0.5, seconds=0.25),
)  # fmt: skip


def report(layers: tuple[LayerReport, ...] = LAYERS, **values: Any) -> RunReport:
    given: dict[str, Any] = {
        "compressx": "1.2",
        "model": {"id": "org/model"},
        "sparsity": total_sparsity(layers),
        "layers": layers,
        "skipped": ({"name": "lm_head", "reason": "outside the decoder blocks"},),
        "evaluation": {
            "dense": {"token_perplexity": 10.0, "arc": {"acc": 0.5, "acc_stderr": 0.01}},
            "pruned": {"token_perplexity": 12.5, "arc": {"acc": 0.4, "acc_stderr": 0.01}},
        },
        "seconds": {"load": 1.0, "calibrate": 0.0, "prune": 2.0, "evaluate": 3.0, "total": 6.04},
        "peak_memory_bytes": 123,
    }
    return RunReport(**(given | values))


def test_sparsity_is_counted_over_weights_not_over_layers() -> None:
    # 32 weights at 0.75, 96 at 0.25 and 32 at 0.5
    assert total_sparsity(LAYERS) == pytest.approx((24 + 24 + 16) / 160)
    assert total_sparsity(()) == 0.0


def test_the_summary_has_a_row_for_each_kind_pruner_and_pattern() -> None:
    assert SUMMARY_COLUMNS == ["module", "pruner", "pattern", "layers", "sparsity", "seconds"]
    assert report().summary_rows() == [
        ["q_proj", "attnprune", "70% joint", "1", "75.00%", "1.0"],
        ["up_proj", "wanda", "50% row", "2", "31.25%", "0.8"],
    ]


def test_the_same_kind_under_two_pruners_has_two_rows() -> None:
    rows = report((layer("a.q_proj"), layer("b.q_proj", pruner="sparsegpt"))).summary_rows()
    assert [(r[0], r[1]) for r in rows] == [("q_proj", "wanda"), ("q_proj", "sparsegpt")]


def test_fused_experts_are_summed_up_under_their_projection() -> None:
    rows = report(tuple(layer(f"m.layers.{b}.mlp.experts.down_proj.{e}") for b in range(2) for e in range(11)))
    assert [(r[0], r[3]) for r in rows.summary_rows()] == [("down_proj", "22")]


def test_evaluation_rows_give_the_relative_change_by_full_name() -> None:
    assert report().evaluation_rows() == [
        ["token_perplexity", "10", "12.5", "+25.0%"],
        ["arc acc", "0.5", "0.4", "-20.0%"],
        ["arc acc_stderr", "0.01", "0.01", "+0.0%"],
    ]


def test_a_change_from_zero_is_left_blank_and_an_unmatched_number_out() -> None:
    rows = report(evaluation={"dense": {"acc": 0.0, "only": 1.0}, "pruned": {"acc": 0.5}}).evaluation_rows()
    assert rows == [["acc", "0", "0.5", ""]]
    assert report(evaluation={}).evaluation_rows() == []


def test_json_holds_every_field_of_the_schema() -> None:
    read = json.loads(report(versions={"torch": "2"}).to_json())
    assert read["layers"][0] == {
        "name": "model.layers.0.self_attn.q_proj",
        "pruner": "attnprune",
        "pattern": "70% joint",
        "shape": [4, 8],
        "target": 0.5,
        "sparsity": 0.75,
        "seconds": 1.0,
        "info": {"attention_error": 0.0123},
    }
    assert set(read) == {"compressx", "model", "sparsity", "layers", "skipped", "evaluation", "seconds",
                         "peak_memory_bytes", "plugins", "versions"}  # fmt: skip
    assert read["evaluation"]["pruned"]["token_perplexity"] == 12.5


def test_markdown_shows_evaluation_modules_layers_and_what_was_not_pruned() -> None:
    lines = report().to_markdown().splitlines()
    assert lines[0] == "# Pruned org/model"
    assert "compressx 1.2, sparsity 40.00%" in lines
    assert "| token_perplexity | 10 | 12.5 | +25.0% |" in lines
    assert "| up_proj | wanda | 50% row | 2 | 31.25% | 0.8 |" in lines
    assert "| total | 6.0 |" in lines
    wanted = "| model.layers.0.self_attn.q_proj | attnprune | 70% joint | 0.7500 | 1.00 | attention_error 0.0123 |"
    assert wanted in lines
    assert "| lm_head | outside the decoder blocks |" in lines


def test_every_markdown_table_has_as_many_cells_as_its_header() -> None:
    width = None
    for line in report().to_markdown().splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.count("|")
        assert width in (None, cells), line
        width = cells


def test_markdown_leaves_out_what_there_is_not() -> None:
    text = report(evaluation={}, skipped=()).to_markdown()
    assert "dense" not in text
    assert "Not pruned" not in text


@pytest.mark.parametrize("model", [{"path": "models/x"}, {"file": "x.gguf", "package": "p"}])
def test_the_title_names_the_model_however_it_was_given(model: dict[str, str]) -> None:
    assert report(model=model).to_markdown().splitlines()[0] in ("# Pruned models/x", "# Pruned x.gguf")
