"""A tiny GGUF file: a quantized Llama with a vocabulary of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFValueType, GGUFWriter, get_tensor_name_map, quants
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
    "attention.sliding_window": "sliding_window", "vocab_size": "vocab_size", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "shortconv.l_cache": "conv_L_cache",
}  # fmt: skip
_EPSILONS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ROTATED_IN_PART = {"phi3", "stablelm", "nemotron", "minimax-m2"}


def metadata_of(config: Any, architecture: str) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a config, by key, without the architecture's name."""
    found = {key: getattr(config, name, None) for key, name in _OF_CONFIG.items()}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    found |= {"rope.freq_base": rope.get("rope_theta"), "attention.key_length": size, "attention.value_length": size}
    if rope.get("rope_type") == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    if architecture not in {"gemma2", "gemma3", "phi3"}:
        del found["attention.sliding_window"]
    if architecture in {"bloom", "gpt2"}:
        found |= {"feed_forward_length": getattr(config, "n_inner", None) or 4 * config.hidden_size}
    elif architecture == "minimax-m2":
        found |= {"expert_gating_func": 2, "expert_feed_forward_length": config.intermediate_size}
    elif architecture == "lfm2":
        kinds = config.layer_types
        found["attention.head_count_kv"] = [config.num_key_value_heads * (x == "full_attention") for x in kinds]
        found["attention.layer_norm_rms_epsilon"] = config.norm_eps
    if architecture in _ROTATED_IN_PART:
        found["rope.dimension_count"] = int(size * rope.get("partial_rotary_factor", 1.0))
    elif architecture == "llama":
        found["rope.dimension_count"] = size
    epsilons = [getattr(config, name) for name in _EPSILONS if hasattr(config, name)]
    if epsilons and architecture != "lfm2":
        found["attention.layer_norm_epsilon"] = epsilons[0]
    return found


def _stored(architecture: str, config: Any, name: str, x: np.ndarray) -> np.ndarray:
    """Lay a tensor out as llama.cpp's converter does."""
    kind = re.sub(r"^blk\.\d+\.", "", name)
    hidden, heads = config.hidden_size, config.num_attention_heads
    if architecture == "llama" and kind.startswith(("attn_q.", "attn_k.")):  # rotated as neighbours, not as halves
        count = heads if kind[5] == "q" else config.num_key_value_heads
        x = x.reshape(count, 2, x.shape[0] // count // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if architecture in {"gemma2", "gemma3", "nemotron"} and kind.endswith("norm.weight"):
        x = x + 1
    if architecture == "gpt2" and kind in {"attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"}:
        x = x.T
    if architecture == "bloom" and kind.startswith("attn_qkv"):  # a query, key and value a head: first all queries
        x = x.reshape(heads, 3, hidden // heads, -1).swapaxes(0, 1).reshape(x.shape)
    return np.ascontiguousarray(x.squeeze() if "shortconv.conv" in kind or kind == "ffn_gate_inp_shexp.weight" else x)


def _named(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Name a model's tensors by gguf's table and lay them out."""
    (kind,) = (key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {}
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        known = (table.get_name(x, (".weight", ".bias")) for x in (name, name.removeprefix("transformer.")))
        own = "output.weight" if name == "lm_head.weight" else next(filter(None, known), "")
        block = "blk." + "".join(re.findall(r"\.(\d+)\.", name)[:1]) + "."
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), x.chunk(2, dim=1), strict=True):
                found[f"{block}ffn_{part}_exps.weight"] = half.numpy()
        elif name.endswith("experts.down_proj"):
            found[f"{block}ffn_down_exps.weight"] = x.numpy()
        else:
            own = f"{block}exp_probs_b.bias" if name.endswith("e_score_correction_bias") else own
            found[own] = _stored(architecture, model.config, own, x.numpy())
    return found


def write_like(
    path: Path,
    model: Any,
    architecture: str,
    keys: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    pre: str = "gpt-2",
) -> Path:
    """Write the GGUF file of a tiny model as llama.cpp's converter does, in float32, with a vocabulary of its own.

    Args:
        path: of the file.
        model: of transformers.
        architecture: as llama.cpp calls it.
        keys: further metadata, or in place of the model's own; after `ARCHITECTURE.` where they have no `general.`;
            one of None is left out.
        tokenizer: of byte-level BPE, whose tokens, merges and template to write; otherwise a vocabulary of words.
        pre: how that one splits text.
    """
    config = model.config
    writer = GGUFWriter(path, architecture)
    for key, value in {**metadata_of(config, architecture), **(keys or {})}.items():
        full = key if key.startswith("general.") else f"{architecture}.{key}"
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        elif value is not None:
            add = {float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}.get(type(value))
            (add or writer.add_uint32)(full, value)
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
    writer.add_tokenizer_pre("default" if tokenizer is None else pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1 if tokenizer is None else tokenizer.bos_token_id)
    writer.add_eos_token_id(2 if tokenizer is None else tokenizer.eos_token_id)
    writer.add_pad_token_id(0 if tokenizer is None else tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    for name, x in _named(model, architecture).items():
        writer.add_tensor(name, x.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_byte_tokenizer() -> Any:
    """Return a byte-level tokenizer of at most 120 tokens, which are ASCII."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    made.train_from_iterator(["the quick brown fox jumps over the lazy dog and the rest of the text " * 9], trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


_PLAIN = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
          "num_attention_heads": 4, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0}  # fmt: skip
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_GEMMA = {**_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bloom": ("bloom", {**_PLAIN, "n_layer": 3, "n_head": 4}),
    "gemma2": ("gemma2", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_key_value_heads": 1}),
    "gpt2": ("gpt2", {**_PLAIN, "n_positions": 128}),
    "lfm2": ("lfm2", {**_GROUPED, "layer_types": ["conv", "full_attention", "conv"],
                      "block_auto_adjust_ff_dim": False}),
    "llama": ("llama", _GROUPED),
    "minimax-m2": ("minimax_m2", {**_GROUPED, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                                  "rotary_dim": 8}),
    "nemotron": ("nemotron", _GROUPED),
    "phi3": ("phi3", _GROUPED),
    "qwen2": ("qwen2", _GROUPED),
    "qwen2moe": ("qwen2_moe", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 128}),
    "qwen3moe": ("qwen3_moe", {**_GROUPED, **_EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "stablelm": ("stablelm", {**_GROUPED, "use_qkv_bias": True, "partial_rotary_factor": 0.25}),
    "starcoder2": ("starcoder2", _GROUPED),
}  # fmt: skip
"""By llama.cpp's name: model type and config of a tiny model."""


def tiny_of(architecture: str, seed: int = 0, **more: Any) -> Any:
    """Draw a model of `ARCHITECTURES`, with more or other settings, whose weights a float16 holds exactly."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = ARCHITECTURES[architecture]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**values, **more})).eval()
        for name, x in model.named_parameters():
            gain = name.endswith("norm.weight") or x.dim() == 1
            x.add_(torch.randn_like(x) * 0.1) if gain else x.normal_(std=0.15)
            x.copy_(x.half().float())
    return model
