"""A tiny GGUF file: a quantized Llama with a vocabulary of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants
from gguf.gguf_writer import GGUFValue

WIDTH, INNER, HEADS, BLOCKS = 64, 96, 4, 2
LICENSE = "apache-2.0"


def write_gguf(
    path: Path, seed: int = 0, *, rows: int | None = None, keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:  # fmt: skip
    """Write the file, with weights by the seed; norms are float32, everything else is Q4_0.

    Args:
        path: of the file.
        seed: of the weights.
        rows: of the embedding and the head, of which only the first have a token; as many as tokens when absent.
        keys: further metadata, or in place of the model's own; one of None is left out.
        tensors: further ones, in float32.
    """
    tokens = ["<s>", "</s>", *map(chr, range(ord("a"), ord("z") + 1)), "ab", "cd", "Ġ", "."]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license(LICENSE)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    rows = len(tokens) if rows is None else rows
    writer.add_vocab_size(rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {
        "token_embd": (rows, WIDTH), "output": (rows, WIDTH),
        **{f"blk.{i}.attn_{x}": (WIDTH, WIDTH) for i in range(BLOCKS) for x in ("q", "k", "v", "output")},
        **{f"blk.{i}.ffn_{x}": (INNER, WIDTH) for i in range(BLOCKS) for x in ("gate", "up")},
        **{f"blk.{i}.ffn_down": (WIDTH, INNER) for i in range(BLOCKS)},
    }  # fmt: skip
    drawn = np.random.default_rng(seed)
    kind = GGMLQuantizationType.Q4_0
    for name, shape in shapes.items():
        stored = quants.quantize(drawn.normal(size=shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=kind)
    for name in ("output_norm", *(f"blk.{i}.{x}_norm" for i in range(BLOCKS) for x in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    for key, value in (keys or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is not None:
            kind = GGUFValueType.get_type(value)
            part = GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.kv_data[0][key] = GGUFValue(value, kind, part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
