"""Folders with packed files: a model folder, or an output folder with one, packed and unpacked file by file.

`X.safetensors` becomes `X.packed.safetensors`, and the index `X.safetensors.index.json` becomes
`X.packed.safetensors.index.json`. So nothing takes packed files for a model: transformers finds no `model.safetensors`.
What else goes along is `export.own_files`. Everything here raises an `ArtifactError` for what is missing, damaged or
cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressx.api.exporter import ExporterSpec, FinishedModel
from compressx.api.hooks import hookimpl
from compressx.api.pruner import NoOptions
from compressx.models.export import copy_files, model_folder, output_folder, room_for, without_links
from compressx.models.layout import layout_of
from compressx.models.packed import Base, PackedFile, PackedTensor, pack_file
from compressx.models.shards import check_files, files_in
from compressx.runtime.cache import cache_folder
from compressx.runtime.errors import ArtifactError, one_line
from compressx.runtime.files import BLOCKS, STATE, locked, os_errors_named, regular, sha256_of

_PLAIN, _PACKED = ".safetensors", ".packed.safetensors"
_INDEX = "model.packed.safetensors.index.json"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """The size of a packed model: of all weight files before and after packing, and of the files beside them.

    `base` is the name of the model that it was packed against, without which it cannot be unpacked; None if of none.
    """

    folder: Path
    tensors: tuple[PackedTensor, ...]
    bytes: int
    packed_bytes: int
    other_bytes: int
    base: str | None

    @property
    def needs(self) -> str:
        """Say what it is unpacked with; empty if that is nothing else."""
        return "" if self.base is None else f"to be unpacked with its base, {self.base}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {**asdict(self), "folder": str(self.folder)}


def is_packed(folder: Path) -> bool:
    """Return whether a model's folder, or an output folder's model, is packed."""
    return any(model_folder(folder).glob(f"*{_PACKED}"))


def needs_base(model: Path | str) -> bool:
    """Return whether a model is a folder that is packed against a base."""
    folder = model_folder(Path(model).expanduser())
    return is_packed(folder) and any(file.base is not None for file in _packed_files(folder))


def base_in(folder: Path, name: str | None = None) -> Base:
    """Return a base model from its folder of safetensors, or its part of the hub's cache; reads headers only.

    The name is by default that of the folder, or the hub id.
    """
    home = folder.resolve()
    hub = home.parents[1].name.removeprefix("models--").replace("--", "/") if home.parent.name == "snapshots" else None
    layouts = [layout_of(folder / file) for file in check_files(folder)]
    files = {tensor: layout for layout in layouts for tensor in layout.tensors}  # of two with one name the last counts
    return Base(one_line(name or hub or home.name), folder, files)


def packed_sizes(folder: Path) -> Sizes:
    """Return the sizes of a packed folder; reads headers only."""
    model = model_folder(folder)
    files = _packed_files(model)
    tensors = tuple(tensor for file in files for tensor in file.sizes())
    base = next((file.base for file in files if file.base is not None), None)
    others = _others(folder, folder, [file.path for file in files])[0].values()
    original, packed = sum(file.original_bytes for file in files), sum(file.path.stat().st_size for file in files)
    return Sizes(model, tensors, original, packed, sum(path.stat().st_size for path in others), base)


def pack_folder(
    source: Path, output: Path, *, base: Base | None = None, progress: Callable[[str], None] = lambda _: None
) -> Sizes:
    """Pack a model's folder, or an output folder with one; `progress` is called with each file.

    Refused are an output that exists, a folder that is packed or not a whole model, quantized weights, whose zeros are
    spread over packed integers, and a base that has no tensor of the model.
    """
    if is_packed(source):
        raise ArtifactError(f"{source} is packed already; compressx unpack restores it")
    plain = [model_folder(source) / name for name in check_files(model_folder(source))]
    if base is not None:
        _check_common(plain, base)
    with _new(source, output) as building:
        if left := _pack(plain, source, building, base, progress):
            _log.warning("%s: %s", source, left)
    return packed_sizes(output)


def _check_common(plain: list[Path], base: Base) -> None:
    """Refuse a base that has no tensor of a model's files with its name, dtype and shape."""
    tensors = {name: tensor for path in plain for name, tensor in layout_of(path).tensors.items()}
    if any(base.like(name, tensor) for name, tensor in tensors.items()):
        return
    told = "no name of a tensor"
    if (name := next((name for name in tensors if name in base.files), None)) is not None:
        kinds = f"{tensors[name]} here, {base.files[name].tensors[name]} there"
        told = f"no dtype and shape of a tensor: {one_line(name)[:200]} is {kinds}"
    raise ArtifactError(
        f"{plain[0].parent} shares with its base {base.folder} {told}; give the model that it was fine-tuned from, in "
        "the dtype that it has"
    )


def _pack(
    plain: list[Path], source: Path, building: Path, base: Base | None, progress: Callable[[str], None]
) -> str | None:
    """Fill a folder with the packed files of another one, and say what is left out."""
    others, left = _others(source, building, plain)
    copy_files(others)
    for path in plain:
        progress(path.name)
        pack_file(path, _place(path, source, building), base=base)
    return left


