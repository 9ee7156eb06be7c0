"""The arithmetic of memory and disk, and runs that do not fit: refused first, or ended with what to change."""

from __future__ import annotations

import gc
import re
import shutil
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.compressx.pipeline.runs import MAGNITUDE, recipe

from compressx.models.architecture import architecture_of
from compressx.pipeline import sizes
from compressx.pipeline.memory import prune
from compressx.pipeline.run import loaded_recipe, plan, run
from compressx.pipeline.stages import prepare
from compressx.plugins.manager import load_plugins
from compressx.runtime.errors import ArtifactError, OutOfMemoryError, RecipeError
from compressx.stages.state import RunState
from compressx.testing import tiny_model, tiny_tokens
from compressx.training import stage as training

STATES = 8 * 32 * 64 * 4
"""Bytes of the hidden states of the calibration text."""

SHAPES = [x.weight.shape for x in architecture_of(tiny_model("llama")).linears.values()]
ADAPTERS, LINEARS = sum(2 * sum(shape) for shape in SHAPES), sum(shape.numel() for shape in SHAPES)


def prepared(asked: dict[str, Any]) -> RunState:
    plugins = load_plugins()
    state = RunState(loaded_recipe(asked, (), plugins), plugins, measured=False)
    prepare(state)
    return state


def test_memory_is_that_of_weights_hidden_states_and_statistics(model):
    """Hidden states twice with dense ones, not at all in files; weights of two blocks where they are streamed."""
    tiny = tiny_model("llama")
    whole, block = (4 * sum(p.numel() for p in x.parameters()) for x in (tiny, tiny.model.layers[0]))
    found = sizes.memory_bytes(prepared(recipe(model, {"targets": ["*"], "pruner": "sparsegpt", "sparsity": 0.5})))
    hessians = sum(8 * n**2 + 8 for n in (64, 96))  # of inputs of two widths, each with a count of tokens
    assert found == {"weights": whole, "hidden states": STATES, "statistics of the largest block": hessians}
    asked = recipe(model, reconstruct_block={}, model={"path": str(model), "streaming": True})
    streamed = sizes.memory_bytes(prepared(asked))
    assert (streamed["hidden states"], streamed["two blocks' weights"]) == (2 * STATES, 2 * block)
    asked["calibration"]["memory_limit"] = STATES
    assert "hidden states" not in sizes.memory_bytes(prepared(asked))
    assert sizes.memory_bytes(prepared(recipe(model, MAGNITUDE))) == {"weights": whole}
    compared = {"fidelity": {"dataset": {"text": str(model.with_name("text.txt"))}, "sequence_length": 32}}
    found = sizes.memory_bytes(prepared(recipe(model, MAGNITUDE, evaluate=compared)))
    assert found == {"weights": whole, "the dense model's": whole}


WHOLE, BLOCKS = (
    4 * sum(p.numel() for p in x.parameters()) for x in (tiny_model("llama"), tiny_model("llama").model.layers)
)
MANY = {"samples": 64}  # whose hidden states are larger than the model


@pytest.mark.parametrize(
    ("calibration", "sections", "largest"),
    [
        ({}, {}, f"the model {WHOLE}"),
        (MANY, {}, f"hidden states {2 * 8 * STATES}"),
        (MANY | {"memory_limit": STATES}, {}, f"hidden states {3 * 8 * STATES}"),
        (MANY, {"reconstruct_block": {}}, f"hidden states {4 * 8 * STATES}"),
        ({}, {"finetune": {}}, f"two checkpoints of fine-tuning {2 * 16 * LINEARS}"),
        ({}, {"finetune": {"lora": {"rank": 2}}}, f"one checkpoint with the model {16 * ADAPTERS + WHOLE}"),
    ],
)
def test_a_disk_without_room_is_refused_with_what_is_needed_and_what_is_free(
    model, monkeypatch, calibration, sections, largest
):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    asked = recipe(model, **sections)
    asked["calibration"] |= calibration
    parts = f"finished blocks {BLOCKS}, masks {2 * LINEARS // 8}, {largest}"
    needed = BLOCKS + 2 * LINEARS // 8 + int(largest.rpartition(" ")[2])
    with pytest.raises(ArtifactError, match=f"^<dict>:output: output out needs {needed} bytes: {parts}; .* has 1000 b"):
        plan(asked)


# --- memory that runs out

NO_GPU_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.50 GiB is "
    "free. Process 7 has 77.65 GiB memory in use."
)
OF_GPU = "4.00 GiB did not fit in cuda:1, where 1.50 GiB of 79.15 GiB are free"
LESS = "lower calibration.batch_size, samples or sequence_length, or set calibration.memory_limit: 4GB"
STREAMED = ", or set model.streaming: true"

STAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "load": ("compressx.pipeline.inputs.open_model", {}, "load: out of memory: an array: {}; set model.streaming: "),
    "statistics": (
        "compressx.blocks.select.observe", {},
        f"prune: out of memory: statistics of model.layers.0: {{}}; {LESS}{STREAMED}",
    ),
    "a pruner": (
        "compressx.api.scores._ScorePruner.prune", {},
        f"prune: out of memory: pruner 'wanda' failed on model.layers.0: {{}}; {LESS}",
    ),
    "reconstruction": (
        "compressx.blocks.prune.reconstruct", {"reconstruct_block": {}},
        f"prune: out of memory: training model.layers.0: {{}}; {LESS}",
    ),
    "an allocation": (
        "compressx.allocation.stage.measured",
        {"prune": [{"targets": ["*"], "pruner": "wanda"}], "allocation": {"method": "owl", "target": 0.5}},
        f"allocate: out of memory: an array: {{}}; {LESS}",
    ),
    "fine-tuning": (
        "compressx.training.finetune._Steps._step", {"finetune": {}},
        "finetune: out of memory: an array: {}; lower finetune.batch_size or sequence_length, or set finetune.lora: "
        "{{rank: 16}}, finetune.gradient_checkpointing: true or finetune.teacher: none",
    ),
    "evaluation": (
        "compressx.evaluation.token_perplexity.measure_tokens", {"evaluated": True},
        "evaluate dense: <dict>:evaluate: out of memory: evaluator 'token_perplexity': {}; lower batch_size or "
        f"sequence_length of the evaluator{STREAMED}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_memory_that_runs_out_is_told_with_what_did_not_fit_and_which_keys_to_change(model, stage, monkeypatch):
    where, sections, told = STAGES[stage]
    monkeypatch.setattr(where, Mock(side_effect=NO_GPU_MEMORY))
    with pytest.raises(OutOfMemoryError, match=f"^{re.escape(told.format(OF_GPU))}"):
        run(recipe(model, **sections))


def test_memory_of_a_model_that_is_in_memory_is_told_without_streaming_and_other_errors_as_they_are(monkeypatch):
    asked = {"prune": [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]}
    no_main_memory = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)"
    )
    for raised, error, told in (
        (no_main_memory, OutOfMemoryError, f"8589934592 bytes did not fit in main memory; {LESS}; the model is no lon"),
        (MemoryError(), OutOfMemoryError, f"what is needed did not fit in main memory; {LESS}; the model is no longer"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError, "^mat1 and mat2"),
    ):
        monkeypatch.setattr("compressx.blocks.prune.advance", Mock(side_effect=raised))
        with pytest.raises(error, match=told):
            prune(tiny_model("llama"), None, asked, calibration=tiny_tokens())


# --- fine-tuning


def parts_of(asked: dict[str, Any]) -> dict[str, int]:
    """Return what is estimated for a recipe's fine-tuning."""
    state = prepared(asked)
    assert state.recipe.finetune is not None
    return training.finetuning_bytes(state, state.recipe.finetune, state.plan)


def test_fine_tuning_is_refused_before_anything_is_read_if_it_cannot_fit(model, monkeypatch):
    """What fits is not refused, processes that do not train hold their models too, and a plan refuses nothing."""
    asked = recipe(model, finetune={"steps": 2})
    needed = sum(parts_of(asked).values())
    monkeypatch.setattr(training, "free_memory", lambda _: needed)
    run({**asked, "output": "fits"})
    monkeypatch.setattr("compressx.pipeline.inputs.read_all", lambda *_, **__: pytest.fail("text was read"))
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(
            RecipeError, match=f"models of the other processes {re.escape(f'{2 * WHOLE / 1e9:.3g}')} GB"
        ):
            run(asked)
    monkeypatch.setattr(training, "free_memory", lambda _: needed - 1)
    told = f"^<dict>:finetune: fine-tuning needs at least {needed / 1e9:.3g} GB of memory .weights .* but cpu has "
    with pytest.raises(RecipeError, match=told + rf"{(needed - 1) / 1e9:.3g} GB; set finetune.lora: {{rank: 16}} or"):
        run(asked)
    plan(asked)
    for change in ({"lora": {"rank": 16}}, {"teacher": "none"}, {"batch_size": 1}):
        assert sum(parts_of({**asked, "finetune": {"steps": 2, **change}}).values()) < needed


def test_of_a_model_in_memory_only_what_comes_on_top_has_to_be_free(monkeypatch):
    monkeypatch.setattr(training, "free_memory", lambda _: 0)
    with pytest.raises(RecipeError, match=f"fine-tuning needs at least .*but cpu has {WHOLE / 1e9:.3g} GB"):
        prune(tiny_model("llama"), None, {"prune": [MAGNITUDE], "finetune": {"steps": 1}}, calibration=tiny_tokens())


def tensor_bytes() -> int:
    """Count the bytes of all tensors that Python can reach."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)  # no subclasses that other tests have left, which hold no memory
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in plain and not x.is_meta]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


@pytest.mark.parametrize("change", [{}, pytest.param({"lora": {"rank": 4}}, marks=pytest.mark.slow)], ids=str)
def test_the_estimate_is_what_the_tensors_of_a_training_take(model, change):
    """Between two steps there are no gradients and no logits."""
    asked = recipe(model, finetune={"steps": 2, **change})
    expected = {k: v for k, v in parts_of(asked).items() if k not in {"gradients", "logits"}}
    before, seen = tensor_bytes(), []

    def progress(stage: str, done: int, *_: Any) -> None:
        if stage == "finetune" and done == 2:
            seen.append(tensor_bytes() - before)

    run(asked, progress=progress)
    assert seen[0] == pytest.approx(sum(expected.values()), rel=0.08)
