"""Whole runs in this process, on tiny models that were saved like real ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import save_file
from tests.compressx.pipeline.runs import recipe, weights
from tests.compressx.saved import save_tiny

import compressx
from compressx.allocation.spread import Curve
from compressx.api.record import BlockReport, RunReport
from compressx.blocks.fisher import FisherDiagonal
from compressx.blocks.prune import prune_model
from compressx.masks.maskset import MaskSet
from compressx.models import hidden
from compressx.models.access import InMemory
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import Plugins, load_plugins
from compressx.runtime.errors import ArtifactError, CalibrationError, RecipeError


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins()


ATTNPRUNE = {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "sparsity": 0.6}
MIXED = (ATTNPRUNE, {"targets": ["*.v_proj"], "pruner": "wanda", "sparsity": 0.5, "reconstruct": "sparsegpt"},
         {"targets": ["*"], "pruner": "sparsegpt", "pattern": "2:4"})  # fmt: skip


@pytest.fixture(scope="module")
def mixed(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prune a Llama once by several rules; returns the output, which tests only read."""
    output = tmp_path_factory.mktemp("mixed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressx.report.figures.draw", lambda *_: ())
        run(recipe(models("llama"), *MIXED, evaluated=True, output=str(output)))
    return output


# --- what a run does


class Reacting:
    """Taylor expansion: what the loss says of each weight's change alone, with no statistic of the inputs."""

    def observe(self, block: Any, name: str) -> None:
        return None

    def prune(self, block: Any, patterns: Any, stats: Any) -> Any:
        of = block.sensitivities
        scores = {n: block.linears[n].weight.float().square() * of[n][:, None] for n in patterns}
        return {n: compressx.PruneResult(keep) for n, keep in compressx.keep_masks(scores, patterns).items()}


def test_a_pruner_that_reads_sensitivities_alone_is_given_text(models: Any, plugins: Plugins) -> None:
    spec = compressx.PrunerSpec("reacting", "by the loss", NoOptions, lambda _: Reacting(), reads_sensitivities=True)
    plugins = dataclasses.replace(plugins, offers={"pruners": {**plugins.offers["pruners"], "reacting": spec}})
    asked = recipe(models("llama"), {"targets": ["*"], "pruner": "reacting", "pattern": "2:4"})
    report = run(asked, plugins=plugins)
    assert {layer.sparsity for layer in report.layers} == {0.5}
    del asked["calibration"]
    with pytest.raises(RecipeError, match="the recipe has no calibration, but its pruners need one"):
        plan(asked, plugins=plugins)


@pytest.mark.parametrize("architecture", ["gemma3", "opt"])
def test_attention_and_the_rest_are_pruned_by_their_own_rules(models: Any, plugins: Plugins, architecture: str) -> None:
    source = models(architecture)
    report = run(recipe(source, *MIXED), plugins=plugins)
    dense, pruned, masks = weights(source), weights("out/model"), MaskSet.load("out/masks.safetensors")
    assert set(masks) == {x.name for x in report.layers}
    by_pruner: dict[str, list[str]] = {}
    for layer in report.layers:
        by_pruner.setdefault(layer.pruner, []).append(layer.name)
        weight, keep = pruned[f"{layer.name}.weight"], masks[layer.name].keep
        assert torch.equal(weight != 0, keep), layer.name
        assert layer.sparsity == pytest.approx(1 - float(keep.float().mean()))
        assert not torch.equal(weight, dense[f"{layer.name}.weight"] * keep), "the survivors get new values"
    assert {k: len(v) for k, v in by_pruner.items()} == {
        "attnprune": 6, "wanda+sparsegpt": 3, "sparsegpt": (3 if architecture == "opt" else 4) * 3
    }  # fmt: skip
    for name in by_pruner["sparsegpt"]:
        assert (masks[name].keep.view(-1, 4).sum(dim=1) == 2).all(), name
    for name in by_pruner["wanda+sparsegpt"]:
        assert (masks[name].keep.sum(dim=1) == 32).all(), name  # half of each row of 64
    pairs = [x for x in report.layers if x.pruner == "attnprune"]
    joint = sum(x.sparsity * x.shape[0] * x.shape[1] for x in pairs) / sum(x.shape[0] * x.shape[1] for x in pairs)
    assert joint == pytest.approx(0.6, abs=1e-3)
    for error in ("output_error.wanda", "output_error.sparsegpt"):
        assert all(0 < x.info["output_error"] <= x.info[error] for x in pairs)
    untouched = set(dense) - {f"{name}.weight" for name in masks}
    assert all(torch.equal(dense[name], pruned[name]) for name in untouched)


