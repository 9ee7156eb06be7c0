"""The memory of loading a model: by count, and by what a process of its own holds at its peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.gguf_files import write_gguf
from tests.compressx.saved import save_wide

from compressx.costs.loading import dequantizing
from compressx.costs.machine import assumed
from compressx.costs.recipe import estimate
from compressx.models.gguf_header import Stored
from compressx.pipeline.preparation import loaded_recipe, prepare
from compressx.plugins.manager import load_plugins

ROWS = 200_000
"""Of an embedding that has nearly all of a model's weights, as those of small models with large vocabularies."""


def test_a_large_tensor_is_held_twice_while_it_is_dequantized_beside_what_was_made_before():
    large, small = Stored(1000, 500, "Q4_K"), Stored(10, 5, "Q4_K")
    assert dequantizing([small, large], 4) == {
        "weights": 40, "checkpoint's file": 505, "tensors being dequantized": 40 + 8000
    }  # fmt: skip


def test_the_numbers_of_a_large_tensor_stay_until_those_of_the_next_one_are_there():
    large, small = Stored(1000, 500, "Q4_K"), Stored(10, 5, "Q4_K")
    assert dequantizing([large, small], 4) == {
        "weights": 4000, "checkpoint's file": 505, "tensors being dequantized": 4000 + 80
    }  # fmt: skip


def test_many_small_tensors_are_held_once_and_the_last_one_three_times():
    found = dequantizing([Stored(10, 5, "Q4_K")] * 100, 4)
    assert found == {"weights": 99 * 40, "checkpoint's file": 500, "tensors being dequantized": 3 * 40}


def test_floats_of_the_file_are_copied_and_a_narrower_copy_is_made_of_them():
    assert dequantizing([Stored(10, 40, "F32")], 4)["tensors being dequantized"] == 40
    assert dequantizing([Stored(10, 40, "F32")], 2)["tensors being dequantized"] == 40 + 20
    assert dequantizing([Stored(10, 20, "F16")], 4)["tensors being dequantized"] == 40 + 40
    assert dequantizing([Stored(10, 5, "Q4_K")], 2)["tensors being dequantized"] == 40 + 40 + 20


LOADED = """
import gc, json, sys

import psutil
import torch

from compressx.models.access import weights_fingerprint
from compressx.models.checkpoint import find_checkpoint
from compressx.models.loading import load_skeleton
from compressx.models.streaming import open_model
from compressx.recipe.sources import ModelSource
from compressx.runtime.timing import forget_peaks, peak_resident_bytes

torch.set_num_threads(1)
source = ModelSource.model_validate(json.loads(sys.argv[1]))
checkpoint = find_checkpoint(source)
load_skeleton(checkpoint)
gc.collect()
forget_peaks()
before = psutil.Process().memory_info().rss
weights_fingerprint(open_model(checkpoint, source.streaming, torch.device("cpu")))
print(peak_resident_bytes() - before)
"""


def held(source: dict[str, Any]) -> float:
    """Return the most bytes that a new process holds more than before while it loads a model."""
    arguments = [sys.executable, "-c", LOADED, json.dumps(source)]
    return float(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    """Save models with a large embedding in some formats; return how a recipe names them."""
    wide: dict[str, Any] = {"vocab_size": ROWS, "tie_word_embeddings": True}
    single = str(save_wide(folder / "float32" / "model", 64, **wide))
    half = str(save_wide(folder / "bfloat16" / "model", 64, dtype=torch.bfloat16, **wide))
    packed = str(write_gguf(folder / "large.gguf", rows=ROWS))
    return {
        "as stored": {"path": single}, "converted": {"path": half, "dtype": "float32"},
        "streamed": {"path": single, "streaming": True}, "dequantized": {"path": packed},
        "dequantized to bfloat16": {"path": packed, "dtype": "bfloat16"},
    }  # fmt: skip


def expected(source: dict[str, Any]) -> float:
    """Return the bytes that a plan counts for loading."""
    known = load_plugins()
    rule = {"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}
    loaded = loaded_recipe({"model": source, "prune": [rule], "output": "out"}, (), known)
    made = prepare(loaded, known)
    planned = estimate(loaded.recipe, made.plan, made.checkpoint, lambda: assumed("cpu:100GF,10GB/s"))
    assert planned.stages[0].name == "load"
    return sum(planned.stages[0].memory.values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a part of a process is Linux's")
def test_the_peak_of_loading_is_what_is_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = sources(tmp_path)
    assert {name: held(x) for name, x in given.items()} == pytest.approx(
        {name: expected(x) for name, x in given.items()}, rel=0.15
    )
