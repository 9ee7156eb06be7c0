"""Load a checkpoint: its model with or without weights, offloaded to disk, and its tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from compressx.models.architecture import find_blocks
from compressx.models.checkpoint import Checkpoint, explained, local_folder
from compressx.models.shards import refuse_more_blocks
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries


def load_skeleton(checkpoint: Checkpoint) -> Any:
    """Build the model on the meta device: every module and shape, no weights.

    Raises:
        ArtifactError: the config cannot be read.
        UnsupportedModelError: a quantized checkpoint, or no causal language model in transformers.
    """
    from transformers import AutoModelForCausalLM

    with quiet_libraries(), explained(checkpoint):
        config = _config(checkpoint)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=checkpoint.trust_remote_code).eval()


def load_empty(checkpoint: Checkpoint) -> Any:
    """Build the model that `load_model` would load, with parameters on the meta device and computed buffers filled.

    Raises:
        ArtifactError: the config cannot be read.
        UnsupportedModelError: as for `load_skeleton`.
    """
    from transformers import GenerationConfig

    with quiet_libraries(), explained(checkpoint):
        config = _config(checkpoint)
        requested = None if checkpoint.dtype == "auto" else getattr(torch, checkpoint.dtype)
        dtype = requested or config.dtype or _stored_dtype(local_folder(checkpoint))
        model = _empty(config, dtype, trust_remote_code=checkpoint.trust_remote_code).eval()
        with contextlib.suppress(OSError):  # not every checkpoint has one
            model.generation_config = GenerationConfig.from_pretrained(
                checkpoint.location, revision=checkpoint.revision
            )
        return model


def _empty(config: Any, dtype: torch.dtype | None, *, trust_remote_code: bool = False) -> Any:
    """Build a model with parameters on the meta device and the same buffers as `from_pretrained`."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # The buffers were computed in `dtype`, which puts GPT-J's rotary angles off by 0.9 in bfloat16. Compute them again
    # in float32, as `from_pretrained` does.
    for module in model.modules():
        module._is_hf_initialized = False
    with torch.no_grad():
        model.initialize_weights()
    return model


def _stored_dtype(folder: Path) -> torch.dtype | None:
    """Return the dtype of a checkpoint's first floating-point weight, transformers' choice if the config has none."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                first: torch.Tensor = file.get_slice(name)[:0]
                if first.is_floating_point():
                    return first.dtype
    return None


def load_model(checkpoint: Checkpoint) -> Any:
    """Load the model with its weights, in evaluation mode, on the CPU.

    A GGUF checkpoint is dequantized, and its model can be saved like any other.

    Raises:
        ArtifactError: weights that cannot be read, are missing, or do not have the shapes of the config.
        UnsupportedModelError: a pickle checkpoint, or an architecture unknown to transformers.
    """
    from transformers import AutoModelForCausalLM

    dtype = checkpoint.dtype
    if checkpoint.gguf_file is not None and dtype == "auto":
        dtype = "float32"
    with quiet_libraries(), explained(checkpoint):
        safetensors = {} if checkpoint.gguf_file is not None else {"use_safetensors": True}
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint.location, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **safetensors, **checkpoint.arguments,
        )  # fmt: skip
    # transformers would continue with random weights.
    if missing := sorted(found["missing_keys"]):
        raise ArtifactError(f"{checkpoint.location}: the checkpoint lacks {', '.join(missing[:3])}")
    if unexpected := sorted(found["unexpected_keys"]):
        refuse_more_blocks(checkpoint.location, unexpected, set(find_blocks(model)))
    for name, stored, expected in sorted(found["mismatched_keys"]):
        raise ArtifactError(
            f"{checkpoint.location}: {name} has shape {[*stored]}, but the config expects {[*expected]}; one of the "
            "two belongs to another model"
        )
    return (_without_gguf(model) if checkpoint.gguf_file is not None else model).eval()


def load_offloaded(checkpoint: Checkpoint, blocks: Iterable[str], device: torch.device, folder: Path) -> Any:
    """Load a model with its decoder blocks on disk; accelerate reads a block whenever it is called.

    Args:
        checkpoint: with safetensors.
        blocks: names of the decoder blocks.
        device: for everything else, and for a block while it runs.
        folder: for accelerate's files.

    Raises:
        ArtifactError: the checkpoint cannot be read.
    """
    from transformers import AutoModelForCausalLM

    with quiet_libraries(), explained(checkpoint):
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
        ArtifactError: the checkpoint has none.
    """
    from transformers import AutoTokenizer

    with quiet_libraries(), explained(checkpoint):
        return AutoTokenizer.from_pretrained(checkpoint.location, **checkpoint.arguments)


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
    """Rebuild a model from GGUF without its quantization_config, which would prevent saving it."""
    # Not `.to(dtype)`, which would round the rotary tables: they are float32 whatever the weights are.
    clean = _empty(_clean_config(model.config), model.dtype)
    clean.load_state_dict(model.state_dict(), assign=True)
    clean.tie_weights()
    clean.generation_config = model.generation_config
    return clean


def _clean_config(config: Any) -> Any:
    """Copy a config without the keys that describe its source file."""
    values = config.to_dict()
    values.pop("quantization_config", None)
    values.pop("_name_or_path", None)
    values.pop("_model_name_or_path", None)
    return type(config).from_dict(values)
