"""Tokenizers: text becomes the tokens that a folder's tokenizer.json says, or a GGUF file.

And in what a model's own tokenizer differs from that of a GGUF file, for the file that is written.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressx.models.checkpoint import Checkpoint
from compressx.models.gguf_header import GgufHeader
from compressx.runtime.errors import ArtifactError, UnsupportedModelError

_log = logging.getLogger(__name__)

_TEXTS = (
    "", "The cat's sat; I'LL go", " a space first", "two  three   spaces \t tab\n\n  \r\nlines ", "1 23 456  7890123 ½",
    "Déjà vu, naïve, \uff21 \ufb01", "De\u0301ja\u0300, nai\u0308ve", "def f(x):\n\treturn x[-1] != {'a_b': \"C\"}",
    "Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語 中文", "😀👍🏽\u200d — “” … \u00a0 \u0000 \ufeff",
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
_SPLITS: Mapping[str, tuple[str, ...]] = {
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
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}
"""Those of which a word that is a token is not merged from its parts."""


def split_as_named(tokenizer: Any, header: GgufHeader) -> Any:
    """Let a tokenizer from a file split text as the file says, if that way is known here; transformers knows some."""
    from tokenizers import Regex, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if header.value("tokenizer.ggml.model") != "gpt2":
        return tokenizer
    name = str(header.value("tokenizer.ggml.pre", "default"))
    found = [splits for names, splits in _SPLITS.items() if name in names.split()]
    if not found:
        raise UnsupportedModelError(
            f"{header.path}: tokenizer.ggml.pre is {name!r:.60}, a way to split text that is not known here: text "
            "would become other tokens; give the model's folder, with its tokenizer.json"
        )
    backend.normalizer = None
    splits = [pre_tokenizers.Split(Regex(x), "isolated") for x in found[0]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    if name in _WHOLE_WORDS:
        model = backend.model
        model.ignore_merges = True
        backend.model = model
    return tokenizer


def own_tokenizer(header: GgufHeader, tokenizer: Any, folder: Path | None = None) -> dict[str, Any]:
    """Return the metadata in which a model's tokenizer differs from a file's, by key; None for what it lacks.

    An added token is matched as a whole, so it can take the place of another one or of padding. Other tokens, or
    merges, that differ are an `ArtifactError`, which names the first. Without a tokenizer nothing is known to differ.
    The settings of generation are those of `folder`, if there is one.
    """
    key, path, values, found = "tokenizer.ggml.", header.path, header.values, dict[str, Any]()
    if tokenizer is None:
        return found
    lists = (header.value(key + x) for x in ("tokens", "token_type", "merges"))
    theirs, types, merges = (x if isinstance(x, list) else [] for x in lists)
    types = types or [_NORMAL] * len(theirs)
    if {*map(type, theirs)} != {str} or len(types) != len(theirs):
        raise ArtifactError(f"{path} has {len(theirs)} tokens and types of {len(types)}; download it again")
    tokens, kinds = map(list, zip(*_own_tokens(header, tokenizer, theirs, types), strict=True))
    found |= {f"{key}tokens": tokens} if tokens != theirs else {}
    found |= {f"{key}token_type": kinds} if kinds != types else {}
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if tokenizer.is_fast else {}
    if merges and model["type"] == "BPE":
        own = (" ".join(x.replace(" ", "Ġ") for x in pair) for pair in model["merges"])
        for i, (here, there) in enumerate(itertools.zip_longest(own, merges)):
            if here != there:
                raise header.foreign(f"merge {i}", there, here)
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if values.get(f"{key}add_bos_token", begins) != begins and values[f"{key}model"] != "gemma4":
        found[f"{key}add_bos_token"] = begins
    for name, role in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        given, own_id = values.get(f"{key}{name}_token_id"), getattr(tokenizer, f"{role}_token_id")
        if own_id not in {None, given} and own_id < len(tokens) and (given is not None or name in {"bos", "eos"}):
            found[f"{key}{name}_token_id"] = own_id
    stops = []
    if folder is not None and (settings := folder / "generation_config.json").is_file():
        stopping = json.loads(settings.read_text("utf-8")).get("eos_token_id")
        stops = stopping if isinstance(stopping, list) else [stopping]
    others = [i for i in stops if isinstance(i, int) and i < len(tokens) and kinds[i] == _CONTROL]
    if others and tokenizer.eos_token_id not in stops and values.get(f"{key}eot_token_id") not in stops:
        found[f"{key}eot_token_id"] = others[0]  # llama.cpp stops at it as well
    template, start = tokenizer.chat_template, "tokenizer.chat_template"
    every = {"default": template} if isinstance(template, str) else dict(template or {})
    if every.get("default") != values.get(start) or len(every) > 1:
        found |= dict.fromkeys(x for x in values if x.startswith(start))
        found |= {start if name == "default" else f"{start}.{name}": text for name, text in every.items()}
        found |= {f"{start}s": [*every]} if len(every) > 1 else {}
    return found


_NORMAL, _CONTROL, _USER, _UNUSED, _BYTE = 1, 3, 4, 5, 6
"""Types of tokens in a file."""


def _own_tokens(
    header: GgufHeader, tokenizer: Any, theirs: Sequence[str], types: Sequence[int]
) -> Iterator[tuple[str, int]]:
    """Yield each token of a model as llama.cpp's converter writes it, and its type."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary, added, spelled = tokenizer.get_vocab(), tokenizer.added_tokens_decoder, bytes_to_unicode()
    ours = {i: token for token, i in vocabulary.items()}
    for i, (there, kind) in enumerate(zip(theirs, types, strict=True)):
        here, whole = ours.get(i), added.get(i)
        as_added = _UNUSED if whole is None else _CONTROL if whole.special else _USER
        same = here in {there, there.replace(" ", "▁"), "".join(spelled[x] for x in there.encode())}
        if same or (here is None and kind in {_UNUSED, _BYTE} and there not in vocabulary):
            yield there, as_added if whole is not None and kind == _NORMAL else kind
        elif kind in {_CONTROL, _USER, _UNUSED} and (here is None or whole is not None):
            yield here or f"[PAD{i}]", as_added
        else:
            raise header.foreign(f"token {i}", there, here)
