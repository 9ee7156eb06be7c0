"""`compressx bench` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.cli.commands import invoke, printed, refused
from tests.compressx.evaluation.benched import inside
from tests.compressx.gguf_files import write_gguf
from tests.compressx.saved import save_tiny

from compressx.evaluation import bench as benching
from compressx.evaluation.bench import BenchSettings
from compressx.evaluation.speed import sizes_of_gguf
from compressx.report.speeds import Length


@pytest.fixture
def work(saved: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, which is timed in this process."""
    (project / "model").symlink_to(saved / "model")
    monkeypatch.setitem(benching.bench.__kwdefaults__, "start", inside)
    return project


def test_two_models_are_shown_side_by_side(work):
    shown = printed("bench", "model", "model", "--prompt-tokens", "4,8", "--new-tokens", "3", "--rounds", "2")
    rows = [line.split() for line in shown.splitlines()]
    assert [row[: row.index("float32")] for row in rows if "float32" in row] == [["model"], ["model", "(2)"]]
    assert [row[:2] for row in rows if row[:1] == ["prefill"]] == [["prefill", "4"]] * 2 + [["prefill", "8"]] * 2
    decode = [" ".join(row) for row in rows if row[:1] == ["decode"]]
    assert [text[: text.index(" model")] for text in decode] == ["decode 3 after 4"] * 2 + ["decode 3 after 8"] * 2
    assert decode[1].startswith("decode 3 after 4 model (2) ")
    assert "the same random token ids below 128." in " ".join(shown.split())


def test_the_default_prompt_is_what_the_positions_leave_and_is_said(work):
    done = invoke("bench", "model", "model", "--new-tokens", "3,120", "--rounds", "1", "--json")
    speeds = json.loads(done.stdout)["models"][0]["speeds"]
    assert [(x["prompt"], x["new"]) for x in speeds] == [(125, 3), (8, 120)]
    assert "WARNING timing 125 + 3, 8 + 120 tokens: model has 128 positions" in done.stderr
    assert done.stderr.count("positions") == 1


def test_a_base_is_that_of_the_models_that_need_one(work):
    printed("pack", "model", "--base", "model", "-o", "packed")
    few = ["--prompt-tokens", "4", "--new-tokens", "2", "--rounds", "1", "--base", "./model"]
    shown = printed("bench", "model", "./packed", *few)
    assert "packed" in shown
    assert "model is not packed against a base; leave --base" in refused("bench", "model", *few)


def test_json_has_every_figure_and_output_gets_a_report(work):
    plain = json.loads(printed("bench", "model", "--prompt-tokens", "4", "--new-tokens", "3", "--rounds", "2",
                               "--batch", "2", "--output", "speed", "--json"))  # fmt: skip
    assert (plain["batch"], plain["rounds"], plain["ids_below"]) == (2, 2, 128)
    [speed] = plain["models"][0]["speeds"]
    assert (speed["prompt"], speed["new"]) == (4, 3)
    assert len(speed["decode"]["seconds"]) == 2
    rate = speed["decode"]["tokens_per_second"]
    assert rate["most"] == pytest.approx(2 * 2 / min(speed["decode"]["seconds"]))
    assert {p.name for p in Path("speed").iterdir()} == {"bench.md", "bench.json", "bench.svg"}
    assert json.loads(Path("speed/bench.json").read_text()) == plain
    assert "written to speed/bench.md" in printed("bench", "model", "--prompt-tokens", "4", "--new-tokens", "2",
                                                  "--rounds", "1", "--output", "speed")  # fmt: skip


def test_every_prompt_is_combined_with_every_new_and_all_options_are_passed_on(work, monkeypatch):
    seen: list[Any] = []
    original = benching.bench
    monkeypatch.setattr(benching, "bench", lambda sources, asked, **_: seen.append((sources, asked)) or original(
        sources[:1], BenchSettings((Length(2, 2),), rounds=1), start=inside))  # fmt: skip
    printed("bench", "model", "model", "--prompt-tokens", "4, 8", "--prompt-tokens", "8", "--new-tokens", "2,3",
            "--batch", "3", "--rounds", "4", "--threads", "1",
            "--dtype", "bfloat16", "--device", "cpu")  # fmt: skip
    [(sources, asked)] = seen
    lengths = (Length(4, 2), Length(4, 3), Length(8, 2), Length(8, 3))
    assert asked == BenchSettings(lengths, batch=3, rounds=4, device="cpu", threads=1)
    assert [(str(s.path), s.dtype) for s in sources] == [("model", "bfloat16")] * 2


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_timed_or_else_the_figures_are_shown(
    work, monkeypatch
):
    Path("file").touch()
    short = ("bench", "model", "--prompt-tokens", "4", "--new-tokens", "2", "--rounds", "1", "--output")
    with monkeypatch.context() as patched:
        patched.setattr(benching, "bench", None)
        assert "cannot write file" in refused(*short, "file")
    Path("speed/bench.json").mkdir(parents=True)  # in the way of the file
    for more, shown in (((), "tokens/s"), (("--json",), "tokens_per_second")):
        done = invoke(*short, "speed", *more)
        assert (done.exit_code, shown in done.stdout) == (2, True)
        assert "cannot write speed/bench.json" in done.stderr


