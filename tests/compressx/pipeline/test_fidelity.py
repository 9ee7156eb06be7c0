"""Runs that compare with the dense model after they pruned it: in memory, streamed, interrupted, in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.compressx.gguf_files import write_gguf
from tests.compressx.pipeline.runs import MAGNITUDE, artifacts, recipe, stopped_at

import compressx
from compressx.evaluation.fidelity import FIGURES
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_model, load_tokenizer
from compressx.pipeline.run import run
from compressx.recipe.sources import ModelSource
from compressx.report.compare import side_by_side
from compressx.report.section import Best

COMPARED = {*FIGURES} - {"context_gain"}


def asked(model: Path, /, **sections: Any) -> dict[str, Any]:
    text = {"dataset": {"text": str(model.with_name("text.txt"))}, "sequence_length": 128, "samples": 2}
    return recipe(model, MAGNITUDE, evaluate={"fidelity": text}, **sections)


def test_a_run_in_memory_streamed_or_without_files_compares_the_pruned_model_with_the_dense_one(model) -> None:
    report = run(asked(model, finetune={"steps": 1}))
    assert {*report.evaluation["dense"]} == {"token_perplexity", "context_gain"}
    for of in ("pruned", "finetuned"):
        dense, found = report.evaluation["dense"], report.evaluation[of]
        assert {name for name in found if not name.endswith("stderr")} == COMPARED | {*dense}
        assert found["perplexity_ratio"] == pytest.approx(found["token_perplexity"] / dense["token_perplexity"])
        assert 0 < found["kl_divergence_median"] < found["kl_divergence_99%"]
    pruned = report.evaluation["pruned"]
    checkpoint = find_checkpoint(ModelSource(path=model))
    section = {key: value for key, value in asked(model).items() if key in ("prune", "evaluate")}
    for copy in (False, True):
        own = load_model(checkpoint)
        done = compressx.prune(own, load_tokenizer(checkpoint), section, copy=copy)
        assert done.report.evaluation["pruned"] == pytest.approx(pruned)
    streamed = asked(model, model={"path": str(model), "streaming": True}, output="streamed")
    assert run(streamed).evaluation["pruned"] == pytest.approx(pruned)


def test_report_card_and_comparison_show_what_compares(model) -> None:
    pruned = run(asked(model)).evaluation["pruned"]
    names = ("perplexity_ratio", "kl_divergence", "top1_agreement")
    shown = {name: f"{pruned[name]:.4g} ± {pruned[f'{name}_stderr']:.2g}" for name in names}
    page = Path("out/report.md").read_text()
    head = page.partition("## ")[0]
    for name, figure in shown.items():
        assert f"| {name.replace('_', ' ')} | {figure} | beside the dense model |" in head
        for text in (page, Path("out/model/README.md").read_text()):
            assert f"| {name} |  | {figure} |" in text
    run(asked(model, output="half", prune=[MAGNITUDE | {"sparsity": 0.3}]))
    found = side_by_side([Path("out"), Path("half")])
    marked = {name: [isinstance(row[i], Best) for row in found.table.rows] for i, name in enumerate(found.table.names)}
    assert [marked[f"{name}, pruned"] for name in ("kl divergence", "top1 agreement")] == [[True] * 2] * 2


def test_a_file_that_is_read_again_is_compared_with_the_dense_model_too(project) -> None:
    (project / "text.txt").write_text("a b c d e f g ab cd . " * 60)
    dense = write_gguf(project / "dense.gguf", scale=0.15)
    given = asked(dense, model=str(dense), export=["safetensors", {"format": "gguf", "options": {"type": "Q4_0"}}])
    given["evaluate"]["fidelity"] |= {"sequence_length": 16}
    report = run(given)
    found = report.exports[1]["evaluation"]
    assert found["kl_divergence"] != report.evaluation["pruned"]["kl_divergence"] > 0
    assert f"| {found['kl_divergence']:.4g} |" in Path("out/report.md").read_text()


def test_a_run_that_is_interrupted_while_it_compares_goes_on(model) -> None:
    whole = run(asked(model, output="whole"))
    stopped_at(asked(model), "evaluate pruned", 2)
    assert run(asked(model), resume=True).evaluation == whole.evaluation
    assert artifacts("out") == artifacts("whole")


def test_a_recipe_has_perplexity_or_fidelity_not_both(model) -> None:
    given = asked(model)
    given["evaluate"]["token_perplexity"] = given["evaluate"]["fidelity"]
    with pytest.raises(compressx.CompressxError, match="fidelity and token_perplexity both name what they measure"):
        compressx.plan(given)
