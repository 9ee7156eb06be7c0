"""Tiny random models of every supported architecture, in memory and in a folder, for tests of plugins.

The models have the structure of the real ones (grouped queries, biases, query/key norms, rotary embeddings of every
kind, sliding windows, logit soft-capping, fused projections, experts, tied heads) at a size that runs in milliseconds.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip

_SHORT = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "bos_token_id": 1,
          "eos_token_id": 2}  # fmt: skip

TINY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_COMMON, "num_key_value_heads": 2}),
    "llama-mha": ("llama", {**_COMMON, "num_key_value_heads": 4}),
    "llama-mqa": ("llama", {**_COMMON, "num_key_value_heads": 1}),
    "llama-tied": ("llama", {**_COMMON, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**_COMMON, "num_key_value_heads": 2, "sliding_window": 8}),
    "qwen2": ("qwen2", {**_COMMON, "num_key_value_heads": 2}),
    "qwen3": ("qwen3", {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma3": ("gemma3_text", {**_COMMON, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "opt": ("opt", {"vocab_size": 128, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "max_position_embeddings": 128, "word_embed_proj_dim": 64}),
    "gpt2": ("gpt2", _GPT2),
    "gpt-neox": ("gpt_neox", {**_COMMON, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}}),
    "phi3": ("phi3", {**_COMMON, "num_key_value_heads": 2}),
    "gemma2": ("gemma2", {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 3.0, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "llama-theta": ("llama", {**_COMMON, "num_key_value_heads": 2, "rope_parameters": {**_ROPE, "rope_theta": 50.0}}),
    "llama-3": ("llama", {**_COMMON, "num_key_value_heads": 2, "rope_parameters": {**_ROPE, "rope_type": "llama3",
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    "llama-yarn": ("llama", {**_COMMON, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "rope_parameters": {**_ROPE, "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16}}),
    "phi": ("phi", {**_COMMON, "num_key_value_heads": 2, "qk_layernorm": True,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "stablelm": ("stablelm", {**_COMMON, "num_key_value_heads": 2, "qk_layernorm": True, "use_qkv_bias": True,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}}),
    "olmo2": ("olmo2", {**_COMMON, "num_key_value_heads": 2}),
    "cohere": ("cohere", {**_COMMON, "num_key_value_heads": 2, "use_qk_norm": True}),
    "glm": ("glm", {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "falcon": ("falcon", {**_SHORT, "multi_query": True, "bias": True}),
    "bloom": ("bloom", {"vocab_size": 128, "hidden_size": 64, "n_layer": 3, "n_head": 4}),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 8}),
    "mixtral": ("mixtral", {**_COMMON, "num_key_value_heads": 2, "num_local_experts": 4}),
    "gpt-oss": ("gpt_oss", {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": _ROPE,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3.5": ("qwen3_5_text", {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "full_attention"]}),
    # The last block uses keys and values of the one before.
    "gemma4": ("gemma4_text", {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}),
}  # fmt: skip
"""By name: the transformers model type and its config's values."""

_WORDS = [f"w{i}" for i in range(18)]


def tiny_model(architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Build a tiny random causal language model of three blocks, width 64 and vocabulary 128.

    Args:
        architecture: a key of `TINY_CONFIGS`.
        dtype: of the weights.
        seed: of the weights. Their scale is raised above transformers' initialisation so that attention is not flat,
            and biases are not zero, so that one that is forgotten shows.

    Returns:
        The transformers model, in evaluation mode.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = TINY_CONFIGS[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gain = name.endswith("norm.weight")  # of two dimensions in Cohere's query and key norm
                if name.endswith("bias") or (parameter.dim() > 1 and not gain):
                    parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def tiny_tokenizer() -> Any:
    """Return a tokenizer of `tiny_text`'s words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *_WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - a token of text, no secret
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    # Whatever class transformers takes for the architecture (Qwen2 has one of its own), added tokens it finds.
    words.add_tokens([AddedToken(word, single_word=True) for word in _WORDS])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def save_tiny_model(folder: Path, architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Save a tiny model as a recipe's `model` may name it: with a tokenizer of `tiny_text`'s words."""
    tiny_tokenizer().save_pretrained(folder)
    tiny_model(architecture, dtype=dtype, seed=seed).save_pretrained(folder)
    return folder


def tiny_text(*, words: int = 600, seed: int = 0) -> str:
    """Draw a text of words that are one token each to the tokenizer of `save_tiny_model`."""
    choice = random.Random(seed)  # noqa: S311 - text, no secret
    return " ".join(choice.choice(_WORDS) for _ in range(words))


def tiny_tokens(*, sequences: int = 8, length: int = 32, seed: int = 0) -> torch.Tensor:
    """Draw token ids [sequences, length] that repeat within a sequence, so that attention has something to find."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(3, 128, (sequences, (length + 1) // 2), generator=generator)
    return torch.cat([half, half], dim=1)[:, :length]
