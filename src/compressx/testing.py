"""Tiny random models of every supported architecture, for tests of pruners.

The models have the structure of the real ones (grouped queries, biases, query/key norms, sliding windows, fused
projections, experts, tied heads) at a size that runs in milliseconds.
"""

from __future__ import annotations

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
_GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
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
    "gpt-neox": ("gpt_neox", {**_COMMON, "rotary_pct": 0.25}),
    "phi3": ("phi3", {**_COMMON, "num_key_value_heads": 2}),
    "mixtral": ("mixtral", {**_COMMON, "num_key_value_heads": 2, "num_local_experts": 4}),
}  # fmt: skip
"""By name: the transformers model type and its config's values."""


def tiny_model(architecture: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Build a tiny random causal language model of three blocks, width 64 and vocabulary 128.

    Args:
        architecture: a key of `TINY_CONFIGS`.
        dtype: of the weights.
        seed: of the weights. Their scale is raised above transformers' initialisation so that attention is not flat.

    Returns:
        The transformers model, in evaluation mode.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, values = TINY_CONFIGS[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.15)
    return model.to(dtype).eval()


def tiny_tokens(*, sequences: int = 8, length: int = 32, vocabulary: int = 128, seed: int = 0) -> torch.Tensor:
    """Draw token ids [sequences, length] that repeat within a sequence, so that attention has something to find."""
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(3, vocabulary, (sequences, (length + 1) // 2), generator=generator)
    return torch.cat([half, half], dim=1)[:, :length]
