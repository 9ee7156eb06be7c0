"""The header of a GGUF file is gone through as often as is counted, and no more."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
import torch
from gguf import quants
from tests.compressx.gguf_files import BLOCKS, INNER, LICENSE, WIDTH, write_gguf

from compressx.models.checkpoint import Checkpoint, find_checkpoint, license_of
from compressx.models.gguf_header import values_of
from compressx.models.loading import load_model
from compressx.recipe.sources import ModelSource


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return find_checkpoint(ModelSource(path=write_gguf(tmp_path / "tiny.gguf")))


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


@pytest.mark.parametrize("longer", [0, 1])
def test_the_license_of_a_file_is_known_without_a_load_and_after_another_took_its_place(checkpoint, longer, tmp_path):
    assert license_of(checkpoint) == {"license": LICENSE}
    path = tmp_path / "tiny.gguf"
    data = path.read_bytes()
    assert data.count(LICENSE.encode()) == 1
    path.write_bytes(data.replace(LICENSE.encode(), b"mit-license"[: len(LICENSE)]) + bytes(longer))
    os.utime(path, ns=(10**18, 10**18 + longer))
    assert values_of(path)["general.license"] == "mit-licens"
