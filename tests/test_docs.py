"""The documentation against the code: every hook, key and option is named, links resolve, its commands are taken."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, get_args

import click
import pytest
import torch
from click.testing import CliRunner
from pydantic import BaseModel
from tests.compressx.saved import save_tiny

import compressx
from compressx import cli, masks, testing
from compressx.api import hooks as hookspecs
from compressx.api.pruner import PrunerSpec, Statistic
from compressx.api.record import (
    AllocationReport,
    Arithmetic,
    BlockReport,
    FinetuneReport,
    HeldOutLoss,
    LayerReport,
    ReconstructionReport,
    RunReport,
    UnitReport,
)
from compressx.pipeline.sweep import runs_of
from compressx.plugins.discovery import LoadTable, PluginTable
from compressx.plugins.manager import load_plugins
from compressx.recipe.schema import Recipe, load_recipe
from compressx.recipe.sections import (
    AttentionAware,
    Calibration,
    DivergenceAllocation,
    Finetune,
    Lora,
    OwlAllocation,
    Protect,
    ReconstructBlock,
)

_ROOT = Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")
_RECIPE_MD = (_ROOT / "docs/recipe.md").read_text(encoding="utf-8")
_COMMANDS_MD = (_ROOT / "docs/command-line.md").read_text(encoding="utf-8")
_DESIGN_MD = (_ROOT / "docs/design.md").read_text(encoding="utf-8")
_RESULTS_MD = (_ROOT / "docs/results.md").read_text(encoding="utf-8")
_WRITE_MD = (_ROOT / "docs/write-a-pruner.md").read_text(encoding="utf-8")
_PAGES = [*(_ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *(_ROOT / "docs").rglob("*.md")]


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", page, flags=re.MULTILINE | re.DOTALL)


def _code_spans(page: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", _prose(page)))


def _prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _keys(model: type[BaseModel], *outer: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name
        for inner in {m for part in (field.annotation, *field.metadata) for m in _models_in(part)} - {model, *outer}:
            yield from _keys(inner, model, *outer)


def _commands(group: click.Group) -> Iterator[click.Command]:
    yield group
    for command in group.commands.values():
        yield from _commands(command) if isinstance(command, click.Group) else (command,)


# --- names


def test_every_hook_and_its_arguments_are_named_in_the_plugin_guide():
    spans = _code_spans(_WRITE_MD)
    hooks = [f for n, f in inspect.getmembers(hookspecs, inspect.isfunction) if n.startswith("compressx_")]
    assert len(hooks) >= 3
    for hook in hooks:
        row = next((line for line in _WRITE_MD.splitlines() if line.startswith(f"| `{hook.__name__}` |")), None)
        assert row is not None, f"{hook.__name__} has no row in the table of hooks"
        assert {*inspect.signature(hook).parameters} <= _code_spans(row), hook.__name__
    assert {*inspect.signature(PrunerSpec).parameters} <= spans


def test_every_key_of_plugins_toml_is_shown_in_the_plugin_guide():
    shown = "\n".join(_blocks(_WRITE_MD, "toml"))

    fields = {**LoadTable.model_fields, **PluginTable.model_fields}
    for key in (field.alias or name for name, field in fields.items()):
        assert re.search(rf"^{key} = ", shown, flags=re.MULTILINE), key


def test_every_key_of_a_recipe_is_named_in_the_recipe_page():
    keys = {*_keys(Recipe), *(k for x in load_plugins().offers["evaluators"].values() for k in _keys(x.options))}

    assert {"sha256", "json", "sequence_length", "reconstruct", "limit", "field"} <= keys  # the recursion is real
    assert keys - _code_spans(_RECIPE_MD) == set()


@pytest.mark.parametrize(
    ("section", "model"),
    [("calibration", Calibration), ("allocation", OwlAllocation), ("allocation", DivergenceAllocation),
     ("allocation", AttentionAware), ("reconstruct_block", ReconstructBlock), ("finetune", Finetune),
     ("finetune", Lora)],
)  # fmt: skip
def test_every_key_of_a_section_has_its_default_in_the_recipe_page(section, model: type[BaseModel]):
    rows = re.findall(r"^\| `(\w+)` \|.*$", text := _section(_RECIPE_MD, section), flags=re.MULTILINE)
    assert {*model.model_fields} <= {*rows}
    for key, field in model.model_fields.items():
        if isinstance(field.default, (bool, int, float, str)):
            shown = re.search(rf"^\| `{key}` \|.*\| *([^|]+?) *\|$", text, flags=re.MULTILINE)
            assert shown is not None, key
            assert json.dumps(field.default) == json.dumps(_default(shown[1])), key


@pytest.mark.parametrize(
    ("section", "key", "model"),
    [*(("evaluate", name, spec.options) for name, spec in load_plugins().offers["evaluators"].items()),
     ("select_tokens", "protect", Protect)],
)  # fmt: skip
def test_every_key_below_a_key_has_its_default_in_the_recipe_page(section, key, model: type[BaseModel]):
    rows = re.search(rf"^\| `{key}` \|.*\n((?:\| \.\.\. .*\n)+)", _section(_RECIPE_MD, section), flags=re.MULTILINE)
    assert rows is not None
    shown = {name: cell.strip() for name, cell in re.findall(r"`(\w+)` \|.*\| *([^|]*?) *\|\n", rows[1])}
    assert {*model.model_fields} == {*shown}
    for name, field in model.model_fields.items():
        if isinstance(field.default, (bool, int, float, str, list)):
            assert json.dumps(field.default) == json.dumps(_default(shown[name])), name


@pytest.mark.parametrize("selector", sorted(load_plugins().offers["token_selectors"]))
def test_every_token_selector_has_its_options_and_their_defaults_in_the_recipe_page(selector):
    row = next(line for line in _RECIPE_MD.splitlines() if line.startswith(f"| `{selector}` |"))
    shown = dict(re.findall(r"`(\w+)` \(`?(\w+)`?\)", row.split("|")[3]))
    fields = load_plugins().offers["token_selectors"][selector].options.model_fields
    assert shown == {name: str(field.default) for name, field in fields.items()}


def test_every_argument_of_a_pruner_spec_has_its_default_in_the_plugin_guide():
    for name, parameter in inspect.signature(PrunerSpec).parameters.items():
        [row] = re.findall(
            rf"^\| `{name}` \|.*\| *([^|]+?) *\|$", _section(_WRITE_MD, "PrunerSpec"), flags=re.MULTILINE
        )
        without = {inspect.Parameter.empty: "required", None: "none"}
        default = parameter.default
        assert row == (without[default] if default in without else f"`{default!r}`".replace("'", '"')), name


def test_options_of_the_command_line_have_their_defaults_in_its_page():
    for command in _commands(cli.cli):
        for option in (p for p in command.params if isinstance(p, click.Option)):
            value = option.default[0] if isinstance(option.default, list) else option.default
            if isinstance(value, (int, str)) and not isinstance(value, bool) and value not in {"", "auto", 0, 1}:
                rows = [line for line in _COMMANDS_MD.splitlines() if re.match(rf"\| `.*{option.opts[-1]}\b", line)]
                assert any(re.search(rf"default `?{value}\b", row) for row in rows) or option.name == "kind", (
                    option.name
                )


def _section(page: str, heading: str) -> str:
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def _default(cell: str) -> object:
    word = cell.strip("`")
    try:
        return json.loads(re.sub(r"^(\d)e", r"\1.0e", word))
    except json.JSONDecodeError:
        return word


def test_every_command_and_option_is_named_in_the_page_of_the_command_line():
    options = {name for c in _commands(cli.cli) for p in c.params if isinstance(p, click.Option) for name in p.opts}
    spans = " ".join(_code_spans(_COMMANDS_MD)).split()

    assert {"--set", "-p", "--json", "--grid"} <= options
    assert options - set(spans) == set()
    for command in cli.cli.commands:
        assert any(span.startswith(f"compressx {command}") for span in _code_spans(_COMMANDS_MD)), command


def test_every_pruner_has_its_default_group_and_its_options_in_the_recipe_page():
    spans = _code_spans(_RECIPE_MD)
    for name, spec in load_plugins().offers["pruners"].items():
        row = next(line for line in _RECIPE_MD.splitlines() if line.startswith(f"| `{name}` |"))
        assert re.findall(r"`(\w+)`", row.split("|")[3]) == list(spec.groups)
        assert set(_keys(spec.options)) <= spans, name
        section = _section(_RECIPE_MD, "Pruners")
        for option, field in spec.options.model_fields.items():
            rows = [line.split("|") for line in section.splitlines() if line.startswith(f"| `{option}` |")]
            [row] = [cells for cells in rows if f"`{name}`" in cells[2]]
            shown = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
            assert field.default is None or shown in row[-2], f"{name}: {option}"


def test_every_key_of_the_report_is_named_in_the_recipe_page():
    reports = (RunReport, LayerReport, AllocationReport, UnitReport, ReconstructionReport, FinetuneReport)
    keys = {name for report in reports for name in report.__dataclass_fields__}

    assert keys - _code_spans(_RECIPE_MD) == set()
    rows = dict(re.findall(r"^\| `([\w.\[\]]+)` \| (.*) \|$", _RECIPE_MD, flags=re.MULTILINE))
    for key, parts in {
        "blocks": (BlockReport, ReconstructionReport), "blocks[].layers": (LayerReport,),
        "allocation": (AllocationReport, UnitReport), "finetune": (FinetuneReport, HeldOutLoss),
        "arithmetic": (Arithmetic,),
    }.items():  # fmt: skip
        missing = {name for part in parts for name in part.__dataclass_fields__} - _code_spans(rows[key])
        assert not missing, (key, missing)


def test_every_public_name_is_in_the_page_of_the_python_api():
    page = (_ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    places = dict(re.findall(r"^::: (\S+)((?:\n {4}.*)*)", page, flags=re.MULTILINE))
    shown = {place.rpartition(".")[2] for place in places}
    for place, options in places.items():
        if members := re.search(r"members: \[(.*?)\]", options, flags=re.DOTALL):
            shown |= set(re.findall(r"\w+", members[1]))
        elif (_ROOT / "src" / f"{place.replace('.', '/')}.py").is_file():
            module = importlib.import_module(place)
            shown |= {name for name, value in vars(module).items() if getattr(value, "__module__", "") == place}
    public = {*compressx.__all__, *masks.__all__, *testing.__all__} - {"__version__"}

    assert {"run", "prune", "MaskSet", "check_plugin"} <= public
    assert public - shown - _code_spans(page) - _code_spans(_WRITE_MD) == set()


def _places(section: str) -> Iterator[str]:
    """Yield the files of `src` that the tables of a section name; a folder without files stands for all in it."""
    package = ""
    for line in section.splitlines():
        if said := re.match(r"`src/(\w+)`", line):
            package = f"{said[1]}/"
        elif line.startswith("|"):
            spans = re.findall(r"`([\w./]+(?:\.py|\.jinja|/))`", line.strip("|").split("|")[1])
            folder = ""
            for span, following in pairwise([*spans, "/"]):
                if not span.endswith("/"):
                    yield f"{package}{span if '/' in span else folder + span}"
                    continue
                folder = span
                if following.endswith("/"):
                    yield from (
                        f"{package}{folder}{path.name}" for path in (_ROOT / "src" / package / folder).glob("*.py")
                    )


def test_every_module_has_its_place_in_the_design_page():
    section, source = _section(_DESIGN_MD, "Where things are"), _ROOT / "src"
    named = {place for place in _places(section) if not place.endswith("__init__.py")}
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py") if path.name != "__init__.py"}

    assert modules - named == set()
    assert [name for name in named if not (source / name).is_file()] == []


# --- figures


def _table(section: str, start: str) -> dict[str, dict[str, str]]:
    """Return the cells of the table whose header begins so by row and column, without bold type, links and brackets."""
    lines = section.partition(f"| {start}")[2].partition("\n\n")[0].splitlines()
    rows = [[re.sub(r"\*|\(.*?\)|[][]", "", cell).strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def test_the_figures_of_the_readme_and_of_the_best_recipes_are_those_of_the_results_page():
    section, best = _section(_README, "Results"), _section(_RESULTS_MD, "The lowest perplexity")
    shown, measured = _table(section, "Token perplexity"), _table(best, "token perplexity")
    assert {float(row.pop("dense")) for row in shown.values()} == {29.2}
    assert "dense 29.16" in best
    trained = _table(best, "token perplexity at 50%")["SparseGPT"]["trained"]
    with_prompts = measured["best-50 as it is, with prompts"]["50%"]
    expected = [measured["SparseGPT"], {"50%": trained}, {**measured["best"], "50%": with_prompts}]
    for readme, results in zip(shown, expected, strict=True):
        _, *cells = shown[readme].items()
        assert [column for column, _ in cells] == ["50%", "70%", "2:4"]
        for column, rounded in [(column, cell) for column, cell in cells if cell]:
            half = 0.5 * 10 ** -len(rounded.partition(".")[2]) * (1 + 1e-9)  # of its last digit
            assert abs(float(rounded) - float(results[column])) <= half, (readme, column)
    [minutes] = [row for name, row in measured.items() if name.startswith("best: minutes without")]
    [memory] = [row for name, row in measured.items() if name.startswith("best: peak memory")]
    assert re.findall(r"best-60 took \[(\d+) minutes", section) == [minutes["60%"]]
    for name, column in {"50": "50%", "60": "60%", "70": "70%", "2of4": "2:4"}.items():
        recipe = (_ROOT / f"recipes/best-{name}.yaml").read_text(encoding="utf-8").replace("\n# ", " ")
        said = [*re.findall(r"(\d+) minutes on two cores|([\d.]+) GB", recipe)]
        assert said == [(minutes[column], "")] * bool(minutes[column]) + [("", memory[column])]  # one was not timed


def test_the_first_screen_of_the_readme_has_the_two_commands_that_set_up_all_run_and_test():
    screen = "\n".join(_README.splitlines()[:24])
    [commands] = _blocks(screen, "sh")
    first, *made = (line.partition("#")[0].split() for line in commands.splitlines())
    assert first == ["git", "clone", "REPOSITORY", "compressx", "&&", "cd", "compressx"]
    assert made == [["make", "quickstart"], ["make", "test"]]
    assert re.search(r"make quickstart .*minutes.*memory.*disk\n.*make test .*minutes.*disk", commands)
    assert "TORCH_INDEX=" in screen
    assert "(CONTRIBUTING.md)" in screen
    for (command, target), what in zip(made, ["compressx run recipes/quickstart.yaml", "pytest"], strict=True):
        fresh = [command, "--dry-run", target, "VENV=none"]  # as where nothing is installed
        told = subprocess.run(fresh, cwd=_ROOT, capture_output=True, text=True, check=True).stdout
        assert "-m venv none" in told, told
        assert what in told, told


# --- links


def test_every_link_leads_somewhere():
    for page in _PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page.read_text(encoding="utf-8"))):
            if "://" in link:
                continue
            file, _, anchor = link.partition("#")
            target = page if not file else page.parent / file
            assert target.exists(), (page, link)
            if anchor:
                headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
                assert anchor in anchors, (page, link)


def test_every_file_of_tests_that_the_page_on_security_names_exists():
    named = re.findall(r"`([\w/]*test_\w+\.py)`", (_ROOT / "docs/security.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    assert [
        name for name in named if not any((_ROOT / "tests" / part / name).is_file() for part in ("compressx", ""))
    ] == []


# --- programs


@pytest.fixture
def model(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama, and text enough for all windows, in the working folder."""
    monkeypatch.setenv("COMPRESSX_CACHE", str(project / "cache"))
    return save_tiny(project / "tiny", "llama")


