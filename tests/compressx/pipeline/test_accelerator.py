"""Whole runs on a pretended accelerator, against the same runs on the CPU: every stage, to the bit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.pipeline.runs import leftovers, recipe, same, stopped, weights

import compressx
from compressx.masks.maskset import MaskSet
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_model, load_tokenizer
from compressx.pipeline.run import loaded_recipe, run
from compressx.pipeline.stages import prepare
from compressx.pipeline.timed import time_run
from compressx.recipe.sources import ModelSource
from compressx.stages.state import RunState

FLOAT32 = {"compute_dtype": "float32"}
"""What is fast on the pretended device says nothing, and masks depend on it."""

REBUILT = {"targets": ["*.v_proj"], "pruner": "wanda", "reconstruct": "sparsegpt", "sparsity": 0.5}
BY_LOSS = {"targets": ["*"], "pruner": "sensitivity", "sparsity": 0.5}
OPEN = {"targets": ["*"], "pruner": "wanda"}
SPARSITIES = {"target": 0.5, "sparsities": [0.4, 0.6], "samples": 4}
TUNED = {"steps": 2, "batch_size": 2}

RUNS: dict[str, tuple[str, tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "divergence": ("llama", (OPEN,), {"allocation": {"method": "divergence", **SPARSITIES}}),
    "owl": ("gpt2", (OPEN,), {"allocation": {"method": "owl", "target": 0.5}}),
    "two pruners": ("gemma3", (REBUILT, BY_LOSS), {}),
    "reconstruct_block": ("mixtral", (), {"reconstruct_block": {"passes": 1}}),
    "finetune": ("llama-tied", (), {"finetune": TUNED}),
    "lora": ("llama", (), {"finetune": {**TUNED, "lora": {"rank": 4}}}),
    "streaming": ("phi3", (BY_LOSS,), {"model": {"streaming": True}}),
    "files": ("llama", (BY_LOSS,), {"calibration": {"memory_limit": "1KB"}}),
    "bfloat16": ("opt", (), {"compute_dtype": "bfloat16", "reconstruct_block": {"passes": 1}, "finetune": TUNED}),
}
"""By what they are about: the model, the rules, and the further sections."""

FAST = {"two pruners", "streaming", "divergence", "files", "finetune"}


def asked(models: Any, about: str, output: str) -> dict[str, Any]:
    kind, rules, sections = RUNS[about]
    whole = recipe(models(kind), *rules, evaluated=True, output=output, **FLOAT32)
    for key, section in sections.items():
        whole[key] = {**whole.get(key, {}), **section} if isinstance(section, dict) else section
    return whole


@pytest.mark.parametrize(
    "about", [pytest.param(about, marks=[] if about in FAST else [pytest.mark.slow]) for about in RUNS]
)
def test_a_run_ends_with_the_weights_and_perplexities_of_one_on_the_cpu(about, models):
    here = run(asked(models, about, "here"), device="cpu")
    with pretended_accelerator() as device:
        there = run(asked(models, about, "there"), device="cuda")
    assert same(weights("here/model"), weights("there/model"))
    assert there.evaluation == here.evaluation
    assert "pretended accelerator" in there.hardware
    assert there.peak_gpu_memory_bytes > here.peak_gpu_memory_bytes == 0
    assert device.launches > 1000
    gc.collect()
    assert device.alive_bytes == 0, "nothing of a run stays on the device"


def test_an_interrupted_run_goes_on_with_the_device_as_if_nothing_had_been(models):
    whole = asked(models, "reconstruct_block", "whole")
    run(whole, device="cpu")
    with pretended_accelerator():
        stopped({**whole, "output": "out"}, 1, device="cuda")
    assert leftovers()
    with pretended_accelerator():
        run({**whole, "output": "out"}, device="cuda", resume=True)
    assert same(weights("whole/model"), weights("out/model"))


@pytest.mark.slow
def test_a_model_that_is_on_the_device_already_is_pruned_there(models):
    given = asked(models, "two pruners", "out")
    run(given, device="cpu")
    checkpoint = find_checkpoint(ModelSource(path=Path(models("gemma3"))))
    with pretended_accelerator():
        model = load_model(checkpoint).to("cuda")
        asks = {key: value for key, value in given.items() if key not in ("model", "output")}
        pruned = compressx.prune(model, load_tokenizer(checkpoint), asks)
        state = dict(pruned.model.state_dict())
        assert {tensor.device.type for tensor in state.values()} == {"cuda"}
        assert same({name: tensor.cpu() for name, tensor in state.items()}, weights("out/model"))
        masks = MaskSet.load("out/masks.safetensors")
        assert all(torch.equal(pruned.masks[name].keep.cpu(), masks[name].keep) for name in masks)


def test_the_time_of_a_run_on_the_device_has_its_seconds_and_the_peak_of_its_memory(models):
    plugins = compressx.load_plugins()
    loaded = loaded_recipe(recipe(models("llama"), **FLOAT32), (), plugins)
    with pretended_accelerator() as device:
        state = RunState(loaded, plugins, torch.device("cuda"), measured=False)
        prepare(state)
        found = time_run(state)
        del state
    assert (found.device, found.blocks) == ("cuda", 3)
    assert found.seconds["prune"] > 0
    assert found.peak_gpu_memory_bytes > 100_000
    gc.collect()
    assert device.alive_bytes == 0, "nothing stays on the device"
