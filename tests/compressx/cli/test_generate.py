"""`compressx generate`, as its users meet it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.compressx.cli.commands import invoke, printed

import compressx
from compressx.recipe.sections import SelectTokens


def answered(*arguments: str) -> dict[str, Any]:
    return json.loads(printed("generate", *arguments, "--json"))


def loaded() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")


def test_the_answer_is_all_that_is_on_standard_output_and_it_is_that_of_the_python_function(work: Path) -> None:
    given, text = ("generate", "model", "--prompt-file", "prompt.txt"), Path("prompt.txt").read_text()
    done = invoke(*given, "--keep", "0.5", "--max-new-tokens", "20")
    expected = compressx.generate(*loaded(), text, keep=0.5, max_new_tokens=20)
    assert (done.exit_code, done.stdout, expected.kept_tokens) == (0, f"{expected.text}\n", 40)
    whole = printed(*given, "--full", "--max-new-tokens", "20")
    assert whole.strip(), "the random model writes words after this prompt"
    assert whole == f"{compressx.generate(*loaded(), text, selector=None, max_new_tokens=20).text}\n"
    rows = {line.split()[0]: line.split()[1:] for line in done.stderr.splitlines() if line.strip()}
    assert rows["stage"] == ["tokens", "seconds", "peak", "GiB"]
    stages = [(rows[name][0], len(rows[name])) for name in ("select", "prefill", "generate")]
    assert stages == [("80", 3), ("40", 2), (str(expected.new_tokens), 3)]
    said = f"read 40 of the prompt's 80 tokens, chosen by retrieval-heads ({expected.reason})"
    assert done.stderr.splitlines()[-1] == said
    assert "head " in expected.reason


def test_json_has_all_of_the_answer_and_how_the_prompt_was_shortened(work: Path) -> None:
    found = answered("model", "--prompt-file", "prompt.txt", "--keep", "60", "--question", "w3 w4", "--set", "block=1")
    assert found.keys() == {*compressx.Answer.__dataclass_fields__, "select_tokens"}
    assert found["select_tokens"] == {
        "selector": "retrieval-heads", "keep": 60, "options": {"block": 1}, "protect": {"first": 4, "last": 32}
    }  # fmt: skip
    assert found["prompt_tokens"] > 80
    assert found["kept_tokens"] == 60
    assert "w3 w4" in found["kept_text"]
    assert found["reason"].startswith("head ")
    assert min(found["seconds"].values()) > 0


def test_a_prompt_comes_from_a_file_an_option_or_standard_input(work: Path) -> None:
    given, text = ("--keep", "0.5", "--selector", "recent", "--json"), Path("prompt.txt").read_text()
    sources = (("--prompt-file", "prompt.txt"), ("--prompt", text), ("--prompt-file", "-"))
    found = [json.loads(invoke("generate", "model", *source, *given, given=text).stdout) for source in sources]
    assert len({(one["text"], one["kept_text"], one["kept_tokens"]) for one in found}) == 1
    assert found[0]["kept_tokens"] == 40


def test_what_was_read_is_shown_if_asked_for(work: Path) -> None:
    given = ("generate", "model", "--prompt-file", "prompt.txt", "--selector", "recent", "--keep", "40")
    words = Path("prompt.txt").read_text().split()
    done = invoke(*given, "--show-kept")
    assert f"read: {' '.join(words[:4])} ... {' '.join(words[-36:])}\n" in done.stderr
    assert "read: " not in invoke(*given).stderr
    assert invoke(*given).stdout == done.stdout


def test_in_full_nothing_is_selected(work: Path) -> None:
    found = answered("out", "--prompt-file", "prompt.txt", "--full", "--max-new-tokens", "10")
    assert (found["prompt_tokens"], found["kept_tokens"], found["select_tokens"]) == (80, 80, None)
    assert found["kept_text"] == Path("prompt.txt").read_text().strip()
    shown = invoke("generate", "out", "--prompt-file", "prompt.txt", "--full", "--max-new-tokens", "10").stderr
    assert shown.splitlines()[-1] == "read all of the prompt's 80 tokens"
    assert "select" not in shown


@pytest.mark.parametrize("model", ["out", "out/model"])
def test_a_runs_folder_says_how_its_model_reads_and_options_change_that(model: str, work: Path) -> None:
    given = (model, "--prompt-file", "prompt.txt")
    own = {"selector": "gemfilter", "keep": 40, "options": {"block": 1}, "protect": {"first": 1, "last": 5}}
    found = answered(*given)
    assert (found["select_tokens"], found["kept_tokens"]) == (own, 40)
    for changes, expected in (
        (["--keep", "0.25"], {**own, "keep": 0.25}),
        (["--set", "block=2"], {**own, "options": {"block": 2}}),
        (["--selector", "gemfilter"], own),
        (["--selector", "recent"], {**own, "selector": "recent", "options": {}}),
        (["--selector", "snapkv", "--set", "block=0"], {**own, "selector": "snapkv", "options": {"block": 0}}),
    ):
        assert answered(*given, *changes)["select_tokens"] == expected, changes


def test_a_run_without_the_section_reads_by_retrieval_heads(work: Path) -> None:
    shutil.copytree("out", "plain")
    recipe = Path("plain/recipe.yaml")
    recipe.write_text(re.sub(r"select_tokens:\n( .*\n)+", "", recipe.read_text()))
    for model in ("plain", "model"):
        found = answered(model, "--prompt-file", "prompt.txt")["select_tokens"]
        assert found == SelectTokens(selector="retrieval-heads", keep=0.125).model_dump(mode="json")


def test_the_pruned_model_answers_and_not_the_dense_one(work: Path) -> None:
    given = ("--prompt-file", "prompt.txt", "--full", "--max-new-tokens", "30")
    dense, pruned = (answered(model, *given)["text"] for model in ("model", "out"))
    assert dense != pruned


def test_a_prompt_that_is_short_enough_is_read_whole_with_a_word_about_it(work: Path) -> None:
    done = invoke("generate", "model", "--prompt", "w1 w2 w3", "--selector", "recent", "--keep", "9")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (0, "read all of the prompt's 3 tokens")


@pytest.mark.slow
def test_in_a_pipe_nothing_but_the_answer_is_printed(work: Path) -> None:
    command = [sys.executable, "-m", "compressx", "generate", "out", "--prompt-file", "-", "--json"]
    text = Path("prompt.txt").read_text()
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kept_tokens"] == 40