def _compressx(*arguments: str) -> None:
    done = CliRunner().invoke(cli.cli, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output


def _pruners() -> set[str]:
    """Return the pruners of the 21 linears that a run into `out` has pruned."""
    layers = [layer for block in json.loads(Path("out/report.json").read_text())["blocks"] for layer in block["layers"]]
    assert len(layers) == 21
    return {layer["pruner"] for layer in layers}


_TEXT_FILE = "{text: text.txt}"
_SMALL = ["model=./tiny", f"calibration.dataset={_TEXT_FILE}", "calibration.samples=4",
          "calibration.sequence_length=16", "output=out"]  # fmt: skip


@pytest.mark.slow
def test_the_readme_has_one_recipe_and_it_runs(model):
    [block] = _blocks(_README, "yaml")
    assert block.startswith("model:")
    Path("recipe.yaml").write_text(block, encoding="utf-8")
    recipe = load_recipe(Path("recipe.yaml")).recipe
    overrides = [*_SMALL]
    if "token_perplexity" in (recipe.evaluate or {}):
        overrides.append(f"evaluate.token_perplexity={{dataset: {_TEXT_FILE}, sequence_length: 16, samples: 2}}")
    if "lm_eval" in (recipe.evaluate or {}):
        overrides.append(
            f"evaluate.lm_eval={{tasks: [{_ROOT}/recipes/tasks/python_docs.yaml], trust_task_code: true, limit: 1}}"
        )
    _compressx("run", "recipe.yaml", *[a for o in overrides for a in ("--set", o)])
    assert _pruners() == {r.pruner + (f"+{r.reconstruct.pruner}" if r.reconstruct else "") for r in recipe.prune}
    assert set(json.loads(Path("out/report.json").read_text())["evaluation"]) == {"dense", "pruned"}


def _shown_plugins() -> list[tuple[str, str]]:
    return [
        (page.name, block)
        for page in (_ROOT / "README.md", _ROOT / "docs/write-a-pruner.md")
        for block in _blocks(page.read_text(encoding="utf-8"), "python")
        if "def compressx_pruners" in block or "@score_pruner" in block
    ]


def test_both_pages_show_a_plugin():
    assert {page for page, _ in _shown_plugins()} == {"README.md", "write-a-pruner.md"}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "source"), _shown_plugins(), ids=[page for page, _ in _shown_plugins()])
