"""The command line, as its users meet it: exit status, messages, and what it leaves on disk."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.compressx.architectures import KINDS
from tests.compressx.built_in import BUILT_IN, PLUGINS
from tests.compressx.cli.commands import invoke, printed, refused
from tests.compressx.saved import save_tiny

from compressx import __version__
from compressx.cli import main

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
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


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


def compressx(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "compressx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def write_plugin(name: str, body: str) -> None:
    Path(f"{name}.py").write_text(f"import compressx\n\n@compressx.hookimpl\ndef {body}\n")


FULL_SIZE = (
    "files are as large as the dense model's: compressx pack {} makes them smaller; for a smaller model, prune "
    "neurons, kv-groups, experts, blocks with shrink: true"
)

# --- a whole run


@pytest.fixture(scope="module")
def finished(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.CompletedProcess[str]]:
    """Do one whole run in a process of its own; gives its end, in the folder with what it leaves."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "r.yaml").write_text(RECIPE)
    for source in saved.iterdir():
        (folder / source.name).symlink_to(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in {**ENVIRONMENT, "COMPRESSX_CACHE": "cache"}.items():
            patch.setenv(name, value)
        done = compressx("run", "r.yaml", "-v", "--set", "calibration.samples=6")
        assert done.returncode == 0
        yield done


def test_a_run_leaves_all_of_its_files_and_nothing_else(finished):
    files = {p.name for p in Path("out").iterdir()}
    assert files == {"model", "masks.safetensors", "recipe.yaml", "plan.json", "report.json", "report.md",
                     "report.html", "run.log", "plots"}  # fmt: skip
    assert {p.name for p in Path("out/model").iterdir()} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert {p.name for p in Path().iterdir()} == {"r.yaml", "model", "text.txt", "cache", "out"}
    assert "samples: 6" in Path("out/recipe.yaml").read_text(), "what --set gave"


def test_a_run_prints_perplexities_and_where_it_wrote_and_beside_that_the_lines_of_its_log(finished):
    assert "\x1b" not in finished.stdout + finished.stderr
    assert "token_perplexity" in finished.stdout
    assert finished.stdout.splitlines()[-2:] == [FULL_SIZE.format("out"), "written to out"]
    assert finished.stderr == Path("out/run.log").read_text()
    lines = [x.split(" ", 2)[2] for x in finished.stderr.splitlines()]  # without date and time
    assert lines[0] == "INFO command: python -m compressx run r.yaml -v --set calibration.samples=6"
    assert len([x for x in lines if x.startswith("DEBUG model.layers.") and "  sparsity 0." in x]) == 21
    assert any("attention_error" in x for x in lines)
    assert [x[:17] for x in lines if " of 3  model.layers." in x] == [f"INFO prune {i} of 3" for i in (1, 2, 3)]


def test_a_run_writes_the_report_of_the_schema(finished):
    report = json.loads(Path("out/report.json").read_text())
    assert report["compressx"] == __version__
    assert {p["name"] for p in report["plugins"]} >= {"magnitude", "wanda", "sparsegpt", "attnprune"}
    assert report["versions"]["torch"] == torch.__version__
    assert report["model"]["path"] == "model"
    assert report["sparsity"] == pytest.approx(0.5, abs=1e-3)
    layers = [layer for block in report["blocks"] for layer in block["layers"]]
    assert len(layers) == 21
    for layer in layers:
        assert {"name", "pruner", "pattern", "target", "sparsity", "seconds", "info"} <= set(layer)
        assert layer["target"] == 0.5
    assert layers[0]["shape"] == [64, 64]
    assert {s["name"]: bool(s["reason"]) for s in report["skipped"]} == {"lm_head": True, "model.embed_tokens": True}
    for kind in ("dense", "pruned"):
        assert 1 < report["evaluation"][kind]["token_perplexity"] < 1e6
    total = report["seconds"].pop("total")
    assert set(report["seconds"]) == {"load", "calibrate", "evaluate dense", "prune", "evaluate pruned", "save"}
    assert sum(report["seconds"].values()) == pytest.approx(total)
    assert report["peak_memory_bytes"] > 2**26
    assert "| token_perplexity |" in Path("out/report.md").read_text()


def test_a_defect_is_not_hidden_behind_a_message(work):
    """Python then shows the traceback and ends with status 1."""
    write_plugin("broken", "compressx_block_pruned(report):\n    raise ZeroDivisionError('in a hook')")
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        main(["--plugin", "broken", "run", "r.yaml"])
    assert not Path("out").exists()


@pytest.fixture
def stop(work: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make a plugin `stopping` that sends the process a signal after each block; 0 is none.

    The process has the signals of one in the foreground: what a shell starts in the background ignores Ctrl-C.
    """
    write_plugin(
        "stopping", "compressx_block_pruned(report):\n    import os; os.kill(os.getpid(), int(os.environ['STOP']))"
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield lambda by: monkeypatch.setenv("STOP", str(int(by)))
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.mark.parametrize(
    ("by", "word", "status"),
    [(signal.SIGINT, "interrupted", 130), pytest.param(signal.SIGTERM, "terminated", 143, marks=pytest.mark.slow)],
)
def test_a_run_that_ctrl_c_or_sigterm_ends_goes_on_with_resume(stop, by, word, status):
    stop(by)
    done = invoke("--plugin", "stopping", "run", "r.yaml")
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.splitlines()[-1] == f"{word}; kept: 1 finished block; --resume continues"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert not Path("out").exists()
    assert "continue with --resume, or start over with --restart" in invoke("run", "r.yaml").stderr
    stop(0)
    assert invoke("--plugin", "stopping", "run", "r.yaml", "--resume").exit_code == 0
    assert Path("out/report.json").is_file()


def test_resuming_a_finished_run_does_nothing_and_another_recipes_run_is_not_replaced(work):
    assert invoke("run", "r.yaml", "-q").exit_code == 0
    written = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    again = invoke("run", "r.yaml", "--resume")
    assert again.exit_code == 0
    assert "out is finished; there is nothing to resume" in again.stderr
    assert "written to out" in again.stdout
    other = invoke("run", "r.yaml", "--resume", "--set", "calibration.samples=5")
    assert other.exit_code == 2
    told = "out was written by another recipe (calibration.samples: was 8, is 5); choose another output, or replace it"
    assert f"{told} with --replace\n" in other.stderr
    planned = invoke("plan", "r.yaml", "--set", "calibration.samples=5")
    assert (planned.exit_code, planned.stdout) == (2, "")
    assert f"{told} with --replace\n" in planned.stderr
    assert invoke("plan", "r.yaml", "--set", "calibration.samples=5", "--replace").exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == written


@pytest.mark.slow
def test_a_sweep_that_sigterm_ends_goes_on_with_the_same_command(stop):
    stop(signal.SIGTERM)
    sweep = ["--plugin", "stopping", "sweep", "r.yaml", "--grid", "prune.1.sparsity=0.4"]
    done = invoke(*sweep)
    assert (done.exit_code, done.stdout) == (143, "")
    assert done.stderr.endswith("terminated; kept: 1 finished block; the same command continues\n")
    stop(0)
    assert invoke(*sweep).exit_code == 0


@pytest.mark.slow
def test_a_program_that_sigterm_ends_has_status_143(stop):
    stop(signal.SIGTERM)
    done = compressx("--plugin", "stopping", "run", "r.yaml")
    assert done.returncode == 143
    *lines, last = done.stderr.splitlines()
    assert last == "terminated; kept: 1 finished block; --resume continues"
    assert " INFO prune 1 of 3  model.layers.0  output error " in lines[-1]
    (log,) = Path().glob(".out.partial-*/run.log")
    assert log.read_text().splitlines()[:-1] == lines
    assert log.read_text().endswith(" ERROR the run ended: Terminated\n")


# --- init, plan, plugins, version


@pytest.mark.parametrize("architecture", KINDS)
def test_the_recipe_that_init_writes_is_planned_as_it_is(architecture, project, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    save_tiny(Path("tiny"), architecture)
    assert "next: compressx plan r.yaml" in printed("init", "tiny", "--output", "r.yaml")
    text = Path("r.yaml").read_text()
    planned = json.loads(printed("plan", "r.yaml", "--json"))
    assert {x["pattern"] for x in planned["linears"]} == {"50% layer"}
    for name in [x["name"] for x in planned["skipped"] if not x["name"].startswith("model.layers")]:
        assert f"#   {name}: " in text
    assert printed("init", "tiny") == text


def test_a_plan_says_that_files_stay_as_large_and_what_makes_them_smaller_unless_it_is_asked_for(work):
    assert printed("plan", "r.yaml", "--set", "output=a b").endswith(FULL_SIZE.format("'a b'") + "\n")
    shrunk = '{targets: ["*.mlp.*"], pruner: magnitude, pattern: neurons, sparsity: 0.25}'
    Path("r.yaml").write_text(f"model: {{path: model}}\nshrink: true\nprune: [{shrunk}]\noutput: out\n")
    assert "as large as" not in printed("plan", "r.yaml")
    assert "as large as" not in printed("run", "r.yaml")


@pytest.mark.parametrize("pruner", list(BUILT_IN))
def test_init_writes_a_recipe_that_is_planned_for_every_pruner_that_the_model_suits(pruner, work):
    save_tiny(Path("tiny"), "mixtral")
    for model in ("model", "tiny"):
        done = invoke("init", model, "--pruner", pruner, "--dtype", "bfloat16")
        if (done.exit_code, pruner, model) == (2, "reap", "model"):
            continue
        assert f"model: {{path: {model}, dtype: bfloat16}}\n" in done.stdout
        Path("r1.yaml").write_text(done.stdout.replace("# shrink:", "shrink:") if model == "model" else done.stdout)
        planned = json.loads(printed("plan", "r1.yaml", "--json"))
        assert {x["pruner"] for x in planned["linears"]} == {pruner}
    if pruner == "attnprune":
        text = printed("init", "model", "--pruner", pruner)
        assert "# model: LlamaForCausalLM,\n# 3 decoder blocks, 0.1 M weights,\n# 0.1 M of them in" in text
        assert "#   model.layers.0-2.self_attn.k_proj: 3 of 32 x 64, 0.0 M\n" in text
        assert '  - {targets: ["*.q_proj", "*.k_proj"], pruner: attnprune, sparsity: 0.5}' in text


@pytest.mark.parametrize("unit", ["neurons", "kv-groups", "experts", "blocks"])
def test_the_pruners_that_a_refusal_names_for_a_unit_remove_it(unit, work):
    save_tiny(Path("tiny"), "mixtral")
    rule = "prune=[{{targets: ['*'], pruner: {}, pattern: {}, sparsity: 0.5}}]"
    told = refused("plan", "r.yaml", "--set", rule.format("alps", unit), "--set", "model=./tiny")
    for pruner in told.strip().rpartition(": ")[2].split(", "):
        given = ["--set", rule.format(pruner, unit), "--set", "model=./tiny", "--set", "shrink=true"]
        assert "as large as" not in printed("plan", "r.yaml", *given)


def planned(*options: str) -> list[str]:
    """Return what a plan prints before the sizes, its blanks made one."""
    done = invoke("plan", "r.yaml", *options)
    lines = [" ".join(x.split()) for x in (done.stdout or done.stderr).splitlines()]
    end = next((i for i, line in enumerate(lines) if line.startswith(("memory: ", "files are "))), len(lines))
    return lines[:end]


def test_a_plan_folds_equal_linears_and_says_why_others_are_left_alone(work):
    Path("r.yaml").write_text(RECIPE + "ignore: [{layers: 0-1}]\n")
    lines = planned()
    assert "model.layers.2.self_attn.q_proj 1 attnprune 50% joint 64 x 64" in lines
    assert "model.layers.0-1.mlp.down_proj ignored by {layers: 0-1} at r.yaml:9:10" in lines
    Path("r.yaml").write_text(RECIPE)
    lines = planned()
    assert "model.layers.0-2.self_attn.q_proj 3 attnprune 50% joint 64 x 64" in lines
    assert "model.embed_tokens an embedding, not a linear" in lines
    assert len([x for x in lines if x.startswith("model.layers.")]) == 7
    assert lines[-1] == "21 linears, 0.1 M weights, sparsity 50.00%"
    assert not Path("out").exists()
    done = json.loads(printed("plan", "r.yaml", "--json", "--set", "prune.1.sparsity=0.25"))
    assert {x["pattern"] for x in done["linears"] if x["pruner"] == "wanda"} == {"25% row"}
    assert {x["name"] for x in done["skipped"]} == {"lm_head", "model.embed_tokens"}


def test_a_plan_with_allocation_shows_the_target_and_that_sparsities_are_chosen_later(work):
    text = RECIPE.replace(", sparsity: 0.5", "")
    Path("r.yaml").write_text(f"{text}allocation: {{method: attention-aware, target: 0.6, samples: 4}}\n")
    lines = planned()
    assert "model.layers.0-2.self_attn.q_proj 3 attnprune allocated joint 64 x 64" in lines
    assert lines[-2:] == [
        "21 linears, 0.1 M weights, target sparsity 60.00%",
        "attention-aware measures divergences when the recipe is run, and chooses sparsities then "
        "(unit rule, 4 samples)",
    ]
    text = text.replace("pruner: wanda}", 'pruner: wanda, pattern: "2:4"}')
    Path("r.yaml").write_text(f"{text}allocation: {{method: owl, target: 0.5, samples: 4}}\n")
    assert "model.layers.0-2.mlp.down_proj 3 wanda allocated N:4 64 x 96" in planned(), "M is given"


def test_plugins_say_what_loaded_and_what_is_blocked(work):
    done = invoke("-p", "no:wanda", "plugins", "--json")
    records = {r["name"]: r for r in json.loads(done.stdout)}
    assert {name: r["status"] for name, r in records.items()} == dict.fromkeys(PLUGINS, "loaded") | {"wanda": "blocked"}
    assert records["attnprune"]["pruners"] == ["attnprune"]
    assert records["attnprune"]["module"] == "compressx_attnprune.plugin"
    assert records["random-tokens"]["token_selectors"] == ["random"]
    table = printed("plugins").splitlines()
    for name in records:
        assert any(line.split()[:1] == [name] and "loaded" in line for line in table)


@pytest.fixture
def narrow(work: Path) -> Path:
    """A model, a recipe and an output whose names, and a sample whose prompt, are not in most encodings."""
    Path("模é").symlink_to("model")
    recipe = RECIPE.replace("{path: model}", "./模é").replace("output: out", "output: out-模é")
    Path("模.yaml").write_text(
        recipe.replace("  token_per", "  sample: {prompt: 模型, tokens: 2}\n  token_per"), "utf-8"
    )
    return work


def ended(monkeypatch: pytest.MonkeyPatch, encoding: str, *words: str) -> tuple[object, str]:
    """Run a command with streams of an encoding; return its status, and what it printed."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, made := io.TextIOWrapper(io.BytesIO(), encoding))
        monkeypatch.setattr(sys, f"__{name}__", made)
    with pytest.raises(SystemExit) as exited:
        main([*words])
    sys.stdout.flush()
    return exited.value.code, sys.stdout.buffer.getvalue().decode("latin-1")


NARROW = {
    "plan": ["plan", "模.yaml"], "plan as JSON": ["plan", "模.yaml", "--json"], "inspect": ["inspect", "模é"],
    "inspect as JSON": ["inspect", "模é", "--json"], "init": ["init", "./模é"],
    "pack": ["pack", "模é", "-o", "gone-模"],
    "answer": ["generate", "模é", "--prompt", "模", "--full", "--max-new-tokens", "2"], "plugins": ["plugins"],
    "measure": ["eval", "模é", "--recipe", "模.yaml"], "error": ["plan", "模型.yaml"],
}  # fmt: skip


@pytest.mark.parametrize(
    "encoding", ["latin-1", *(pytest.param(e, marks=pytest.mark.slow) for e in ("ascii", "utf-8"))]
)
@pytest.mark.parametrize("command", [*NARROW, pytest.param("run", marks=pytest.mark.slow)])
def test_a_command_ends_well_on_a_terminal_of_any_encoding(narrow, command, encoding, monkeypatch) -> None:
    words = NARROW.get(command, ["run", "模.yaml"])
    code, said = ended(monkeypatch, encoding, *words)
    assert code == (2 if command == "error" else 0)
    if "--json" in words:
        assert json.loads(said)
    if command == "run":
        assert ("\\u6a21" in said) == (encoding != "utf-8"), "what the terminal cannot show is escaped"
        assert Path("out-模é/report.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "status"), [(">&-", 0), ("2>&-", 0), (">&- 2>&- <&-", 0), (">/dev/full", 2), ("| head -c 1", 1)]
)
def test_standard_streams_may_be_closed_or_unread_and_what_a_full_disk_lacks_is_an_error(work, ending, status) -> None:
    command = f"set -o pipefail; {sys.executable} -m compressx inspect model {ending}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
