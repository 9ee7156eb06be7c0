"""Estimates of whole recipes, held against what torch counts while they run, and against what they hold."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from tests.compressx.flops import counter
from tests.compressx.gguf_files import write_gguf
from tests.compressx.pipeline.runs import recipe
from tests.compressx.saved import save_tiny, save_wide
from torch.nn.attention import SDPBackend, sdpa_kernel

from compressx.api.work import KINDS
from compressx.costs.estimate import Estimate
from compressx.costs.loading import _ENTRY
from compressx.costs.machine import ASSUMED, Machine
from compressx.costs.recipe import estimate, estimated
from compressx.costs.stages import _BLOCK, _CHOSEN, _LINEAR
from compressx.masks import file as masks_file
from compressx.models.arithmetic import choose
from compressx.models.gguf_header import contents_of
from compressx.pipeline.preparation import loaded_recipe, prepare
from compressx.pipeline.run import run
from compressx.plugins.manager import load_plugins
from compressx.runtime import rates
from compressx.runtime.rates import Rates
from compressx.testing import tiny_model

EVEN = Machine("a machine that does a billion of anything in a second", dict.fromkeys(KINDS, 1e9))
HALF: dict[str, Any] = {"sparsity": 0.5}


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))  # an allocation from the cache costs nothing
    return save_tiny(tmp_path / "model", "llama")


def of(written: dict[str, Any], *modules: str, machine: Machine = EVEN) -> Estimate:
    known = load_plugins(modules=modules)
    loaded = loaded_recipe(written, (), known)
    prepared = prepare(loaded, known)
    return estimate(loaded.recipe, prepared.plan, prepared.checkpoint, lambda: machine)


def rules(pruner: str, **more: Any) -> list[dict[str, Any]]:
    return [{"targets": ["*"], "pruner": pruner, **HALF, **more}]


RECIPES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], float]] = {
    "magnitude": (rules("magnitude"), {}, 0.0),
    "wanda": (rules("wanda"), {}, 0.0),
    "sparsegpt": (rules("sparsegpt"), {}, 0.0),
    "wanda + sparsegpt": (rules("wanda", reconstruct="sparsegpt"), {}, 0.0),
    "the head, too": ([{"targets": ["lm_head"], "pruner": "sparsegpt", **HALF}, *rules("wanda")], {}, 0.0),
    "some blocks": ([{"targets": ["*.layers.1.*"], "pruner": "sparsegpt", **HALF}], {}, 0.0),
    "sensitivity": (rules("sensitivity"), {}, 0.02),
    "sensitivity, jointly": (rules("sensitivity", group="joint"), {}, 0.02),
    "reconstructed blocks": (rules("wanda"), {"reconstruct_block": {"passes": 2}}, 0.05),
    "allocated by outliers": (rules("sparsegpt"), {"allocation": {"method": "owl", "target": 0.5}}, 0.0),
    "allocated by divergence": (
        rules("sparsegpt"), {"allocation": {"method": "divergence", "target": 0.5, "unit": "linear"}}, 0.02,
    ),
    "fine-tuned": (
        rules("magnitude"),
        {"finetune": {"steps": 3, "batch_size": 2, "held_out": 1, "gradient_checkpointing": False}}, 0.02,
    ),
    "fine-tuned with checkpointing": (rules("magnitude"), {"finetune": {"steps": 3, "batch_size": 2}}, 0.05),
}  # fmt: skip
"""By name: rules, other sections, and by how much the count may be off. Of fused attention five products are counted
backwards, and attention that is multiplied out has four; what enters the first of three blocks needs no gradient."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_flops_of_a_run_are_those_that_torch_counts(model, name, monkeypatch):
    """Of conjugate gradients nobody knows the number of steps before, so the mean of those that were taken counts."""
    made, sections, tolerance = RECIPES[name]
    written = recipe(model, *made, evaluated=True, **sections, compute_dtype="float32")
    if "allocation" in sections:
        written["prune"] = [{k: v for k, v in rule.items() if k != "sparsity"} for rule in made]
    with sdpa_kernel(SDPBackend.MATH), counter() as counted:
        report = run(written)
    if steps := [layer.info["solver_steps"] for layer in report.layers if "solver_steps" in layer.info]:
        monkeypatch.setattr("compressx.pruners.sensitivity._SOLVER_STEPS", mean(steps))
    found = of(written)
    assert found.unknown == ()
    flops = sum(stage.work["float32"] + stage.work["attention"] for stage in found.stages)
    assert flops == pytest.approx(counted.total, rel=tolerance or 1e-9)


