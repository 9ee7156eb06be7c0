"""Load a checkpoint: its model with or without weights, offloaded to disk, and its tokenizer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from compressx.models import gguf_header
from compressx.models.architecture import find_blocks, text_config
from compressx.models.checkpoint import Checkpoint, explained, local_folder
from compressx.models.shards import refuse_more_blocks
from compressx.runtime.errors import ArtifactError, UnsupportedModelError
from compressx.runtime.quiet import quiet_libraries

_TOKENIZER_FILE = re.compile(r"token|vocab|merges|spiece|sentencepiece|tekken|\.(model|spm|bpe)$", re.IGNORECASE)


@contextlib.contextmanager
def _reading(checkpoint: Checkpoint) -> Iterator[None]:
    """Read a checkpoint quietly, with errors explained, and the header of a GGUF file only once."""
    with quiet_libraries(), explained(checkpoint), contextlib.ExitStack() as stack:
        if checkpoint.gguf_file is not None:
            stack.enter_context(gguf_header.read_once())
        yield


def load_skeleton(checkpoint: Checkpoint) -> Any:
    """Build the model on the meta device: every module and shape, no weights.

    Raises:
        ArtifactError: the config cannot be read.
        UnsupportedModelError: a quantized checkpoint, or no causal language model in transformers.
    """
    from transformers import AutoModelForCausalLM

    with _reading(checkpoint):
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

    with _reading(checkpoint):
        config = _config(checkpoint)
        requested = None if checkpoint.dtype == "auto" else getattr(torch, checkpoint.dtype)
        dtype = requested or config.dtype or _stored_dtype(local_folder(checkpoint))
        model = build_empty(config, dtype, trust_remote_code=checkpoint.trust_remote_code).eval()
        with contextlib.suppress(OSError):  # not every checkpoint has one
            model.generation_config = GenerationConfig.from_pretrained(
                checkpoint.location, revision=checkpoint.revision
            )
        return model


def build_empty(config: Any, dtype: torch.dtype | None, *, trust_remote_code: bool = False) -> Any:
    """Build a model with parameters on the meta device and the same buffers as `from_pretrained`.

    Args:
        config: of the model.
        dtype: of its parameters; the config's when None.
        trust_remote_code: whether its code may come with the model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    # The buffers were computed in `dtype`, which puts GPT-J's rotary angles off by 0.9 in bfloat16. Compute them again
    # in float32, as `from_pretrained` does.
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():  # there is nothing to be drawn
        parameter._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    return model


def dtype_of(checkpoint: Checkpoint, config: Any) -> torch.dtype:
    """Return the dtype that `load_model` loads in; of a model on the hub whose config has none, float32."""
    if checkpoint.dtype != "auto":
        return getattr(torch, checkpoint.dtype)  # type: ignore[no-any-return]
    if checkpoint.gguf_file is not None:
        return torch.float32
    return config.dtype or _stored_dtype(Path(checkpoint.location)) or torch.float32


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

    dtype = "float32" if checkpoint.gguf_file is not None and checkpoint.dtype == "auto" else checkpoint.dtype
    with _reading(checkpoint):
        safetensors = {} if checkpoint.gguf_file is not None else {"use_safetensors": True}
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint.location, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True,
            **safetensors, **checkpoint.arguments,
        )  # fmt: skip
    if checkpoint.gguf_file is not None:
        gguf_header.close(Path(checkpoint.location) / checkpoint.gguf_file)
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
    untie_own_head(model)
    return (_without_gguf(model) if checkpoint.gguf_file is not None else model).eval()


def untie_own_head(model: Any) -> None:
    """Correct a config that ties the head to the embedding, if the checkpoint has another head.

    transformers then loads both and only warns, and whatever ties weights later, as lm-evaluation-harness does, would
    replace the head.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return
    for config in (model.config, text_config(model)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False


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

    with _reading(checkpoint):
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
        ArtifactError: the checkpoint has none, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    folder = Path(checkpoint.location)
    local = checkpoint.gguf_file is None and folder.is_dir()
    if local and not any(_TOKENIZER_FILE.search(path.name) for path in folder.iterdir()):
        raise _without_tokenizer(checkpoint)
    try:
        with _reading(checkpoint):
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.location, **checkpoint.arguments)
    except Exception as error:
        if type(error) is not Exception:  # which the library of tokenizers raises
            raise
        raise ArtifactError(
            f"cannot load the tokenizer of {checkpoint.location}: {error}; its tokenizer.json is damaged, or for "
            "another version of the package tokenizers"
        ) from error
    # Without a vocabulary transformers makes a tokenizer that knows no word.
    if {*tokenizer.get_vocab()} <= {*tokenizer.all_special_tokens}:
        raise _without_tokenizer(checkpoint)
    return tokenizer


def _without_tokenizer(checkpoint: Checkpoint) -> ArtifactError:
    return ArtifactError(
        f"{checkpoint.location} has no tokenizer, such as tokenizer.json; save the model's there, with "
        "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
    )


def _config(checkpoint: Checkpoint) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.location, **checkpoint.arguments)
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"{checkpoint.location} is quantized (its config has a quantization_config); prune the full-precision "
            "model, then quantize"
        )
    _refuse_encoder(checkpoint, config)
    return config


def _refuse_encoder(checkpoint: Checkpoint, config: Any) -> None:
    """Refuse an encoder, which transformers would load with the head of a decoder, and an encoder-decoder."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    decodes = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if not decodes and (config.is_encoder_decoder or masked):
        kind = "an encoder-decoder" if config.is_encoder_decoder else "an encoder, which sees the tokens that follow"
        (name, *_) = config.architectures or [config.model_type]
        raise UnsupportedModelError(
            f"{checkpoint.location}: {name} is {kind}; compressx prunes decoder-only language models, such as Llama, "
            "Gemma or GPT-2"
        )


def _without_gguf(model: Any) -> Any:
    """Rebuild a model from GGUF without its quantization_config, which would prevent saving it."""
    # Not `.to(dtype)`, which would round the rotary tables: they are float32 whatever the weights are.
    clean = build_empty(_clean_config(model.config), model.dtype)
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
