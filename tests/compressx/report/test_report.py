"""The report's JSON, its Markdown, and the rows of its summary."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from compressx.api.record import (
    SUMMARY_COLUMNS,
    AllocationReport,
    BlockReport,
    FinetuneReport,
    LayerReport,
    RunReport,
    UnitReport,
    in_short,
    shared,
    total_sparsity,
)
from compressx.report.markdown import page


def layer(name: str, *, pruner: str = "wanda", pattern: str = "50% row", rows: int = 4, sparsity: float = 0.5,
          seconds: float = 1.0, **info: float) -> LayerReport:  # fmt: skip
    return LayerReport(name, pruner, pattern, (rows, 8), 0.5, sparsity, seconds, info)


LAYERS = (
    layer("model.layers.0.self_attn.q_proj", pruner="attnprune", pattern="70% joint", sparsity=0.75,
          attention_error=0.0123),
    layer("model.layers.0.mlp.up_proj", rows=12, sparsity=0.25, seconds=0.5),
    layer("model.layers.1.mlp.up_proj", rows=4, sparsity=0.5, seconds=0.25),
)  # fmt: skip


def in_blocks(layers: tuple[LayerReport, ...]) -> tuple[BlockReport, ...]:
    """Return one block for all of them."""
    return (BlockReport(0, "model.layers.0", layers, 3.0, 0.0123),)


def report(layers: tuple[LayerReport, ...] = LAYERS, **values: Any) -> RunReport:
    given: dict[str, Any] = {
        "compressx": "1.2",
        "model": {"id": "org/model"},
        "sparsity": total_sparsity(layers),
        "blocks": in_blocks(layers),
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
    assert read["blocks"][0]["layers"][0] == {
        "name": "model.layers.0.self_attn.q_proj",
        "pruner": "attnprune",
        "pattern": "70% joint",
        "shape": [4, 8],
        "target": 0.5,
        "sparsity": 0.75,
        "seconds": 1.0,
        "info": {"attention_error": 0.0123},
        "history": {},
    }
    assert set(read) == {"compressx", "model", "sparsity", "blocks", "skipped", "evaluation", "seconds",
                         "peak_memory_bytes", "plugins", "versions", "figures", "allocation",
                         "finetune"}  # fmt: skip
    (block,) = read["blocks"]
    del block["layers"]
    assert block == {
        "index": 0,
        "fqn": "model.layers.0",
        "seconds": 3.0,
        "output_error": 0.0123,
        "reconstruction": None,
    }
    assert read["evaluation"]["pruned"]["token_perplexity"] == 12.5


def test_markdown_shows_evaluation_modules_layers_and_what_was_not_pruned() -> None:
    lines = page(report()).splitlines()
    assert lines[0] == "# Pruned org/model"
    assert "compressx 1.2, sparsity 40.00%" in lines
    assert "| token_perplexity | 10 | 12.5 | +25.0% |" in lines
    assert "| up_proj | wanda | 50% row | 2 | 31.25% | 0.8 |" in lines
    assert "| total | 6.0 |" in lines
    assert "| model.layers.0 | 3 | 40.00% | 0.0123 | 3.0 |" in lines
    wanted = "| model.layers.0.self_attn.q_proj | attnprune | 70% joint | 0.7500 | 1.00 | attention_error 0.0123 |"
    assert wanted in lines
    assert "| lm_head | outside the decoder blocks |" in lines


def test_every_markdown_table_has_as_many_cells_as_its_header() -> None:
    width = None
    for line in page(report()).splitlines():
        if not line.startswith("|"):
            width = None
            continue
        cells = line.count("|")
        assert width in (None, cells), line
        width = cells


def test_markdown_leaves_out_what_there_is_not() -> None:
    text = page(report(evaluation={}, skipped=()))
    assert "dense" not in text
    assert "Not pruned" not in text


@pytest.mark.parametrize("model", [{"path": "models/x"}, {"file": "x.gguf", "package": "p"}])
def test_the_title_names_the_model_however_it_was_given(model: dict[str, str]) -> None:
    assert page(report(model=model)).splitlines()[0] in ("# Pruned models/x", "# Pruned x.gguf")


def test_json_has_the_curves_and_names_the_figures() -> None:
    learnt = dataclasses.replace(LAYERS[0], history={"loss": (2.0, 0.5)})
    figure = {"file": "plots/a.svg", "caption": "An error."}
    read = json.loads(report((learnt,), figures=(figure,)).to_json())
    assert read["blocks"][0]["layers"][0]["history"] == {"loss": [2.0, 0.5]}
    assert read["figures"] == [figure]


def test_markdown_embeds_every_figure_under_its_caption_and_has_no_heading_without_one() -> None:
    drawn = [{"file": f"plots/{name}", "caption": f"What {name} shows."} for name in ("a.svg", "b.png")]
    text = page(report(figures=tuple(drawn)))
    _, _, section = text.partition("\n## Figures\n")
    assert section.startswith(
        "\nWhat a.svg shows.\n\n![What a.svg shows.](plots/a.svg)\n"
        "\nWhat b.png shows.\n\n![What b.png shows.](plots/b.png)\n\n## "
    )
    assert "Figures" not in page(report())


def test_what_is_one_object_is_shared_and_what_is_only_equal_is_not() -> None:
    one, equal = {"error": 1.0}, {"error": 1.0}
    assert shared([("q", one), ("v", equal), ("k", one), ("o", {})]) == [(["q", "k"], one), (["v"], equal)]


def test_several_linears_are_named_in_short() -> None:
    assert in_short(["m.0.q_proj"]) == "m.0.q_proj"
    assert in_short(["m.0.q_proj", "m.0.k_proj", "m.0.up.3", "m.0.up.4"]) == "m.0.q_proj, k_proj, up"


def test_what_fine_tuning_changed_is_measured_against_the_dense_model_too() -> None:
    evaluation = {"dense": {"token_perplexity": 10.0, "arc": {"acc": 0.5}}, "pruned": {"token_perplexity": 15.0},
                  "finetuned": {"token_perplexity": 12.0, "arc": {"acc": 0.4}}}  # fmt: skip
    tuned = FinetuneReport("dense", 1000, 2, (8, 512), (0.5, 0.25))
    made = report(evaluation=evaluation, finetune=tuned)
    assert made.evaluation_rows() == [["token_perplexity", "10", "15", "+50.0%", "12", "+20.0%"]]
    assert "|  | dense | pruned | change | finetuned | change |" in page(made)
    assert json.loads(made.to_json())["finetune"]["losses"] == [0.5, 0.25]
    assert "## Fine-tuning" not in page(report())


UNITS = (
    UnitReport("model.layers.0", "attnprune", ("m.q_proj", "m.k_proj"), 32, 0.75, 0.0123, (0.5, 0.9), (0.001, 0.02)),
    UnitReport("", "magnitude", ("lm_head",), 128, 0.3125, None),
)  # fmt: skip
ALLOCATION = AllocationReport("attention-aware", 0.4, "rule", "model", 160, 64, UNITS)


def test_markdown_shows_what_each_unit_was_given_and_what_that_is_expected_to_cost() -> None:
    lines = page(report(allocation=ALLOCATION)).splitlines()
    assert any(
        x.startswith("attention-aware, by rule, scope model, target 40.00%: 64 zeros of 160 weights.") for x in lines
    )
    assert "| model.layers.0 | q_proj, k_proj | attnprune | 75.00% | 0.0123 |" in lines
    assert "| outside | lm_head | magnitude | 31.25% |  |" in lines
    assert "## Allocation" not in page(report())


def test_the_summary_has_one_row_for_layers_whose_sparsities_were_allocated() -> None:
    layers = (layer("a.up_proj", pattern="41.5% row"), layer("b.up_proj", pattern="58.5% row"))
    assert [r[2:4] for r in report(layers, allocation=ALLOCATION).summary_rows()] == [["allocated row", "2"]]
    assert [r[2:4] for r in report(layers).summary_rows()] == [["41.5% row", "1"], ["58.5% row", "1"]]


def test_json_holds_the_measured_curves_of_every_unit() -> None:
    read = json.loads(report(allocation=ALLOCATION).to_json())["allocation"]
    assert (read["target"], read["zeros"], read["units"][1]["divergence"]) == (0.4, 64, None)
    assert read["units"][0]["sparsities"] == [0.5, 0.9]
    assert read["units"][0]["divergences"] == [0.001, 0.02]
