"""The header of a model's GGUF file, made of its config, where there is no file of the dense model to take it from.

It is read like that of any file, so all that is checked of one is checked of it: transformers has to read the config.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compressx.api.projections import head_size
from compressx.models.architecture import text_config
from compressx.models.gguf_header import GgufHeader
from compressx.models.gguf_readers import Readers
from compressx.models.gguf_settings import NOT_ROTATED, OWN_HEAD, SETTINGS, TURNED_IN_PART
from compressx.runtime.errors import CompressxError, UnsupportedModelError

_NAMES = {"gemma3_text": "gemma3", "minimax_m2": "minimax-m2", "mistral": "llama", "qwen2_moe": "qwen2moe",
          "qwen3_moe": "qwen3moe"}  # fmt: skip
"""llama.cpp's names of architectures by transformers', where they differ."""
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "vocab_size": "vocab_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "feed_forward_length": "intermediate_size",
}  # fmt: skip
"""Keys of sizes that no tensor says, by their names in a config."""
_WIDTHS = {"feed_forward_length": "ffn_down", "expert_feed_forward_length": "ffn_down_exps",
           "expert_shared_feed_forward_length": "ffn_down_shexp"}  # fmt: skip
_COUNTED = {"gpt2", "lfm2", "starcoder2"}
"""Architectures whose rows of the embedding transformers takes from the number of tokens in the file."""


@contextmanager
def described(model: Any) -> Iterator[GgufHeader]:
    """Yield the header of the GGUF file of a transformers model, which may be on `meta`, before it was pruned.

    It has no tokenizer. What a file cannot say of the model is an `UnsupportedModelError`, also in the `with`.
    """
    config = text_config(model)
    architecture = _NAMES.get(config.model_type, config.model_type)
    if architecture not in SETTINGS:
        told = f"{config.model_type} is none of the architectures that are written, {', '.join(SETTINGS)}"
        raise UnsupportedModelError(f"format gguf: {told}; export another format")
    with tempfile.TemporaryDirectory(prefix="compressx-") as folder:
        path = Path(folder) / "header.gguf"
        try:
            _write(path, model, architecture)
            yield GgufHeader.of(path)
        except CompressxError as error:
            if str(path) not in str(error):
                raise
            told = str(error).removeprefix("format gguf: ").partition("; ")[0]
            told = told.replace(f"{path} is of", f"{path} would be of").replace(str(path), f"a file of {architecture}")
            raise UnsupportedModelError(f"format gguf: {told}; export another format") from error


def _write(path: Path, model: Any, architecture: str) -> None:
    """Write the header, and nothing where the weights would be."""
    from gguf import GGUFWriter

    config, readers, shapes = text_config(model), Readers(model, architecture), dict[str, tuple[int, ...]]()
    for name, source in readers.sources.items():
        if name != "output.weight" or not config.tie_word_embeddings or architecture in OWN_HEAD:
            home, _, own = source.rpartition(".")
            shapes[name] = readers.shape(name, tuple(getattr(model.get_submodule(home), own).shape), {})
    metadata, factors = _metadata(config, architecture), _factors(config, architecture)
    metadata |= {key: shapes.get(f"blk.0.{x}.weight", (metadata.get(key),))[-1] for key, x in _WIDTHS.items()}
    with closing(GGUFWriter(path, architecture)) as writer:
        add: Mapping[type, Any] = {list: writer.add_array, str: writer.add_string, float: writer.add_float32}
        for key, value in metadata.items():
            if value is not None:
                add.get(type(value), writer.add_uint32)(f"{architecture}.{key}", value)
        writer.add_pad_token_id(0)  # the tokenizer's own take the place of this, and of the tokens
        if architecture in _COUNTED:
            writer.add_token_list([""] * config.vocab_size)
        for name, shape in (*(("rope_freqs.weight", x.shape) for x in factors), *shapes.items()):
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
        weights = sum(writer.ggml_pad(x.nbytes, writer.data_alignment) for x in writer.tensors[0].values())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        begin = writer.ggml_pad(writer.fout[0].tell(), writer.data_alignment)
        for x in factors:
            writer.write_tensor_data(x)
    os.truncate(path, begin + weights)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    """Return what a config says, by llama.cpp's keys without the architecture's name; None where it has nothing."""
    found = {key: getattr(config, name, None) for key, name in _SIZES.items()}
    found["context_length"] = found["context_length"] or getattr(config, "seq_length", None) or config.hidden_size
    size = head_size(None, config)
    found |= {"attention.key_length": size, "attention.value_length": size}
    for name, key in SETTINGS[architecture].items():
        if isinstance(key, str):
            value = getattr(config, name)
            found[key] = float(value) if value and key.endswith(("epsilon", "softcapping")) else value
    if architecture == "lfm2":  # where a block has convolutions, it has no heads
        found["attention.head_count_kv"] = [config.num_key_value_heads * (x != "conv") for x in config.layer_types]
    elif architecture == "minimax-m2":
        found["expert_gating_func"] = 2  # the sigmoid
    if architecture in NOT_ROTATED:
        return found
    every = config.rope_parameters
    rope = every.get("full_attention", every)
    turned = size * rope.get("partial_rotary_factor", 1.0) if architecture in TURNED_IN_PART else size
    found |= {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": int(turned)}
    if local := every.get("sliding_attention"):
        found["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return found


def _factors(config: Any, architecture: str) -> list[np.ndarray]:
    """Return the tensor by which llama.cpp divides the frequencies of Llama 3's positions, if the config scales so."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    if architecture != "llama" or rope.get("rope_type") != "llama3":
        return []
    size = head_size(None, config)
    plain = float(rope["rope_theta"]) ** -(torch.arange(0, size, 2) / size)
    return [(plain / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]).numpy()]
