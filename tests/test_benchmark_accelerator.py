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

from compressx.masks.inspect import fits_two_four
from compressx.models.architecture import survey


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
    assert len(rows) == 9
    assert all(row["equal"] == 1.0 and row["error"] == row["error on the CPU"] for row in rows)


def test_every_stage_of_a_run_ends_on_the_device_as_on_the_cpu(program: ModuleType, finished: Any) -> None:
    rows = finished[0]["sections"]["stages of a run"]["rows"]
    assert [row["stage"] for row in rows] == list(program.STAGES)
    assert all(row["equal"] == 1.0 and row["perplexity"] == row["perplexity on the CPU"] > 1 for row in rows)
    assert [row["sparsity"] for row in rows] == [pytest.approx(0.5, abs=1e-3)] * len(rows)


def test_rounding_changes_the_last_bit_of_half_of_the_weights(program: ModuleType) -> None:
    model = program.model_of(program.SIZES["tiny"], torch.device("cpu"))
    weights = [w.detach() for w in model.parameters() if w.dim() == 2]
    changed = [w.detach() for w in program.rounded(model).parameters() if w.dim() == 2]
    shares = [float((a != b).float().mean()) for a, b in zip(weights, changed, strict=True)]
    assert all(0.4 < share < 0.6 for share in shares)
    assert all(torch.allclose(a, b, rtol=2.0**-22, atol=0.0) for a, b in zip(weights, changed, strict=True))


def test_parts_are_measured_by_name_and_those_that_a_size_does_not_have_are_refused(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called = ["accelerator.py", "--output", str(tmp_path), "--device", "cpu", "--only"]
    monkeypatch.setattr(sys, "argv", [*called, "2:4"])
    program.main()
    assert [*json.loads((tmp_path / "accelerator.json").read_text())["sections"]] == ["2:4 products"]
    monkeypatch.setattr(sys, "argv", [*called, "model"])
    with pytest.raises(SystemExit, match="2"):
        program.main()
    assert "--only model: not measured at this size" in capsys.readouterr().err


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


def test_what_the_device_cannot_do_is_said_and_the_rest_is_measured(finished: Any) -> None:
    found, text = finished
    assert found["sections"]["2:4 products"]["rows"] == []
    assert "2:4 products need an NVIDIA GPU of compute capability 8.0, and this is cpu" in text
    assert "| magnitude 50% |" in text
    assert found["machine"] in text


def test_a_dense_and_a_two_four_model_take_turns(finished: Any) -> None:
    found, text = finished
    dense, sparse = found["sections"]["tokens a second of 2 blocks"]["rows"]
    assert [(x["model"], x["converted"], x["prompt + new"]) for x in (dense, sparse)] == [
        ("dense", 0, "16 + 4"), ("2of4", 0, "16 + 4")
    ]  # fmt: skip
    assert dense["decode, x"] == 1.0
    assert min(x[key] for x in (dense, sparse) for key in ("prefill, tokens/s", "decode, tokens/s", "prefill, x")) > 0
    assert "| dense | 0 | 1 | 16 + 4 |" in text


def test_the_two_four_model_is_two_four_and_the_other_is_dense(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, seen = program.two_four.timed, dict[int, Any]()

    def noted(model: Any, *of: Any) -> Any:
        seen[id(model)] = model
        return timed(model, *of)

    monkeypatch.setattr(program.two_four, "timed", noted)
    model = program.model_of(program.SIZES["tiny"], torch.device("cpu"), 2)
    list(program.two_four.speeds(torch.device("cpu"), model, ((16, 4),), (1,)))
    dense, sparse = seen.values()
    assert dense is model
    assert not any(fits_two_four(x.weight == 0) for x in survey(dense).linears.values())
    assert all(fits_two_four(x.weight == 0) for x in survey(sparse).linears.values())
    kept = sparse.model.layers[0].mlp.up_proj.weight != 0
    assert torch.equal(dense.model.layers[0].mlp.up_proj.weight[kept], sparse.model.layers[0].mlp.up_proj.weight[kept])


def test_every_linear_of_a_block_is_converted_and_multiplies_rows(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that stay as they are, since the products of packed ones need the hardware."""
    packed: list[torch.Tensor] = []
    monkeypatch.setattr(program.two_four, "to_sparse_semi_structured", lambda w: packed.append(w) or w.clone())
    model = program.model_of(program.SIZES["tiny"], torch.device("cpu"), 2)
    ids = torch.randint(100, (2, 8))
    with torch.no_grad():
        expected = model(ids).logits
        assert program.two_four.convert(model) == 2 * 7 == len(packed)
        shapes: list[int] = []
        monkeypatch.setattr(torch.nn.functional, "linear", rows_of(shapes, torch.nn.functional.linear))
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    assert shapes.count(2) == 2 * 7


def rows_of(seen: list[int], linear: Any) -> Any:
    """Return the product that notes of how many dimensions its factor is."""

    def noted(x: torch.Tensor, *of: Any) -> torch.Tensor:
        seen.append(x.dim())
        return linear(x, *of)

    return noted


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
        seconds, peak_memory_bytes, peak_gpu_memory_bytes, sparsity = {"prune": 1.0}, 2, 0, 0.5

    def run(recipe: dict[str, Any], **options: Any) -> Report:
        seen.append({**recipe, **options})
        return Report()

    monkeypatch.setattr(program.compressx, "run", run)
    rows = list(program.wholes(torch.device("cpu"), {"path": "M.gguf"}, "valid.txt", tmp_path))
    assert [row["method"] for row in rows] == list(program.METHODS)
    assert rows[0]["seconds"] == 1.0
    assert seen[0]["model"] == {"path": "M.gguf"}
    assert seen[0]["calibration"]["dataset"] == {"text": "valid.txt"}
    assert len({s["output"] for s in seen}) == len(seen)