def test_attention_in_one_fused_weight_is_pruned_beside_the_rest(models: Any, plugins: Plugins) -> None:
    source = models("gpt2")
    attention = {"targets": ["*.c_attn"], "pruner": "attnprune", "sparsity": 0.6}
    report = run(recipe(source, attention, {"targets": ["*"], "pruner": "wanda", "pattern": "2:4"}), plugins=plugins)
    dense, pruned, masks = weights(source), weights("out/model"), MaskSet.load("out/masks.safetensors")
    fused = [x for x in report.layers if x.pruner == "attnprune"]
    assert [x.name for x in fused] == [f"transformer.h.{i}.attn.c_attn" for i in range(3)]
    for layer in report.layers:
        weight, keep = pruned[f"{layer.name}.weight"], masks[layer.name].keep
        assert torch.equal(weight.T != 0, keep), layer.name  # GPT-2 stores [in_features, out_features]
        assert torch.equal(weight, dense[f"{layer.name}.weight"] * keep.T) == (layer not in fused)
        assert layer in fused or (keep.view(-1, 4).sum(dim=1) == 2).all(), "along the inputs"
    for layer in fused:
        keep = masks[layer.name].keep
        assert int((~keep).sum()) == round(0.6 * 192 * 64)
        assert int((~keep[128:]).sum()) == round(0.6 * 64 * 64), "the values take their share"
        assert 0 < layer.info["output_error"] <= layer.info["output_error.sparsegpt"]


def test_another_seed_calibrates_on_other_windows(models: Any, plugins: Plugins) -> None:
    source = models("llama")
    run(recipe(source, output="a"), plugins=plugins)
    other = recipe(source, output="b")
    other["calibration"]["seed"] = 1
    run(other, plugins=plugins)
    a, b = MaskSet.load("a/masks.safetensors"), MaskSet.load("b/masks.safetensors")
    assert any(not torch.equal(a[n].keep, b[n].keep) for n in a)


def test_magnitude_reads_no_text(models: Any, plugins: Plugins) -> None:
    given = recipe(models("llama"), {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5})
    Path("short.txt").write_text("w1")  # any pruner that observes would refuse it
    given["calibration"]["dataset"] = {"text": "short.txt"}
    assert run(given, plugins=plugins).sparsity == 0.5
    del given["calibration"]
    assert run(given, plugins=plugins).sparsity == 0.5


# --- allocation


