"""Tiny mixtures of every kind of router, with their shared and correction parts, and of every layout of experts."""

from __future__ import annotations

from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**_COMMON, "num_local_experts": 4}),
    "qwen3-moe": ("qwen3_moe", {**_COMMON, "num_experts": 4, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-dense-block": ("qwen3_moe", {**_COMMON, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {**_COMMON, "num_experts": 4}),
    "qwen2-moe": ("qwen2_moe", {**_COMMON, "num_experts": 4, "shared_expert_intermediate_size": 48}),
    "deepseek-v3": ("deepseek_v3", {**_COMMON, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_key_value_heads": 4, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}),
}  # fmt: skip

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("llama4_text", {**_COMMON, "intermediate_size_mlp": 96, "num_local_experts": 4, "head_dim": 16,
        "attention_chunk_size": 16, "moe_layers": [0, 2]}),
    "jetmoe": ("jetmoe", {**_COMMON, "num_local_experts": 4, "kv_channels": 16}),
    "dbrx": ("dbrx", {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 128, "vocab_size": 128,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}}),
    "longcat": ("longcat_flash", {**{k: x for k, x in _COMMON.items() if k != "num_hidden_layers"}, "num_layers": 3,
        "num_key_value_heads": 4, "ffn_hidden_size": 96, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "moe_topk": 2, "n_routed_experts": 4,
        "zero_expert_num": 2, "expert_ffn_hidden_size": 48}),
}  # fmt: skip
"""Whose experts are laid out, or multiplied, in a way of their own."""


def mixture(name: str, **changed: Any) -> Any:
    """Make a tiny random mixture, in evaluation mode, whose router prefers some experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = {**MIXTURES, **LAYOUTS}[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**values, **changed}))
        with torch.no_grad():
            for part, x in [*model.named_parameters(), *model.named_buffers()]:
                if x.dim() > 1 or "correction" in part:
                    x.normal_(std=0.15)
    return model.eval()
