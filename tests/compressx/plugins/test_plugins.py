"""The plugin host, on plugins and installed distributions that each test writes itself."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.compressx.plugins.conftest import OFFERS, Site, listed, refusal

from compressx.api import hooks
from compressx.plugins.discovery import PluginRecord, PluginsFile, read_plugins_file
from compressx.plugins.kinds import KINDS, PRUNER
from compressx.plugins.manager import load_plugins
from compressx.runtime.errors import PluginError

ROOT = Path(__file__).parents[3]
NOTHING: dict[str, Any] = {kind.key: () for kind in KINDS}
ANY = " or ".join(", ".join(kind.name for kind in KINDS).rsplit(", ", 1))
HERE_OR = ("installed packages; install it, or give the path of its file to --plugin, or that of its folder in "
           "plugins.toml")  # fmt: skip
SELECTORS = OFFERS.replace("compressx_pruners", "compressx_token_selectors").replace("PrunerSpec", "TokenSelectorSpec")
# --- finding and loading


def test_the_sources_come_in_their_order_and_two_loads_share_nothing(site: Site) -> None:
    for name in ("cx_a", "cx_b", "cx_c", "cx_d"):
        site.offers(name, name)
    site.install("dist", b="cx_b", a="cx_a")
    site.toml(listed("c", "cx_c"))
    one, other = load_plugins(modules=["cx_d"]), load_plugins()
    expected = [("a", "entry point"), ("b", "entry point"), ("c", "plugins.toml")]
    assert [(r.name, r.source) for r in one.records] == [*expected, ("cx_d", "--plugin")]
    assert [(r.name, r.source) for r in other.records] == expected
    assert one.manager is not other.manager


def test_without_entry_points_only_the_listed_plugins_are_loaded(site: Site) -> None:
    site.offers("cx_a", "a")
    site.install("dist", a="cx_a")
    site.toml("[load]\nentry_points = false\n")
    assert load_plugins().records == ()
    assert load_plugins(blocked=["a"]).records == ()  # blocking what is installed is no typo


def test_a_plugin_reached_twice_is_one_plugin(site: Site) -> None:
    site.offers("cx_a", "a", "another")
    site.install("dist", a="cx_a")
    site.toml(listed("a", "cx_a"))
    plugins = load_plugins(modules=["cx_a"])
    place = "entry point of dist 1.2, plugins.toml:1, --plugin cx_a"
    found = PluginRecord("a", "cx_a", "entry point", place, "dist", "1.2", asked=True)
    offers = {**NOTHING, "pruners": ("a", "another")}
    assert plugins.records == (dataclasses.replace(found, status="loaded", offers=offers),)
    assert plugins.find(PRUNER, "another").name == "another"
    assert plugins.manager.get_plugin("a") is sys.modules["cx_a"]


# --- failing and blocking


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import flash_attn_9", "ModuleNotFoundError: No module named 'flash_attn_9' (HERE/cx_bad.py, line 1)"),
        ("x = 1\n1 / 0", "ZeroDivisionError: division by zero (HERE/cx_bad.py, line 2)"),
        (
            "import json\n\njson.loads('{')",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) "
            "(HERE/cx_bad.py, line 3)",
        ),
        ("raise SystemExit(3)", "SystemExit: 3 (HERE/cx_bad.py, line 1)"),
        ("x = 1\ndef f(:", "SyntaxError: invalid syntax (cx_bad.py, line 2)"),
        ("raise __import__('compressx').PluginError('too old')", "too old (HERE/cx_bad.py, line 1)"),
        ("x = 1", "TypeError: it implements no hook; mark its functions with @compressx.hookimpl"),
    ],
)
def test_a_plugin_that_fails_is_recorded_and_the_others_go_on(site: Site, body: str, error: str) -> None:
    site.module("cx_bad", body)
    site.offers("cx_good", "good")
    site.install("dist", bad="cx_bad", good="cx_good")
    plugins = load_plugins()
    assert [(r.name, r.status, r.error) for r in plugins.records] == [
        ("bad", "failed", error.replace("HERE", str(site.folder))),
        ("good", "loaded", None),
    ]
    assert list(plugins.offers["pruners"]) == ["good"]


@pytest.mark.parametrize(
    ("toml", "given", "message"),
    [
        ("\n" + listed("a", "cx_b"), {},
         "plugin 'a' (plugins.toml:2) and plugin 'a' (entry point of dist 1.2) share a name or a module, but not the "
         "module: cx_b and cx_a; rename one of them"),
        (listed("b", "cx_a"), {},
         "plugin 'b' (plugins.toml:1) and plugin 'a' (entry point of dist 1.2) share a name or a module, but not the "
         "name: b and a; rename one of them"),
        (listed("b", "m") + listed("b", "n"), {},
         "plugin 'b' (plugins.toml:4) and plugin 'b' (plugins.toml:1) share a name or a module, but not the module: "
         "n and m; rename one of them"),
        ("", {"modules": ["a/cx_a.py", "b/cx_a.py"]},
         "plugin 'cx_a' (--plugin b/cx_a.py) and plugin 'a' (entry point of dist 1.2, --plugin a/cx_a.py) share a name "
         "or a module, but not the folder: HERE/b and HERE/a; rename one of them"),
        ("", {"modules": ["cx_absent"]},
         "plugin 'cx_absent' (--plugin cx_absent) failed to load: ModuleNotFoundError: No module named "
         f"'cx_absent'; looked in the working directory HERE and in {HERE_OR}"),
        ("", {"modules": ["bad"]},
         "plugin 'bad' (--plugin bad) failed to load: ZeroDivisionError: division by zero (HERE/bad.py, line 1)"),
        ("", {"modules": ["a/cx_b.py"]}, "--plugin a/cx_b.py: no such file; did you mean 'cx_a.py'? looked in HERE/a"),
        *(("", {"modules": [module]},
           f"--plugin {module!r} is not a module; expected MODULE, such as my_pruner for my_pruner.py in the working "
           "directory, HERE, or the path of such a file, with :OBJECT or without")
          for module in ("", "a b", "a:b:c", "./my-own.py")),
        ("", {"blocked": ["aa"]}, "-p no:aa: no plugin is named 'aa'; did you mean 'a'? valid: a"),
        ('[load]\nentry_points = true\ndisabled = ["aa"]\n', {},
         "plugins.toml:3: no plugin is named 'aa'; did you mean 'a'? valid: a"),
        ("", {"modules": ["cx_a"], "blocked": ["a"]},
         "-p no:a: 'a' is blocked, but --plugin requests it; leave one of the two out"),
        ("", {"toml": Path("other.toml")}, "other.toml: cannot be read: No such file or directory"),
    ],
)  # fmt: skip
def test_what_cannot_all_be_loaded_is_an_error_that_names_both_places(
    site: Site, toml: str, given: dict[str, Any], message: str
) -> None:
    (site.folder / "my-own.py").touch()
    site.module("bad", "1 / 0")
    for folder in ("a", "b", "."):
        site.offers("cx_a", "wanda", folder=folder)
    site.install("dist", a="cx_a")
    site.toml(toml)
    assert refusal(lambda: load_plugins(**given)) == message.replace("HERE", str(site.folder))


@pytest.mark.parametrize("given", ["./deep/cx_mine.py:plugin", "HERE/deep/cx_mine.py"])
def test_a_plugin_can_be_given_as_the_path_of_its_file(site: Site, given: str) -> None:
    site.offers("cx_mine", "mine", folder="deep")
    with (site.folder / "deep/cx_mine.py").open("a") as file:
        file.write("\nplugin = __import__('sys').modules[__name__]\n")
    plugins = load_plugins(modules=[given.replace("HERE", str(site.folder))])
    assert [*plugins.offers["pruners"]] == ["mine"]
    assert plugins.records[0].code()


def test_what_a_module_prints_while_it_is_imported_is_no_result_of_a_command(site: Site, capsys: Any) -> None:
    site.module("cx_loud", "print('hello')\n" + OFFERS.format(names=("loud",)))
    load_plugins(modules=["cx_loud"])
    assert capsys.readouterr() == ("", "hello\n")


def test_a_blocked_plugin_is_never_imported(site: Site) -> None:
    for name in ("cx_a", "cx_b"):
        site.module(name, "raise AssertionError('imported')")
    site.install("dist", a="cx_a", b="cx_b")
    site.toml('[load]\ndisabled = ["b"]\n')
    plugins = load_plugins(blocked=["a"])
    assert [(r.name, r.status, r.error) for r in plugins.records] == [("a", "blocked", None), ("b", "disabled", None)]
    assert not {"cx_a", "cx_b"} & set(sys.modules)
    assert plugins.manager.is_blocked("a")


# --- hooks


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("@compressx.hookimpl\ndef compressx_pruner(): return []", "'compressx_pruner' is not a hook"),
        ("@compressx.hookimpl(specname='compressx_pruner')\ndef anything(): return []", "'anything' is not a hook"),
        ("def compressx_pruners(): return []",
         "'compressx_pruners' lacks @compressx.hookimpl and would never be called"),
    ],
)  # fmt: skip
def test_a_misspelt_hook_or_one_without_its_marker_is_refused_even_if_nobody_asked_for_the_plugin(
    site: Site, body: str, problem: str
) -> None:
    site.module("cx_mine", f"import compressx\n{body}")
    site.install("dist", mine="cx_mine")
    nearest = "; did you mean 'compressx_pruners'? valid: " + ", ".join(n for n in dir(hooks) if n[:10] == "compressx_")
    assert refusal(load_plugins) == (
        f"plugin 'mine' (entry point of dist 1.2): function {problem}" + (nearest if "not a hook" in problem else "")
    )


def test_an_argument_that_the_hook_does_not_have_is_refused(site: Site) -> None:
    site.module("cx_argument", "import compressx\n@compressx.hookimpl\ndef compressx_block_pruned(rapport): ...")
    said = r"plugin 'cx_argument' \(--plugin cx_argument\): .*'rapport'.*; expected compressx_block_pruned\(report\)"
    assert re.fullmatch(said, refusal(lambda: load_plugins(modules=["cx_argument"])))


def test_a_hook_may_take_fewer_arguments_and_another_name(site: Site) -> None:
    body = """
