"""Whole runs on a pretended accelerator, against the same runs on the CPU: every stage, to the bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.pipeline.runs import recipe, same, weights

import compressx
from compressx.pipeline.run import loaded_recipe, run
from compressx.pipeline.stages import prepare
from compressx.pipeline.timed import time_run
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
    "two pruners": ("gemma3", (REBUILT, BY_LOSS), {}),
    "reconstruct_block": ("mixtral", (), {"reconstruct_block": {"passes": 1}}),
    "finetune": ("llama-tied", (), {"finetune": TUNED}),
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