def test_stages_come_in_the_order_of_a_run_and_only_those_that_it_has(model):
    names = [stage.name for stage in of(recipe(model)).stages]
    assert names == ["load", "prune: passes and statistics", "prune: wanda", "save"]
    whole = of(
        recipe(
            model,
            *rules("sensitivity"),
            evaluated=True,
            reconstruct_block={},
            finetune={"steps": 2},
            compute_dtype="float32",
        )
    )
    assert [stage.name for stage in whole.stages] == [
        "load", "evaluate dense", "calibrate", "prune: passes and statistics", "prune: sensitivity",
        "prune: block reconstruction", "evaluate pruned", "finetune", "evaluate finetuned", "save",
    ]  # fmt: skip


OTHER = """
from pydantic import BaseModel

from compressx import PruneResult, PrunerSpec, Work, hookimpl, keep_mask


class NoOptions(BaseModel):
    pass


class Quiet:  # a statistic that does not count its work either
    def update(self, x): ...

    def tensors(self):
        return {}


class Other:
    def observe(self, block, name):
        return Quiet()

    def prune(self, block, patterns, stats):
        return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}


class Wrong(Other):
    def work(self, block, patterns, text):
        return 3.0


class Half(Other):
    def prepare(self, block, name, statistic):
        return None

    def prune(self, block, patterns, stats, prepared):
        return super().prune(block, patterns, stats)

    def work(self, block, patterns, text):
        return Work()


@hookimpl
def compressx_pruners():
    return [PrunerSpec(x.__name__.lower(), "for a test", NoOptions, lambda _, x=x: x()) for x in (Other, Wrong, Half)]
"""


@pytest.fixture
def other(model, request) -> str:
    name = f"{request.node.name}.py"  # of its own: modules stay imported
    Path(name).write_text(OTHER)
    return name


def test_what_does_not_count_its_work_is_named_and_not_taken_for_nothing(model, other):
    found = of(recipe(model, *rules("other")), other)
    assert found.unknown == ("Quiet, a statistic of pruner other", "pruner other")
    assert not any("other" in stage.name for stage in found.stages)


def test_preparing_that_is_not_counted_is_named(model, other):
    found = of(recipe(model, *rules("half")), other)
    assert found.unknown == ("Quiet, a statistic of pruner half", "what pruner half prepares")


def test_work_that_is_no_work_is_told_in_place_of_an_estimate(model, other):
    known = load_plugins(modules=[other])
    loaded = loaded_recipe(recipe(model, *rules("wrong")), (), known)
    prepared = prepare(loaded, known)
    told = estimated(loaded.recipe, prepared.plan, prepared.checkpoint, lambda: EVEN)
    assert isinstance(told, str)
    assert told.startswith("work of pruner 'wrong' failed on model.layers.0: TypeError: expected a Work, got 3.0")


def test_evaluations_that_depend_on_the_text_are_named(model):
    text = {"text": str(model.with_name("text.txt"))}
    evaluate = {"token_perplexity": {"dataset": text, "sequence_length": 32}, "sample": {"prompt": "w1 w2"}}
    found = of(recipe(model, evaluate=evaluate))
    assert found.unknown == (
        "evaluate.sample", "evaluate.token_perplexity without samples, which reads all of the text"
    )  # fmt: skip


def test_seconds_are_work_over_rates_and_minutes_of_training_become_steps(model):
    found = of(recipe(model, finetune={"minutes": 0.5, "batch_size": 2}, compute_dtype="float32"))
    tuning = next(stage for stage in found.stages if stage.name == "finetune")
    assert found.seconds(tuning) == pytest.approx(30, rel=0.1)
    assert found.notes[0].startswith("0.5 minutes of fine-tuning are about ")
    assert found.total == pytest.approx(found.started + sum(sum(s.work.counts.values()) / 1e9 for s in found.stages))


