from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.compressx.two_of_four import KINDS, pruned

from compressx.masks.maskset import squash
from compressx.models import export
from compressx.models.export import check_output, check_unfinished, output_folder
from compressx.models.shards import save_model
from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import BLOCKS, STATE
from compressx.testing import tiny_model


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))  # noqa: PTH208 - hidden names included


def write_output(folder: Path, content: str) -> None:
    for name in ("report.json", "recipe.yaml", "masks.safetensors"):
        (folder / name).write_text(content)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    write_output(folder, "earlier")
    return folder


@pytest.mark.parametrize("there", [False, True])
def test_the_folder_appears_whole_under_its_name_and_nothing_stays_beside_it(there: bool, tmp_path: Path) -> None:
    target = tmp_path / "runs" / "one" / "out"
    if there:  # an empty folder, with nothing to resume
        target.mkdir(parents=True)
    with output_folder(target, resume=there) as building:
        assert building.parent == target.parent
        (building / "model").mkdir()
        (building / "model" / "config.json").write_text("{}")
        assert not there or not any(target.iterdir())
    assert (target / "model" / "config.json").read_text() == "{}"
    assert names_in(target.parent) == ["out"]


def test_an_earlier_output_is_replaced_only_at_the_end_and_wholly(earlier: Path) -> None:
    (earlier / "units.json").write_text("x")
    with output_folder(earlier) as building:
        write_output(building, "new")
        assert (earlier / "report.json").read_text() == "earlier"
    assert (earlier / "report.json").read_text() == "new"
    assert "units.json" not in names_in(earlier)
    assert names_in(earlier.parent) == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_any_exception_removes_what_was_built_and_leaves_the_earlier_output(error, earlier):
    with pytest.raises(error), output_folder(earlier) as building:  # noqa: PT012 - the block is the test
        write_output(building, "new")
        raise error
    assert (earlier / "report.json").read_text() == "earlier"
    assert names_in(earlier.parent) == ["out"]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=["ctrl-c", "full"])
def test_a_failure_between_the_two_renames_puts_the_earlier_output_back(error, failing, earlier, monkeypatch):
    real, calls = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise error
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises((KeyboardInterrupt, ArtifactError)) as raised, output_folder(earlier) as building:
        write_output(building, "new")
    if isinstance(error, OSError):
        assert f"cannot write {earlier}: No space left on device; free some space" in str(raised.value)
    assert (earlier / "report.json").read_text() == "earlier"
    assert names_in(earlier.parent) == ["out"]


@pytest.mark.parametrize("error", [OSError(errno.EBUSY, "Device or resource busy"), KeyboardInterrupt()], ids=repr)
def test_what_a_run_finished_is_kept_when_the_last_rename_fails(error, tmp_path, monkeypatch):
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        raise error

    for attempt in ("first", "second"):
        monkeypatch.setattr(Path, "rename", rename if attempt == "first" else real)
        with contextlib.ExitStack() as expected:
            if attempt == "first":
                expected.enter_context(pytest.raises((KeyboardInterrupt, ArtifactError)))
            with output_folder(tmp_path / "out", resume=attempt == "second") as building:
                if attempt == "second":
                    assert (building / "blocks/one").read_text() == "first"
                write_output(building, attempt)
                (building / "state.json").write_text("{}")
                (building / "blocks").mkdir(exist_ok=True)
                (building / "blocks/one").write_text(attempt)
    assert names_in(tmp_path) == ["out"]
    assert (tmp_path / "out/report.json").read_text() == "second"
    assert not {"state.json", "blocks"} & {*names_in(tmp_path / "out")}


REFUSED = {
    "volume": r"is a mount point, .*; choose a folder in it, such as .*volume/run",
    "thesis": r"thesis exists and is not an earlier output of compressx",
    "file": "file is a file; choose a folder",
    "file/below": r"below cannot be created: .*file is not a folder|below: Not a directory",
    "/": r"output .* is the root of the file system; choose a folder in it",
    ".": "current folder or one above it", "..": "current folder or one above it",
    "closed/out": "closed/out cannot be created: .*closed is not a folder that you can write to",
    "${USER}": r"output .*\$\{USER\} has a variable, which a recipe does not expand",
}  # fmt: skip