import compressx
heard = []

@compressx.hookimpl
def compressx_run_finished(output):
    heard.append(output)

@compressx.hookimpl(specname="compressx_block_pruned")
def listen(report):
    heard.append(report)
"""
    site.module("cx_listener", body)
    plugins = load_plugins(modules=["cx_listener"])
    plugins.manager.hook.compressx_run_finished(report=None, output="folder")
    plugins.manager.hook.compressx_block_pruned(report="block 3")
    assert sys.modules["cx_listener"].heard == ["folder", "block 3"]
    assert plugins.records[0].offers == NOTHING


GROUPS = "expected a tuple of row, layer, joint, such as ('row',)"


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        ("None", "TypeError: compressx_pruners returned None; return a list of PrunerSpec"),
        ("['wanda']", "TypeError: compressx_pruners returned 'wanda', which is not a PrunerSpec"),
        ("(1 / 0 for _ in [1])", "ZeroDivisionError: division by zero (HERE/cx_nonsense.py, line 14)"),
        ("[spec('', Options)]", "TypeError: pruner '' has no name; expected text"),
        ("[spec('x', dict)]",
         "TypeError: pruner 'x' has options <class 'dict'>; expected a subclass of pydantic's BaseModel, even an empty "
         "one"),
        ("[spec('x', Options, groups=('rows',))]", f"TypeError: pruner 'x' has groups ('rows',); {GROUPS}"),
        ("[spec('x', Options, groups=(), nm=False)]",
         "TypeError: pruner 'x' prunes nothing: its groups and units are empty and nm is False"),
        ("[spec('x', Options, units=('neuron',))]",
         "TypeError: pruner 'x' has units ('neuron',); expected a tuple of neurons, kv-groups, experts, blocks, such "
         "as ('neurons',)"),
        ("[spec('x', Options, selecting_options=('stepz',))]",
         "TypeError: pruner 'x' has selecting_options ['stepz'], which are not options of it"),
        ("[spec('x', Options, check=True)]", "TypeError: pruner 'x' has check True, which is not callable"),
        ("[spec('x', Options), spec('x', Options)]", "ValueError: compressx_pruners offers the pruner 'x' twice"),
    ],
)  # fmt: skip
def test_a_plugin_that_offers_nonsense_fails_and_hears_nothing(site: Site, returned: str, error: str) -> None:
    head = OFFERS.partition("@")[0]
    body = f"""{head}
