"""A tiny model in a folder, as a user has one."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from compressx.testing import tiny_model

WORDS = [f"w{i}" for i in range(18)]


def save_tiny(folder: Path, architecture: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny model with a tokenizer of whole words, and a text of them beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106 - a token of text, no secret
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    tiny_model(architecture, dtype=dtype).save_pretrained(folder)
    choice = random.Random(0)  # noqa: S311 - text, no secret
    folder.with_name("text.txt").write_text(" ".join(choice.choice(WORDS) for _ in range(600)))
    return folder