@pytest.mark.parametrize("target", REFUSED)
def test_a_target_that_cannot_be_an_output_is_refused_before_any_work(target, tmp_path, monkeypatch) -> None:
    for name in ("thesis", "volume", "closed", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "thesis" / "report.json").write_text("{}")
    (tmp_path / "file").write_text("")
    write_output(tmp_path, "mine")
    monkeypatch.setattr(Path, "is_mount", lambda self: self.name == "volume")
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path).name != "closed")
    before = names_in(tmp_path)
    if target.startswith("."):
        monkeypatch.chdir(tmp_path / "work")
    given = Path(target) if target.startswith(".") else tmp_path / target
    with pytest.raises(ArtifactError, match=REFUSED[target]):
        check_output(given)
    with pytest.raises(ArtifactError, match=REFUSED[target]), output_folder(given):
        pytest.fail("the block must not run")
    check_output(tmp_path / "volume/run")
    assert names_in(tmp_path) == before


def test_everything_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        assert {p.stat().st_ino for p in (self, *self.rglob("*"))} <= set(synced)
        return real(self, target)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(Path, "rename", rename)
    with output_folder(tmp_path / "out") as building:
        (building / "model").mkdir()
        (building / "model" / "weights").write_text("x")
    assert synced[-1] == tmp_path.stat().st_ino


@pytest.mark.parametrize("asked", [{}, {"resume": True}, {"restart": True}])
def test_a_second_run_for_an_output_is_refused_while_the_first_is_going_on(tmp_path: Path, asked: Any) -> None:
    with output_folder(tmp_path / "out") as building:
        for state in (False, True):
            if state:
                (building / "state.json").write_text("{}")
            with (
                pytest.raises(
                    ArtifactError, match=r"out is active, by process .*\.out\.lock; wait for it, or choose an"
                ),
                output_folder(tmp_path / "out", **asked),
            ):
                pytest.fail("the block must not run")
        (building / "report").write_text("whole")
    assert names_in(tmp_path / "out") == ["report"]


def _contending(target: Path, wanted: int, failures: Any) -> None:
    """Build an output again and again while others do, and check that nobody else is in the folder."""
    failure, mine = None, target.with_name("mine")
    while wanted and failure is None:
        try:
            with output_folder(target, resume=True) as building:
                mine.touch(exist_ok=False)
                (building / "state.json").write_text("{}")
                mine.unlink()
                wanted -= 1
                sys.exit()
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            failure = None if isinstance(error, ArtifactError) and " is active, " in str(error) else repr(error)
    failures.put(failure)


def test_of_runs_that_start_and_end_at_the_same_time_none_shares_a_folder(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("fork")
    failures = processes.Queue()
    several = [processes.Process(target=_contending, args=(tmp_path / "out", 100, failures)) for _ in range(3)]
    for process in several:
        process.start()
    assert [failures.get(timeout=60) for _ in several] == [None] * 3
    for process in several:
        process.join()
    assert len(names_in(tmp_path)) == 1


def test_a_run_that_cannot_have_the_folder_is_refused_at_once_and_nothing_changes(tmp_path: Path) -> None:
    target = tmp_path / "out"
    check_unfinished(tmp_path / "none" / "out")
    with contextlib.suppress(KeyboardInterrupt), output_folder(target) as building:
        (building / "state.json").write_text("{}")
        with pytest.raises(ArtifactError, match="is active, by"):
            check_unfinished(target, restart=True)
        raise KeyboardInterrupt
    with pytest.raises(ArtifactError, match="continue with --resume, or start over with --restart"):
        check_unfinished(target)
    check_unfinished(target, resume=True)
    check_unfinished(target, restart=True)
    assert names_in(tmp_path) == [building.name]


@pytest.mark.parametrize(
    "names", [["notes.md"], [".git"], ["bench.json", "model.bak"], ["a", "b", "c", "d", "e"]], ids=str
)
def test_an_earlier_output_with_somebodys_own_files_is_refused_until_they_may_be_deleted(names, earlier: Path) -> None:
    for name in names:
        (earlier / name).mkdir()
    shown = ", ".join(names) if len(names) < 4 else "a, b, c and 2 more"
    told = rf"out has what no run wrote: {re.escape(shown)}; it would be deleted .* move it, .* with --replace"
    with pytest.raises(ArtifactError, match=told):
        check_output(earlier)
    with pytest.raises(ArtifactError, match=told), output_folder(earlier, restart=True):
        pytest.fail("the block must not run")
    assert {*names} < {*names_in(earlier)}
    check_output(earlier, replace=True)
    with output_folder(earlier, replace=True) as building:
        write_output(building, "new")
    assert not {*names} & {*names_in(earlier)}


def test_notes_that_are_put_into_the_earlier_output_during_the_run_stay_there(earlier: Path) -> None:
    with pytest.raises(ArtifactError, match=r"what no run wrote: notes\.md"), output_folder(earlier):
        (earlier / "notes.md").write_text("years")
    assert (earlier / "report.json").read_text() == "earlier"


def test_what_may_lie_in_an_output_is_what_the_documentation_lists() -> None:
    page = (Path(__file__).parents[3] / "docs/recipe.md").read_text(encoding="utf-8")
    table = page.partition("## The output folder")[2].partition("`report.json`:")[0]
    listed = {name.rstrip("/") for name in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)}
    assert listed == export._WRITTEN - {STATE, BLOCKS, ".DS_Store"}