def allocated(model: Path, target: float = 0.5, **settings: Any) -> dict[str, Any]:
    attention = {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune"}
    whole = recipe(model, attention, {"targets": ["*"], "pruner": "sparsegpt"})
    return whole | {"allocation": {"method": "attention-aware", "target": target, **settings}}


@pytest.mark.slow
def test_allocation_reaches_its_target_to_the_weight_and_says_how(models: Any, plugins: Plugins) -> None:
    """On the way it tells of every block that is measured, and what it chose is in the plan and the reports."""
    target, told = 0.537, []
    asked = allocated(models("llama"), target)
    report = run(asked, plugins=plugins, progress=lambda *step: told.append(step))
    masks = MaskSet.load("out/masks.safetensors")
    weights = sum(entry.keep.numel() for entry in masks.values())
    zeros = {name: int((~entry.keep).sum()) for name, entry in masks.items()}
    assert sum(zeros.values()) == round(target * weights)
    assert report.allocation is not None
    assert (report.allocation.zeros, report.allocation.weights) == (round(target * weights), weights)
    assert [len(u.linears) for u in report.allocation.units] == [2, 5] * 3
    for unit in report.allocation.units:
        assert sum(zeros[name] for name in unit.linears) == round(unit.sparsity * unit.weights)
        assert unit.divergence is not None
        assert unit.divergence == pytest.approx(Curve(unit.sparsities, unit.divergences).error(unit.sparsity))
    assert len({round(u.sparsity, 3) for u in report.allocation.units}) == 6, "each unit has its own"
    assert not any(reached_in(masks, block, target) for block in range(3))

    assert list(dict.fromkeys(stage for stage, *_ in told)) == ["load", "calibrate", "allocate", "prune", "save"]
    first, gradients, *blocks = (step for stage, *step in told if stage == "allocate")
    assert (first, gradients) == ([0, 3, ""], [0, 3, "gradients at 0 of 2 windows"])
    assert blocks == [[i, 3, ""] for i in range(1, 4)]
    assert report.seconds["allocate"] > 0

    planned = json.loads(Path("out/plan.json").read_text())
    given = {x["name"]: x["sparsity"] for x in planned["linears"]}
    assert "allocation" not in planned
    assert given == {x.name: x.target for x in report.layers}
    written = json.loads(Path("out/report.json").read_text())["allocation"]["units"][0]
    assert written["linears"] == [f"model.layers.0.self_attn.{n}_proj" for n in "qk"]
    assert given[written["linears"][0]] == written["sparsity"]
    assert written["sparsities"] == sorted(written["sparsities"])
    assert written["divergences"] == sorted(written["divergences"])
    text = Path("out/report.md").read_text()
    row = f"| model.layers.0 | q_proj, k_proj | attnprune | {written['sparsity']:.2%} | {written['divergence']:.3g} |"
    assert row in text
    assert "| q_proj | attnprune | allocated joint | 3 |" in text


def reached_in(masks: MaskSet, block: int, target: float) -> bool:
    """Whether the linears of one block have the target between them."""
    keeps = [entry.keep for name, entry in masks.items() if name.startswith(f"model.layers.{block}.")]
    zeros, total = sum(int((~keep).sum()) for keep in keeps), sum(keep.numel() for keep in keeps)
    return abs(zeros / total - target) < 1e-4


@pytest.mark.slow
def test_within_blocks_allocation_gives_each_block_the_target(models: Any, plugins: Plugins) -> None:
    report = run(allocated(models("llama"), 0.537, scope="block", sparsities=[0.2, 0.4, 0.6, 0.8]), plugins=plugins)
    masks = MaskSet.load("out/masks.safetensors")
    assert all(reached_in(masks, block, 0.537) for block in range(3))
    assert report.allocation is not None
    assert len({round(u.sparsity, 3) for u in report.allocation.units}) == 6


def test_allocation_measures_on_the_dense_model_and_leaves_it_dense(models: Any, plugins: Plugins) -> None:
    """What is pruned afterwards equals a run whose rules give the allocated sparsities themselves."""
    source = models("llama")
    whole = recipe(source, {"targets": ["*"], "pruner": "wanda", "group": "layer"})
    first = run(whole | {"allocation": {"method": "attention-aware", "target": 0.5}}, plugins=plugins)
    rules = [{"targets": [x.name], "pruner": "wanda", "group": "layer", "sparsity": x.target} for x in first.layers]
    again = run(recipe(source, *rules, output="again"), plugins=plugins)
    assert Path("out/masks.safetensors").read_bytes() == Path("again/masks.safetensors").read_bytes()
    assert again.allocation is None


METHODS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "owl": {"outlier_threshold": 2.0, "spread": 0.1, "samples": 4},
    "divergence": {"sparsities": [0.3, 0.7], "samples": 4},
    "divergence of linears": {"unit": "linear", "sparsities": [0.3, 0.7], "samples": 4},
    "attention-aware": {"sparsities": [0.3, 0.7], "samples": 4},
    "explicit": {"sparsities": {"*.layers.0.*": 0.25, "*.layers.1.*": 0.5, "*": 0.75}},
}
QUERY_KEY = {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune"}
PRUNERS: dict[str, tuple[dict[str, Any], ...]] = {
    "magnitude": ({"targets": ["*"], "pruner": "magnitude"},),
    "wanda by layer": ({"targets": ["*"], "pruner": "wanda", "group": "layer"},),
    "wanda by row": ({"targets": ["*"], "pruner": "wanda"},),
    "sparsegpt": ({"targets": ["*"], "pruner": "sparsegpt"},),
    "wanda+sparsegpt": ({"targets": ["*"], "pruner": "wanda", "group": "layer", "reconstruct": "sparsegpt"},),
    "attnprune": (QUERY_KEY, {"targets": ["*"], "pruner": "sparsegpt"}),
    "attnprune by layer": ({**QUERY_KEY, "group": "layer"}, {"targets": ["*"], "pruner": "magnitude"}),
    "wanda N:M": ({"targets": ["*"], "pruner": "wanda", "pattern": "2:4"},),
    "sparsegpt N:M": ({"targets": ["*"], "pruner": "sparsegpt", "pattern": "4:8"},),
    "N:M and not": (
        {**QUERY_KEY, "pattern": "2:4"},
        {"targets": ["*.mlp.*"], "pruner": "sparsegpt", "pattern": "4:8"},
        {"targets": ["*"], "pruner": "magnitude"},
    ),
}
PAIRS = [*zip(itertools.cycle(METHODS), PRUNERS), ("owl", "N:M and not"), ("attention-aware", "attnprune")]
SLACK = {"wanda by row": 16, "wanda N:M": 32 * 64 // 8, "sparsegpt N:M": 32 * 64 // 16}
"""Zeros by which a total may miss its target: half of the finest step. All else is exact."""


def by_method(source: Path, method: str, pruner: str, **settings: Any) -> dict[str, Any]:
    settings = {"method": method.split(maxsplit=1)[0], **METHODS[method], **settings}
    if method != "explicit":
        settings.setdefault("target", 0.5371)
    return recipe(source, *PRUNERS[pruner]) | {"allocation": settings}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "pruner"), PAIRS)
