"""Weights that are codes are refused before they are read, by what the files and their headers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compressx.cli.commands import refused
from tests.compressx.saved import save_tiny
from torch import Tensor

from compressx.models.checkpoint import Checkpoint, find_checkpoint, local_folder
from compressx.models.loading import load_model
from compressx.models.packed_folder import pack_folder
from compressx.models.shards import _WEIGHT
from compressx.models.streaming import open_streamed
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import UnsupportedModelError
from compressx.testing import TINY_CONFIGS, tiny_model

WEIGHT = "model.layers.0.mlp.down_proj.weight"
EIGHT, FOUR = torch.float8_e4m3fn, torch.zeros(8, 8, dtype=torch.uint8)
KINDS: dict[str, tuple[dict[str, Tensor], str]] = {
    "fp8": ({WEIGHT: torch.ones(64, 96).to(EIGHT), f"{WEIGHT}_scale": torch.ones(1)}, f"{WEIGHT} of dtype F8_E4M3"),
    "int8": ({WEIGHT: torch.ones(64, 96).to(torch.int8), WEIGHT.replace("weight", "SCB"): torch.ones(64)},
             f"{WEIGHT} of dtype I8"),
    "blocks of fp8, widened": ({f"{WEIGHT}_scale_inv": torch.ones(1, 1)}, f"{WEIGHT}_scale_inv of dtype F32"),
    "GPTQ": ({WEIGHT.replace("weight", "qweight"): torch.ones(8, 64).int()}, "down_proj.qweight of dtype I32"),
    "AWQ's zeros": ({WEIGHT.replace("weight", "qzeros"): torch.ones(8, 64).int()}, "down_proj.qzeros of dtype I32"),
    "NF4": ({WEIGHT: FOUR, f"{WEIGHT}.quant_state.bitsandbytes__nf4": FOUR[0].clone()}, f"{WEIGHT} of dtype U8"),
    "compressed-tensors": ({WEIGHT.replace("weight", "weight_packed"): torch.ones(8, 64).int()}, "weight_packed of"),
    "MXFP4": ({"model.layers.0.mlp.experts.gate_up_proj_blocks": FOUR}, "gate_up_proj_blocks of dtype U8"),
    "scales of MXFP4": ({"a_scales": torch.ones(4).to(torch.float8_e8m0fnu)}, "a_scales of dtype F8_E8M0"),
    "quanto": ({f"{WEIGHT}._data": torch.ones(64, 96).to(torch.int8)}, f"{WEIGHT}._data of dtype I8"),
    "a bias": ({"lm_head.bias": torch.ones(4).to(torch.float8_e5m2)}, "lm_head.bias of dtype F8_E5M2"),
}  # fmt: skip


def changed(folder: Path, tensors: dict[str, Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    return folder


SAID = {
    "config.json": [{"quantization_config": {"quant_method": "fp8"}}, {"text_config": {"quantization_config": {}}},
                    {"compression_config": {"format": "pack"}}],
    "hf_quant_config.json": [{"quantization": {"quant_algo": "FP8"}}],
}  # fmt: skip
CASES = [
    *((tensors, {}, rf"model\.safetensors is quantized: .*{told}") for tensors, told in KINDS.values()),
    *(({}, {name: said}, f"is quantized .{name} has a") for name, every in SAID.items() for said in every),
]


def wrote(folder: Path, configs: dict[str, Any]) -> Path:
    for name, said in configs.items():
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | said))
    return folder


@pytest.mark.parametrize(("tensors", "configs", "told"), CASES)
def test_codes_are_refused_by_their_dtype_or_by_what_any_config_says(tensors, configs, told, tmp_path):
    folder = wrote(changed(save_tiny(tmp_path / "model", "llama"), tensors), configs)
    for read in (lambda: find_checkpoint(ModelSource(path=folder)), lambda: pack_folder(folder, tmp_path / "out")):
        with pytest.raises(UnsupportedModelError, match=f"{told}.*give the model in full precision") as error:
            read()
        assert "\n" not in str(error.value)


def test_a_cache_in_8_bits_alone_is_no_quantized_model(tmp_path):
    said = {"quantization": {"quant_algo": None, "kv_cache": "FP8"}}
    configs = {"hf_quant_config.json": said, "config.json": {"quantization_config": None}}
    folder = wrote(save_tiny(tmp_path / "model", "llama"), configs)
    assert find_checkpoint(ModelSource(path=folder)).location == str(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in {"llama", "gpt2", "mixtral"} else pytest.mark.slow) for x in TINY_CONFIGS]
)
def test_every_matrix_in_integers_would_be_found_and_no_buffer_is_taken_for_one(name):
    with torch.device("meta"):
        model = tiny_model(name)
    for parameter, x in model.named_parameters():
        assert x.dim() < 2 or _WEIGHT.search(parameter), f"{parameter} may be integers"
    for buffer, x in model.named_buffers():
        assert x.is_floating_point() or not _WEIGHT.search(buffer), f"{buffer} may not be integers"


@pytest.mark.parametrize("load", [load_model, local_folder, open_streamed])
def test_codes_from_the_hub_are_refused_after_the_download_and_before_they_are_read(load, tmp_path, monkeypatch):
    folder = changed(save_tiny(tmp_path / "model", "llama"), KINDS["fp8"][0])
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **given: asked.update(given) or str(folder))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    with pytest.raises(UnsupportedModelError, match=f"is quantized: {WEIGHT} of dtype F8_E4M3"):
        load(Checkpoint("org/model"))
    assert asked["ignore_patterns"] == ["*/*", "consolidated*"]


@pytest.mark.parametrize("command", ["plan", "eval", "pack", "inspect"])
def test_every_command_refuses_codes_in_one_line(command, project):
    folder = changed(save_tiny(project / "tiny", "llama"), KINDS["int8"][0])
    text = {"token_perplexity": {"dataset": {"text": str(project / "text.txt")}, "sequence_length": 16, "samples": 1}}
    rules = [{"targets": ["*"], "pruner": "magnitude", "sparsity": 0.5}]
    recipe = {"model": str(folder), "prune": rules, "evaluate": text, "output": "out"}
    (project / "r.yaml").write_text(json.dumps(recipe))
    more = ["--recipe", "r.yaml"] if command == "eval" else []
    given = "r.yaml" if command == "plan" else str(folder)
    said = refused(command, given, *more)
    assert f"is quantized: {WEIGHT} of dtype I8 is a code" in said
    assert len(said.strip().splitlines()) == 1
    assert not (project / "out").exists()


def test_masks_positions_and_counts_in_integers_are_no_codes(tmp_path):
    folder = changed(
        save_tiny(tmp_path / "model", "gpt2"),
        {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "position_ids": torch.arange(64)[None],
         "h.1.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool), "num_batches_tracked": torch.tensor(3)},
    )  # fmt: skip
    assert load_model(find_checkpoint(ModelSource(path=folder))).dtype == torch.float32
