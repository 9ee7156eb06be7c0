"""What a run did, as data and as JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tests.compressx.report.reports import ALLOCATION, LAYERS, report

from compressx.api.record import grouped, total_sparsity


def test_sparsity_is_counted_over_weights_not_over_layers() -> None:
    # 32 weights at 0.75, 96 at 0.25 and 32 at 0.5
    assert total_sparsity(LAYERS) == pytest.approx((24 + 24 + 16) / 160)
    assert total_sparsity(()) == 0.0


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
        "group": "",
    }
    assert set(read) == {"compressx", "model", "sparsity", "blocks", "skipped", "evaluation", "seconds",
                         "peak_memory_bytes", "plugins", "versions", "figures", "allocation",
                         "finetune", "date", "command", "hardware", "calibration", "arithmetic", "shrink",
                         "peak_gpu_memory_bytes", "unread", "exports", "base", "targeted"}  # fmt: skip
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


def test_json_has_the_curves_and_names_the_figures() -> None:
    learnt = dataclasses.replace(LAYERS[0], history={"loss": (2.0, 0.5)})
    figure = {"file": "plots/a.svg", "caption": "An error."}
    read = json.loads(report((learnt,), figures=(figure,)).to_json())
    assert read["blocks"][0]["layers"][0]["history"] == {"loss": [2.0, 0.5]}
    assert read["figures"] == [figure]


def test_linears_of_one_group_have_the_figures_of_its_first_and_equal_figures_make_no_group() -> None:
    q, k, v, o = (
        dataclasses.replace(LAYERS[0], name=name, group=group)
        for name, group in (("q", "q"), ("k", "q"), ("v", ""), ("o", ""))
    )
    one, equal = {"error": 1.0}, {"error": 1.0}
    assert grouped([(q, one), (v, equal), (k, {"error": 2.0}), (o, {})]) == [([q, k], one), ([v], equal)]


def test_json_holds_the_measured_curves_of_every_unit() -> None:
    read = json.loads(report(allocation=ALLOCATION).to_json())["allocation"]
    assert (read["target"], read["zeros"], read["units"][1]["divergence"]) == (0.4, 64, None)
    assert read["units"][0]["sparsities"] == [0.5, 0.9]
    assert read["units"][0]["divergences"] == [0.001, 0.02]
