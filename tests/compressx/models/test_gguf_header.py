"""The header of a GGUF file is gone through as often as is counted, and no more."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import pytest
import torch
from gguf import gguf_reader, quants
from tests.compressx.gguf_files import BLOCKS, INNER, LICENSE, WIDTH, write_gguf
from transformers import modeling_gguf_pytorch_utils as of_transformers

from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.gguf_header import contents_of, values_of
from compressx.models.license import license_of
from compressx.models.loading import load_model, load_skeleton, load_tokenizer
from compressx.recipe.sources import ModelSource


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return find_checkpoint(ModelSource(path=write_gguf(tmp_path / "tiny.gguf")))


def counting(counts: Counter[str], name: str, made: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        result = made(*args, **kwargs)
        if name == "dequantize" and args[1].name != "F32":
            counts["dequantized"] += result.size
        return result

    return call


def test_a_load_parses_the_header_once_maps_names_once_and_dequantizes_what_is_counted(
    checkpoint, tmp_path, monkeypatch
):
    counts: Counter[str] = Counter()
    monkeypatch.chdir(tmp_path)  # where the file's bare name is a path, too
    made = gguf_reader.GGUFReader.__init__
    with (
        patch.object(gguf_reader.GGUFReader, "__init__", counting(counts, "header", made)),
        patch.object(gguf, "get_tensor_name_map", counting(counts, "names", gguf.get_tensor_name_map)),
        patch.object(gguf, "dequantize", counting(counts, "dequantize", quants.dequantize)),
        patch.object(
            of_transformers, "_gguf_parse_value", counting(counts, "entries", of_transformers._gguf_parse_value)
        ),
    ):
        load_skeleton(checkpoint)
        load_tokenizer(checkpoint)
        planned = contents_of(tmp_path / "tiny.gguf")
        before = counts["entries"]
        model = load_model(checkpoint)
        license_of(checkpoint)
    assert (counts["header"], counts["names"]) == (1, 1)
    # The config and the weights; the architecture and the name of the model are looked up by themselves.
    assert 0 <= counts["entries"] - before - 2 * planned.entries <= 4
    assert counts["dequantized"] == planned.quantized
    assert planned.quantized == sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert planned.size == (tmp_path / "tiny.gguf").stat().st_size


def test_the_weights_are_those_of_the_file_and_not_of_its_namesake_in_the_working_directory(
    checkpoint, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    write_gguf(tmp_path / "elsewhere" / "tiny.gguf", seed=1)
    monkeypatch.chdir(tmp_path / "elsewhere")
    model = load_model(checkpoint)
    down = next(x for x in gguf.GGUFReader(tmp_path / "tiny.gguf").tensors if x.name == "blk.1.ffn_down.weight")
    stored = torch.from_numpy(quants.dequantize(down.data, down.tensor_type).copy())
    assert stored.shape == (WIDTH, INNER)
    assert torch.equal(model.model.layers[BLOCKS - 1].mlp.down_proj.weight, stored)


def test_the_license_of_a_file_is_known_without_a_load_and_after_another_took_its_place(checkpoint, tmp_path):
    assert license_of(checkpoint) == {"license": LICENSE}
    path = tmp_path / "tiny.gguf"
    data = path.read_bytes()
    assert data.count(LICENSE.encode()) == 1
    path.write_bytes(data.replace(LICENSE.encode(), b"mit-license"[: len(LICENSE)]) + b"\0")
    assert values_of(path)["general.license"] == "mit-licens"
