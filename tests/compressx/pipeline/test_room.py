"""Runs that do not fit in memory: refused before they begin, or ended with what to change."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tests.compressx.pipeline.runs import MAGNITUDE, recipe

from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_skeleton
from compressx.pipeline.memory import prune
from compressx.pipeline.run import plan, run
from compressx.recipe.schema import Recipe
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import OutOfMemoryError, RecipeError
from compressx.testing import tiny_model, tiny_tokens
from compressx.training import stage as room
from compressx.training.stage import finetuning_bytes

NO_GPU_MEMORY = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.50 GiB is "
    "free. Process 7 has 77.65 GiB memory in use."
)
NO_MAIN_MEMORY = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
OF_GPU = "4.00 GiB did not fit in cuda:1, where 1.50 GiB of 79.15 GiB are free"
OF_PYTHON = "what is needed did not fit in main memory"
OF_MAIN = "8589934592 bytes did not fit in main memory"
CALIBRATION = (
    "lower calibration.batch_size (4), or lower calibration.samples (8), or lower calibration.sequence_length (32)"
)
STREAMED = "set model.streaming: true"

SENSITIVE = {"targets": ["*"], "pruner": "sensitivity", "sparsity": 0.5}
STAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "load": ("compressx.pipeline.inputs.open_model", {}, f"load: out of memory: an array: {{}}; {STREAMED}"),
    "statistics": (
        "compressx.blocks.select.observe", {},
        f"prune: out of memory: statistics of model.layers.0: {{}}; {CALIBRATION}, or set calibration.memory_limit: "
        f"4GB, or {STREAMED}",
    ),
    "a pruner": (
        "compressx.pruners.wanda.Wanda.prune", {},
        f"prune: out of memory: pruner 'wanda' failed on model.layers.0: {{}}; {CALIBRATION}, or set ",
    ),
    "a block": ("compressx.blocks.prune.advance", {}, "prune: out of memory: running and pruning model.layers.0: {}; "),
    "reconstruction": (
        "compressx.blocks.prune.reconstruct", {"reconstruct_block": {}},
        f"prune: out of memory: training model.layers.0: {{}}; {CALIBRATION}, or set ",
    ),
    "sensitivities": (
        "compressx.blocks.stage.fisher_diagonal", {"prune": [SENSITIVE]},
        f"calibrate: out of memory: an array: {{}}; {CALIBRATION}",
    ),
    "an allocation": (
        "compressx.allocation.stage.allocate",
        {"prune": [{"targets": ["*"], "pruner": "wanda"}], "allocation": {"method": "owl", "target": 0.5}},
        f"allocate: out of memory: an array: {{}}; {CALIBRATION}",
    ),
    "fine-tuning": (
        "compressx.training.finetune._Steps._step", {"finetune": {"gradient_checkpointing": False}},
        "finetune: out of memory: an array: {}; lower finetune.batch_size (4), or lower calibration.sequence_length "
        "(32), or set finetune.lora: {{rank: 16}}, or set finetune.gradient_checkpointing: true, or set "
        "finetune.teacher: none",
    ),
    "evaluation": (
        "compressx.evaluation.token_perplexity.token_perplexity", {"evaluated": True},
        "evaluate dense: <dict>:evaluate: out of memory: evaluator 'token_perplexity': {}; lower "
        f"evaluate.token_perplexity.batch_size (4), or lower "
        f"evaluate.token_perplexity.sequence_length (32), or {STREAMED}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_memory_that_runs_out_is_told_with_what_did_not_fit_and_which_keys_to_change(model, stage, monkeypatch):
    where, sections, told = STAGES[stage]
    for error, missing in ((NO_GPU_MEMORY, OF_GPU), (NO_MAIN_MEMORY, OF_MAIN), (MemoryError(), OF_PYTHON)):
        monkeypatch.setattr(where, Mock(side_effect=error))
        with pytest.raises(OutOfMemoryError, match=f"^{re.escape(told.format(missing))}"):
            run(recipe(model, **sections), restart=True)
    if stage == "a block":
        monkeypatch.setattr(where, Mock(side_effect=RuntimeError("mat1 and mat2 shapes cannot be multiplied")))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run(recipe(model, **sections), restart=True)


def test_a_model_in_memory_cannot_be_streamed_and_is_told_to_be_in_part_pruned(monkeypatch):
    monkeypatch.setattr("compressx.blocks.prune.advance", Mock(side_effect=NO_GPU_MEMORY))
    asked = {"prune": [{"targets": ["*"], "pruner": "wanda", "sparsity": 0.5}]}
    with pytest.raises(OutOfMemoryError, match="; the model is no longer as it was: 0 of 3 blocks") as raised:
        prune(tiny_model("llama"), None, asked, calibration=tiny_tokens())
    assert "streaming" not in str(raised.value)


# --- fine-tuning


def parts_of(asked: dict[str, Any]) -> dict[str, int]:
    """Return what is estimated for a recipe's fine-tuning."""
    skeleton = load_skeleton(find_checkpoint(ModelSource(path=asked["model"]["path"])))
    read = Recipe.model_validate(asked)
    assert read.finetune is not None
    teacher = sum(p.numel() for p in skeleton.parameters()) if read.finetune.teacher == "dense" else 0
    return finetuning_bytes(read, read.finetune, plan(asked), skeleton, 4, teacher)


