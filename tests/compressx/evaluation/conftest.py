from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def tokenizer() -> Any:
    """One token for each ASCII character, as many as a tiny model knows, and no padding token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(i): i for i in range(3, 128)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token=None, model_max_length=16)  # noqa: S106