def test_every_method_and_every_pruner_reaches_its_total(
    models: Any, plugins: Plugins, method: str, pruner: str
) -> None:
    report = run(by_method(models("llama"), method, pruner), plugins=plugins)
    masks = MaskSet.load("out/masks.safetensors")
    total = sum(entry.keep.numel() for entry in masks.values())
    zeros = {name: int((~entry.keep).sum()) for name, entry in masks.items()}
    expected = 0.5 if method == "explicit" else 0.5371
    assert abs(sum(zeros.values()) - round(expected * total)) <= SLACK.get(pruner, 0)
    assert report.allocation is not None
    assert (report.allocation.method, report.allocation.zeros) == (method.split(maxsplit=1)[0], sum(zeros.values()))
    for unit in report.allocation.units:
        assert sum(zeros[name] for name in unit.linears) == round(unit.sparsity * unit.weights)
    for name, entry in masks.items():
        if ":" in entry.pattern:
            keep, of = map(int, entry.pattern.split(":"))
            assert (entry.keep.view(-1, of).sum(dim=1) == keep).all(), name
            assert of == (8 if ("mlp" in name and pruner != "wanda N:M") or pruner == "sparsegpt N:M" else 4)
    assert any(":" in entry.pattern for entry in masks.values()) == ("N:M" in pruner)
    differing = {round(u.sparsity, 2) for u in report.allocation.units}
    if method != "uniform":
        assert len(differing) > 1


@pytest.mark.slow
def test_sparsity_zero_leaves_a_linear_as_it_was(models: Any, plugins: Plugins) -> None:
    source = models("llama")
    for pruner in ("sparsegpt", "sparsegpt N:M", "wanda by row", "magnitude"):
        run(by_method(source, "explicit", pruner, sparsities={"*.up_proj": 0.0, "*": 0.5}), plugins=plugins)
        dense, pruned = weights(source), weights("out/model")
        name = "model.layers.1.mlp.up_proj"
        assert MaskSet.load("out/masks.safetensors")[name].keep.all()
        assert torch.equal(dense[f"{name}.weight"], pruned[f"{name}.weight"])


def test_blocks_with_more_outliers_are_pruned_less_by_owl(models: Any, plugins: Plugins) -> None:
    report = run(by_method(models("llama"), "owl", "sparsegpt"), plugins=plugins)
    assert report.allocation is not None
    units = sorted(report.allocation.units, key=lambda u: u.outliers or 0.0)
    assert all(a.sparsity > b.sparsity for a, b in itertools.pairwise(units))
    assert max(abs(u.sparsity - 0.5371) for u in units) == pytest.approx(0.1, abs=1e-4)
    text = Path("out/report.md").read_text()
    assert "owl, by block, scope model, target 53.71%: " in text
    first = report.allocation.units[0]
    assert f"| sparsegpt | {first.sparsity:.2%} | {first.outliers:.3%} |" in text


def test_uniform_without_a_pruner_that_observes_needs_no_calibration(models: Any, plugins: Plugins) -> None:
    asked = by_method(models("llama"), "uniform", "magnitude")
    del asked["calibration"]
    report = run(asked, plugins=plugins)
    assert report.sparsity == pytest.approx(0.5371, abs=1e-5)
    assert plan(asked, plugins=plugins).allocation is None
    assert "| model.layers.0 | q_proj, k_proj," in Path("out/report.md").read_text()


