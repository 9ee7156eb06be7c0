"""Whole runs in this process, on tiny models that were saved like real ones."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.compressx.pipeline.runs import MAGNITUDE, MIXED, TASKS, files, recipe, same, stopped, weights

import compressx
from compressx.allocation.units import Curve
from compressx.api.record import BlockReport, RunReport
from compressx.blocks.fisher import FisherDiagonal
from compressx.blocks.prune import prune_model
from compressx.masks.maskset import MaskSet
from compressx.models import blockwise
from compressx.models.access import InMemory
from compressx.models.packed_folder import base_in, pack_folder
from compressx.pipeline.run import plan, run
from compressx.plugins.manager import Plugins, load_plugins
from compressx.runtime.errors import ArtifactError, CalibrationError, CompressxError, RecipeError


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins()


# --- what a run does


def offering(plugins: Plugins, spec: compressx.PrunerSpec) -> Plugins:
    pruners = {**plugins.offers["pruners"], spec.name: spec}
    return dataclasses.replace(plugins, offers={**plugins.offers, "pruners": pruners})


def test_a_pruner_that_reads_sensitivities_alone_needs_text(model, plugins):
    spec = dataclasses.replace(plugins.offers["pruners"]["magnitude"], name="reacting", reads_sensitivities=True)
    asked = recipe(model, {"targets": ["*"], "pruner": "reacting", "pattern": "2:4"})
    assert plan(asked, plugins=offering(plugins, spec)).needs_calibration
    del asked["calibration"]
    with pytest.raises(RecipeError, match="the recipe has no calibration, but its pruners need one"):
        plan(asked, plugins=offering(plugins, spec))


def test_attention_and_the_rest_are_pruned_by_their_own_rules(models):
    source = models("gemma3")
    report = run(recipe(source, *MIXED))
    dense, pruned, masks = weights(source), weights("out/model"), MaskSet.load("out/masks.safetensors")
    assert set(masks) == {x.name for x in report.layers}
    by_pruner: dict[str, list[str]] = {}
    for layer in report.layers:
        by_pruner.setdefault(layer.pruner, []).append(layer.name)
        weight, keep = pruned[f"{layer.name}.weight"], masks[layer.name].keep
        assert torch.equal(weight != 0, keep), layer.name
        assert layer.sparsity == pytest.approx(1 - float(keep.float().mean()))
        assert not torch.equal(weight, dense[f"{layer.name}.weight"] * keep), "the survivors get new values"
    assert {k: len(v) for k, v in by_pruner.items()} == {"attnprune": 6, "wanda+sparsegpt": 3, "sparsegpt": 12}
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


def test_magnitude_reads_no_text(model):
    given = recipe(model, MAGNITUDE)
    Path("short.txt").write_text("w1")  # any pruner that observes would refuse it
    given["calibration"]["dataset"] = {"text": "short.txt"}
    assert run(given).sparsity == 0.5
    del given["calibration"]
    assert run(given, replace=True).sparsity == 0.5


# --- allocation


def allocated(model: Path, target: float = 0.5, **settings: Any) -> dict[str, Any]:
    attention = {"targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune"}
    whole = recipe(model, attention, {"targets": ["*"], "pruner": "sparsegpt"})
    return whole | {"allocation": {"method": "attention-aware", "target": target, **settings}}


@pytest.mark.slow
def test_allocation_reaches_its_target_to_the_weight_and_says_how(model):
    """On the way it tells of every block that is measured, and what it chose is in the plan and the reports."""
    target, told = 0.537, []
    report = run(allocated(model, target), progress=lambda *step: told.append(step))
    masks = MaskSet.load("out/masks.safetensors")
    zeros = {name: int((~entry.keep).sum()) for name, entry in masks.items()}
    total = round(target * sum(entry.keep.numel() for entry in masks.values()))
    assert sum(zeros.values()) == report.allocation.zeros == total
    assert [len(u.linears) for u in report.allocation.units] == [2, 5] * 3
    for unit in report.allocation.units:
        assert sum(zeros[name] for name in unit.linears) == round(unit.sparsity * unit.weights)
        assert unit.divergence == pytest.approx(Curve(unit.sparsities, unit.divergences).error(unit.sparsity))
    assert list(dict.fromkeys(stage for stage, *_ in told)) == ["load", "calibrate", "allocate", "prune", "save"]
    begun, first, gradients, *blocks = (step for stage, *step in told if stage == "allocate")
    assert (begun, first, gradients) == ([0, 1, ""], [0, 3, ""], [0, 3, "gradients at 0 of 2 sequences"])
    assert blocks == [[i, 3, ""] for i in range(1, 4)]
    planned = json.loads(Path("out/plan.json").read_text())
    assert "allocation" not in planned
    assert {x["name"]: x["sparsity"] for x in planned["linears"]} == {x.name: x.target for x in report.layers}
    text, one = Path("out/report.md").read_text(), report.allocation.units[0]
    assert f"| model.layers.0 | q_proj, k_proj | attnprune | {one.sparsity:.2%} | {one.divergence:.3g} |" in text
    assert "| q_proj | attnprune | allocated joint | 3 |" in text


def test_allocation_measures_on_the_dense_model_and_leaves_it_dense(model):
    """What is pruned afterwards equals a run whose rules give the allocated sparsities themselves."""
    whole = recipe(model, {"targets": ["*"], "pruner": "wanda", "group": "layer"})
    first = run(whole | {"allocation": {"method": "attention-aware", "target": 0.5}})
    rules = [{"targets": [x.name], "pruner": "wanda", "group": "layer", "sparsity": x.target} for x in first.layers]
    again = run(recipe(model, *rules, output="again"))
    assert Path("out/masks.safetensors").read_bytes() == Path("again/masks.safetensors").read_bytes()
    assert again.allocation is None


# --- evaluation, progress and hooks


def test_the_dense_evaluation_is_cached_and_the_pruned_is_not(model, monkeypatch):
    from compressx.evaluation import token_perplexity as evaluate

    measured: list[bool] = []
    real = evaluate.measure_tokens

    def counting(access: InMemory, *rest: Any, **options: Any) -> torch.Tensor:
        measured.append(bool((access.model.model.layers[0].mlp.up_proj.weight == 0).any()))
        return real(access, *rest, **options)

    monkeypatch.setattr(evaluate, "measure_tokens", counting)
    given = recipe(model, {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.9}, evaluated=True)
    first, second = run(given), run(given)
    assert measured == [False, True, True]
    assert len(list(Path("cache/evaluations").glob("*.json"))) == 1
    assert first.evaluation == second.evaluation
    other = run(given | {"model": {"path": str(Path("out/model").resolve())}, "output": "other"})
    assert other.evaluation["dense"] == first.evaluation["pruned"], "what is cached is of one model's weights"


def test_what_an_allocation_measures_serves_every_target_of_the_same_rules_and_text(model, monkeypatch):
    from compressx.allocation import methods

    measured: list[int] = []
    real = methods.measure
    monkeypatch.setattr(methods, "measure", lambda *a, **k: (measured.append(1), real(*a, **k))[1])

    def allocated(target: float, pruner: str = "wanda", seed: int = 0, **changed: Any) -> RunReport:
        settings = {"method": "divergence", "samples": 4, "sparsities": [0.4, 0.8], "target": target} | changed
        given = recipe(model, {"targets": ["*"], "pruner": pruner}, allocation=settings)
        given["calibration"] |= {"seed": seed}
        return run(given, replace=True)

    first, other = allocated(0.5), allocated(0.6)
    assert len(measured) == 1
    assert [u.divergences for u in other.allocation.units] == [u.divergences for u in first.allocation.units]
    assert other.sparsity == pytest.approx(0.6, abs=1e-3)
    shutil.rmtree("cache")
    assert allocated(0.6).allocation == other.allocation, "the same as when it is measured"
    for number, changed in enumerate(({"sparsities": [0.4, 0.7]}, {"pruner": "magnitude"}, {"seed": 1}), start=3):
        allocated(0.6, **changed)
        assert len(measured) == number, changed


def test_progress_and_hooks_hear_of_every_block_and_of_the_end(model, plugins, monkeypatch):
    told: list[tuple[str, int, int]] = []
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
    asked = recipe(model, evaluated=True, output="~/out")
    report = run(asked, plugins=plugins, progress=lambda *step: told.append(step[:3]))
    stages = ["load", "calibrate", "evaluate dense", "prune", "save", "evaluate pruned"]
    assert list(dict.fromkeys(stage for stage, *_ in told)) == stages
    assert [step for stage, *step in told if stage == "prune"] == [[i, 3] for i in range(4)]
    assert ("evaluate pruned", 4, 4) in told
    assert [b.fqn for b in blocks] == [f"model.layers.{i}" for i in range(3)]
    assert tuple(layer for b in blocks for layer in b.layers) == report.layers
    assert all(b.seconds > 0 for b in blocks)
    assert finished == [(report, Path.cwd() / "out", True)]
    with pytest.raises(ArtifactError, match=r"~/out was written by another recipe \(ignore: "):
        plan(asked | {"ignore": ["*.o_proj"]})


@pytest.mark.slow
def test_the_written_recipe_and_plan_repeat_the_run_to_the_bit(model):
    run(recipe(model, *MIXED))
    planned = json.loads(Path("out/plan.json").read_text())
    again = plan("out/recipe.yaml").to_dict()
    assert [x["name"] for x in planned["linears"]] == [x["name"] for x in again["linears"]]
    report = run("out/recipe.yaml", overrides=["output=again"])
    assert {x["name"] for x in planned["linears"]} == {x.name for x in report.layers}
    assert Path("again/masks.safetensors").read_bytes() == Path("out/masks.safetensors").read_bytes()
    assert same(weights("out/model"), weights("again/model"))


# --- figures


def test_a_run_with_nothing_to_show_has_no_plots_and_does_without_matplotlib(model, drawn, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it would fail
    rule = {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5}  # it gives `damping`: one figure, no family
    assert run(recipe(model, rule)).figures == ()
    assert not Path("out/plots").exists()
    assert "Figures" not in Path("out/report.md").read_text()


# --- the output folder, and what is refused


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_run_that_fails_half_way_leaves_the_earlier_output_and_keeps_finished_blocks_beside_it(error, model, plugins):
    class Breaking:
        @compressx.hookimpl
        def compressx_block_pruned(self, report: BlockReport) -> None:
            if report.index == 1:
                raise error

    given = recipe(model, {**MAGNITUDE})
    run(given, plugins=plugins)
    before = files("out")
    plugins.manager.register(Breaking())
    given["prune"][0]["sparsity"] = 0.25
    with pytest.raises(error):
        run(given, plugins=plugins, replace=True)
    assert files("out") == before
    (left,) = (p for p in Path().iterdir() if p.name != "out")
    assert json.loads((left / "state.json").read_text())["finished"] == ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize("section", ["calibration", "evaluation"])
def test_text_that_is_too_short_is_refused_before_weights_are_loaded(model, unloaded, section):
    given = recipe(model, evaluated=True)
    settings = given["calibration"] if section == "calibration" else given["evaluate"]["token_perplexity"]
    settings["samples"] = 1000
    with pytest.raises(
        CalibrationError, match=f"^<dict>:.*{section} needs 1000 sequences of 32 tokens; the text has 600"
    ):
        run(given)
    assert not Path("out").exists()


def test_all_mistakes_of_a_recipe_are_reported_at_once(model, project):
    Path("recipe.yaml").write_text(
        f"""\
