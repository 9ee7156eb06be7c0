"""`benchmarks/accelerator.py` on the CPU, with a tiny block."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return importlib.import_module("accelerator")


@pytest.fixture(scope="module")
def finished(program: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the command writes, with a smaller model for the comparison."""
    output = tmp_path_factory.mktemp("accelerator")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "SMALL", program.SIZES["tiny"])
        patch.setattr(sys, "argv", ["accelerator.py", "--output", str(output), "--device", "cpu"])
        program.main()
    return json.loads((output / "accelerator.json").read_text()), (output / "accelerator.md").read_text()


def test_every_method_prunes_the_block_to_its_sparsity_and_twice_to_the_same(
    program: ModuleType, finished: Any
) -> None:
    (block,) = [section["rows"] for title, section in finished[0]["sections"].items() if title.startswith("a block")]
    assert [row["method"] for row in block] == list(program.METHODS)
    assert [row["sparsity"] for row in block] == [
        pytest.approx(0.8 if "80%" in m else 0.5, abs=1e-3) for m in program.METHODS
    ]
    assert all(row["twice the same"] and row["seconds"] >= row["prune"] > 0 for row in block)


def test_masks_of_the_device_are_compared_with_those_of_the_cpu(finished: Any) -> None:
    rows = finished[0]["sections"]["agreement with the CPU"]["rows"]
    assert len(rows) == 8
    assert all(row["equal"] == 1.0 and row["error"] == row["error on the CPU"] for row in rows)


def test_every_stage_of_a_run_ends_on_the_device_as_on_the_cpu(program: ModuleType, finished: Any) -> None:
    rows = finished[0]["sections"]["stages of a run"]["rows"]
    assert [row["stage"] for row in rows] == list(program.STAGES)
    assert all(row["equal"] == 1.0 and row["perplexity"] == row["perplexity on the CPU"] > 1 for row in rows)
    assert [row["sparsity"] for row in rows] == [pytest.approx(0.5, abs=1e-3)] * len(rows)


def test_what_the_device_cannot_do_is_said_and_the_rest_is_measured(finished: Any) -> None:
    found, text = finished
    assert found["sections"]["2:4 products"]["rows"] == []
    assert "2:4 products need an NVIDIA GPU of compute capability 8.0, and this is cpu" in text
    assert "| magnitude 50% |" in text
    assert found["machine"] in text
