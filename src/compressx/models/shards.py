"""The tensors of a checkpoint, read and written by decoder block, in the checkpoint's own names.

Transformers renames and merges what some checkpoints hold while it loads them: the experts of a mixture are many
tensors in the file and one in the model. Its own conversion does that here too, for one block at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressx.runtime.errors import ArtifactError
from compressx.runtime.files import atomic_write, os_errors_named, written_whole
from compressx.runtime.quiet import quiet_libraries

OUTSIDE = ""
"""Stands for everything outside the decoder blocks where a block's name is asked for."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, eq=False)
class Shards:
    """Where the tensors of a checkpoint lie.

    Attributes:
        folder: that holds the files.
        files: file by the name of a tensor.
        members: names of the tensors by decoder block; `OUTSIDE` has the rest.
    """

    folder: Path
    files: Mapping[str, str]
    members: Mapping[str, tuple[str, ...]]


def tensors_of(model: nn.Module, blocks: Iterable[str], fqn: str) -> dict[str, Tensor]:
    """Return the parameters and stored buffers of a block, or of what lies outside the blocks, by name in the model."""
    held = model.get_submodule(fqn).state_dict(prefix=f"{fqn}." if fqn else "")
    if fqn != OUTSIDE:
        return held
    return {name: tensor for name, tensor in held.items() if not any(name.startswith(f"{b}.") for b in blocks)}


def of_file(path: Path, fqn: str) -> Shards:
    """Return one file that holds the tensors of one block.

    Raises:
        ArtifactError: a file that is missing or damaged.
    """
    with ExitStack() as stack:
        names = tuple(_opened(path, stack).keys())
    return Shards(path.parent, dict.fromkeys(names, path.name), {fqn: names})


def check_files(folder: Path) -> None:
    """Look whether the files of a local checkpoint are there and whole, without reading a weight.

    Raises:
        ArtifactError: names a file that is missing, damaged or cut short.
    """
    for file in sorted(set(_files(folder).values())):
        with ExitStack() as stack:
            _opened(folder / file, stack)


def find_shards(folder: Path, model: Any, blocks: Iterable[str]) -> Shards:
    """Find out which tensors of a local checkpoint belong to which block of a model.

    Args:
        folder: holds `model.safetensors`, or several files and their index.
        model: the transformers model, on any device, `meta` included.
        blocks: fully qualified names of its decoder blocks.

    Raises:
        ArtifactError: files that are missing or cannot be read.
    """
    from transformers.core_model_loading import rename_source_key

    files = _files(folder)
    renamings, converters = _conversions(model)
    known = model.state_dict()
    members: dict[str, list[str]] = {OUTSIDE: [], **{fqn: [] for fqn in blocks}}
    elsewhere = []
    for name in files:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        block = next((fqn for fqn in members if fqn and renamed.startswith(f"{fqn}.")), OUTSIDE)
        members[block].append(name)
        if block == OUTSIDE:
            elsewhere.append(renamed)
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    refuse_more_blocks(folder, [n for n in elsewhere if not any(re.search(p, n) for p in ignored)], members)
    return Shards(folder, files, {fqn: tuple(names) for fqn, names in members.items()})


def refuse_more_blocks(where: Path | str, names: Iterable[str], blocks: Collection[str]) -> None:
    """Refuse a checkpoint that holds a decoder block which the model does not have.

    Args:
        where: the checkpoint.
        names: of its tensors, those that the model has no place for among them, with its prefix or without.
        blocks: fully qualified names of the model's decoder blocks.

    Raises:
        ArtifactError: names the block. transformers would leave it out, and the rest would be another model.
    """
    lists = {fqn.rpartition(".")[0] for fqn in blocks if fqn}
    for name in names:
        if (found := re.match(r"(.+?)\.(\d+)\.", name)) is None:
            continue
        for its in lists:
            if f".{its}".endswith(f".{found[1]}") and f"{its}.{found[2]}" not in blocks:
                raise ArtifactError(
                    f"{where}: the checkpoint holds {name}, while the config means {len([b for b in blocks if b])} "
                    "decoder blocks; one of the two belongs to another model"
                )