def test_a_link_to_an_earlier_output_stays_a_link(earlier: Path) -> None:
    link = earlier.parent / "latest"
    link.symlink_to(earlier)
    with output_folder(link) as building:
        write_output(building, "new")
    assert link.is_symlink()
    assert (earlier / "report.json").read_text() == "new"


_KILLED = """
import os, signal, sys
from pathlib import Path
from compressx.models.export import output_folder
real = Path.rename
def rename(self, target):
    result = real(self, target)
    if sys.argv[2] == "between renames":
        os.kill(os.getpid(), signal.SIGKILL)
    return result
Path.rename = rename
with output_folder(Path(sys.argv[1])) as building:
    (building / "half").write_text("half")
    if sys.argv[2] == "while building":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_half_written_files_in_any_folder_of_an_interrupted_run_are_removed(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), output_folder(target) as folder:  # noqa: PT012 - the block is the test
        (folder / "state.json").write_text("{}")
        (folder / "model").mkdir()
        (folder / "model" / ".model.safetensors.0a1b2c3d.partial").touch()
        raise KeyboardInterrupt
    with output_folder(target, resume=True) as folder:
        assert [p.name for p in folder.rglob("*.partial")] == []
    assert [*target.rglob(".*")] == []


PLACES = ["", "blocks", "model", "run.log", "blocks/model.layers.0.json", "state.json", "pipe"]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder that no run made, with what a run could write or remove."""
    folder = tmp_path / "foreign"
    (folder / "blocks").mkdir(parents=True)
    for name in ("state.json", "run.log", "blocks/.x.partial", "blocks/model.layers.0.json"):
        (folder / name).write_text("precious")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def interrupted_with_a_link(target: Path, place: str, foreign: Path) -> Path:
    """Make the folder of an interrupted run, as a stranger's archive may hold it."""
    left = target.with_name(f".{target.name}.partial-0a1b2c3d")
    link, leads_to = left / place, foreign / place if (foreign / place).exists() else foreign
    link.parent.mkdir(parents=True, exist_ok=True)
    if place not in {"", "state.json"}:
        (left / "state.json").write_text("{}")
    os.mkfifo(link) if place == "pipe" else link.symlink_to(leads_to)
    return link


@pytest.mark.parametrize("place", PLACES)
def test_links_in_the_folder_of_an_interrupted_run_are_refused_and_restart_removes_them_alone(
    tmp_path: Path, foreign: Path, place: str
) -> None:
    link, before = interrupted_with_a_link(tmp_path / "out", place, foreign), contents(foreign)
    with (
        pytest.raises(ArtifactError, match=rf"^{link} is a link or the like, which no run made; remove it, or give"),
        output_folder(tmp_path / "out", resume=True),
    ):
        pytest.fail("the block must not run")
    assert contents(foreign) == before
    with output_folder(tmp_path / "out", restart=True) as building:
        write_output(building, "new")
    assert contents(foreign) == before
    assert names_in(tmp_path) == ["foreign", "out"]
    assert not (tmp_path / "out").is_symlink()


@pytest.mark.parametrize("there", [False, True])
def test_a_link_in_place_of_an_output_moved_aside_is_not_restored(tmp_path: Path, foreign: Path, there: bool) -> None:
    (tmp_path / ".out.earlier-0a1b2c3d").symlink_to(foreign)
    before = contents(foreign)
    if there:
        (tmp_path / "out").mkdir()
    with output_folder(tmp_path / "out") as building:
        write_output(building, "new")
    assert contents(foreign) == before
    assert names_in(tmp_path) == ["foreign", "out"]
    assert (tmp_path / "out" / "report.json").read_text() == "new"