def unpack_folder(
    source: Path, output: Path, *, base: Base | None = None, progress: Callable[[str], None] = lambda _: None
) -> Sizes:
    """Restore what `pack_folder` packed, weight files byte for byte; `progress` is called with each file.

    Refused are an output that exists, a folder that is not packed, and another base than it was packed against.
    """
    if not is_packed(source):
        raise ArtifactError(
            f"{source} is not packed: {model_folder(source)} has no *{_PACKED}, as compressx pack writes"
        )
    sizes, files = packed_sizes(source), _packed_files(model_folder(source))
    _check_base(source, files, base)
    if sizes.bytes > (free := room_for(output)[1]):  # of zeros a small file can hold any number
        raise ArtifactError(f"{source} unpacked takes {sizes.bytes} bytes, {output} can have {free}; free some space")
    with _new(source, output) as building:
        others, left = _others(source, building, [file.path for file in files])
        if left:
            _log.warning("%s: %s", source, left)
        copy_files(others)
        for file in files:
            progress(file.path.name)
            file.unpack(_place(file.path, source, building), base=base)
    return sizes


def _check_base(folder: Path, files: Sequence[PackedFile], base: Base | None) -> None:
    """Refuse a base that is needed and not given, given and not needed, or another one by its headers."""
    if base is not None and all(file.base is None for file in files):
        raise ArtifactError(f"{folder} is not packed against a base; leave --base, or model.base in a recipe, out")
    for file in files:
        file.check_base(base)


def unpacked(folder: Path, base: Base | None = None) -> Path:
    """Return a copy of a packed model's folder, unpacked, from the cache; unpacked into it by the first call."""
    files = _packed_files(folder)
    _check_base(folder, files, base)  # whether or not there is a copy
    target = cache_folder() / "unpacked" / _key(folder, files)
    if not _is_whole(target, folder, files):
        with os_errors_named("create", target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_name(f".{target.name}.unpacking")
        with locked(lock, f"another process that unpacks {folder}", wait=True):
            if not _is_whole(target, folder, files):
                if target.is_symlink():
                    target.unlink()
                shutil.rmtree(target, ignore_errors=True)  # somebody removed or changed a part of it
                size = sum(file.original_bytes for file in files)
                _log.info("unpacking %s into %s, %.2f GB", folder, target, size / 1e9)
                unpack_folder(folder, target, base=base)
    return target


def _key(folder: Path, files: list[PackedFile]) -> str:
    """Name a folder by its content."""
    digest = hashlib.sha256(json.dumps([[file.path.name, file.digest] for file in files]).encode())
    for path in _others(folder, folder, [file.path for file in files])[0].values():
        digest.update(json.dumps([path.relative_to(folder).as_posix(), sha256_of(path)]).encode())
    return digest.hexdigest()[:32]


def _is_whole(target: Path, folder: Path, files: list[PackedFile]) -> bool:
    """Return whether a copy has the files of a folder and no others, by their sha256; sizes and times prove nothing."""
    weights = {file.path: _place(file.path, folder, target) for file in files}
    others, _ = _others(folder, target, weights)
    found = {path for path in target.rglob("[!.]*") if path.is_symlink() or not path.is_dir()}
    if found != {*others, *weights.values()} or any(path.is_symlink() for path in (target, *found)):
        return False
    try:
        same = all(sha256_of(copy) == sha256_of(path) for copy, path in others.items())
        return same and all(file.is_of(weights[file.path]) for file in files)
    except ArtifactError:  # what is missing or damaged is made anew
        return False


def _packed_files(model: Path) -> list[PackedFile]:
    """Open the packed files of a model: the single one, or all that its index names."""
    index = model / _INDEX
    names = {f"model{_PACKED}"}
    if index.exists() and not (model / f"model{_PACKED}").is_file():
        names = {name.removesuffix(_PLAIN) + _PACKED for name in files_in(index).values()}
    if missing := sorted(name for name in names if not regular(model / name).is_file()):
        raise ArtifactError(f"{model} is packed, but {', '.join(missing[:3])} is missing; copy the folder again")
    return [PackedFile(model / name) for name in sorted(names)]


def _place(path: Path, source: Path, target: Path) -> Path:
    """Return where a file of weights, or their index, of a folder is in another one, of the other form."""
    ending, other = (_PACKED, _PLAIN) if _PACKED in path.name else (_PLAIN, _PACKED)
    name, _, rest = path.name.rpartition(ending)
    return (target / path.relative_to(source)).with_name(name + other + rest)


def _others(source: Path, target: Path, weights: Collection[Path]) -> tuple[dict[Path, Path], str | None]:
    """Return the files that are copied as they are, by place in the copy, and what is left out; the index is renamed.

    Links that leave the folder, or what is no regular file, are refused.
    """
    form = _PACKED if any(_PACKED in path.name for path in weights) else _PLAIN
    index = model_folder(source) / f"model{form}.index.json"
    kept, left = without_links(source, {*weights, index})
    places = {path: target / path.relative_to(source) for path in kept if path not in weights}
    if index in places:
        places[index] = _place(index, source, target)
    return {place: path for path, place in places.items()}, left


def _new(source: Path, output: Path) -> AbstractContextManager[Path]:
    """Build an output that must not be there, from a folder in which nothing is unfinished."""
    for name in (STATE, BLOCKS):  # which an output folder loses when it is finished
        if (source / name).exists():
            raise ArtifactError(
                f"{source} has {name}, as the folder of an unfinished run; finish the run, or remove it"
            )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ArtifactError(f"output {output} exists; name a new folder with -o")
    return output_folder(output)


class PackedExporter:
    """Writes what `compressx pack` does."""

    def export(self, model: FinishedModel, folder: Path) -> str | None:
        base = None if model.base is None else base_in(model.base)  # if they have nothing in common, it is not used
        plain = [model.folder / name for name in check_files(model.folder)]
        return _pack(plain, model.folder, folder, base, lambda _: None)


@hookimpl
def compressx_exporters() -> list[ExporterSpec]:
    """Offer the exporter to recipes."""
    summary = "without zeros, as `compressx pack` writes it"
    return [ExporterSpec("packed", summary, NoOptions, lambda _: PackedExporter())]