model: {model}
calibration: {{dataset: {{text: none.txt}}, samples: 8, sequence_length: 32}}
prune:
  - {{targets: ["*.query"], pruner: wanda, sparsity: 0.5}}
  - {{targets: ["*.q_proj"], pruner: wnda, sparsity: 0.5}}
evaluate:
  token_perplexity: {{dataset: wikitxt}}
  lm_eval: {{tasks: [none.yaml]}}
output: recipe.yaml
"""
    )
    told = ["output", "no file", "no dataset", "no such file", "target '*.query' matches no linear", "no pruner 'wnda'",
            "sequence_length 2048 is longer than the model's 128 positions"]  # fmt: skip
    schema = ["calibration.samples is 0"]
    for asked in (plan, run):
        for overrides, expected in (([], told), (["calibration.samples=0"], schema)):
            with pytest.raises(CompressxError) as raised:
                asked("recipe.yaml", overrides=overrides)
            lines = str(raised.value).splitlines()
            assert len(lines) == len(expected)
            for line in expected:
                assert any(line in found for found in lines)
            assert all(found.startswith(("recipe.yaml:", "--set ")) for found in lines)
    assert sorted(map(str, Path().iterdir())) == ["recipe.yaml"]


def test_a_model_that_is_not_there_hides_no_other_mistake_and_makes_none(project):
    given = recipe(project / "nowhere", {"targets": ["*.nothing"], "pruner": "wnda", "sparsity": 0.5})
    with pytest.raises(CompressxError) as raised:
        plan(given)
    missing, pruner, text = str(raised.value).splitlines()
    assert text.startswith("<dict>:calibration.dataset: text: no file matches")
    assert missing.startswith("<dict>:model: model path")
    assert pruner.startswith("<dict>:prune[0].pruner: no pruner 'wnda'")


def test_an_interrupted_run_is_refused_before_the_model_is_looked_for_and_may_be_removed_meanwhile(
    model, project, monkeypatch
):
    left = stopped(recipe(model), after=1)
    with pytest.raises(ArtifactError, match=r"^<dict>:output: an earlier run .* continue with --resume"):
        run(recipe(project / "nowhere"))
    whole = Path.rglob

    def removed_under_way(folder: Path, pattern: str) -> Iterator[Path]:
        for file in whole(folder, pattern):
            yield file
            shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(Path, "rglob", removed_under_way)
    plan(recipe(model))
    assert not left.exists(), "its files are not counted as free"


def test_a_plan_loads_neither_weights_nor_text(model, project):
    bare = project / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((model / name).read_bytes())
    save_file({}, bare / "model.safetensors")
    bare.with_name("text.txt").write_bytes(b"\xff no text")
    assert len(plan(recipe(bare)).linears) == 21
    assert not Path("out").exists()
    assert plan(recipe(bare), overrides=["prune.0.targets=['*.q_proj']"]).linears


def test_an_output_that_would_replace_what_a_run_reads_is_refused(model):
    """The model, also packed; the teacher; and text."""
    run(recipe(model, output="earlier"))
    before = files("earlier")
    pack_folder(Path("earlier"), Path("packed"))
    pack_folder(Path("earlier"), Path("small"), base=base_in(Path("earlier/model")))
    small = {"path": "small", "base": "earlier"}
    shutil.copy(model.with_name("text.txt"), "earlier/notes.txt")
    text = {"dataset": {"text": "earlier/*.txt"}, "samples": 8, "sequence_length": 32}
    taught = {"steps": 1, "teacher": {"path": "earlier/model"}}
    dense = {"calibration": recipe(model)["calibration"]}
    for asked, told in (
        (recipe(Path("earlier/model"), output="earlier") | dense, "earlier would overwrite the input model"),
        (recipe(Path("packed"), output="packed") | dense, "packed would overwrite the input model; name another"),
        (recipe(model, output="earlier", model=small) | dense, "earlier would overwrite the input model; name another"),
        (recipe(model, output="earlier", finetune=taught), "earlier would overwrite the teacher of finetune"),
        (recipe(model, output="earlier", calibration=text), r"earlier would .* the text of calibration\.dataset; name"),
    ):
        with pytest.raises(ArtifactError, match=f"output {told}"):
            run(asked, replace=True)
    assert before.items() < files("earlier").items()
    plan(recipe(model, output="out", finetune=taught))


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"prune": [{**MAGNITUDE, "sparsity": 0.6}]}, r"\(.*\.sparsity: was 0\.5, is 0\.6\)"),
     ({"ignore": ["*.o_proj"], "deterministic": True}, r"\(ignore: was .*, is .*; deterministic: was false, is true\)"),
     ("broken", r"\(out/recipe\.yaml:1:.*\)")],
    ids=["a value", "keys", "not readable"],
)  # fmt: skip
def test_a_finished_run_of_another_recipe_is_replaced_only_if_it_is_said_and_then_the_log_names_it(
    model, changed, told
):
    run(recipe(model, MAGNITUDE))
    other = recipe(model, MAGNITUDE) | (changed if isinstance(changed, dict) else {})
    if changed == "broken":
        Path("out/recipe.yaml").write_text("prune: [")
    before = files(".")
    for refuse in (plan, run):
        with pytest.raises(
            ArtifactError, match=f"^<dict>:output: out was written by another recipe {told}; .* --replace$"
        ):
            refuse(other)
    assert files(".") == before
    for prune_again, whose in (({"replace": True}, f"of another recipe {told}"), ({}, "of the same recipe")):
        run(other, **prune_again)
        assert re.search(f"INFO replaces the finished run in out, {whose}\n", Path("out/run.log").read_text())


def test_notes_beside_a_finished_run_are_not_deleted_by_another_of_the_same_recipe(model):
    asked = recipe(model, MAGNITUDE)
    run(asked)
    Path("out/notes.md").write_text("years")
    for refuse in (plan, run):
        with pytest.raises(
            ArtifactError, match=r"^<dict>:output: output .*out has what no run wrote: notes\.md; .*--replace"
        ):
            refuse(asked)
    assert run(asked, resume=True).sparsity == pytest.approx(0.5), "finished before, so nothing is replaced"
    assert Path("out/notes.md").read_text() == "years"
    run(asked, replace=True)
    assert "out, of the same recipe, and with it notes.md\n" in Path("out/run.log").read_text()
    assert not Path("out/notes.md").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_head_of_its_own_is_kept_where_the_config_ties_it(streaming, models, project):
    """transformers loads both and warns; lm-evaluation-harness ties again."""
    shutil.copytree(models("llama"), folder := project / "own-head" / "model")
    shutil.copy(models("llama").with_name("text.txt"), folder.with_name("text.txt"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    asked = recipe(folder, evaluated=True)
    asked["evaluate"] |= TASKS
    measured = run(asked | {"model": {"path": str(folder), "streaming": streaming}}).evaluation
    expected = run(recipe(models("llama"), evaluated=True, output="plain")).evaluation
    assert all(measured[of]["token_perplexity"] == expected[of]["token_perplexity"] for of in ("dense", "pruned"))
    assert torch.equal(weights("out/model")["lm_head.weight"], weights("plain/model")["lm_head.weight"])
    assert json.loads(Path("out/model/config.json").read_text())["tie_word_embeddings"] is False


# --- memory


@pytest.fixture
def in_files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the hidden states and gradients that were kept in files."""
    kept: list[int] = []
    real = blockwise.StateFiles.__call__

    def counting(self: blockwise.StateFiles, states: torch.Tensor) -> torch.Tensor:
        kept.append(states.numel() * states.element_size())
        return real(self, states)

    monkeypatch.setattr(blockwise.StateFiles, "__call__", counting)
    return kept


