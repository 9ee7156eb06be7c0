"""Read and write the tensors of a checkpoint by decoder block, under their checkpoint names.

transformers renames and merges some tensors on loading: the experts of a mixture are many tensors in the file and one
in the model. Its own conversion is used here, for one block at a time. A file that is missing, damaged, of another
model or cannot be written is an `ArtifactError`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from compressx.models.architecture import refuse_prepared
from compressx.runtime.errors import ArtifactError, UnsupportedModelError, one_line
from compressx.runtime.files import atomic_write, os_errors_named, regular, sync_tree, written_whole
from compressx.runtime.quiet import quiet_libraries

OUTSIDE = ""
"""In place of a block's name: everything outside the decoder blocks."""

INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_POINTER = b"version https://git-lfs"
_WEIGHT = re.compile(r"(weight|proj|zeros|scale|blocks|packed|absmax|g_idx|\b[vw]\d)[^.]*$|\.weight\.")
_AHEAD = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Where configs count the blocks that predict several tokens."""
_CODE = re.compile("F[468]_|F4")
_SCALE = re.compile(r"weight_scale(_inv|_2)?$|\.SCB$|\.absmax$|\.q?scales$")
_QUANTIZED = re.compile(rb'"(quantization_config|compression_config|quant_algo)"\s*:\s*["{]')


@dataclass(frozen=True, eq=False)
class Shards:
    """The location of a checkpoint's tensors.

    `files` has the file name by tensor name, `members` the tensor names by decoder block, with the rest under
    `OUTSIDE`.
    """

    folder: Path
    files: Mapping[str, str]
    members: Mapping[str, tuple[str, ...]]


def tensors_of(model: nn.Module, blocks: Iterable[str], fqn: str) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a block, or outside the blocks, by name in the model."""
    tensors = model.get_submodule(fqn).state_dict(prefix=f"{fqn}." if fqn else "")
    if fqn != OUTSIDE:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not any(name.startswith(f"{b}.") for b in blocks)}


def own_tensors(model: Any, blocks: Iterable[str], fqn: str) -> dict[str, Tensor]:
    """Return those of `tensors_of` that are written with this block, not with another one that shares them."""
    tensors, held = tensors_of(model, blocks, fqn), dict(model.named_parameters(remove_duplicate=False))
    elsewhere = {x: of for x, of in model.all_tied_weights_keys.items() if of not in tensors}
    return {n: x for n, x in tensors.items() if n not in elsewhere or held.get(n) is not held.get(elsewhere[n])}


def of_file(path: Path, fqn: str) -> Shards:
    """Return the shards of one block, all in one file."""
    with _opened(path) as file:
        names = tuple(file.keys())
    return Shards(path.parent, dict.fromkeys(names, path.name), {fqn: names})


def check_files(folder: Path) -> list[str]:
    """Check that the files of a local checkpoint exist and are complete, and return their names; reads no weights.

    Refused are quantized weights, by the config or by dtypes and names.
    """
    plain = "give the model in full precision, and quantize the result last"
    for path in (folder / "config.json", folder / "hf_quant_config.json"):
        with os_errors_named("read", path):
            if path.exists() and (said := _QUANTIZED.search(regular(path).read_bytes())):
                raise UnsupportedModelError(f"{folder} is quantized ({path.name} has a {said[1].decode()}); {plain}")
    for file in (files := _listed(folder)):
        with _opened(folder / file) as opened:
            stored = {name: opened.get_slice(name).get_dtype() for name in sorted(opened.keys())}
        # Other integers are positions, masks and counts.
        codes = [x for x, dtype in stored.items() if _CODE.match(dtype) or (dtype[0] in "IU" and _WEIGHT.search(x))]
        if found := next(iter(codes or filter(_SCALE.search, stored)), None):
            raise UnsupportedModelError(
                f"{folder / file} is quantized: {found} of dtype {stored[found]} is a {'code' if codes else 'scale'}, "
                f"and config.json has no quantization_config; {plain}"
            )
    return files


