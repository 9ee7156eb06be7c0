"""A text becomes the tokens that the tokenizer.json in the model's folder says."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from compressx.models.checkpoint import Checkpoint
from compressx.runtime.errors import ArtifactError

_log = logging.getLogger(__name__)

_TEXTS = (
    "", "The cat's sat; I'LL go", " a space first", "two  three   spaces \t tab\n\n  \r\nlines ", "1 23 456  7890123 ½",
    "Déjà vu, naïve, \uff21 \ufb01", "De\u0301ja\u0300, nai\u0308ve", "def f(x):\n\treturn x[-1] != {'a_b': \"C\"}",
    "Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 中文", "😀👍🏽\u200d — “” … \u00a0 \u0000 \ufeff",
)  # fmt: skip
"""What tokenizers split differently: scripts, digits, runs of spaces, code, letters with accents as one and as two."""


def as_in_folder(tokenizer: Any, checkpoint: Checkpoint) -> Any:
    """Return the tokenizer, or the one of its folder's tokenizer.json if the two make different tokens of a text.

    For many types of models and classes of tokenizers transformers takes little but the vocabulary from that file.

    Returns:
        Where they differ, with the first difference as the attribute `differs`.

    Raises:
        ArtifactError: settings beside the file change its tokens.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    where, file = checkpoint.location, None
    if not type(tokenizer).__module__.startswith("transformers_modules"):
        optional = {"revision": checkpoint.revision, "_raise_exceptions_for_missing_entries": False}
        file = cached_file(where, "tokenizer.json", **optional)
    if file is None:
        return tokenizer
    alone = Tokenizer.from_file(file)
    alone.no_truncation()
    alone.no_padding()
    alone.encode_special_tokens = bool(tokenizer.split_special_tokens)
    if (difference := _difference(tokenizer, alone)) is None:
        return tokenizer
    found = PreTrainedTokenizerFast.from_pretrained(where, **checkpoint.arguments)
    if (left := _difference(found, alone)) is not None:
        raise ArtifactError(
            f"{where}: its tokenizer.json and transformers make different tokens: {left}; take out of its "
            "tokenizer_config.json what changes them, such as fix_mistral_regex"
        )
    _log.warning(
        "%s: AutoTokenizer and tokenizer.json make different tokens: %s; taken are the file's", where, difference
    )
    found.differs = difference
    return found


def _difference(tokenizer: Any, alone: Any) -> str | None:
    """Tell the first text of a sample of which a tokenizer and the one of tokenizer.json make different tokens.

    Tokens that stand in tokenizer_config.json alone are the folder's, too, and not compared.
    """
    added, size = [x.content for x in alone.get_added_tokens_decoder().values()], alone.get_vocab_size()
    texts = [*_TEXTS, " a ".join(added[:1000]), *(alone.decode([*range(i, size, 64)][:100]) for i in range(64))]
    for token in {*tokenizer.get_added_vocab()} - {*added}:
        texts = [text.replace(token, "") for text in texts]
    for special in (False, True):
        here = tokenizer(texts, add_special_tokens=special)["input_ids"]
        there = [x.ids for x in alone.encode_batch(texts, add_special_tokens=special)]
        for text, own, wanted in zip(texts, here, there, strict=True):
            if own != wanted:
                i = next(i for i, (x, y) in enumerate(itertools.zip_longest(own, wanted)) if x != y)
                return f"{text[:40]!r} becomes, from token {i} on, {own[i : i + 4]} and {wanted[i : i + 4]}"
    return None