def load(model: Any, shards: Shards, fqn: str, device: torch.device | str = "cpu") -> None:
    """Give one block of a model (or what lies outside the blocks) its weights, in the dtypes that it has.

    Args:
        model: on the `meta` device where it is not loaded.
        shards: of `find_shards`.
        fqn: the block's name, or `OUTSIDE`.
        device: where the weights go.

    Raises:
        ArtifactError: a file that cannot be read, or tensors that are missing or of another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    names = shards.members[fqn]
    settings = LoadStateDictConfig(
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),  # what transformers keeps in float32
        device_map={"": device},
        weight_mapping=get_model_conversion_mapping(model),
    )
    with ExitStack() as stack, quiet_libraries():
        files = {file: _opened(shards.folder / file, stack) for file in {shards.files[name] for name in names}}
        slices = {name: files[shards.files[name]].get_slice(name) for name in names}
        info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    if wrong := {*map(str, info.mismatched_keys), *info.conversion_errors, *info.error_msgs}:
        raise ArtifactError(
            f"{shards.folder}: its tensors do not fit {type(model).__name__}: {', '.join(sorted(wrong))}"
        )


def unload(module: nn.Module, names: Iterable[str]) -> None:
    """Give up parameters and buffers of a module by name: what stays is their shape and dtype."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        home = module.get_submodule(owner)
        tensor = getattr(home, leaf)
        empty = torch.empty_like(tensor, device="meta")
        setattr(home, leaf, nn.Parameter(empty, requires_grad=False) if leaf in home._parameters else empty)


def checkpoint_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn some of a model's tensors into what its checkpoint holds: names as they are stored, experts apart.

    Args:
        model: whose tensors they are, by the names of its state dict.
        tensors: all that belong together in one stored tensor must be there.
    """
    from transformers.core_model_loading import revert_weight_conversion

    apart: dict[int, str] = {}  # what is tied is stored once
    for name, tensor in tensors.items():
        apart.setdefault(tensor.data_ptr(), name)
    stored: dict[str, Tensor] = revert_weight_conversion(model, {name: tensors[name] for name in apart.values()})
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as a safetensors file that is there whole or not at all, and on disk.

    Raises:
        ArtifactError: when it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with written_whole(path) as beside:
        try:
            save_file(dict(tensors), beside, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk comes as one
            raise ArtifactError(f"cannot write {path}: {error}; is there room left?") from error


def read(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file.

    Raises:
        ArtifactError: a file that is missing or damaged.
    """
    with ExitStack() as stack:
        file = _opened(path, stack)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def each(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file with their names one after the other, in the order of the names.

    Raises:
        ArtifactError: a file that is missing or damaged.
    """
    with ExitStack() as stack:
        file = _opened(path, stack)
        for name in sorted(file.keys()):
            yield name, file.get_tensor(name)


def join(folder: Path, parts: Sequence[Shards]) -> None:
    """Make one checkpoint of a folder with `model.safetensors` and of other files, which are linked or copied there.

    Args:
        folder: of the checkpoint; its one file becomes the last of several.
        parts: each of one file, in order.

    Raises:
        ArtifactError: when files cannot be linked, copied or written.
    """
    count = len(parts) + 1
    with ExitStack() as stack, os_errors_named("write", folder):
        last = folder / _shard_name(count, count)
        (folder / _SINGLE).rename(last)
        weight_map = dict.fromkeys(_opened(last, stack).keys(), last.name)
        for number, part in enumerate(parts, start=1):
            (file,) = set(part.files.values())
            _link(part.folder / file, folder / _shard_name(number, count))
            weight_map |= dict.fromkeys(part.files, _shard_name(number, count))
        size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    atomic_write(folder / _INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links on this file system
        shutil.copyfile(source, target)


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _opened(path: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with os_errors_named("read", path):
            return stack.enter_context(safe_open(path, framework="pt"))
    except SafetensorError as error:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
        advice = "it is a pointer of git-lfs; fetch what it points to with git lfs pull" if pointer else str(error)
        raise ArtifactError(f"{path} is no safetensors file, or not all of one: {advice}") from error


def _files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    index = folder / _INDEX
    if not index.exists():
        with ExitStack() as stack:
            return dict.fromkeys(_opened(folder / _SINGLE, stack).keys(), _SINGLE)
    try:
        with os_errors_named("read", index):
            files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{index} is damaged, or no index of shards: {error!r}") from error
    if missing := sorted({file for file in files.values() if not (folder / file).is_file()}):
        raise ArtifactError(f"{index} names {', '.join(missing[:3])}, which {folder} does not hold")
    return files


def _conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Return what transformers does to the names of a checkpoint: renamings, and conversions of several tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    mapping = get_model_conversion_mapping(model)
    renamings, converters = ([x for x in mapping if isinstance(x, kind)] for kind in (WeightRenaming, WeightConverter))
    return renamings, converters