@pytest.mark.parametrize(
    ("dtype", "trained", "taken"),
    [("float32", False, "float32"), ("float32", True, "bfloat16"), ("float16", False, "float32"),
     ("float16", True, "bfloat16"), ("bfloat16", False, "bfloat16")],
)  # fmt: skip
def test_products_are_counted_in_the_dtype_that_a_run_takes_with_the_same_rates(
    model, monkeypatch, dtype, trained, taken
):
    products = {"float32": 2e9, "bfloat16": 4e9, "float16": 1e9}
    written = recipe(model, **({"reconstruct_block": {}} if trained else {}))
    written["model"]["dtype"] = dtype
    machine = Machine("a machine with products of bfloat16", EVEN.rates | products)
    found = next(s for s in of(written, machine=machine).stages if s.name == "prune: passes and statistics").work
    assert {name for name in products if found[name]} == {taken}
    monkeypatch.setattr(rates, "_measured", lambda _: Rates(products, 1e9))
    assert choose("auto", getattr(torch, dtype), torch.device("cpu"), training=trained).dtype == taken


def test_a_model_in_float64_is_counted_with_products_of_float32_which_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = [save_tiny(tmp_path / kind / "model", "llama", getattr(torch, kind)) for kind in ("float32", "float64")]
    single, double = (of(recipe(x, *rules("sparsegpt"), evaluated=True)) for x in models)
    assert double.notes == ("products in float64 are taken to be as fast as in float32",)
    assert [s.work.flops for s in double.stages] == [s.work.flops for s in single.stages]
    assert double.disk["model"] == 2 * single.disk["model"]


def test_the_disk_holds_what_a_run_leaves_while_it_goes_on(model):
    found = of(recipe(model, reconstruct_block={})).disk
    run(recipe(model))
    written = sum(p.stat().st_size for p in Path("out/model").glob("*.safetensors"))
    assert written == pytest.approx(found["model"], rel=0.05)
    assert found["journal: hidden states, twice"] == 2 * 2 * 8 * 32 * 64 * 4


def test_a_longer_text_takes_more_memory_by_its_hidden_states_and_what_a_block_returns(model):
    held = []
    for samples in (8, 16):
        written = recipe(model)
        written["calibration"] |= {"samples": samples, "batch_size": 2}
        (stage,) = (s for s in of(written).stages if s.name == "prune: wanda")
        held.append(stage.memory)
    more = {name: held[1][name] - held[0][name] for name in held[0]}
    states = 8 * 32 * 64 * 4
    # Outputs of the first batches are kept for the error.
    assert more == {
        "weights": 0, "hidden states": states, "arguments of blocks": 0, "statistics and pruners": states
    }  # fmt: skip
    # Two rotary tables [32, 16] and the positions, which batches share.
    assert held[0]["arguments of blocks"] == 2 * 32 * 16 * 4 + 32 * 8


def test_a_streamed_model_holds_one_block_at_a_time_or_what_lies_outside_them(model):
    tiny = tiny_model("llama")
    block = 4 * sum(p.numel() for p in tiny.model.layers[0].parameters())
    outside = 4 * sum(p.numel() for p in tiny.parameters()) - 3 * block
    assert outside < block
    pruned = {s.name: s.memory["weights"] for s in of(_streamed(recipe(model))).stages}
    assert pruned == {
        "load": block, "prune: passes and statistics": block, "prune: wanda": block, "save": block
    }  # fmt: skip
    save_wide(model, 8, vocab_size=4096, num_attention_heads=2, num_key_value_heads=2)
    (at_first,) = (s for s in of(_streamed(recipe(model))).stages if s.name == "prune: passes and statistics")
    states, given = 8 * 32 * 8 * 4, 2 * 32 * 2 * 4 + 32 * 8
    # When all batches have reached the first block; the head is not tied.
    assert at_first.memory == {
        "weights": 4 * (2 * 4096 * 8 + 8), "hidden states": states, "arguments of blocks": given
    }  # fmt: skip


def _streamed(written: dict[str, Any]) -> dict[str, Any]:
    written["model"]["streaming"] = True
    return written