def test_uniform_is_what_every_rule_with_that_sparsity_does_where_that_is_exact(models: Any, plugins: Plugins) -> None:
    source = models("llama")
    run(by_method(source, "uniform", "wanda by row", target=0.5), plugins=plugins)
    run(recipe(source, {**PRUNERS["wanda by row"][0], "sparsity": 0.5}, output="again"), plugins=plugins)
    assert Path("out/masks.safetensors").read_bytes() == Path("again/masks.safetensors").read_bytes()


# --- evaluation, progress and hooks


def test_the_dense_evaluation_is_cached_and_the_pruned_is_not(
    models: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compressx.evaluation import perplexity as evaluate

    measured: list[bool] = []
    real = evaluate.token_perplexity

    def counting(access: InMemory, *rest: Any, **options: Any) -> float:
        measured.append(bool((access.model.model.layers[0].mlp.up_proj.weight == 0).any()))
        return real(access, *rest, **options)

    monkeypatch.setattr(evaluate, "token_perplexity", counting)
    given = recipe(models("llama"), {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.9}, evaluated=True)
    first, second = run(given, plugins=plugins), run(given, plugins=plugins)
    assert measured == [False, True, True]
    assert len(list(Path("cache/evaluations").glob("*.json"))) == 1
    assert first.evaluation == second.evaluation
    dense, pruned = (first.evaluation[k]["token_perplexity"] for k in ("dense", "pruned"))
    assert 1 < dense != pruned > 1
    other = run(given | {"model": {"path": str(Path("out/model").resolve())}, "output": "other"}, plugins=plugins)
    assert other.evaluation["dense"] == first.evaluation["pruned"], "what is cached is of one model's weights"


def test_progress_tells_every_stage_to_its_end(models: Any, plugins: Plugins) -> None:
    told: list[tuple[str, int, int]] = []
    run(recipe(models("llama"), evaluated=True), plugins=plugins, progress=lambda *step: told.append(step[:3]))
    stages = list(dict.fromkeys(stage for stage, _, _ in told))
    assert stages == ["load", "calibrate", "evaluate dense", "prune", "save", "evaluate pruned"]
    assert [(done, total) for stage, done, total in told if stage == "prune"] == [(i, 3) for i in range(4)]
    assert ("evaluate pruned", 4, 4) in told


def test_hooks_hear_of_every_block_and_of_the_end(
    models: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[BlockReport] = []
    finished: list[tuple[RunReport, Path, bool]] = []

    class Listener:
        @compressx.hookimpl
        def compressx_block_pruned(self, report: BlockReport) -> None:
            blocks.append(report)

        @compressx.hookimpl
        def compressx_run_finished(self, report: RunReport, output: Path) -> None:
            finished.append((report, output, (output / "report.json").is_file()))

    plugins.manager.register(Listener())
    monkeypatch.setenv("HOME", str(Path.cwd()))
    report = run(recipe(models("llama"), output="~/out"), plugins=plugins)
    assert [b.fqn for b in blocks] == [f"model.layers.{i}" for i in range(3)]
    assert tuple(layer for b in blocks for layer in b.layers) == report.layers
    assert all(b.seconds > 0 for b in blocks)
    assert finished == [(report, Path.cwd() / "out", True)]


@pytest.mark.slow
def test_the_written_recipe_and_plan_repeat_the_run_to_the_bit(mixed: Path, plugins: Plugins) -> None:
    planned = json.loads((mixed / "plan.json").read_text())
    again = plan(mixed / "recipe.yaml").to_dict()
    assert [x["name"] for x in planned["linears"]] == [x["name"] for x in again["linears"]]
    report = run(mixed / "recipe.yaml", plugins=plugins, overrides=["output=again"])
    assert {x["name"] for x in planned["linears"]} == {x.name for x in report.layers}
    assert Path("again/masks.safetensors").read_bytes() == (mixed / "masks.safetensors").read_bytes()
    first, second = weights(mixed / "model"), weights("again/model")
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- figures


class NoOptions(BaseModel):
    pass


class Showing:
    """Drops the smallest weights, and shows one error, one curve and two matrices for all of its linears in a block."""

    def __init__(self, options: BaseModel) -> None:
        pass

    def observe(self, block: compressx.Block, name: str) -> None:
        return None

    def prune(self, block: compressx.Block, patterns: Any, stats: Any) -> Any:
        error = 0.1 + block.index
        info, history = {"error": error, "error.other": 2 * error}, {"loss": [error / (i + 1) for i in range(30)]}
        images = {"dense": torch.eye(300), "pruned": torch.ones(300, 300) / 300}
        masks = compressx.keep_masks({n: block.linears[n].weight.abs() for n in patterns}, patterns)
        return {n: compressx.PruneResult(k, info=info, images=images, history=history) for n, k in masks.items()}


@pytest.mark.slow
def test_figures_are_drawn_and_embedded_once_for_query_and_key(models: Any, plugins: Plugins, drawn: None) -> None:
    spec = compressx.PrunerSpec("showing", "for a test", NoOptions, Showing)
    with_showing = dataclasses.replace(plugins, offers={"pruners": {**plugins.offers["pruners"], "showing": spec}})
    rule = {"targets": ["*.q_proj", "*.k_proj"], "pruner": "showing", "sparsity": 0.5}
    report = run(recipe(models("llama"), rule), plugins=with_showing)
    heat = [f"plots/matrices_model.layers.{i}.self_attn.q_proj.png" for i in range(3)]
    assert [f["file"] for f in report.figures] == ["plots/layers_error.svg", "plots/steps_q_proj_k_proj.svg", *heat]
    assert {f"plots/{p.name}" for p in Path("out/plots").iterdir()} == {f["file"] for f in report.figures}
    markdown = Path("out/report.md").read_text()
    assert all(f"]({f['file']})" in markdown for f in report.figures)
    read = json.loads(Path("out/report.json").read_text())
    assert read["figures"] == [dict(f) for f in report.figures]
    assert read["blocks"][0]["layers"][0]["history"]["loss"] == pytest.approx([0.1 / (i + 1) for i in range(30)])
    assert "images" not in read["blocks"][0]["layers"][0]


def test_a_run_with_nothing_to_show_has_no_plots_and_does_without_matplotlib(
    models: Any, plugins: Plugins, drawn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it would fail
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rule = {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5}  # it gives `damping`: one figure, no family
    assert run(recipe(models("llama"), rule), plugins=plugins).figures == ()
    assert not Path("out/plots").exists()
    assert "Figures" not in Path("out/report.md").read_text()


# --- the output folder, and what is refused


def broken_plugin(error: BaseException) -> types.ModuleType:
    module = types.ModuleType("broken")

    @compressx.hookimpl
    def compressx_block_pruned(report: BlockReport) -> None:
        if report.index == 1:
            raise error

    module.compressx_block_pruned = compressx_block_pruned  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), KeyboardInterrupt()])