def test_a_plugin_that_a_page_shows_prunes_a_model(page, source, model, monkeypatch):
    module = re.match(r"# (\w+)\.py\n", source)
    assert module is not None, "the block says what its file is called"
    [name] = re.findall(r'(?:PrunerSpec|score_pruner)\(\s*(?:name=)?"([\w-]+)"', source)
    Path(f"{module[1]}.py").write_text(source, encoding="utf-8")
    Path("recipe.yaml").write_text(
        f"model: ./tiny\ncalibration: {{dataset: {_TEXT_FILE}, samples: 4, sequence_length: 16}}\nprune:\n"
        f'  - {{targets: ["*.q_proj"], pruner: {name}, pattern: "2:4"}}\n'
        f'  - {{targets: ["*.down_proj"], pruner: {name}, sparsity: 0.25, group: joint, reconstruct: sparsegpt}}\n'
        f'  - {{targets: ["*"], pruner: {name}, sparsity: 0.5}}\noutput: out\n',
        encoding="utf-8",
    )
    monkeypatch.delitem(sys.modules, module[1], raising=False)
    _compressx("--plugin", module[1], "run", "recipe.yaml")
    assert _pruners() == {name, f"{name}+sparsegpt"}


@pytest.mark.slow
def test_the_plugin_guide_shows_a_test_that_passes(project, monkeypatch):
    [plugin, _] = _blocks(_WRITE_MD, "python")
    [test] = [block for block in _blocks(_WRITE_MD, "py") if "def test_" in block]
    (project / "my_pruner.py").write_text(plugin, encoding="utf-8")
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.delitem(sys.modules, "my_pruner", raising=False)
    names: dict[str, Any] = {}
    exec(test, names)  # noqa: S102 - our own page
    names["test_the_pruner_keeps_every_promise"]()


