"""The output folder: built beside its target and renamed when complete."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from compressx.api.exporter import ExporterSpec, FinishedModel
from compressx.api.hooks import hookimpl
from compressx.api.pruner import NoOptions
from compressx.models.shards import INDEX, check_files
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import BLOCKS, STATE, locked, os_errors_named, regular, sync, sync_tree

_WRITTEN = frozenset((
    "model", "masks.safetensors", "units.json", "recipe.yaml", "plan.json", "report.json", "report.html", "report.md",
    "plots", "run.log", "exports", STATE, BLOCKS, ".DS_Store",
))  # fmt: skip
"""What a run, or a Mac that shows it, writes into an output folder; what else is there is somebody's own."""

READ = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.bpe", "*.spm", "*.py")
"""Files that transformers and vLLM read beside weights; never a pickle."""
SETTINGS = (*READ, "*.md", "LICENSE", "NOTICE", "COPYING")
"""The same, and notices."""
_TEMPLATES = "additional_chat_templates"
_NOT_OWN = re.compile(r"\..*|params\.json|.*\.index\.json|model(-\d+-of-\d+)?(\.packed)?\.safetensors")
"""Hidden files, weights, and what describes weights, also in other formats."""


def own_files(folder: Path, weights: Collection[Path] = ()) -> tuple[list[Path], list[Path]]:
    """Return what goes along when a model's folder, or an output folder, is copied, and what else it has.

    Of a model these are its `weights`, as given, settings, code and notices; of an output folder what a run wrote. They
    are regular files, and no link leads out of the folder but to the hub's blobs. Hidden files and other weights are in
    neither list.
    """
    home, model, folders = folder.resolve(), model_folder(folder), [folder]
    kept, left = list[Path](), list[Path]()
    with os_errors_named("look into", folder):
        for path in (path for at in folders for path in sorted(at.iterdir())):
            of_model, own = model in path.parents, path in weights
            if not own and (_NOT_OWN.fullmatch(path.name) if of_model else path.name.startswith(".")):
                continue
            if of_model and path.is_dir():
                own = path.name == _TEMPLATES
            elif of_model:
                named = any(fnmatch(path.name, x) for x in SETTINGS)
                own = own or (named and path.is_file() and path.stat().st_size < 2**27)
            else:
                own = path.relative_to(folder).parts[0] in _WRITTEN
            if own and path.is_dir() and not path.is_symlink():
                folders.append(path)
            else:
                (kept if own and path.is_file() and _stays(path, home) else left).append(path)
    return kept, left


def _stays(path: Path, home: Path) -> bool:
    """Return whether a file is in a folder, or what a link leads to in it or a blob of the same model in the cache."""
    end = Path(os.path.realpath(path))
    if home.parent.name == "snapshots" and end.parent == home.parents[1] / "blobs":
        return True
    return end.is_relative_to(home) and not any(x.startswith(".") for x in end.relative_to(home).parts)


def without_links(
    folder: Path, weights: Collection[Path] = (), names: Iterable[str] = ("*",)
) -> tuple[list[Path], str | None]:
    """Return `own_files`, the others in words, unless an `ArtifactError` says which with such names is a link."""
    kept, left = own_files(folder, weights)
    for path in (path for path in left if any(fnmatch(path.name, x) for x in names)):
        if path.is_symlink():
            where = f"{path} is a link to {os.path.realpath(path)}, expected a file in {folder}"
            raise ArtifactError(one_line(f"{where}; put a copy there, or remove the link"))
        regular(path)
    return kept, left_out(path.name for path in left)