def test_fine_tuning_is_refused_before_anything_is_read_if_it_cannot_fit(model, monkeypatch):
    """What fits is not refused, processes that do not train hold their models too, and a plan refuses nothing."""
    asked = recipe(model, finetune={"steps": 2})
    needed = sum(parts_of(asked).values())
    monkeypatch.setattr(room, "free_memory", lambda _: needed)
    run({**asked, "output": "fits"})
    monkeypatch.setattr("compressx.pipeline.inputs.read_all", lambda *_, **__: pytest.fail("text was read"))
    whole = 2 * 4 * sum(p.numel() for p in tiny_model("llama").parameters())
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "3")
        with pytest.raises(RecipeError, match=f"models of the other processes {re.escape(f'{whole / 1e9:.3g}')} GB"):
            run(asked)
    monkeypatch.setattr(room, "free_memory", lambda _: needed - 1)
    with pytest.raises(RecipeError) as raised:
        run(asked)
    told = str(raised.value)
    assert told.startswith(f"<dict>:finetune: fine-tuning needs at least {needed / 1e9:.3g} GB of memory (weights ")
    assert f"but cpu has {(needed - 1) / 1e9:.3g} GB" in told
    for option, change in (
        ("finetune.lora: {rank: 16}", {"lora": {"rank": 16}}),
        ("finetune.teacher: none", {"teacher": "none"}),
    ):
        smaller = sum(parts_of({**asked, "finetune": {"steps": 2, **change}}).values())
        assert smaller < needed
        assert f"{option} ({smaller / 1e9:.3g} GB)" in told
    assert not Path("out").exists()
    monkeypatch.setattr(room, "free_memory", lambda _: 0)
    plan(asked)


def test_of_a_model_in_memory_only_what_comes_on_top_has_to_be_free(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(room, "free_memory", lambda _: 0)
    has = sum(p.numel() for p in model.parameters()) * 4
    with pytest.raises(RecipeError, match=f"fine-tuning needs at least .*but cpu has {has / 1e9:.3g} GB"):
        prune(model, None, {"prune": [MAGNITUDE], "finetune": {"steps": 1}}, calibration=tiny_tokens())


def tensor_bytes() -> int:
    """Count the bytes of all tensors that Python can reach."""
    gc.collect()
    plain = (torch.Tensor, torch.nn.Parameter)  # no subclasses that other tests have left, which hold no memory
    storages = [x.untyped_storage() for x in gc.get_objects() if type(x) in plain and not x.is_meta]
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


@pytest.mark.parametrize(
    "change",
    [{}, *(pytest.param({key: value}, marks=pytest.mark.slow)
           for key, value in (("teacher", "none"), ("held_out", 0), ("lora", {"rank": 4})))],
    ids=str,
)  # fmt: skip
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