def test_mistakes_are_refused_with_the_option_and_what_is_expected(work):
    assert "--prompt-tokens 1x: '1x' is no whole number; expected as in --prompt-tokens 128,512" in refused(
        "bench", "model", "--prompt-tokens", "1x"
    )
    assert "--new-tokens 4,: '' is no whole number" in refused("bench", "model", "--new-tokens", "4,")
    assert "--rounds 0: expected at least 1" in refused("bench", "gone", "--rounds", "0")
    assert (
        "model: --prompt-tokens 100, --new-tokens 64: a prompt of 100 tokens and 64 after it are more than"
        in refused("bench", "model", "--prompt-tokens", "100")
    )
    assert "model: --prompt-tokens 1, --new-tokens 128: " in refused("bench", "model", "--new-tokens", "128")
    assert "model is a path, and only hub models have revisions" in refused("bench", "model", "--revision", "main")


@pytest.mark.slow
def test_llama_cpp_times_gguf_files_as_it_runs_them(work):
    write_gguf(work / "tiny.gguf")
    few = ["--engine", "llama.cpp", "--rounds", "1", "--new-tokens", "3"]
    plain = json.loads(printed("bench", "tiny.gguf", "tiny.gguf", *few, "--prompt-tokens", "8", "--json"))
    first, second = plain["models"]
    assert (first["dtype"], first["file_bytes"]) == ("GUESSED", (work / "tiny.gguf").stat().st_size)
    assert first["parameters"] == 2 * 32 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96) + 5 * 64
    assert first["read_bytes"] == first["weight_bytes"] - 32 * 64 * 18 // 32  # a row of the input embedding is read
    assert "llama.cpp by xllamacpp" in first["machine"]
    assert [x["speeds"][0]["decode"]["seconds"][0] > 0 for x in (first, second)] == [True, True]
    done = invoke("bench", "tiny.gguf", *few, "--json")
    assert "WARNING timing 125 + 3 tokens: tiny.gguf has 128 positions" in done.stderr


def test_a_type_that_the_package_does_not_know_is_said_to_be_a_guess(tmp_path):
    path = write_gguf(tmp_path / "new.gguf", keys={"general.file_type": 999})
    assert sizes_of_gguf(path)["dtype"] == "GUESSED"


def test_llama_cpp_refuses_what_it_cannot_time(work, monkeypatch):
    write_gguf(work / "tiny.gguf")
    engine = ["--engine", "llama.cpp"]
    assert "model: --engine llama.cpp reads GGUF files; write one by compressx export model" in refused(
        "bench", "model", *engine
    )
    assert "--engine llama.cpp times one sequence at a time on the CPU" in refused(
        "bench", "tiny.gguf", *engine, "--batch", "2"
    )
    with (work / "cut.gguf").open("wb") as file:
        file.write((work / "tiny.gguf").read_bytes()[:-40])
    assert "cut.gguf" in refused("bench", "cut.gguf", *engine)
    write_gguf(work / "odd.gguf", keys={"llama.attention.head_count": 5})
    assert "odd.gguf: llama.cpp by xllamacpp" in refused("bench", "odd.gguf", *engine, "--new-tokens", "2")
    monkeypatch.setattr(benching.importlib.util, "find_spec", lambda _: None)
    assert "pip install 'compressx[llama-cpp]'" in refused("bench", "tiny.gguf", *engine)


def test_the_command_times_two_models_in_processes_of_their_own(tmp_path):
    save_tiny(tmp_path / "one", "llama")
    save_tiny(tmp_path / "two", "gpt2")
    command = [sys.executable, "-m", "compressx", "bench", "one", "two", "--prompt-tokens", "8", "--new-tokens", "4",
               "--rounds", "3", "--threads", "1", "--json"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    one, two = json.loads(done.stdout)["models"]
    assert (one["name"], one["parameters"], two["name"], two["parameters"]) == ("one", 108992, "two", 166464)
    for found in (one, two):
        assert found["memory_bytes"]["before"] < found["memory_bytes"]["run"] < 1e9
        assert all(len(found["speeds"][0][stage]["seconds"]) == 3 for stage in ("prefill", "decode"))