def find_shards(folder: Path, model: Any, blocks: Iterable[str]) -> Shards:
    """Assign the tensors of a local checkpoint to the blocks of a model, whose `unread` gets those that it has not."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    files, mapping = files_of(folder), get_model_conversion_mapping(model)
    renamings, converters = ([x for x in mapping if isinstance(x, kind)] for kind in (WeightRenaming, WeightConverter))
    known = {**model.state_dict(), **dict(model.named_buffers())}
    members: dict[str, list[str]] = {OUTSIDE: [], **{fqn: [] for fqn in blocks}}
    unread = []
    for name in files:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        home = next((fqn for fqn in members if fqn and renamed.startswith(f"{fqn}.")), OUTSIDE)
        members[home].append(name)
        if renamed not in known:
            unread.append(renamed)
    ignored = {*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"}
    ahead = _predicting(model, unread, len(members) - 1)
    model.unread = tuple(sorted(n for n in unread if n in ahead or not any(re.search(p, n) for p in ignored)))
    refuse_more_blocks(folder, {*unread} - ahead, members)
    # No class builds such blocks, and engines that look for what the config counts would fail.
    model.emptied = {}
    for config in (model.config, model.config.get_text_config(decoder=True)):
        for key in _AHEAD:
            if (count := getattr(config, key, None)) and not any(".mtp" in f".{name}" for name in known):
                model.emptied[key] = count
                setattr(config, key, 0)
    return Shards(folder, files, {fqn: tuple(names) for fqn, names in members.items()})


def are_equal(folder: Path, files: Mapping[str, str], *groups: Sequence[str]) -> bool:
    """Return whether two groups of stored tensors are the same to the bit."""
    with ExitStack() as stack:
        used = {files[x] for names in groups for x in names}
        opened = {file: stack.enter_context(_opened(folder / file)) for file in used}
        one, other = ([opened[files[x]].get_tensor(x) for x in names] for names in groups)
        return len(one) == len(other) and all(map(torch.equal, one, other))


def _predicting(model: Any, names: Iterable[str], depth: int) -> set[str]:
    """Return the tensors of blocks that predict several tokens: they are named `mtp`, or follow the decoder blocks."""
    config = model.config.get_text_config(decoder=True)
    last = depth + max(getattr(config, key, None) or 0 for key in _AHEAD)
    numbers = {name: re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.", name) for name in names}
    after = {name for name, found in numbers.items() if found is not None and 0 < depth <= int(found[1]) < last}
    return after | {name for name in numbers if re.search(r"(^|\.)mtp(_|\.|$)", name)}


def refuse_more_blocks(where: Path | str, names: Iterable[str], blocks: Collection[str]) -> None:
    """Refuse a checkpoint with more decoder blocks than the model; transformers would silently drop them.

    `names` are those of its tensors, at least the unexpected ones, with the model's prefix or without.
    """
    lists = {fqn.rpartition(".")[0] for fqn in blocks if fqn}
    for name in names:
        if (found := re.match(r"(.+?)\.(\d+)\.", name)) is None:
            continue
        for parent in lists:
            if f".{parent}".endswith(f".{found[1]}") and f"{parent}.{found[2]}" not in blocks:
                raise ArtifactError(
                    f"{where}: the checkpoint has {name}, but the config has {len([b for b in blocks if b])} decoder "
                    "blocks; one of the two belongs to another model"
                )


def load(model: Any, shards: Shards, fqn: str, device: torch.device | str = "cpu") -> None:
    """Load the weights of one block, or `OUTSIDE` the blocks, from `meta` to a device, in the model's dtypes."""
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
        used = {shards.files[name] for name in names}
        files = {file: stack.enter_context(_opened(shards.folder / file)) for file in used}
        slices = {name: files[shards.files[name]].get_slice(name) for name in names}
        info, _ = convert_and_load_state_dict_in_model(model, slices, settings)
    if wrong := {*map(str, info.mismatched_keys), *info.conversion_errors, *info.error_msgs}:
        raise ArtifactError(
            f"{shards.folder}: its tensors do not fit {type(model).__name__}: {', '.join(sorted(wrong))}"
        )


def unload(module: nn.Module, names: Iterable[str]) -> None:
    """Move parameters and buffers of a module to the meta device, by name."""
    for name in names:
        parent, _, leaf = name.rpartition(".")
        owner = module.get_submodule(parent)
        tensor = getattr(owner, leaf)
        empty = torch.empty_like(tensor, device="meta")
        setattr(owner, leaf, nn.Parameter(empty, requires_grad=False) if leaf in owner._parameters else empty)


def checkpoint_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors by their state dict names to the names and layout of the checkpoint, such as separate experts.

    All that share a stored tensor must be included.
    """
    from transformers.core_model_loading import revert_weight_conversion

    unique: dict[int, str] = {}  # tied tensors are stored once
    for name, tensor in tensors.items():
        unique.setdefault(tensor.data_ptr(), name)
    stored: dict[str, Tensor] = revert_weight_conversion(model, {name: tensors[name] for name in unique.values()})
    return {name: tensor.contiguous() for name, tensor in stored.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, atomically."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with written_whole(path) as beside:
        try:
            save_file(dict(tensors), beside, metadata={"format": "pt"})
        except SafetensorError as error:  # for example a full disk
            raise ArtifactError(f"cannot write {path}: {one_line(str(error))}; is the disk full?") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file."""
    return dict(each_tensor(path))