def test_a_streamed_model_on_the_cpu_holds_another_block_while_it_is_written(model):
    whole, streamed = recipe(model), recipe(model)
    streamed["model"] |= {"streaming": True}
    block = sum(p.numel() for p in tiny_model("llama").model.layers[0].parameters()) * 4
    (stage,) = (s for s in of(streamed).stages if s.name == "prune: wanda")
    assert stage.memory["block being written"] == block
    for other in (of(whole), of(streamed, machine=ASSUMED["h100"])):  # the model's own; in main memory
        assert all("block being written" not in s.memory for s in other.stages)


def test_the_journal_writes_the_weights_of_each_block_and_states_once_if_another_block_follows(model):
    def counted(targets: str, machine: Machine = EVEN) -> tuple[float, float]:
        asked = recipe(model, {"targets": [targets], "pruner": "wanda", **HALF})
        (passes,) = (s.work for s in of(asked, machine=machine).stages if s.name == "prune: passes and statistics")
        return passes["written"], passes["hashed"]

    block, states = 4.0 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64), 4.0 * 8 * 32 * 64
    assert counted("*.layers.1.*") == (block, block)
    assert counted("*") == (3 * block + states, 3 * block)
    assert counted("*", ASSUMED["h100"]) == (3 * block + states, 0.0), "hashed behind the GPU's work"


def test_what_python_does_for_blocks_and_linears_and_choices_by_a_mask_take_a_processor_s_time(model):
    here, gpu = (
        next(s for s in of(recipe(model, *rules("magnitude")), machine=x).stages if s.name.startswith("prune: passes"))
        for x in (EVEN, ASSUMED["h100"])
    )
    blocks, linears = 3, 3 * 7
    weights = 3 * 64 * (64 + 32 + 32 + 64 + 3 * 96)
    assert here.work["launches"] == _BLOCK * blocks + _LINEAR * linears == 6 * gpu.work["launches"]
    assert here.work["moved"] - gpu.work["moved"] == _CHOSEN * (weights + 3 * 2 * 64)


def test_loading_counts_what_a_checkpoint_s_kind_of_file_takes(model, tmp_path):
    dense = of(recipe(model)).stages[0].work
    parameters = 4 * (2 * 128 * 64 + 3 * (64 * (64 + 32 + 32 + 64 + 3 * 96) + 2 * 64) + 64)
    assert (dense["read"], dense["hashed"], dense["dequantized"]) == (parameters, parameters, 0)
    path = write_gguf(tmp_path / "tiny.gguf")
    packed = of({**recipe(model, *rules("magnitude")), "model": {"path": str(path)}}).stages[0].work
    stored = contents_of(path)
    assert (packed["read"], packed["dequantized"]) == (stored.size, stored.quantized)
    assert packed["launches"] == 2 * _ENTRY * stored.entries


def test_saving_counts_the_model_and_the_masks_which_are_checked_as_they_are_joined(model, monkeypatch):
    hashed: list[int] = []
    digest = masks_file._digest
    monkeypatch.setattr(masks_file, "_digest", lambda masks, packed: digest(masks, _noted(packed, hashed)))
    saved = of(recipe(model, *rules("magnitude"))).stages[-1].work
    run(recipe(model, *rules("magnitude")))
    masks = 3 * 64 * (64 + 32 + 32 + 64 + 3 * 96) / 8
    # Once when a block's are written, and as often as is counted when they are joined.
    assert sum(hashed) - masks == saved["hashed"]
    assert saved["written"] == 4 * (2 * 128 * 64 + 3 * (8 * masks / 3 + 2 * 64) + 64) + masks


def _noted(packed: Any, into: list[int]) -> Any:
    for bits in packed:
        into += [tensor.nbytes for tensor in bits.values()]
        yield bits


def test_the_estimate_as_json_has_everything(model):
    found = of(recipe(model, evaluated=True)).to_dict()
    assert found["seconds"] == pytest.approx(found["started_seconds"] + sum(s["seconds"] for s in found["stages"]))
    assert found["not_estimated"] == []
    assert found["memory_bytes"]["interpreter"] > 1e7
    assert found["host_memory_bytes"] == sum(found["memory_bytes"].values())