@pytest.mark.parametrize("moment", ["while building", "between renames"])
def test_what_a_killed_process_left_is_cleared_and_what_it_moved_aside_comes_back(moment: str, earlier: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(earlier), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    assert any(name.startswith(".out.partial-") for name in names_in(earlier.parent))
    assert earlier.exists() == (moment == "while building")
    with pytest.raises(KeyboardInterrupt), output_folder(earlier):  # noqa: PT012 - the block is the test
        assert (earlier / "report.json").read_text() == "earlier"
        raise KeyboardInterrupt
    assert names_in(earlier.parent) == ["out"]
    assert (earlier / "report.json").read_text() == "earlier"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_transformers_alone_loads_what_was_saved_with_the_zeros_of_the_masks(kind, tmp_path):
    from transformers import AutoModelForCausalLM

    model, masks = pruned(kind[0], dtype=kind[1])
    save_model(model, None, tmp_path)
    loaded, expected = AutoModelForCausalLM.from_pretrained(tmp_path), model.state_dict()
    assert type(loaded) is type(model)
    assert masks.deviations(loaded) == {}
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_what_is_saved_is_dense_safetensors_that_others_may_read_and_saving_prints_nothing(tmp_path, capfd):
    model, _ = pruned("llama-tied")
    save_model(model, None, tmp_path / "model")
    assert capfd.readouterr() == ("", "")
    assert names_in(tmp_path / "model") == ["config.json", "generation_config.json", "model.safetensors"]
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert "lm_head.weight" not in stored  # tied, so stored once
    assert all(tensor.layout == torch.strided for tensor in stored.values())
    modes = {p.stat().st_mode for p in (tmp_path / "model").iterdir()}
    assert len(modes) == 1
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_prepared_model_is_not_saved_until_it_is_squashed(tmp_path: Path) -> None:
    model, masks = pruned("llama")
    sparsifier = masks.to_torch_ao(model)
    with pytest.raises(ArtifactError, match="cannot be saved while its weights are parametrized"):
        save_model(model, None, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    squash(sparsifier)
    save_model(model, None, tmp_path / "model")
    assert masks.verify(type(model).from_pretrained(tmp_path / "model"))


@pytest.mark.parametrize("as_object", [False, True])
def test_a_model_that_claims_to_be_quantized_is_refused_before_anything_is_written(as_object, tmp_path):
    from transformers import FineGrainedFP8Config

    model, _ = pruned("llama")
    model.config.quantization_config = FineGrainedFP8Config() if as_object else {"quant_method": "fp8"}
    with pytest.raises(ArtifactError, match=r"cannot be saved to .*model: its config says .* quantized \(fp8\)"):
        save_model(model, None, tmp_path / "model")
    assert names_in(tmp_path) == []


def test_weights_for_which_there_is_no_room_are_an_error_that_names_the_path(earlier: Path) -> None:
    model, _ = pruned("llama")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with (
            pytest.raises(
                ArtifactError, match=rf"LlamaForCausalLM to {earlier.parent}/\.out\.partial-\w+/model: .*too large"
            ),
            output_folder(earlier) as building,
        ):
            save_model(model, None, building / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (earlier / "report.json").read_text() == "earlier"
    assert names_in(earlier.parent) == ["out"]


@pytest.mark.parametrize(
    ("error", "message"),
    [(OSError(28, "No space left on device"), "cannot write {}/model: No space left on device; free some"),
     (Exception("No space\nleft (os error 28)"), r"cannot save the tokenizer to {}/model: No space\\nleft")],
    ids=["an error of the system", "as tokenizers say it"],
)  # fmt: skip
def test_a_full_disk_is_an_error_that_names_the_path(error: Exception, message: str, tmp_path: Path) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise error

    with pytest.raises(ArtifactError, match=message.format(tmp_path)):
        save_model(pruned("llama")[0], Full(), tmp_path / "model")


@pytest.mark.parametrize(
    "published",
    [{"temperature": 0.9, "top_p": 0.6}, {"do_sample": False, "top_k": 20}, {"num_beams": 1, "early_stopping": True}],
    ids=str,
)
def test_generation_settings_that_transformers_loads_and_refuses_to_save_are_saved(published, tmp_path):
    """5.16 refuses those that it has loaded, later ones only those that were changed."""
    model = tiny_model("llama")
    model.generation_config.update(**published)
    with pytest.raises(ValueError, match="Fix these issues"):
        model.save_pretrained(tmp_path)
    own = model.generation_config
    save_model(model, None, tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert published.items() <= written.items()
    assert written["eos_token_id"] == 2
    assert model.generation_config is own
