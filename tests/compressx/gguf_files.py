"""A tiny GGUF file: a quantized Llama with a vocabulary of its own."""

from __future__ import annotations

import json
import re
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
    tensors: Mapping[str, np.ndarray] | None = None, scale: float = 1.0,
) -> Path:  # fmt: skip
    """Write the file, with weights by the seed; norms are float32, everything else is Q4_0.

    Args:
        path: of the file.
        seed: of the weights.
        rows: of the embedding and the head, of which only the first have a token; as many as tokens when absent.
        keys: further metadata, or in place of the model's own; one of None is left out.
        tensors: further ones, in float32.
        scale: standard deviation of the weights.
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
        stored = quants.quantize(drawn.normal(scale=scale, size=shape).astype(np.float32), kind)
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


_OF_CONFIG = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window", "vocab_size": "vocab_size", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip


def write_like(
    path: Path, model: Any, architecture: str, keys: Mapping[str, Any] | None = None, tokenizer: Any = None
) -> Path:
    """Write a GGUF file of a tiny model with its metadata, a vocabulary and names of tensors, all of which are zeros.

    Args:
        path: of the file.
        model: of transformers; its names are the only thing that transformers' table is asked for.
        architecture: as llama.cpp calls it.
        keys: further metadata, or in place of the model's own; after `ARCHITECTURE.` where they have no `general.`.
        tokenizer: of byte-level BPE, whose tokens, merges and template to write; otherwise a vocabulary of words.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config, state = model.config, model.state_dict()
    writer = GGUFWriter(path, architecture)
    found = {key: getattr(config, name, None) for key, name in _OF_CONFIG.items() if key not in (keys or {})}
    epsilons = [x for x in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps") if hasattr(config, x)]
    found["attention.layer_norm_rms_epsilon"] = getattr(config, "rms_norm_eps", None)
    if epsilons:
        found["attention.layer_norm_epsilon"] = getattr(config, epsilons[0])
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    for key, value in {**found, "rope.freq_base": theta, **(keys or {})}.items():
        full = key if "." in key and key.startswith("general.") else f"{architecture}.{key}"
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        elif value is not None:
            writer.add_float32(full, value) if isinstance(value, float) else writer.add_uint32(full, value)
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(18))]  # those of `save_tiny_model`
    padding = ["Ċ", "Ġ", "ab", *(f"[PAD{i}]" for i in range(len(words) + 3, config.vocab_size))]
    tokens, merges, types = [*words, *padding], ["a b"], [3, 3, 3, *[1] * (len(words) - 3), *[5] * len(padding)]
    if tokenizer is not None:
        ours, added = {i: x for x, i in tokenizer.get_vocab().items()}, tokenizer.added_tokens_decoder
        tokens = [ours.get(i, f"[PAD{i}]") for i in range(config.vocab_size)]
        types = [(3 if added[i].special else 4) if i in added else 1 if i in ours else 5 for i in range(len(tokens))]
        merges = [" ".join(x) for x in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
        if tokenizer.chat_template:
            writer.add_chat_template(tokenizer.chat_template)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default" if tokenizer is None else "gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1 if tokenizer is None else tokenizer.bos_token_id)
    writer.add_eos_token_id(2 if tokenizer is None else tokenizer.eos_token_id)
    writer.add_pad_token_id(0 if tokenizer is None else tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    for name, source in get_gguf_hf_weights_map(model, processor, architecture, config.num_hidden_layers).items():
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        shape = [*state[source].shape]
        fused = "_exps" in name
        if fused and "down" not in name:
            shape[1] //= 2
        if architecture == "gpt2" and re.fullmatch(r"blk.*(qkv|output|up|down)\.weight", name):
            shape.reverse()
        writer.add_tensor(f"{name}.weight" if fused else name, np.zeros([n for n in shape if n != 1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_PLAIN = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
          "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0}  # fmt: skip
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "bloom": ("bloom", {**_PLAIN, "n_layer": 3, "n_head": 4}, {"context_length": 128}),
    "falcon": ("falcon", {**_PLAIN, "multi_query": True, "bias": False}, {"attention.head_count_kv": 1}),
    "gemma2": ("gemma2", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, {}),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_key_value_heads": 1}, {"rope.freq_base": 1e6}),
    "gpt2": ("gpt2", {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4}, {}),
    "lfm2": ("lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
             {"attention.layer_norm_rms_epsilon": 1e-5, "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}),
    "llama": ("llama", _GROUPED, {"rope.dimension_count": 16}),
    "minimax-m2": ("minimax_m2", {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "rotary_dim": 8},
                   {"expert_gating_func": 2, "expert_count": 4, "expert_feed_forward_length": 96,
                    "rope.dimension_count": 8}),
    "nemotron": ("nemotron", _GROUPED, {"attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 8}),
    "phi3": ("phi3", _GROUPED, {"rope.dimension_count": 16}),
    "qwen2": ("qwen2", _GROUPED, {}),
    "qwen2moe": ("qwen2_moe", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 64}, {}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 128}, {}),
    "qwen3moe": ("qwen3_moe", {**_GROUPED, **_EXPERTS, "head_dim": 16, "norm_topk_prob": True}, {}),
    "stablelm": ("stablelm", {**_GROUPED, "use_qkv_bias": True, "partial_rotary_factor": 0.25},
                 {"rope.dimension_count": 4}),
    "starcoder2": ("starcoder2", _GROUPED, {}),
}  # fmt: skip
"""By llama.cpp's name: model type and config of a tiny model, and what else its file says."""


def tiny_of(architecture: str, seed: int = 0) -> Any:
    """Draw a model of `ARCHITECTURES` whose weights a float16 holds exactly."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values, _ = ARCHITECTURES[architecture]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).eval()
        for name, x in model.named_parameters():
            gain = name.endswith("norm.weight") or x.dim() == 1
            x.add_(torch.randn_like(x) * 0.1) if gain else x.normal_(std=0.15)
            x.copy_(x.half().float())
    return model
