"""The command line, as its users meet it: exit status, messages, and what it leaves on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tests.compressx.built_in import BUILT_IN

from compressx import __version__
from compressx.cli import cli

RECIPE = """\
model: {path: model}
calibration: {dataset: {text: text.txt}, samples: 8, sequence_length: 32}
prune:
  - {targets: ["*.q_proj", "*.k_proj"], pruner: attnprune, sparsity: 0.5}
  - {targets: ["*"], pruner: wanda, sparsity: 0.5}
evaluate:
  token_perplexity: {dataset: {text: text.txt}, sequence_length: 32, samples: 4}
output: out
"""
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
PER_BLOCK = 7  # linears in a block of the tiny llama
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with two saved tiny models, each with a tokenizer of whole words, and a text of those words."""
    from compressx.testing import save_tiny_model, tiny_text

    folder = tmp_path_factory.mktemp("saved")
    for name, architecture in (("model", "llama"), ("tied", "llama-tied")):
        save_tiny_model(folder / name, architecture)
    (folder / "text.txt").write_text(tiny_text())
    return folder


@pytest.fixture
def work(saved: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with a good recipe, the models and the text."""
    for source in saved.iterdir():
        (project / source.name).symlink_to(source)
    (project / "r.yaml").write_text(RECIPE)
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return project


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "compressx", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def compressx(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compressx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def invoke(*arguments: str) -> Result:
    """Run a command in this process, which is faster; an exception that is no exit is raised."""
    return CliRunner().invoke(cli, list(arguments), catch_exceptions=False)


def test_going_on_and_beginning_anew_are_not_asked_for_at_once(work: Path) -> None:
    done = invoke("run", "r.yaml", "--resume", "--restart")
    assert done.exit_code == 2
    assert "--restart begins it anew; give one" in done.stderr


def edit(old: str, new: str) -> None:
    assert RECIPE.count(old) >= 1, old
    Path("r.yaml").write_text(RECIPE.replace(old, new, 1))


def write_plugin(name: str, body: str) -> None:
    Path(f"{name}.py").write_text(f"import compressx\n\n@compressx.hookimpl\ndef {body}\n")


# --- mistakes: each one clear message, and nothing written

WANDA = '{targets: ["*"], pruner: wanda, sparsity: 0.5}'
MISTAKES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    # what is replaced, by what, the place, what the message says
    "a misspelt key": ("prune:", "prnue:", "r.yaml:3", ("unknown key 'prnue'", "did you mean 'prune'?")),
    "a misspelt key of a rule": (WANDA, '{target: ["*"], pruner: wanda, sparsity: 0.5}', "r.yaml:5",
                                 ("unknown key 'target'", "did you mean 'targets'?")),
    "a target without a linear": ('"*.q_proj", "*.k_proj"', '"*.q_prj"', "r.yaml:4",
                                  ("'*.q_prj' matches no linear", "did you mean '*.q_proj'?")),
    "sparsity above one": (WANDA, WANDA.replace("0.5", "1.7"), "r.yaml:5",
                           ("prune[1].sparsity is 1.7", "less than 1", "fraction of zeros in [0, 1)")),
    "negative sparsity": (WANDA, WANDA.replace("0.5", "-0.5"), "r.yaml:5", ("prune[1].sparsity is -0.5", "at least 0")),
    "sparsity in percent": (WANDA, WANDA.replace("0.5", "50%"), "r.yaml:5",
                            ("prune[1].sparsity is '50%'", "a number", "0.5 is 50%")),
    "sparsity and pattern": (WANDA, WANDA.replace("0.5", '0.9, pattern: "2:4"'), "r.yaml:5",
                             ("sparsity and pattern exclude each other; keep one",)),
    "a key given twice": ("output: out", "output: out\noutput: other", "r.yaml:9", ("output",)),
    "a rule's key given twice": (WANDA, WANDA.replace("0.5", "0.5, sparsity: 0.6"), "r.yaml:5", ("sparsity",)),
    "an unknown pruner": (WANDA, WANDA.replace("wanda", "wandas"), "r.yaml:5",
                          ("no pruner 'wandas'", "did you mean 'wanda'?")),
    "an unknown option": ("attnprune, sparsity: 0.5", "attnprune, sparsity: 0.5, options: {step: 3}", "r.yaml:4",
                          ("unknown option 'step'", "did you mean 'steps'?")),
    "a shadowed rule": (WANDA, WANDA + '\n  - {targets: ["*.o_proj"], pruner: magnitude, sparsity: 0.5}', "r.yaml:6",
                        ("of prune[2] is shadowed", "by prune[1] at r.yaml:5", "put the narrower rule first")),
    "a model that is not there": ("path: model", "path: modle", "r.yaml:1",
                                  ("model path modle does not exist; did you mean 'model'? looked in ",)),
    "a pattern that keeps more than all": (WANDA, WANDA.replace("sparsity: 0.5", 'pattern: "5:4"'), "r.yaml:5",
                                           ("5:4 keeps 5 of 4", "1 <= N < M")),
    "a pattern that keeps all": (WANDA, WANDA.replace("sparsity: 0.5", "pattern: 4:4"), "r.yaml:5",
                                 ("4:4 keeps 4 of 4", "1 <= N < M", "left out of targets")),
    "a section that is a word": ("output: out", "output: out\nallocation: owl", "r.yaml:9",
                                 ("such as {method: attention-aware, target: 0.5}",)),
    "a pattern that is none": (WANDA, WANDA.replace("sparsity: 0.5", "pattern: half"), "r.yaml:5", ("'half'", '"2:4"')),
    "text that is not there": ("text: text.txt", "text: txet.txt", "r.yaml:2",
                               ("no file matches 'txet.txt'; did you mean 'text.txt'? looked in ",)),
    "text that is a folder": ("text: text.txt", "text: model", "r.yaml:2", ("'model' is a folder", "'model/**/*.txt'")),
    "a misspelt dataset": ("{text: text.txt}", "wikitxt", "r.yaml:2",
                           ("no dataset 'wikitxt'", "did you mean 'wikitext'?")),
    "an input not divisible": (WANDA, WANDA.replace("sparsity: 0.5", 'pattern: "3:7"'), "r.yaml:5",
                               ("has 64 input features, not divisible by 7",)),
    "an ignored head": (WANDA, WANDA.replace("sparsity", "ignore: [lm_head], sparsity"), "r.yaml:5",
                        ("unknown key 'ignore'",)),
    "attnprune on the values": ('"*.q_proj", "*.k_proj"', '"*.q_proj", "*.v_proj"', "r.yaml:4",
                                ("also takes model.layers.0.self_attn.v_proj", 'targets: ["*.q_proj", "*.k_proj"]')),
    "no calibration": ("calibration: {dataset: {text: text.txt}, samples: 8, sequence_length: 32}\n", "", "r.yaml",
                       ("the recipe has no calibration",)),
    "sparsity and allocation": ("output: out", "allocation: {method: attention-aware, target: 0.5}\noutput: out",
                                "r.yaml:5", ("prune[1] has sparsity 0.5", "drop sparsity here, or drop allocation")),
    "an unknown allocation": ("output: out", "output: out\nallocation: {method: owll, target: 0.5}", "r.yaml:9",
                              ("no method 'owll'", "did you mean 'owl'? valid: attention-aware, error")),
    "an output that is a file": ("output: out", "output: text.txt", "r.yaml:8", ("is a file; name a folder",)),
}  # fmt: skip
TIED = "a tied head"
MISTAKES[TIED] = ('path: model', 'path: tied', "r.yaml:5",
                  ("lm_head, which is not prunable", "tied to model.embed_tokens"))  # fmt: skip
SILENT_ELSEWHERE = ["a misspelt key", "a target without a linear", "sparsity above one", "sparsity and pattern",
                    "a rule's key given twice", TIED, "an unknown pruner", "text that is not there"]  # fmt: skip


def make(mistake: str) -> None:
    old, new, *_ = MISTAKES[mistake]
    edit(old, new)
    if mistake == TIED:
        text = Path("r.yaml").read_text()
        Path("r.yaml").write_text(text.replace('["*"]', '["lm_head"]'))


def assert_refused(status: int, out: str, err: str, mistake: str) -> None:
    _, _, place, expected = MISTAKES[mistake]
    assert status == 2, err
    assert out == ""
    assert err.startswith("error: r.yaml:")
    lines = err.removeprefix("error: ").splitlines()
    # a needed key that is misspelt is told as missing too, on a line of its own
    assert any(x.startswith(f"{place}:") and all(part in x for part in expected) for x in lines), err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert not [p.name for p in Path().iterdir() if p.name in ("out", "other", "cache") or p.name.startswith(".")]


@pytest.mark.slow
@pytest.mark.parametrize("mistake", SILENT_ELSEWHERE)
def test_a_mistake_ends_a_run_with_one_message_and_status_2(work: Path, mistake: str) -> None:
    make(mistake)
    done = compressx("run", "r.yaml")
    assert_refused(done.returncode, done.stdout, done.stderr, mistake)


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_mistake_is_named_with_place_value_and_remedy(work: Path, mistake: str, command: str) -> None:
    make(mistake)
    done = invoke(command, "r.yaml")
    assert_refused(done.exit_code, done.stdout, done.stderr, mistake)


def test_several_mistakes_are_told_at_once(work: Path) -> None:
    Path("r.yaml").write_text(RECIPE.replace("samples: 8", "samples: 0").replace("output:", "ouput:"))
    done = invoke("plan", "r.yaml")
    assert done.exit_code == 2
    places = [line.removeprefix("error: ").split(" ")[0] for line in done.stderr.splitlines()]
    assert len([p for p in places if p.startswith("r.yaml:2:")]) == 1
    assert len([p for p in places if p.startswith("r.yaml:8:")]) == 1


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_recipe_that_is_not_there_is_named(work: Path, command: str) -> None:
    done = invoke(command, "nowhere.yaml")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "nowhere.yaml" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-p", "wanda", "plugins"], "expected no:NAME, got 'wanda'"),
        (["-p", "no:", "plugins"], "expected no:NAME, got 'no:'"),
        (["-p", "no:wandas", "plugins"], "did you mean 'wanda'?"),
        (["--plugin", "no_such_module", "plugins"], "no_such_module"),
        (["run", "r.yaml", "--device", "tpu"], "tpu"),
        pytest.param(["run", "r.yaml", "--device", "cuda"], "finds no CUDA GPU here", marks=WITHOUT_CUDA),
        pytest.param(["eval", "model", "--device", "cuda"], "finds no CUDA GPU here", marks=WITHOUT_CUDA),
        (["run", "r.yaml", "--set", "prune.1.sparsity=1.7"], "--set prune.1.sparsity=1.7: prune[1].sparsity is 1.7"),
        (["run", "r.yaml", "--set", "prune[1].sparsity=50"], "--set prune[1].sparsity=50: prune[1].sparsity is 50"),
        (["run", "r.yaml", "--set", "calibration.sample=8"], "did you mean 'samples'?"),
    ],
)
def test_a_wrong_option_of_the_command_line_is_named(work: Path, arguments: list[str], complaint: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert not Path("out").exists()


def test_a_blocked_plugin_is_the_reason_that_its_pruner_is_missing(work: Path) -> None:
    done = invoke("-p", "no:wanda", "run", "r.yaml")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: r.yaml:5:")
    assert "no pruner 'wanda': plugin 'wanda' (entry point) is blocked; drop -p no:wanda" in done.stderr


# --- a whole run

LOAD = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("out/model")
assert "compressx" not in sys.modules
zeros = {n: [p.dtype.is_floating_point, (p == 0).flatten().nonzero().flatten().tolist()]
         for n, p in model.named_parameters() if p.dim() == 2}
print(json.dumps({"zeros": zeros, "ids": AutoTokenizer.from_pretrained("out/model")("w0 w7 w8")["input_ids"]}))
"""


@pytest.fixture(scope="module")
def finished(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Do one whole run in a process of its own."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "r.yaml").write_text(RECIPE)
    for source in saved.iterdir():
        (folder / source.name).symlink_to(source)
    environment = {**os.environ, **ENVIRONMENT, "COMPRESSX_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "compressx", "run", "r.yaml", "-v", "--set", "calibration.samples=6"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
def test_a_run_leaves_all_of_its_files_and_nothing_else(finished: Any) -> None:
    folder, _ = finished
    left = {p.name for p in (folder / "out").iterdir()}
    assert left == {"model", "masks.safetensors", "recipe.yaml", "plan.json", "report.json", "report.md", "report.html",
                    "plots"}  # fmt: skip
    assert {p.name for p in (folder / "out/model").iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert {p.name for p in folder.iterdir()} == {"r.yaml", "model", "tied", "text.txt", "cache", "out"}


def test_a_run_prints_perplexities_layers_and_where_it_wrote(finished: Any) -> None:
    _, done = finished
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "token_perplexity" in done.stdout
    lines = done.stdout.splitlines()
    assert len([x for x in lines if x.startswith("model.layers.") and "  sparsity 0." in x]) == 21
    assert any("attention_error" in x for x in lines)
    assert lines[-1] == "written to out"


CURVES = """
import compressx
from pydantic import BaseModel

class NoOptions(BaseModel): pass

class Learn:
    def __init__(self, options): pass
    def observe(self, block, name): return None
    def prune(self, block, patterns, stats):
        history = {"loss": [0.04 / (1 + i) for i in range(61)], "lr": [0.5, 0.25]}
        masks = compressx.keep_masks({n: block.linears[n].weight.abs() for n in patterns}, patterns)
        return {n: compressx.PruneResult(keep, history=history) for n, keep in masks.items()}

@compressx.hookimpl
def compressx_pruners():
    return [compressx.PrunerSpec("learn", "for a test", NoOptions, Learn)]
"""


@pytest.mark.slow
def test_verbose_prints_the_curves_of_query_and_key_as_one_line(work: Path) -> None:
    Path("learner.py").write_text(CURVES)
    edit("attnprune", "learn")
    done = compressx("--plugin", "learner", "run", "r.yaml", "-v")
    assert (done.returncode, done.stderr) == (0, "")
    assert [x for x in done.stdout.splitlines() if "loss" in x] == [
        f"model.layers.{i}.self_attn.q_proj, k_proj  loss 0.04 ... 0.0025 ... 0.00129 ... 0.00087 ... 0.000656 "
        "(61 steps); lr 0.5 0.25 (2 steps)"
        for i in range(3)
    ]
    assert Path("out/plots/steps_q_proj_k_proj.svg").is_file()


def test_a_run_writes_the_report_of_the_schema(finished: Any) -> None:
    folder, _ = finished
    report = json.loads((folder / "out/report.json").read_text())
    assert report["compressx"] == __version__
    assert report["model"]["path"] == "model"
    assert report["sparsity"] == pytest.approx(0.5, abs=1e-3)
    layers = [layer for block in report["blocks"] for layer in block["layers"]]
    assert len(layers) == 21
    for layer in layers:
        assert {"name", "pruner", "pattern", "target", "sparsity", "seconds", "info"} <= set(layer)
        assert layer["target"] == 0.5
    assert {s["name"] for s in report["skipped"]} == {"lm_head", "model.embed_tokens"}
    assert all(s["reason"] for s in report["skipped"])
    for kind in ("dense", "pruned"):
        assert 1 < report["evaluation"][kind]["token_perplexity"] < 1e6
    assert set(report["seconds"]) == {"load", "calibrate", "allocate", "prune", "finetune", "evaluate", "total"}
    assert report["peak_memory_bytes"] > 2**26
    assert "| token_perplexity |" in (folder / "out/report.md").read_text()


def test_what_set_gave_is_in_the_written_recipe(finished: Any) -> None:
    folder, _ = finished
    assert "samples: 6" in (folder / "out/recipe.yaml").read_text()


@pytest.mark.slow
def test_the_model_loads_without_compressx_and_its_zeros_are_the_masks(finished: Any) -> None:
    from compressx.masks.maskset import MaskSet

    folder, _ = finished
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    loaded = json.loads(done.stdout)
    masks = MaskSet.load(folder / "out/masks.safetensors")
    assert len(masks) == 21
    for name, entry in masks.items():
        dropped = (~entry.keep).flatten().nonzero().flatten().tolist()
        assert loaded["zeros"].pop(f"{name}.weight") == [True, dropped], name
    assert {name: zeros for name, (_, zeros) in loaded["zeros"].items()} == {
        "lm_head.weight": [],
        "model.embed_tokens.weight": [],
    }
    assert loaded["ids"] == [3, 10, 11]


@pytest.mark.slow
def test_quiet_prints_nothing(work: Path) -> None:
    done = compressx("run", "r.yaml", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert Path("out/report.json").is_file()


def test_quiet_still_prints_errors(work: Path) -> None:
    make("an unknown pruner")
    done = invoke("run", "r.yaml", "-q")
    assert_refused(done.exit_code, done.stdout, done.stderr, "an unknown pruner")


@pytest.mark.slow
def test_a_defect_shows_its_traceback_and_ends_with_status_1(work: Path) -> None:
    write_plugin("broken", "compressx_block_pruned(report):\n    raise ZeroDivisionError('in a hook')")
    done = compressx("--plugin", "broken", "run", "r.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.rstrip().endswith("ZeroDivisionError: in a hook")
    assert "broken.py" in done.stderr
    assert not Path("out").exists()


@pytest.mark.slow
def test_an_interrupt_ends_with_status_130_and_the_run_goes_on_with_resume(work: Path) -> None:
    body = "import pathlib, time; pathlib.Path('reached').touch(); time.sleep(60)"
    write_plugin("slow", f"compressx_block_pruned(report):\n    {body}")
    process = start("--plugin", "slow", "run", "r.yaml")
    try:
        limit = time.monotonic() + 120
        while not Path("reached").exists() and process.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        assert [p for p in Path().iterdir() if p.name.startswith(".out.partial")], "the run was under way"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "interrupted; finished blocks are kept, and --resume goes on after them"
    assert "Traceback" not in err
    assert not Path("out").exists()
    again = invoke("run", "r.yaml")
    assert again.exit_code == 2
    assert "go on with --resume, or begin anew with --restart" in again.stderr
    assert invoke("run", "r.yaml", "--resume").exit_code == 0  # the plugin that slowed it down decides nothing
    assert Path("out/report.json").is_file()


# --- plan, plugins, version


def test_a_plan_lists_every_linear_and_why_others_are_left_alone(work: Path) -> None:
    done = invoke("plan", "r.yaml")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [" ".join(x.split()) for x in done.stdout.splitlines()]
    assert "model.layers.0.self_attn.q_proj attnprune 50% joint 64 x 64" in lines
    assert "model.layers.2.mlp.down_proj wanda 50% row 64 x 96" in lines
    assert "model.embed_tokens an embedding, not a linear" in lines
    assert lines[-1] == "21 linears, 0.1 M weights, sparsity 50.00%"
    assert not Path("out").exists()


def allocate() -> None:
    text = RECIPE.replace(", sparsity: 0.5", "")
    Path("r.yaml").write_text(text + "allocation: {method: attention-aware, target: 0.5, samples: 4}\n")


def test_a_plan_with_allocation_shows_the_target_and_that_sparsities_are_chosen_later(work: Path) -> None:
    allocate()
    done = invoke("plan", "r.yaml", "--set", "allocation.target=0.6")
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [" ".join(x.split()) for x in done.stdout.splitlines()]
    assert "model.layers.0.self_attn.q_proj attnprune allocated joint 64 x 64" in lines
    assert lines[-2:] == [
        "21 linears, 0.1 M weights, target sparsity 60.00%",
        "attention-aware measures divergences when the recipe is run, and chooses sparsities then "
        "(unit rule, scope model, 4 samples)",
    ]


def shown(allocation: str, rest: str = '{targets: ["*"], pruner: wanda}') -> list[str]:
    """Plan with an allocation on line 9 and return the lines, their blanks made one."""
    text = RECIPE.replace(", sparsity: 0.5", "").replace('{targets: ["*"], pruner: wanda}', rest)
    Path("r.yaml").write_text(text + f"allocation: {allocation}\n")
    done = invoke("plan", "r.yaml")
    return [" ".join(x.split()) for x in (done.stdout or done.stderr).splitlines()]


def test_a_plan_shows_what_uniform_and_explicit_sparsities_come_to(work: Path) -> None:
    lines = shown("{method: uniform, target: 0.75}")
    assert "model.layers.0.self_attn.q_proj attnprune 75% joint 64 x 64" in lines
    assert "model.layers.2.mlp.down_proj wanda 75% row 64 x 96" in lines
    assert lines[-1] == "21 linears, 0.1 M weights, sparsity 75.00%"
    lines = shown('{method: explicit, sparsities: {"*.layers.0.*": 0.25, "*.down_proj": 0.75, "*": 0.5}}')
    assert "model.layers.0.mlp.down_proj wanda 25% row 64 x 96" in lines
    assert "model.layers.1.mlp.down_proj wanda 75% row 64 x 96" in lines
    assert "model.layers.1.self_attn.q_proj attnprune 50% joint 64 x 64" in lines
    assert lines[-1].endswith("sparsity 45.00%")


def test_a_plan_shows_that_n_is_open_and_m_is_not(work: Path) -> None:
    rest = '{targets: ["*"], pruner: wanda, pattern: "2:4"}'
    lines = shown("{method: owl, target: 0.5, spread: 0.1, samples: 4}", rest)
    assert "model.layers.2.mlp.down_proj wanda allocated N:4 64 x 96" in lines
    assert lines[-1] == (
        "owl measures outliers when the recipe is run, and chooses sparsities then (unit block, scope model, 4 samples)"
    )
    lines = shown("{method: uniform, target: 0.25}", rest)
    assert "model.layers.2.mlp.down_proj wanda 3:4 64 x 96" in lines


EXPLICIT = "{method: explicit, sparsities: {%s}}"


@pytest.mark.parametrize(
    ("allocation", "rest", "place", "told"),
    [
        (EXPLICIT % '"*.up_prj": 0.5, "*": 0.4', "", "9:45", ("'*.up_prj' matches no linear", "mean '*.up_proj'?")),
        (EXPLICIT % '"*": 0.5, "*.up_proj": 0.4', "", "9:55",
         ("'*.up_proj' is shadowed: all 3", "by '*' at r.yaml:9:45", "put the narrower one first")),
        (EXPLICIT % '"*.mlp.*": 0.5', "", "9:32", ("q_proj and 11 more", 'end with "*"')),
        (EXPLICIT % '"*": 1.0', "", "9:45", ("allocation.sparsities.* is 1.0; expected less than 1",)),
        (EXPLICIT % '"*.q_proj": 0.4, "*": 0.5', "", "9:45", ("competes jointly has one sparsity", "prune[0]")),
        (EXPLICIT % '"*.mlp.*": 0.995, "*": 0.5', "", "9:45", ("leaves none of the", "each row of model.layers.0.mlp")),
        (EXPLICIT % '"*.mlp.*": 0.55, "*": 0.5', '{targets: ["*"], pruner: wanda, pattern: "4:8"}', "9:45",
         ("0.55 is no N:8", "the nearest are 0.5 (4:8) and 0.625 (3:8)")),
        (EXPLICIT % '"*.mlp.*": 0.95, "*": 0.5', '{targets: ["*"], pruner: wanda, pattern: "4:8"}', "9:45",
         ("0.95 is no N:8", "the nearest are 0.75 (2:8) and 0.875 (1:8)")),
        (EXPLICIT % '"*.mlp.*": 0.9999999, "*": 0.5', '{targets: ["*"], pruner: wanda, pattern: "4:8"}', "9:45",
         ("0.9999999 is no N:8", "the nearest are 0.75 (2:8) and 0.875 (1:8)")),
        ('{method: explicit, sparsities: {"*": 0.5}, target: 0.6}', "", "9:56",
         ("come to 50.00% of the planned weights, and target is 60.00%", "drop target")),
        ("{method: explicit, sparsities: 0.5}", "", "9:32", ("allocation.sparsities is 0.5; expected a mapping",)),
        ("{method: uniform}", "", "9:1", ("missing key 'target'",)),
        ("{method: uniform, target: 0.75}", '{targets: ["*"], pruner: wanda, pattern: "2:4"}', "", ()),
        ("{method: uniform, target: 0.9}", '{targets: ["*"], pruner: wanda, pattern: "2:4"}', "9:31",
         ("target 0.9 cannot be reached", "v_proj allow at most 0.75")),
        ("{method: owl, target: 0.9}", "", "9:1", ("from 0.82 to 0.98", "at most 0.05 fits")),
        ("{method: owl, target: 0.5, lambda: 0.1}", "", "9:40",
         ("unknown key 'lambda'", "valid: method, outlier_threshold, samples, spread, target")),
        ("{method: error, target: 0.5, scope: block}", "", "9:42", ("nothing is left to choose",)),
        ("{method: error, target: 0.5, unit: layer}", "", "9:42", ("'block', 'rule' or 'linear'",)),
        ("{method: attention-aware, target: 0.5, unit: rule}", "", "9:52",
         ("unknown key 'unit'", "valid: method, samples, scope, sparsities, target")),
        ("owl", "", "9:1", ("allocation is 'owl'; expected a mapping",)),
    ],
)  # fmt: skip
def test_a_mistake_in_an_allocation_has_its_place(
    work: Path, allocation: str, rest: str, place: str, told: tuple[str, ...]
) -> None:
    line = "\n".join(shown(allocation, *([rest] if rest else [])))
    if told:
        assert line.startswith(f"error: r.yaml:{place}: "), line
    else:
        assert not line.startswith("error"), line
    assert all(words in line for words in told), line


@pytest.mark.slow
def test_a_run_with_allocation_prints_one_row_for_each_kind_of_module(work: Path) -> None:
    allocate()
    done = invoke("run", "r.yaml", "--set", "allocation.target=0.6")
    lines = [" ".join(x.split()) for x in done.stdout.splitlines()]
    assert len([x for x in lines if " allocated " in x]) == PER_BLOCK
    assert any(x.startswith("sparsity 60.00% of the planned linears") for x in lines)


def test_a_plan_as_json_obeys_set(work: Path) -> None:
    done = invoke("plan", "r.yaml", "--json", "--set", "prune.1.sparsity=0.25", "--set", "prune.1.group=layer")
    planned = json.loads(done.stdout)
    assert {x["pattern"] for x in planned["linears"] if x["pruner"] == "wanda"} == {"25% layer"}
    assert {x["name"] for x in planned["skipped"]} == {"lm_head", "model.embed_tokens"}


def test_plugins_as_json_say_what_loaded_and_what_is_blocked(work: Path) -> None:
    done = invoke("-p", "no:wanda", "plugins", "--json")
    records = {r["name"]: r for r in json.loads(done.stdout)}
    assert {name: r["status"] for name, r in records.items()} == dict.fromkeys(BUILT_IN, "loaded") | {
        "wanda": "blocked"
    }
    assert records["attnprune"]["pruners"] == ["attnprune"]
    assert records["attnprune"]["module"] == "compressx_attnprune.plugin"


def test_plugins_as_a_table_names_every_pruner(work: Path) -> None:
    done = invoke("plugins")
    assert done.exit_code == 0
    for name in BUILT_IN:
        assert any(line.split()[:1] == [name] and "loaded" in line for line in done.stdout.splitlines())


def test_version_and_help_need_no_recipe(work: Path) -> None:
    assert invoke("--version").stdout.strip().endswith(__version__)
    for command in ("run", "plan", "plugins"):
        assert command in invoke("-h").stdout
