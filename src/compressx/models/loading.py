"""Load a checkpoint: its weights and its tokenizer, its shapes alone, or the weights of one block at a time."""

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
        ArtifactError: when the config cannot be read.
        UnsupportedModelError: a quantized checkpoint, or transformers has no causal language model for it.
    """
    from transformers import AutoModelForCausalLM

    with quiet_libraries(), explained(checkpoint):
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

    with quiet_libraries(), explained(checkpoint):
        config = _config(checkpoint)
        asked = None if checkpoint.dtype == "auto" else getattr(torch, checkpoint.dtype)
        dtype = asked or config.dtype or _stored_dtype(local_folder(checkpoint))
        model = _empty(config, dtype, trust_remote_code=checkpoint.trust_remote_code).eval()
        with contextlib.suppress(OSError):  # not every checkpoint has one
            model.generation_config = GenerationConfig.from_pretrained(
                checkpoint.location, revision=checkpoint.revision
            )
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
    with quiet_libraries(), explained(checkpoint):
        safetensors = {} if checkpoint.gguf_file is not None else {"use_safetensors": True}
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint.location, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **safetensors, **checkpoint.arguments,
        )  # fmt: skip
    # transformers would go on with random numbers.
    if missing := sorted(found["missing_keys"]):
        raise ArtifactError(f"{checkpoint.location}: the checkpoint lacks {', '.join(missing[:3])}")
    if unexpected := sorted(found["unexpected_keys"]):
        refuse_more_blocks(checkpoint.location, unexpected, set(find_blocks(model)))
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
        ArtifactError: when there is none.
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
