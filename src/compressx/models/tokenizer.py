"""Tokenizers: text becomes the tokens that a folder's tokenizer.json says, or a GGUF file."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from compressx.models.checkpoint import Checkpoint
from compressx.models.gguf_header import GgufHeader
from compressx.runtime.errors import ArtifactError, UnsupportedModelError

_log = logging.getLogger(__name__)

TEXTS = (
    "", "The cat's sat; I'LL go", " a space first", "two  three   spaces \t tab\n\n  \r\nlines ", "1 23 456  7890123 ½",
    "Déjà vu, naïve, \uff21 \ufb01", "De\u0301ja\u0300, nai\u0308ve", "def f(x):\n\treturn x[-1] != {'a_b': \"C\"}",
    "Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 中文", "😀👍🏽\u200d — “” … \u00a0 \u0000 \ufeff",
    "HTTPServer camelCase Über3 ÑandÚ'RE a_b-c/d//e!\n/ ok.\n\n", "(a+b)=c; `x` $5^2 ~12345|<b>  7\n\n 8 \r\n \r\n a",
    "voilà। ok。然后\uff0cno… \uff11\uff12\uff13 ²½ Ⅷ\u3000x中文カナabc한국 \u200bᬅ\u0301",
)  # fmt: skip
"""What tokenizers split differently: scripts, digits, runs of spaces, code, letters with accents as one and as two."""


def as_in_folder(tokenizer: Any, checkpoint: Checkpoint) -> Any:
    """Return the tokenizer, or the one of its folder's tokenizer.json if the two make different tokens of a text.

    For many types of models and classes of tokenizers transformers takes little but the vocabulary from that file. That
    one has the first difference as the attribute `differs`. Settings beside it that change its tokens are refused.
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
    texts = [*TEXTS, " a ".join(added[:1000]), *(alone.decode([*range(i, size, 64)][:100]) for i in range(64))]
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


_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?…。\uff0c、।\u06d4،)]+"
SPLITS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2 phi-2 mpt olmo jais trillion gigachat a.x-4.0 mellum exaone4": (_WORDS,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b": (r"\p{N}", _WORDS),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe": (_LLAMA3,),
    "qwen2 stablelm2 deepseek-r1-qwen megrez kormo f2llmv2 hunyuan": (_LLAMA3.replace("{1,3}", ""),),
    "qwen35": (_LLAMA3.replace("{1,3}", "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s", r"[^\s\p{M}"),),
    "gpt-4o llama4 kanana2 minimax-m2": (_CASED.replace("END", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),),
    "tekken": (_CASED.replace("END", "").replace("{1,3}", ""),),
    "bloom poro-chat gpt3-finnish": (_BLOOM,),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
    "viking": (_BLOOM, r"\p{N}"),
}
"""Regular expressions that split text one after the other, by what a GGUF file calls them.

They are those of the models, which llama.cpp uses as well; of `_CASED` it has an approximation.
"""
WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Those of which a word that is a token is not merged from its parts."""


def splitter(expressions: Sequence[str]) -> Any:
    """Return the pre-tokenizer that splits text by regular expressions, and spells bytes as letters."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(x), "isolated") for x in expressions]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, as_bytes])


def split_as_named(tokenizer: Any, header: GgufHeader) -> Any:
    """Let a tokenizer from a file split text as the file says, if that way is known here; transformers knows some."""
    backend = tokenizer.backend_tokenizer
    if header.value("tokenizer.ggml.model") != "gpt2":
        return tokenizer
    name = str(header.value("tokenizer.ggml.pre", "default"))
    found = [splits for names, splits in SPLITS.items() if name in names.split()]
    if not found:
        raise UnsupportedModelError(
            f"{header.path}: tokenizer.ggml.pre is {name!r:.60}, a way to split text that is not known here: text "
            "would become other tokens; give the model's folder, with its tokenizer.json"
        )
    backend.normalizer = None
    backend.pre_tokenizer = splitter(found[0])
    if name in WHOLE_WORDS:
        model = backend.model
        model.ignore_merges = True
        backend.model = model
    return tokenizer