def test_the_plugin_guide_shows_a_statistic_that_the_host_shares():
    [source] = [block for block in _blocks(_WRITE_MD, "py") if "@dataclass" in block]
    names: dict[str, Any] = {}
    exec(source, names)  # noqa: S102 - our own page
    one = names["Peaks"](3)
    x = torch.tensor([[[1.0, -5.0, 0.0], [2.0, 1.0, 0.0]]])
    assert isinstance(one, Statistic)
    assert one == names["Peaks"](3)
    assert one != names["Peaks"](4)
    for batch in (x, -x / 2):
        one.update(batch)
    peaks, reduction = one.tensors()["peaks"]
    assert (peaks.tolist(), reduction) == ([2.0, 5.0, 0.0], "max")


_WANDA = """\
model: ./tiny
prune:
  - {targets: ["*"], pruner: wanda, sparsity: 0.5}
output: out
"""
_WRONG = {
    "several": "model: ./tiny\ncalibration:\n  dataset: python-docs\n  samples: 0\nprune:\n"
    '  - targets: ["*"]\n    pruner: wanda\n    sparcity: 0.5\n'
    '  - targets: ["*.q_proj"]\n    pruner: magnitude\n    sparsity: 50\noutput: out\n',
    "no match": _WANDA.replace("*", "*.query").replace("wanda", "magnitude"),
}


