"""What tests of plugins build on."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from compressx.testing import TINY_CONFIGS, save_tiny_model, tiny_text


@pytest.mark.parametrize("architecture", TINY_CONFIGS)
def test_a_saved_model_has_a_tokenizer_to_which_each_word_of_the_text_is_one_token(architecture: str, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path, architecture))
    text = tiny_text(words=40)
    assert tokenizer(text)["input_ids"] == [3 + int(word[1:]) for word in text.split()]
