"""`compressx generate`, as its users meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.compressx.cli.commands import invoke, printed, refused
from tests.compressx.saved import save_tiny

import compressx
from compressx.cli import cli
from compressx.recipe.sections import SelectTokens
from compressx.testing import tiny_text

SECTION = "select_tokens: {selector: gemfilter, keep: 40, options: {block: 1}, protect: {first: 1, last: 5}}\n"
RECIPE = f"""\
model: {{path: model}}
prune:
  - {{targets: ["*"], pruner: magnitude, sparsity: 0.5}}
{SECTION}output: out
"""
WORDS = 80
FILE = ("--prompt-file", "prompt.txt")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a long prompt, and the outputs of a run with and of one without `select_tokens`."""
    folder = tmp_path_factory.mktemp("generate")
    save_tiny(folder / "model", "llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESSX_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        Path("prompt.txt").write_text(f"{tiny_text(words=WORDS)}\n")
        for name, text in (
            ("out", RECIPE),
            ("plain", RECIPE.replace(SECTION, "").replace("output: out", "output: plain")),
        ):
            Path(f"{name}.yaml").write_text(text)
            assert invoke("run", "-q", f"{name}.yaml").exit_code == 0
    return folder


@pytest.fixture
def work(finished: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for source in finished.iterdir():
        (project / source.name).symlink_to(source)
    monkeypatch.setenv("COMPRESSX_CACHE", str(finished / "cache"))
    return project


def answered(*arguments: str) -> dict[str, Any]:
    return json.loads(printed("generate", *arguments, "--json"))


def loaded() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained("model"), AutoTokenizer.from_pretrained("model")


def test_the_answer_is_all_that_is_on_standard_output_and_it_is_that_of_the_python_function(work: Path) -> None:
    done = invoke("generate", "model", "--prompt-file", "prompt.txt", "--keep", "0.5", "--max-new-tokens", "20")
    expected = compressx.generate(*loaded(), Path("prompt.txt").read_text(), keep=0.5, max_new_tokens=20)
    assert (done.exit_code, done.stdout) == (0, f"{expected.text}\n")
    assert expected.kept_tokens == 40
    whole = invoke("generate", "model", "--prompt-file", "prompt.txt", "--full", "--max-new-tokens", "20").stdout
    assert whole.strip(), "the random model writes words after this prompt"
    assert (
        whole
        == f"{compressx.generate(*loaded(), Path('prompt.txt').read_text(), selector=None, max_new_tokens=20).text}\n"
    )
    rows = {line.split()[0]: line.split()[1:] for line in done.stderr.splitlines() if line.strip()}
    assert rows["stage"] == ["tokens", "seconds", "peak", "GiB"]
    assert [rows[name][0] for name in ("select", "prefill", "generate")] == [
        str(n) for n in (80, 40, expected.new_tokens)
    ]
    assert [len(rows[name]) for name in ("select", "prefill", "generate")] == [3, 2, 3]
    said = f"read 40 of the prompt's 80 tokens, chosen by retrieval-heads ({expected.reason})"
    assert done.stderr.splitlines()[-1] == said
    assert "head " in expected.reason


def test_json_has_all_of_the_answer_and_how_the_prompt_was_shortened(work: Path) -> None:
    found = answered("model", "--prompt-file", "prompt.txt", "--keep", "60", "--question", "w3 w4", "--set", "block=1")
    assert found.keys() == {*compressx.Answer.__dataclass_fields__, "select_tokens"}
    assert found["select_tokens"] == {
        "selector": "retrieval-heads", "keep": 60, "options": {"block": 1}, "protect": {"first": 4, "last": 32}
    }  # fmt: skip
    assert found["prompt_tokens"] > WORDS
    assert found["kept_tokens"] == 60
    assert "w3 w4" in found["kept_text"]
    assert found["reason"].startswith("head ")
    assert min(found["seconds"].values()) > 0


def test_a_prompt_comes_from_a_file_an_option_or_standard_input(work: Path) -> None:
    given = ("--keep", "0.5", "--selector", "recent", "--json")
    text = Path("prompt.txt").read_text()
    found = [
        printed("generate", "model", "--prompt-file", "prompt.txt", *given),
        printed("generate", "model", "--prompt", text, *given),
        CliRunner().invoke(cli, ["generate", "model", "--prompt-file", "-", *given], input=text).stdout,
    ]
    answers = [json.loads(one) for one in found]
    assert {(one["text"], one["kept_text"]) for one in answers} == {(answers[0]["text"], answers[0]["kept_text"])}
    assert answers[0]["kept_tokens"] == 40


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
    for model in ("plain", "model"):
        found = answered(model, "--prompt-file", "prompt.txt")["select_tokens"]
        assert found == SelectTokens(selector="retrieval-heads", keep=0.125).model_dump(mode="json")


def test_the_pruned_model_answers_and_not_the_dense_one(work: Path) -> None:
    given = ("--prompt-file", "prompt.txt", "--full", "--max-new-tokens", "30")
    dense, pruned = (answered(model, *given)["text"] for model in ("model", "out"))
    assert dense != pruned


def test_a_prompt_that_is_short_enough_is_read_whole_with_a_word_about_it(work: Path) -> None:
    done = invoke("generate", "model", "--prompt", "w1 w2 w3", "--selector", "recent", "--keep", "100",
                  "--max-new-tokens", "3")  # fmt: skip
    assert done.exit_code == 0
    assert done.stderr.splitlines()[-1] == "read all of the prompt's 3 tokens"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected one of --prompt-file and --prompt"),
        (("--prompt-file", "prompt.txt", "--prompt", "w1"), "expected one of --prompt-file and --prompt"),
        (("--prompt-file", "prmpt.txt"), "cannot read prmpt.txt: No such file or directory"),
        (("--prompt-file", "model"), "cannot read model: Is a directory"),
        (("--prompt-file", "bytes.txt"), "bytes.txt: not UTF-8 at byte 1"),
        (("--prompt-file", "empty.txt"), "--prompt-file empty.txt is empty; expected a text"),
        (("--prompt", " \n"), "--prompt is empty; expected a text"),
        (("--prompt", "w1 \udcff"), "the prompt: character 3 is \\udcff, half of a surrogate pair, which is not text"),
        ((*FILE, "--question", "\ud83d?"), "the prompt: character 12 is \\ud83d, half of a surrogate pair"),
        ((*FILE, "--keep", "0"), "--keep: keep is 0; expected at least 1 or more than 0: tokens of a prompt to keep"),
        ((*FILE, "--keep", "1.5"), "--keep: keep is 1.5; expected"),
        ((*FILE, "--keep", "an eighth"), "--keep: keep is 'an eighth'; expected"),
        ((*FILE, "--keep", "20"), "keep is 20, but 36 tokens of the prompt are protected"),
        ((*FILE, "--selector", "gemfiltr"), "no token selector 'gemfiltr'; did you mean 'gemfilter'?"),
        ((*FILE, "--set", "blok=1"), "--set blok: unknown option 'blok'; did you mean 'block'?"),
        ((*FILE, "--set", "block=x"), "--set block: block is 'x'; expected a whole number or 'auto'"),
        ((*FILE, "--set", "block"), "--set block: expected KEY"),
        ((*FILE, "--selector", "gemfilter", "--set", "block=3", "--keep", "40"), "has no block 3; expected 0 to 2"),
        ((*FILE, "--max-new-tokens", "500"), "a prompt of 36 tokens and 500 after it are more than the model's"),
        ((*FILE, "--full", "--keep", "3"), "--full reads the whole prompt; leave out --selector, --keep and --set"),
        ((*FILE, "--revision", "abc"), "--revision abc: model is a path, and only hub models have revisions"),
        ((*FILE, "--device", "gpu"), "device gpu: unknown; expected auto, cpu, cuda"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_message_that_names_the_option_or_the_file(arguments, said, work) -> None:
    Path("bytes.txt").write_bytes(b"a\xff")
    Path("empty.txt").write_text("\n")
    message = refused("generate", "model", *arguments)
    assert message.startswith(f"error: {said}") or said in message
    assert message.count("\n") == 1


def test_models_and_recipes_that_cannot_be_read_are_named(work: Path) -> None:
    assert "did you mean './model'?" in refused("generate", "modle", "--prompt", "w1 w2")
    Path("broken").mkdir()
    Path("broken/recipe.yaml").write_text("model: {path: model}\nslect_tokens: {}\n")
    assert refused("generate", "broken", "--prompt", "w1 w2").startswith("error: broken/recipe.yaml:2:1: unknown key")
    save_tiny(Path("own/bloom"), "bloom")
    message = refused("generate", "own/bloom", "--prompt-file", "prompt.txt")
    assert "transformer.h.0: the attention of BloomBlock does not go through" in message
    assert printed("generate", "own/bloom", "--prompt-file", "prompt.txt", "--selector", "recent").endswith("\n")


def test_standard_input_that_is_no_text_is_refused(work: Path) -> None:
    given = ["generate", "model", "--prompt-file", "-"]
    done = CliRunner().invoke(cli, given, input=b"a\xff")
    assert (done.exit_code, done.stderr) == (
        2,
        "error: --prompt-file -: standard input is not UTF-8 (invalid start byte)\n",
    )
    assert "--prompt-file - is empty" in CliRunner().invoke(cli, given, input="").stderr


@pytest.mark.slow
def test_in_a_pipe_nothing_but_the_answer_is_printed(work: Path) -> None:
    command = [sys.executable, "-m", "compressx", "generate", "out", "--prompt-file", "-", "--json"]
    text = Path("prompt.txt").read_text()
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kept_tokens"] == 40