def each_tensor(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a safetensors file one at a time, sorted by name."""
    with _opened(path) as file:
        for name in sorted(file.keys()):
            yield name, file.get_tensor(name)


def save_model(model: Any, tokenizer: Any | None, folder: Path, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Save a pruned model, its masks squashed, in transformers' format: dense safetensors, config, tokenizer.

    `tensors` are those to save, by their state dict names; None for all.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import GenerationConfig

    refuse_prepared(model)
    if (quantization := getattr(model.config, "quantization_config", None)) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ArtifactError(
            f"{type(model).__name__} cannot be saved to {folder}: its config says that it is quantized "
            f"({getattr(method, 'value', method)}), but its weights are dense; rebuild it from a config without "
            "quantization_config"
        )
    with os_errors_named("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        settings = getattr(model, "generation_config", None)
        try:
            # transformers refuses to save settings that it loads, and that their authors published.
            with quiet_libraries(), patch.object(model, "generation_config", GenerationConfig(), create=True):
                model.save_pretrained(folder, state_dict=None if tensors is None else dict(tensors))
            if settings is not None and model.can_generate():
                settings.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
        # A full disk raises SafetensorError.
        except (SafetensorError, StrictDataclassError, ValueError, TypeError) as error:
            raise ArtifactError(f"cannot save {type(model).__name__} to {folder}: {one_line(str(error))}") from error
        if tokenizer is not None:
            try:
                with quiet_libraries():
                    tokenizer.save_pretrained(folder)
                if (config := folder / "tokenizer_config.json").is_file():  # by the name in transformers 4 and 5
                    named = config.read_text("utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
                    config.write_text(named, "utf-8")
            except OSError:
                raise
            except Exception as error:  # tokenizers raises a bare Exception for a full disk
                raise ArtifactError(f"cannot save the tokenizer to {folder}: {one_line(str(error))}") from error
        for weights in folder.glob("*.safetensors"):
            weights.chmod(folder.stat().st_mode & 0o666)  # safetensors writes 0600, which other users cannot read
        sync_tree(folder)


def join(folder: Path, parts: Sequence[Shards]) -> None:
    """Link or copy `parts`, one file each, before a checkpoint's one `model.safetensors`, and write their index."""
    count = len(parts) + 1
    with os_errors_named("write", folder):
        last = folder / _shard_name(count, count)
        (folder / _SINGLE).rename(last)
        weight_map = dict.fromkeys(of_file(last, OUTSIDE).files, last.name)
        for number, part in enumerate(parts, start=1):
            (file,) = set(part.files.values())
            try:
                os.link(part.folder / file, folder / _shard_name(number, count))
            except OSError:  # the file system has no hard links
                shutil.copyfile(part.folder / file, folder / _shard_name(number, count))
            weight_map |= dict.fromkeys(part.files, _shard_name(number, count))
        size = sum((folder / file).stat().st_size for file in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    atomic_write(folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with os_errors_named("read", path):
            opened = safe_open(regular(path), framework="pt")
    except SafetensorError as error:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
        advice = "it is a git-lfs pointer; fetch the file with git lfs pull" if pointer else one_line(str(error))[:300]
        raise ArtifactError(f"{path} is not a safetensors file, or it is truncated: {advice}") from error
    with opened:
        yield opened


def files_of(folder: Path) -> dict[str, str]:
    """Return the file name of each tensor of a local checkpoint, by the tensor's name.

    The files' headers decide, as for transformers: an index only says which files there are, and of two that hold the
    same name the last counts.
    """
    files: dict[str, str] = {}
    for file in _listed(folder):
        files |= dict.fromkeys(of_file(folder / file, OUTSIDE).files, file)
    if odd := [name for name in files if not name.isprintable()]:
        raise ArtifactError(f"{folder} has a tensor named '{one_line(odd[0]):.80}', expected printable characters")
    return files


def _listed(folder: Path) -> list[str]:
    """Return the names of a local checkpoint's files, in order."""
    index = folder / INDEX
    if (folder / _SINGLE).is_file() or not index.exists():  # where both are, transformers reads the single one
        return [_SINGLE]
    files = sorted({*files_in(index).values()})
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ArtifactError(f"{index} lists {', '.join(missing[:3])}, missing in {folder}")
    return files


def files_in(index: Path) -> dict[str, str]:
    """Return the file name of each tensor that an index lists; an `ArtifactError` refuses all but plain file names."""
    try:
        with os_errors_named("read", index):
            files = dict(json.loads(regular(index).read_text(encoding="utf-8"))["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = one_line(f"{type(error).__name__}: {error}")
        raise ArtifactError(f"{index} is damaged, or not an index of shards: {problem}") from error
    for name in files.values() or ("",):
        plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and not {*name} & {*"/\\:"}
        if not plain or not name.endswith(".safetensors") or len(name) > 200:  # of 255 with endings
            raise ArtifactError(
                f"{index} lists {str(name)[:80]!r}, expected the name of a file beside it, such as "
                f"{_shard_name(1, 2)}; take the model from a place that you trust"
            )
    return files
