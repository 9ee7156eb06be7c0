"""The headline of a run, its sparsity: where matrices of the blocks stay dense, it says of how much of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.mixtures import LAYOUTS, mixture
from tests.compressx.pipeline.runs import loaded, recipe, same, weights

import compressx
from compressx.masks import MaskSet
from compressx.models.architecture import architecture_of
from compressx.pipeline.run import run
from compressx.pipeline.stages import sections
from compressx.report.markdown import to_markdown

_ALL = {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}
_ATTENTION, _BLOCK = 64 * (64 + 32 + 32 + 64), 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "all": ("llama", _ALL, {}, 1.0),
    "routers alone stay": ("mixtral", _ALL, {}, 1 - 4 * 64 / (4 * 64 + _ATTENTION + 4 * 3 * 64 * 96)),
    "ignored": ("llama", _ALL, {"ignore": ["*.mlp.*"]}, _ATTENTION / _BLOCK),
    "units": ("llama", {"targets": ["*"], "pruner": "wanda", "pattern": "neurons", "sparsity": 0.25}, {},
              3 * 64 * 96 / _BLOCK),
    "head": ("llama", _ALL | {"targets": ["lm_head", "*.q_proj"]}, {}, 64 * 64 / _BLOCK),
    "smaller": ("llama", {"targets": ["*"], "pruner": "wanda", "pattern": "neurons", "sparsity": 1 / 3},
                {"shrink": True}, 3 * 64 * 96 / _BLOCK),
}  # fmt: skip


def headlines(folder: Path, report: compressx.RunReport) -> dict[str, str]:
    """Return every line that gives the sparsity of the whole run."""
    terminal = to_markdown([next(iter(sections(report)))])
    pages = {
        "terminal": terminal,
        "report": (folder / "report.md").read_text(encoding="utf-8").partition("##")[0],
        "card": (folder / "model/README.md").read_text(encoding="utf-8").partition("##")[0],
        "log": (folder / "run.log").read_text(encoding="utf-8").partition("finished")[2],
        "notebook": repr(report),
    }
    return {where: next((x for x in page.splitlines() if " linears" in x), "") for where, page in pages.items()}


@pytest.mark.parametrize("about", PARTS)
def test_the_headline_says_of_how_much_of_the_blocks_matrices_where_some_stay_dense(about, models):
    architecture, rule, more, share = PARTS[about]
    report = run(recipe(models(architecture), rule, **more))
    assert report.targeted == pytest.approx(share)
    assert json.loads(Path("out/report.json").read_text(encoding="utf-8"))["targeted"] == report.targeted
    lines = headlines(Path("out"), report)
    assert not lines["log"] or share < 0.995
    for where, line in lines.items():
        said = re.findall(r" linears \((\d+)% of the blocks' matrices\)", line)
        assert said == ([] if share > 0.995 else [f"{share:.0%}"[:-1]]), (where, line)


def test_what_is_no_linear_counts_as_dense(models, monkeypatch):
    """Experts in a layout that is not known."""
    monkeypatch.setattr("compressx.models.architecture._fused_experts", lambda _: None)
    report = run(recipe(models("mixtral"), _ALL))
    assert report.targeted == pytest.approx(_ATTENTION / (4 * 64 + _ATTENTION + 4 * 3 * 64 * 96))
    assert "| sparsity | 50.00% | of 12 linears (14% of the blocks' matrices) |" in to_markdown(sections(report))
    card = Path("out/model/README.md").read_text(encoding="utf-8")
    assert "# model, 7% sparse" in card, "of the whole blocks"
    assert "50.00% of the weights of 12 linears (14% of the blocks' matrices) are zero." in card


# --- experts in layouts of their own, from the folder to the folder


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_in_every_layout_are_pruned_in_memory_and_streamed_to_the_same_bits(name, models, tmp_path):
    folder = tmp_path / "model"
    model = mixture(name)
    model.save_pretrained(folder)
    for file in models("llama").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    asked = recipe(folder, {"targets": ["*"], "pruner": "sparsegpt", "pattern": "2:4"})
    if name == "longcat":
        asked["ignore"] = ["*.classifier"]  # whose weight the router reads without calling it
    asked["calibration"]["dataset"]["text"] = str(models("llama").with_name("text.txt"))
    reports = [
        run(asked | {"model": {"path": str(folder), "streaming": s}, "output": f"out-{s}"}) for s in (False, True)
    ]
    assert all(r.targeted > 0.99 for r in reports)
    assert {x.name for x in reports[0].layers} == {n for n in architecture_of(model).linears if "classifier" not in n}
    assert {x.sparsity for x in reports[0].layers} == {0.5}
    assert same(weights("out-True/model"), weights("out-False/model"))
    masks = MaskSet.load("out-True/masks.safetensors")
    assert masks.deviations(loaded("out-True/model")) == {}