def copy_files(sources: Mapping[Path, Path]) -> None:
    """Copy files, each to its key; an `ArtifactError` names one that cannot be read or written."""
    for target, path in sources.items():
        with os_errors_named(f"copy {path} to", target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def left_out(names: Iterable[str]) -> str | None:
    """Say in words what of a folder does not go along with its model, if anything."""
    listed = ", ".join(map(ascii, names))
    return f"left out {listed}, no files of a model" if listed else None


def model_folder(folder: Path) -> Path:
    """Return the folder of a model: of an output folder the `model` in it, else the folder itself."""
    inside = folder / "model"
    return inside if not (folder / "config.json").is_file() and (inside / "config.json").is_file() else folder


def check_output(target: Path, *, replace: bool = False) -> None:
    """Refuse all but a missing folder, an empty one, and an earlier output (with `report.json` and `recipe.yaml`).

    One with files that no run wrote is accepted only if `replace`.
    """
    folder = _resolved(target)
    with os_errors_named("look into", folder):
        there, others = folder.is_dir(), not_written(folder)
        earlier = (folder / "report.json").is_file() and (folder / "recipe.yaml").is_file()
        above = next(p for p in folder.parents if p.exists())
        refusals = {
            "has a variable, which a recipe does not expand; write the name, or let the shell expand it in --set "
            "output=...": "${" in str(target),
            "is a file; choose a folder": folder.exists() and not there,
            "exists and is not an earlier output of compressx (it has no report.json and recipe.yaml); choose a new "
            "folder, or empty this one": there and any(folder.iterdir()) and not earlier,
            "is a mount point, so no folder can be renamed to it; choose a folder in it, such as "
            f"{folder / 'run'}": folder.is_mount(),
            "would replace the current folder or one above it; choose another": Path.cwd().is_relative_to(folder),
            f"cannot be created: {above} is not a folder that you can write to": not (
                above.is_dir() and os.access(above, os.W_OK | os.X_OK)
            ),
            f"has what no run wrote: {others}; it would be deleted with the earlier run: move it, choose another "
            "output, or delete it with --replace": others and not replace,
        }
    for why, refused in refusals.items():
        if refused:
            raise ArtifactError(f"output {folder} {why}")


def refuse_overwriting(target: Path, what: str, path: Path | None) -> None:
    """Refuse an output folder that holds something that a run reads; `what` says in words."""
    if path is not None and (read := path.expanduser()).exists() and read.resolve().is_relative_to(_resolved(target)):
        raise ArtifactError(f"output {target} would overwrite the {what}; name another folder")


def not_written(target: Path) -> str:
    """Name what no run wrote into an output folder, at most three of them."""
    folder = _resolved(target)
    with os_errors_named("look into", folder):
        names = sorted(p.name for p in folder.iterdir() if p.name not in _WRITTEN) if folder.is_dir() else []
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_unfinished(target: Path, *, resume: bool = False, restart: bool = False) -> None:
    """Refuse at once, without creating anything, what `output_folder` would refuse later for another run's sake.

    That is another process that is building the output, or an interrupted run with neither `resume` nor `restart`.
    """
    folder = _resolved(target)
    with os_errors_named("look into", folder.parent):
        if folder.parent.is_dir() and (folder.with_name(f".{folder.name}.lock").exists() or unfinished(target)):
            with _locked(folder):
                _resumable(folder, resume=resume, restart=restart)


@contextmanager
def output_folder(
    target: Path, *, resume: bool = False, restart: bool = False, replace: bool = False, part: str = ""
) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `target` when the block ends without an exception.

    Until then `target` is unchanged, and no other process can build it. After an exception (KeyboardInterrupt included)
    the new folder is removed, unless it has a `state.json`: then a later call can resume with it. Leftovers of killed
    processes are removed first.

    Args:
        target: folder to create or replace.
        resume: continue with the folder of an interrupted run, if there is one.
        restart: remove such a folder.
        replace: also replace files that no run wrote.
        part: the file or folder in it that becomes `target`; by default all of it.
    """
    check_output(target, replace=replace)
    folder = _resolved(target)
    with os_errors_named("create", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        building = _made(folder, resume=resume, restart=restart)
        earlier = _sibling(folder, "earlier", building.name.rpartition("-")[2])
        try:
            yield building
            check_output(folder, replace=replace)  # something may have been put there during the run
            with os_errors_named("write", folder):
                sync_tree(building)
                if folder.exists():
                    folder.rename(earlier)
                (building / part).rename(folder)
                if not part:
                    forget_blocks(folder)  # only now: until the rename, a later call may resume from them
                sync(folder.parent)
        finally:
            # After success `earlier` is left to remove, and what is beside `part`; after a failure restore `earlier`.
            if not (building / STATE).exists():
                shutil.rmtree(building, ignore_errors=True)
            _settle(earlier, folder)


def forget_blocks(folder: Path) -> None:
    """Remove what a run could have been resumed from, once its output is complete."""
    (folder / STATE).unlink(missing_ok=True)
    shutil.rmtree(folder / BLOCKS, ignore_errors=True)


def unfinished(target: Path) -> list[Path]:
    """Return the folders that a running process or ended ones have been building for a target."""
    folder = _resolved(target)
    partial = _sibling(folder, "partial", "").name
    return [p for p in folder.parent.iterdir() if p.name.startswith(partial)] if folder.parent.is_dir() else []


def room_for(target: Path) -> tuple[Path, int]:
    """Return the folder that a target will be in, and its free bytes with those of what earlier runs left for it."""
    above = next(p for p in _resolved(target).parents if p.is_dir())
    size = 0
    with suppress(FileNotFoundError):  # the first process may be removing it meanwhile
        for file in (x for folder in unfinished(target) for x in folder.rglob("*")):
            size += file.stat().st_size if file.is_file() else 0
    return above, shutil.disk_usage(above).free + size


def _locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock that every change of a target or of what is built for it needs."""
    return locked(folder.with_name(f".{folder.name}.lock"), f"another run for output {folder}")


def _resumable(folder: Path, *, resume: bool, restart: bool) -> Path | None:
    """Return the folder of the latest interrupted run, which is an error if the user has not decided about it."""
    found = [p for p in unfinished(folder) if (p / STATE).exists()]
    left = max(found, key=lambda p: (p / STATE).stat().st_mtime, default=None)
    if left is not None and not resume and not restart:
        raise ArtifactError(
            f"an earlier run for output {folder} was interrupted, and what it finished is kept in {left}; continue "
            "with --resume, or start over with --restart"
        )
    return left if resume else None


def _made(folder: Path, *, resume: bool, restart: bool) -> Path:
    """Return the folder to fill, beside the output: a new one, or that of an interrupted run.

    Partial folders of ended processes are removed, and earlier outputs that they had moved aside restored.
    """
    with os_errors_named("create", folder):
        left = _resumable(folder, resume=resume, restart=restart)
        building = left or _sibling(folder, "partial", secrets.token_hex(4))
        for partial in unfinished(folder):
            if partial != building:
                _remove(partial)
        for path in [*folder.parent.iterdir()]:
            start, _, token = path.name.rpartition("-")
            if start == f".{folder.name}.earlier" and not _sibling(folder, "partial", token).exists():
                _settle(path, folder)
        building.mkdir(exist_ok=True)
        for part in [building, *building.rglob("*")]:
            if part.is_symlink() or not (part.is_dir() or part.is_file()):
                raise ArtifactError(f"{part} is a link or the like, which no run made; remove it, or give --restart")
            if part.match(".*.partial"):  # of a file that a killed process was writing
                part.unlink()
    return building


def _resolved(target: Path) -> Path:
    """Follow links and `..`, so that a rename replaces the folder itself."""
    with os_errors_named("resolve", target):
        folder = target.expanduser().resolve()
    if not folder.name:
        raise ArtifactError(f"output {folder} is the root of the file system; choose a folder in it")
    return folder


def _sibling(folder: Path, role: Literal["partial", "earlier"], token: str) -> Path:
    return folder.with_name(f".{folder.name}.{role}-{token}")


def _settle(earlier: Path, folder: Path) -> None:
    """Restore an earlier output if nothing has replaced it, else remove it."""
    if not earlier.exists():
        return
    if folder.exists() or earlier.is_symlink():
        _remove(earlier)
    else:
        earlier.rename(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, or a link in its place without what it leads to."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


class SafetensorsExporter:
    """Writes what a run has written for itself."""

    def export(self, model: FinishedModel, folder: Path) -> str | None:
        if folder == model.folder:
            return None
        weights = [model.folder / name for name in (*check_files(model.folder), INDEX)]
        kept, left = without_links(model.folder, weights)
        copy_files({folder / path.relative_to(model.folder): path for path in kept})
        return left


@hookimpl
def compressx_exporters() -> list[ExporterSpec]:
    """Offer the exporter to recipes."""
    summary = "dense, with zeros, as transformers loads it"
    return [ExporterSpec("safetensors", summary, NoOptions, lambda _: SafetensorsExporter(), dense=True)]
