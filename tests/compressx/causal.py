"""Small configs of transformers' causal language models, most of them made by the names of a config's settings."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "vocab_size", "max_position"), 128),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "index_topk", "head_size"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_d_state"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "sliding_window", "state_size", "mamba_n_heads", "mamba_dt_rank"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank", "mamba_num_heads"), 8),
    **dict.fromkeys(("global_head_dim", "attention_head_dim"), 32),
    **dict.fromkeys(("ssm_state_size", "chunk_size", "mamba_head_dim", "attention_window_size"), 16),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "index_n_heads": 4, "encoder_attention_heads": 4,
    "n_groups": 1, "vocab_size_per_layer_input": 128, "mamba_d_conv": 4, "use_mamba_kernels": False,
    "is_decoder": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_LATENT: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 4}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_OF_KIND: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _LATENT),
    "bamba": {"layer_types": None, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"layer_types": None, "mamba_d_ssm": 128},
    "gemma3n_text": {"layer_types": _MIXED, "num_kv_shared_layers": 0},
    "gemma4_text": {"layer_types": ["sliding_attention", *["full_attention"] * 2], "num_kv_shared_layers": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "recurrent_gemma": {"layer_types": None},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32], "attn_layers": ["local", "lsh", "local"]},
    "zamba": {"layer_types": None, "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4,
        "attention_hidden_size": 128, "n_mamba_heads": 2, "num_key_value_heads": 4},
    "zamba2": {"layer_types": None, "layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3], "mamba_ngroups": 1, "n_mamba_heads": 8, "num_mem_blocks": 1,
        "attention_hidden_size": 128, "adapter_rank": 8, "num_key_value_heads": 4},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

_LARGE = {"gemma3", "git", "got_ocr2", "moss_transcribe_diarize", "phi4_multimodal", "roc_bert", "dots3_note_text"}
"""Of parts that these settings do not make small."""

CAUSAL = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in {*_LARGE, "blt", "kimi_linear"}]


def small_config(kind: str, *, whole: bool = True) -> Any:
    """Make a small config of a model type; of some it is none that a model can be built from."""
    cls: Any = CONFIG_MAPPING[kind]
    default = cls()
    aliases = getattr(cls, "attribute_map", None) or {}
    known = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__annotations__", {}), *default.to_dict()}
    values = {key: value for key, value in _SMALL.items() if key in known - aliases.keys() or aliases.get(key) in known}
    values = {key: value for key, value in values.items() if aliases.get(key) not in values}
    computed = isinstance(inspect.getattr_static(cls, "layer_types", None), property)
    if getattr(default, "layer_types", None) is not None and not computed:
        seen = [*dict.fromkeys(default.layer_types)]
        values["layer_types"] = (seen * 3)[:3] if len(seen) > 1 else seen * 3
    if whole and getattr(default, "text_config", None) is not None and default.text_config.model_type in CONFIG_MAPPING:
        values["text_config"] = small_config(default.text_config.model_type, whole=False).to_dict()
    values |= _OF_KIND.get(kind, {})
    return cls(**{key: value for key, value in values.items() if value is not None})