def spec(name, options, build=print, **more):
    return compressx.PrunerSpec(name, "", options, build, **more)

@compressx.hookimpl
def compressx_pruners():
    return {returned}

@compressx.hookimpl
def compressx_block_pruned(report):
    raise AssertionError("called")
"""
    site.module("cx_nonsense", body)
    site.install("dist", nonsense="cx_nonsense")
    plugins = load_plugins()
    assert [(r.status, r.error) for r in plugins.records] == [("failed", error.replace("HERE", str(site.folder)))]
    plugins.manager.hook.compressx_block_pruned(report=None)
    assert plugins.offers == {key: {} for key in NOTHING}


def test_what_a_name_stands_for_is_what_the_plugin_offers_or_else_what_has_that_name(site: Site) -> None:
    site.offers("cx_pruners", "one", "two")
    site.module("cx_tokens", SELECTORS.format(names=["cx_pruners", "two", "three"]))
    site.module("cx_ears", "import compressx\n@compressx.hookimpl\ndef compressx_block_pruned(report): ...")
    plugins = load_plugins(modules=["cx_pruners", "cx_tokens", "cx_ears"])
    pruners, selectors = plugins.offers["pruners"], plugins.offers["token_selectors"]
    assert plugins.named("cx_pruners") == [pruners["one"], pruners["two"]]
    assert plugins.named("two") == [pruners["two"], selectors["two"]]
    assert plugins.named("three") == [selectors["three"]]
    assert refusal(lambda: plugins.named("cx_ears")).startswith(f"no {ANY} 'cx_ears'; ")
    assert refusal(lambda: plugins.named("thre")) == (
        f"no {ANY} 'thre'; did you mean 'three'? valid: cx_pruners, one, three, two; compressx "
        "plugins lists what is installed"
    )


def test_a_pruner_that_is_not_there_is_told_with_the_plugins_that_failed(site: Site) -> None:
    absent = "no pruner 'owl'; none is loaded; compressx plugins lists what is installed"
    assert refusal(lambda: load_plugins().find(PRUNER, "owl")) == absent
    site.module("cx_alps", "import flash_attn_9")
    site.install("compressx-alps", fast="cx_alps")
    plugins = load_plugins()
    assert refusal(lambda: plugins.find(PRUNER, "alps")) == (
        "no pruner 'alps': plugin 'fast' (entry point) failed to load: ModuleNotFoundError: "
        f"No module named 'flash_attn_9' ({site.folder / 'cx_alps.py'}, line 1)"
    )
    assert refusal(lambda: plugins.find(PRUNER, "owl")) == (
        "no pruner 'owl'; none is loaded; plugins that failed to load: fast; compressx plugins lists what is installed"
    )


# --- plugins.toml


def test_a_folder_of_the_project_is_on_sys_path_only_during_the_import(site: Site) -> None:
    site.offers("cx_inside", "inside", folder="lib/deep")
    site.toml(listed("inside", "cx_inside", path="lib/deep"))
    before = list(sys.path)
    assert list(load_plugins().offers["pruners"]) == ["inside"]
    assert sys.path == before


def test_a_module_of_the_same_name_from_elsewhere_is_refused(site: Site) -> None:
    site.offers("cx_clash", "clash")
    importlib.import_module("cx_clash")
    site.offers("cx_clash", "clash", folder="lib")
    site.toml(listed("clash", "cx_clash", path="lib"))
    assert refusal(load_plugins).endswith(
        f"not from {site.folder / 'lib'}; another module has the same name, so rename it"
    )


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        *((path, "it resolves to HERE") for path in ("lib/../..", "link")), ("/", "it resolves to /"),
        ("plugins.toml", "it resolves to HERE/project/plugins.toml"), ("gone", "No such file or directory"),
        ("loop", ""), ("a\0b", "embedded null byte"), ("x" * 5000, "File name too long"),
    ],
)  # fmt: skip
def test_a_folder_outside_the_project_or_none_is_refused(site: Site, path: str, fault: str) -> None:
    project = site.folder / "project"
    (project / "lib").mkdir(parents=True)
    (project / "link").symlink_to(site.folder)
    (project / "loop").symlink_to(project / "loop")
    file = project / "plugins.toml"
    file.write_text(listed("a", "cx_a", path=path))
    told = f"{file}:4: path {path!r} is no folder inside the project {project}: {fault}"
    assert refusal(lambda: read_plugins_file(file)).startswith(told.replace("HERE", str(site.folder)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[lod]\n", "1: unknown key 'lod'; did you mean 'load'? valid: load, plugin"),
        ("# c\n[load]\n\ndisable = []\n",
         "4: unknown key 'disable' in load; did you mean 'disabled'? valid: disabled, entry_points"),
        ("[load]\nentry_points = 'yes'\n",
         "2: load.entry_points is 'yes'; expected true or false: whether installed plugins are loaded"),
        ("[[plugin]]\nname='a'\nmodule='m'\n\n[[plugin]]\nname='b'\nmodul='m'\n",
         "7: unknown key 'modul' in plugin[1]; did you mean 'module'? "
         "valid: module, name, path\n"
         "plugins.toml:5: missing key 'module' in plugin[1]: MODULE or MODULE:OBJECT"),
        ("load.disabled = 3\n", "1: load.disabled is 3; expected a list: names of plugins that are never imported"),
        ("[load]\na = \n", "2:5: not TOML: Invalid value"),
        ("[load]\n[load]\n", "2:6: not TOML: Cannot declare ('load',) twice"),
        ("[load]\ndisabled = [\n  3,\n]\n",
         "2: load.disabled[0] is 3; expected text (numbers, true and null in quotes): "
         "names of plugins that are never imported"),
        ("a = " + "[" * 5000, " not TOML: nested too deeply"),
        ("a = 1979-05-27\n", "1: unknown key 'a'; valid: load, plugin"),
        ("[load]\n# \udcff\n", "2: byte 0xff is not UTF-8; save the file as UTF-8"),
    ],
)  # fmt: skip
def test_a_wrong_plugins_file_is_told_in_plain_words_with_its_line(site: Site, text: str, message: str) -> None:
    (site.folder / "plugins.toml").write_bytes(text.encode(errors="surrogateescape"))
    assert refusal(load_plugins).startswith(f"plugins.toml:{message}")


def test_the_repositorys_own_file_loads_what_the_package_installs() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["compressx"]
    records = [r for r in load_plugins(toml=ROOT / "plugins.toml").records if r.distribution == "compressx"]
    assert {r.name: r.module for r in records} == points
    assert {r.status for r in records} == {"loaded"}


def test_the_example_in_the_repositorys_own_file_loads(site: Site) -> None:
    shutil.copytree(ROOT / "examples", site.folder / "examples")
    site.toml(re.sub(r"^# (?=\[\[|\w+ = )", "", (ROOT / "plugins.toml").read_text(), flags=re.MULTILINE))
    (record,) = load_plugins().records
    site.modules.add(record.module)
    assert record.offers["pruners"] == ("random",)


# --- fuzzing

fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
_WORDS = ["[load]", "[[plugin]]", "name", "module", "path", "disabled", "entry_points", " = ", "\n", "\n",
          "'a'", '"b.c"', "['a']", "[]", "true", "3", *"{}[].#\\", "'''", "1979-05-27"]  # fmt: skip
toml_text = st.lists(st.sampled_from(_WORDS), max_size=30).map("".join)


def read(path: Path) -> PluginsFile | str:
    try:
        return read_plugins_file(path)
    except PluginError as error:
        return str(error)


@fuzz
@given(
    data=st.binary(max_size=100)
    | st.text(max_size=100).map(lambda t: t.encode("utf-8", "surrogatepass"))
    | toml_text.map(str.encode)
)
def test_arbitrary_files_raise_nothing_but_plugin_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "plugins.toml"
    path.write_bytes(data)
    outcome = read(path)
    assert isinstance(outcome, PluginsFile) or outcome.startswith(str(path))


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=6)
lists = st.lists(names, max_size=2)
tables = st.fixed_dictionaries(
    {"name": names},
    optional={
        "module": st.sampled_from(["a", "a.b:c", "1", ""]),
        "path": st.sampled_from([".", "..", "lib", ""]) | names,
        "sumary": names,
    },
)  # fmt: skip


@fuzz
@given(
    load=st.fixed_dictionaries({}, optional={"disabled": lists, "entry_points": st.booleans()}),
    plugins=st.lists(tables, max_size=3),
)
def test_arbitrary_tables_are_read_as_written_or_refused_with_a_line(
    tmp_path: Path, load: dict[str, Any], plugins: list[dict[str, Any]]
) -> None:
    lines = ["[load]", *(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in load.items())]
    for plugin in plugins:
        lines += ["[[plugin]]", *(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in plugin.items())]
    path = tmp_path / "plugins.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    outcome = read(path)
    if isinstance(outcome, PluginsFile):
        assert outcome.load.model_dump(exclude_unset=True) == load
        for record, table in zip(outcome.plugins, plugins, strict=True):
            assert (record.name, record.module) == (table["name"], table["module"])
            assert record.folder == ((tmp_path / table["path"]).resolve() if "path" in table else None)
    else:
        places = [line.removeprefix(f"{path}:").split(": ")[0] for line in outcome.split("\n")]
        assert all(lines[int(place) - 1] for place in places)
