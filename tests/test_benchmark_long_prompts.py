"""The benchmark of long prompts: what it measures of a model, and the table that it makes of answers."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.saved import save_tiny

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_prompts

    return long_prompts


def told(length: int, *, right: bool, kept: float | None, seconds: float) -> dict[str, Any]:
    return {"length": length, "depth": 0.5, "text": "", "read": 8, "kept": kept, "right": right, "seconds": seconds,
            "select": None, "memory": 3_000_000, "reason": "of block 7"}  # fmt: skip


def test_the_table_has_a_row_for_each_method_and_length_in_the_order_of_the_methods(
    program: Any, tmp_path: Path
) -> None:
    answers = tmp_path / "answers"
    answers.mkdir()
    recent = [told(64, right=right, kept=0.5, seconds=s) for right, s in ((True, 1.0), (False, 2.0), (False, 9.0))]
    (answers / "recent.json").write_text(json.dumps([*recent, told(96, right=True, kept=1.0, seconds=4.0)]))
    (answers / "full.json").write_text(json.dumps([told(64, right=True, kept=None, seconds=3.0)]))
    text = program.write(tmp_path)
    assert text.splitlines()[2:5] == [
        "| full | 64 | 1 | 1.00 |  | 3.00 | 0.00 |",
        "| recent | 64 | 3 | 0.33 | 0.50 | 2.00 | 0.00 |",
        "| recent | 96 | 1 | 1.00 | 1.00 | 4.00 | 0.00 |",
    ]
    assert "- recent: of block 7" in text
    with (tmp_path / "long-prompts.csv").open() as file:
        assert [row["how"] for row in csv.DictReader(file)] == ["of block 7"] * 3
    program.draw(tmp_path, ("full", "recent"))
    assert "<svg" in (tmp_path / "long-prompts.svg").read_text()


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