@pytest.mark.parametrize("mistake", _WRONG)
def test_the_errors_that_the_recipe_page_shows_are_what_is_printed(mistake, project, capsys):
    testing.save_tiny_model(project / "tiny", "llama")
    (project / "recipe.yaml").write_text(_WRONG[mistake], encoding="utf-8")
    capsys.readouterr()  # save_pretrained draws a bar
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "recipe.yaml"])

    assert ended.value.code == 2
    assert f"\n{capsys.readouterr().err}" in _RECIPE_MD


# --- the site


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_has_every_page_in_its_navigation(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'not included in the "nav"' not in done.stderr
    schema = (tmp_path / "site/reference/schema/index.html").read_text(encoding="utf-8")
    for key in ("reconstruct_block", "memory_limit", "attnprune", "held_out"):
        assert key in schema
    assert "Prune a model by a recipe" in (tmp_path / "site/reference/api/index.html").read_text(encoding="utf-8")


_WITH_COMMANDS = [
    path for path in (
        _ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")), *sorted((_ROOT / "examples").rglob("*.md")),
        *sorted((_ROOT / "recipes").rglob("*.yaml")), *sorted((_ROOT / "benchmarks").rglob("*.py")),
    )
    if re.search(r"compressx [a-z]+ |python benchmarks/", path.read_text(encoding="utf-8"))
]  # fmt: skip
_SLOW = {_ROOT / "docs/results.md": pytest.mark.slow}
_STUBS = """
PATH=/nonexistent
command_not_found_handle() { printf '%s\\0' "$@" >> "$TOLD"; printf '\\n\\0' >> "$TOLD"; }
cd() { :; }; eval() { :; }
"""
"""For bash: write down what would be run, with functions, loops and variables resolved, and run nothing."""
Command: TypeAlias = list[str]
_OTHERS = {"cat", "cmp", "cp", "diff", "git", "hf", "llama-quantize", "make", "pip", "pytest", "python3"}
"""Programs that are not ours, whose options are not looked at; any other name is a function that the page lacks."""

for_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the pages are for bash")


def _in_blocks(page: str, folder: Path) -> Iterator[Command]:
    told = folder / "told"
    script = _STUBS + "\n".join(_blocks(page, "sh"))
    subprocess.run(["bash", "-c", script], cwd=folder, env={"TOLD": str(told)}, stdin=subprocess.DEVNULL,
                   capture_output=True, check=False)  # fmt: skip
    for command in told.read_text(encoding="utf-8").split("\n\0") if told.exists() else ():
        if command:
            words = command.split("\0")[:-1]
            yield words[words.index("-m") + 1 :] if words[0] == "torchrun" else words


def _in_prose(page: str) -> Iterator[Command]:
    prose = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`((?:compressx|python benchmarks)[^`\n]* --[^`\n]*)`", prose):
        yield shlex.split(re.sub(r"\bN\b", "2", span))


def _in_comments(page: str) -> Iterator[Command]:
    """Yield the commands in the comments of a recipe and in the docstring of a benchmark."""
    shown = re.findall(
        r"^(?:#|   )\s+(?:\w+=\S+ )?((?:compressx [a-z]|python benchmarks/).*)$", page, flags=re.MULTILINE
    )
    for command in shown:
        yield shlex.split(command.replace("...", ""))


def _pages_recipes(page: str) -> dict[str, str]:
    """Return the recipes that a page says to save, by name."""
    named = re.findall(r"[Ss]ave (?:this )?as `(\w+\.yaml)`:?\n+```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return dict(named)


class _Taken(Exception):  # noqa: N818 - no error: the arguments were taken
    pass


def _benchmark(words: Command, patch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, arguments: Any = None, _: Any = None) -> None:
        raise _Taken(parse(self, arguments))

    patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    patch.setattr(sys, "argv", words)
    program = Path(words[0])
    module = importlib.import_module(program.stem if program.suffix else f"{program.name}.__main__")
    with pytest.raises(_Taken):
        module.main()


def _taken(group: click.Group, words: Command, patch: pytest.MonkeyPatch, *, whole: bool) -> dict[str, Any]:
    """Parse a command without running it, and return its parameters; in prose, arguments may be missing."""
    seen: dict[str, Any] = {}
    for command in _commands(group):
        patch.setattr(command, "callback", seen.update)
    done = CliRunner().invoke(group, words, catch_exceptions=False)
    assert done.exit_code == 0 or (not whole and "Missing argument" in done.output), (words, done.output)
    return seen


def _check(words: Command, patch: pytest.MonkeyPatch, *, whole: bool) -> None:
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        _benchmark(words[1:], patch)
    if words[0] != "compressx" or len(words) == 1:
        assert words[0] in _OTHERS | {"python", "compressx"}, words
        return
    seen = _taken(cli.cli, words[1:], patch, whole=whole)
    recipe = seen.get("recipe")
    path = next((p for p in (Path(recipe or ""), _ROOT / (recipe or "")) if p.is_file()), None)
    if path is not None and seen.get("axes"):
        runs_of(path, seen["axes"], seen["overrides"], None, load_plugins())
    elif path is not None and "masks" not in seen:  # that of `eval` is overridden otherwise
        load_recipe(path, seen["overrides"])


@for_bash
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=_SLOW.get(p, ()), id=str(p.relative_to(_ROOT))) for p in _WITH_COMMANDS]
)
def test_every_command_of_a_page_is_one_that_the_programs_take(page: Path, project: Path, monkeypatch) -> None:
    text = page.read_text(encoding="utf-8")
    for name, recipe in _pages_recipes(text).items():
        Path(name).write_text(recipe, encoding="utf-8")
    found: list[tuple[Callable[[str], Iterator[Command]], bool]] = [(_in_comments, True)]
    if page.suffix == ".md":
        found = [(partial(_in_blocks, folder=project), True), (_in_prose, False)]
    for commands, whole in found:
        for words in commands(text):
            with monkeypatch.context() as patch:
                _check(words, patch, whole=whole)


@for_bash
def test_functions_and_loops_of_a_page_are_resolved_and_what_is_wrong_is_found(project: Path, monkeypatch) -> None:
    page = '```sh\nq() { compressx run a.yaml "$@"; }\nfor s in 1 2; do q --set output=$s; done\nq --sett x=1\n```\n'
    first, second, wrong = _in_blocks(page, project)
    assert (first, second) == (["compressx", "run", "a.yaml", "--set", "output=1"], [*first[:-1], "output=2"])
    _check(first, monkeypatch, whole=True)
    with pytest.raises(AssertionError, match="No such option"):
        _check(wrong, monkeypatch, whole=True)
    with pytest.raises(SystemExit):
        _check(
            ["python", "benchmarks/layer_error.py", "--model", "x", "--text", "x", "--width", "3"],
            monkeypatch,
            whole=True,
        )
