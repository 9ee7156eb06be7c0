"""A tiny model in a folder with a text beside it, as a user has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compressx.testing import save_tiny_model, tiny_text


def save_tiny(folder: Path, architecture: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny model with its tokenizer, and a text of words that it knows as `text.txt` beside the folder."""
    save_tiny_model(folder, architecture, dtype=dtype)
    folder.with_name("text.txt").write_text(tiny_text())
    return folder


def save_wide(
    folder: Path, width: int, *, dtype: torch.dtype = torch.float32, architecture: str = "llama", **changes: Any
) -> Path:
    """Save a model of two blocks with wider weights as `save_tiny` does: what is fixed counts less then."""
    from transformers import AutoConfig, AutoModelForCausalLM

    save_tiny(folder, architecture, dtype)
    config = AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    config.update({**sizes, "head_dim": width // 4, "max_position_embeddings": 1024, **changes})
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    return folder