def test_block_reconstruction_goes_by_the_losss_reaction_whatever_prunes(model, monkeypatch):
    asked = recipe(model, {"targets": ["*.up_proj"], "pruner": "wanda", "sparsity": 0.5})
    asked["reconstruct_block"] = {"passes": 1}
    whole = run(asked)
    monkeypatch.setattr("compressx.blocks.stage.fisher_diagonal", lambda *_, **__: FisherDiagonal())
    without = run({**asked, "output": "without"})
    for mine, others in zip(whole.blocks, without.blocks, strict=True):
        assert mine.reconstruction.before != pytest.approx(others.reconstruction.before, rel=1e-4)


@pytest.mark.parametrize(
    ("allocates", "limits", "windows"),
    [(False, ("131KB", "132KB"), 2 * 8),  # both hidden states of block reconstruction
     pytest.param(True, ("180KB", "181KB"), 2 * 8 + 3 * 2, marks=pytest.mark.slow)],  # of 3 blocks, at two windows
)  # fmt: skip
def test_what_training_and_allocation_measure_with_counts_against_the_memory_limit_and_goes_before_pruning(
    model, in_files, monkeypatch, allocates, limits, windows
):
    left: list[Path] = []
    monkeypatch.setattr(
        "compressx.blocks.stage.prune_model",
        lambda *given: left.extend(Path().rglob("allocation")) or prune_model(*given),
    )
    trained = recipe(model, {"targets": ["*.up_proj"], "pruner": "wanda", "sparsity": 0.5})
    asked = allocated(model, sparsities=[0.4, 0.8]) if allocates else trained | {"reconstruct_block": {"passes": 1}}
    for limit, size in zip(limits, (windows * 32 * 64 * 4, 0), strict=True):
        asked["calibration"] |= {"memory_limit": limit}
        run(asked | {"output": limit})
        assert sum(in_files) == size
        in_files.clear()
    assert left == []
    below, above = (Path(limit, "masks.safetensors").read_bytes() for limit in limits)
    assert below == above