def test_a_run_that_fails_half_way_leaves_the_earlier_output_and_keeps_finished_blocks_beside_it(
    models: Any, plugins: Plugins, error: BaseException
) -> None:
    given = recipe(models("llama"), {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5})
    run(given, plugins=plugins)
    before = {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()}
    plugins.manager.register(broken_plugin(error))
    given["prune"][0]["sparsity"] = 0.25
    with pytest.raises(type(error)):
        run(given, plugins=plugins)
    assert {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == before
    (kept,) = (p for p in Path().iterdir() if p.name != "out")
    assert json.loads((kept / "state.json").read_text())["finished"] == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("section", ["calibration", "evaluation"])
def test_text_that_is_too_short_is_refused_before_weights_are_loaded(
    models: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    given = recipe(models("llama"), evaluated=True)
    settings = given["calibration"] if section == "calibration" else given["evaluate"]["token_perplexity"]
    settings["samples"] = 1000
    monkeypatch.setattr("compressx.pipeline.run.open_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(
        CalibrationError, match=f"^<dict>:.*{section} needs 1000 windows of 32 tokens; the text has 600"
    ):
        run(given, plugins=plugins)
    assert not Path("out").exists()


def test_text_is_looked_for_before_the_model_is(models: Any, plugins: Plugins, project: Path) -> None:
    given = recipe(project / "nowhere", evaluated=True)
    given["calibration"]["dataset"] = given["evaluate"]["token_perplexity"]["dataset"] = {"text": "none.txt"}
    with pytest.raises(CalibrationError, match=r"^<dict>:calibration\.dataset: text: no file matches 'none\.txt'"):
        plan(given, plugins=plugins)


def test_a_plan_loads_neither_weights_nor_text(models: Any, plugins: Plugins, project: Path) -> None:
    bare = project / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((models("llama") / "config.json").read_bytes())
    save_file({}, bare / "model.safetensors")
    bare.with_name("text.txt").write_bytes(b"\xff no text")
    assert len(plan(recipe(bare), plugins=plugins).linears) == 21
    assert not Path("out").exists()


def test_a_recipe_that_a_program_made_takes_no_overrides(models: Any, plugins: Plugins) -> None:
    with pytest.raises(RecipeError, match="overrides need a recipe given as a path"):
        plan(recipe(models("llama")), plugins=plugins, overrides=["output=x"])


def test_an_output_that_would_replace_the_model_it_is_made_from_is_refused(project: Path):
    model = save_tiny(project / "out" / "model", "llama")
    for name in ("report.json", "recipe.yaml"):  # as an earlier run would have left it
        (project / "out" / name).touch()
    with pytest.raises(ArtifactError, match="would overwrite the input model"):
        run({"model": {"path": str(model)}, "prune": [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}],
             "output": str(project / "out")})  # fmt: skip
    assert (model / "model.safetensors").is_file()


# --- streaming


STREAMED = {
    "llama": MIXED,
    "llama-tied": ({"targets": ["*.1.*"], "pruner": "sparsegpt", "sparsity": 0.5},),
    "gpt2": ({"targets": ["*"], "pruner": "wanda", "pattern": "2:4"},),
    "mixtral": ({"targets": ["lm_head"], "pruner": "sparsegpt", "sparsity": 0.5},),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", STREAMED)
def test_a_streamed_model_gives_the_bits_of_one_in_memory(architecture: str, models: Any, plugins: Plugins) -> None:
    source, rules = models(architecture), STREAMED[architecture]
    reports = []
    for streaming in (False, True):
        asked = recipe(source, *rules, evaluated=True, output=f"out-{streaming}")
        asked["model"]["streaming"] = streaming
        reports.append(run(asked, plugins=plugins))
    assert Path("out-True/masks.safetensors").read_bytes() == Path("out-False/masks.safetensors").read_bytes()
    streamed, whole = weights("out-True/model"), weights("out-False/model")
    assert streamed.keys() == whole.keys()
    assert all(torch.equal(streamed[name], whole[name]) for name in whole)
    assert reports[0].evaluation == reports[1].evaluation
    assert sorted(p.name for p in Path("out-True/model").glob("*.safetensors")) == [
        f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)
    ]
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert all((Path("out-True/model") / name).is_file() for name in kept)
    assert not Path("out-True/blocks").exists()
    for name in ("config.json", "generation_config.json"):
        one, other = (json.loads(Path(f"out-{s}/model/{name}").read_text()) for s in (True, False))
        assert one == other


def test_allocation_streams_too(models: Any, plugins: Plugins) -> None:
    found = []
    for streaming in (False, True):
        asked = recipe(models("llama"), {"targets": ["*"], "pruner": "wanda", "group": "layer"})
        asked |= {"allocation": {"method": "attention-aware", "target": 0.5}, "output": f"out-{streaming}"}
        asked["model"]["streaming"] = streaming
        found.append(run(asked, plugins=plugins).allocation)
    assert found[0] == found[1]
    assert Path("out-True/masks.safetensors").read_bytes() == Path("out-False/masks.safetensors").read_bytes()


@pytest.mark.slow
def test_tasks_of_the_harness_run_on_a_streamed_model(models: Any, plugins: Plugins) -> None:
    evaluations = []
    for streaming in (False, True):
        source = models("llama")
        asked = recipe(source, output=f"out-{streaming}")
        asked["model"]["streaming"] = streaming
        task = {"name": "words", "dataset": {"text": str(source.with_name("text.txt"))}}
        asked["evaluate"] = {"lm_eval": {"tasks": [task]}}
        evaluations.append(run(asked, plugins=plugins).evaluation)
    for stage in ("dense", "pruned"):
        assert evaluations[1][stage]["word_perplexity"] == pytest.approx(evaluations[0][stage]["word_perplexity"])


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the hidden states and gradients that were kept in files."""
    kept: list[int] = []
    real = hidden.InFiles.__call__

    def counting(self: hidden.InFiles, states: torch.Tensor) -> torch.Tensor:
        kept.append(states.numel() * states.element_size())
        return real(self, states)

    monkeypatch.setattr(hidden.InFiles, "__call__", counting)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_hidden_states_in_files_give_the_same_bits(
    models: Any, plugins: Plugins, streaming: bool, in_files: list[int], mixed: Path
) -> None:
    asked = recipe(models("llama"), *MIXED)
    asked["model"]["streaming"] = streaming
    asked["calibration"]["memory_limit"] = "65KB"  # 8 x 32 x 64 floats are 65.5 KB
    run(asked, plugins=plugins)
    assert sum(in_files) == 8 * 32 * 64 * 4
    assert Path("out/masks.safetensors").read_bytes() == (mixed / "masks.safetensors").read_bytes()
    assert not list(Path("out").rglob("*.states"))
    asked["calibration"]["memory_limit"] = "66KB"
    run(asked | {"prune": recipe(models("llama"))["prune"]}, plugins=plugins)
    assert sum(in_files) == 8 * 32 * 64 * 4, "what fits stays in memory"


def test_block_reconstruction_goes_by_the_losss_reaction_whatever_prunes(
    models: Any, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(models("llama"), {"targets": ["*.up_proj"], "pruner": "wanda", "sparsity": 0.5})
    asked["reconstruct_block"] = {"passes": 1}
    whole = run(asked, plugins=plugins)
    monkeypatch.setattr("compressx.pipeline.pruning.fisher_diagonal", lambda *_, **__: FisherDiagonal())
    without = run({**asked, "output": "without"}, plugins=plugins)
    for mine, others in zip(whole.blocks, without.blocks, strict=True):
        assert mine.reconstruction is not None
        assert others.reconstruction is not None
        assert mine.reconstruction.before != pytest.approx(others.reconstruction.before, rel=1e-4)


def test_both_streams_of_block_reconstruction_count_against_the_memory_limit(
    models: Any, plugins: Plugins, in_files: list[int]
) -> None:
    for limit, size in (("131KB", 2 * 8 * 32 * 64 * 4), ("132KB", 0)):
        asked = recipe(models("llama"), {"targets": ["*.up_proj"], "pruner": "wanda", "sparsity": 0.5}, output=limit)
        asked["calibration"]["memory_limit"] = limit
        run({**asked, "reconstruct_block": {"passes": 1}}, plugins=plugins)
        assert sum(in_files) == size
        in_files.clear()


@pytest.mark.slow
def test_what_an_allocation_measures_with_counts_against_the_memory_limit_and_goes_before_pruning(
    models: Any, plugins: Plugins, in_files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[Path] = []
    monkeypatch.setattr(
        "compressx.pipeline.pruning.prune_model",
        lambda *given: left.extend(Path().rglob("allocation")) or prune_model(*given),
    )
    window = 32 * 64 * 4
    measuring = 2 * 8 + 3 * 2  # before and after a block; of three blocks, at two windows
    for name, limit, kept in (("below", "180KB", measuring), ("above", "181KB", 0)):
        asked = allocated(models("llama"), sparsities=[0.4, 0.8]) | {"output": name}
        asked["calibration"] |= {"memory_limit": limit}
        run(asked, plugins=plugins)
        assert sum(in_files) == kept * window
        in_files.clear()
    assert left == []
    assert Path("below/masks.safetensors").read_bytes() == Path("above/masks.safetensors").read_bytes()


def test_a_memory_limit_that_is_no_size_is_refused(models: Any) -> None:
    asked = recipe(models("llama"))
    asked["calibration"]["memory_limit"] = "4 parsecs"
    with pytest.raises(RecipeError, match=r"calibration\.memory_limit is '4 parsecs'; expected a size such as 500MB"):
        plan(asked)
    asked["calibration"]["memory_limit"] = 4
    with pytest.raises(RecipeError, match=r"calibration\.memory_limit is 4; expected at least 1000"):
        plan(asked)


def test_a_key_that_a_dataset_does_not_have_is_refused_while_planning(models: Any) -> None:
    asked = recipe(models("llama"))
    for name, key in (("python-docs", "config"), ("python-docs", "split"), ("c4", "config")):
        asked["calibration"]["dataset"] = {"name": name, key: "other"}
        with pytest.raises(CalibrationError, match=rf"calibration\.dataset: dataset '{name}' takes no {key}"):
            plan(asked)
