"""`benchmarks/accelerator.py` on the CPU, with a tiny block."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return importlib.import_module("accelerator")


@pytest.fixture(scope="module")
def measured(program: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the command writes, with a smaller model for the comparison."""
    output = tmp_path_factory.mktemp("accelerator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "SMALL", program.SIZES["tiny"])
        patch.setattr(sys, "argv", ["accelerator.py", "--output", str(output), "--device", "cpu"])
        program.main()
    return json.loads((output / "accelerator.json").read_text()), (output / "accelerator.md").read_text()


def test_every_method_prunes_the_block_to_its_sparsity_and_twice_to_the_same(
    program: ModuleType, measured: Any
) -> None:
    (block,) = [section["rows"] for title, section in measured[0]["sections"].items() if title.startswith("a block")]
    assert [row["method"] for row in block] == list(program.METHODS)
    assert [row["sparsity"] for row in block] == [
        pytest.approx(0.8 if "80%" in m else 0.5, abs=1e-3) for m in program.METHODS
    ]
    assert all(row["twice the same"] and row["seconds"] >= row["prune"] > 0 for row in block)


def test_masks_of_the_device_are_compared_with_those_of_the_cpu(measured: Any) -> None:
    rows = measured[0]["sections"]["agreement with the CPU"]["rows"]
    assert len(rows) == 9
    assert all(row["equal"] == 1.0 and row["error"] == row["error on the CPU"] for row in rows)


def test_an_agreement_below_one_is_seen(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "SMALL", program.SIZES["tiny"])
    monkeypatch.setattr(program, "METHODS", {"Wanda 50%": program.METHODS["Wanda 50%"]})
    original, calls = program.pruned, []

    def other(model: Any, size: Any, rules: Any, ids: torch.Tensor) -> Any:
        calls.append(1)
        return original(model, size, rules, ids if len(calls) == 1 else ids.flip(1) * 0 + 3)

    monkeypatch.setattr(program, "pruned", other)
    (row,) = program.agreements(torch.device("cpu"))
    assert 0.4 < row["equal"] < 1.0


def test_what_the_device_cannot_do_is_said_and_the_rest_is_measured(measured: Any) -> None:
    found, text = measured
    assert found["sections"]["2:4 products"]["rows"] == []
    assert "Not measured: RuntimeError: needs a CUDA GPU of compute capability 8.0 or later" in text
    assert "| magnitude 50% |" in text
    assert found["machine"] in text


def test_an_error_in_a_section_keeps_the_rows_before_it(program: ModuleType) -> None:
    def rows() -> Any:
        yield {"method": "first"}
        raise RuntimeError("CUDA error")

    section = program.measured("block", rows)
    assert section["rows"] == [{"method": "first"}]
    assert section["not measured"] == "RuntimeError: CUDA error"
    assert "| first |" in program.table("block", section)


def test_smollm2_is_pruned_whole_from_a_gguf_or_its_package(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    class Report:
        seconds, peak_memory_bytes, sparsity = {"prune": 1.0}, 2, 0.5

    def run(recipe: dict[str, Any], **options: Any) -> Report:
        seen.append({**recipe, **options})
        return Report()

    monkeypatch.setattr(program.compressx, "run", run)
    monkeypatch.setattr(program, "estimated", lambda *_: 0.9)
    rows = list(program.wholes(torch.device("cpu"), {"path": "M.gguf"}, "valid.txt", tmp_path))
    assert [row["method"] for row in rows] == list(program.METHODS)
    assert rows[0]["seconds"] == 1.0
    assert rows[0]["estimated"] == 0.9
    assert seen[0]["model"] == {"path": "M.gguf"}
    assert seen[0]["calibration"]["dataset"] == {"text": "valid.txt"}
    assert len({s["output"] for s in seen}) == len(seen)
