"""The benchmark of long prompts: what it measures of a model, and the table that it makes of answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.compressx.saved import save_tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
def test_a_model_answers_the_same_prompts_by_every_method_and_a_second_call_measures_nothing_again(
    tmp_path: Path,
) -> None:
    saved = save_tiny(tmp_path / "model", "llama")
    (tmp_path / "hay.txt").write_text("w1 w2 w3. " * 100)
    command = [
        sys.executable, str(BENCHMARKS / "long_prompts.py"), "--model", str(saved), "--text", str(tmp_path / "hay.txt"),
        "--output", str(tmp_path / "out"), "--lengths", "80", "100", "--depths", "2", "--needles", "1",
        "--keep", "0.5", "--tokens", "4", "--dtype", "float32", "--methods", "full", "recent",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    full, recent = (json.loads((tmp_path / "out/answers" / f"{m}.json").read_text()) for m in ("full", "recent"))
    assert [x["read"] for x in full] == [80, 80, 100, 100]
    assert [x["read"] for x in recent] == [40, 40, 50, 50]
    assert [(x["length"], x["depth"]) for x in full] == [(x["length"], x["depth"]) for x in recent]
    assert recent[0]["kept"] < 0.5 < recent[1]["kept"], "the end is kept, and of the beginning four tokens"
    assert all(x["seconds"] > 0 and x["memory"] > 0 for x in (*full, *recent))
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "of 4" not in again.stdout, "nothing is measured again"
    assert "| recent | 100 | 2 |" in again.stdout
