"""Write a Llama of any size with random weights and a word-level tokenizer, in transformers format."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig

from compressx.models import shards
from compressx.models.architecture import find_blocks


def config(width: int, inner: int, layers: int, vocabulary: int, dtype: str = "bfloat16") -> LlamaConfig:
    """Return a config with heads of at most 128 features, and a quarter as many key heads."""
    head = min(128, width // 4)
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=width // head, num_key_value_heads=max(1, width // head // 4), head_dim=head,
        max_position_embeddings=4096, tie_word_embeddings=False, dtype=dtype,
    )  # fmt: skip


def make(folder: Path, settings: LlamaConfig) -> None:
    """Write random weights block by block, and a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(settings, dtype=settings.dtype)
    blocks = find_blocks(model)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, fqn in enumerate((shards.OUTSIDE, *blocks)):
        file = f"model-{number + 1:05d}-of-{len(blocks) + 1:05d}.safetensors"
        tensors = {
            name: torch.ones(t.shape, dtype=t.dtype)
            if t.dim() == 1
            else torch.empty(t.shape, dtype=t.dtype).normal_(std=0.02, generator=generator)
            for name, t in shards.tensors_of(model, blocks, fqn).items()
        }
        shards.write_tensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    settings.architectures = ["LlamaForCausalLM"]
    settings.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(settings.vocab_size)}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)  # noqa: S106
    # Last: a folder with an index is complete.
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_text(path: Path, words: int, vocabulary: int) -> None:
    """Write random words of the tokenizer."""
    choice = random.Random(0)  # noqa: S311 - not a secret
    path.write_text(" ".join(f"w{choice.randrange(vocabulary)}" for _ in range(words)), encoding="utf-8")
