"""Tokenizers in GGUF files: the metadata that says what a model's own does, or in what it differs from a file's."""

from __future__ import annotations

import itertools
import json
import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compressx.models.gguf_header import GgufHeader
from compressx.models.tokenizer import SPLITS, TEXTS, WHOLE_WORDS, splitter
from compressx.runtime.errors import ArtifactError, UnsupportedModelError

_log = logging.getLogger(__name__)

_NORMAL, _CONTROL, _USER, _UNUSED, _BYTE = 1, 3, 4, 5, 6
"""Types of tokens in a file."""
_KEY = "tokenizer.ggml."
_SPACE = "▁"  # in the tokens of SentencePiece
_BYTES = {f"<0x{i:02X}>" for i in range(256)}


def _refused(what: str) -> UnsupportedModelError:
    """Return the error about a model that needs a GGUF file to be written, and what to do."""
    return UnsupportedModelError(
        f"format gguf: {what}; name a GGUF file of the dense model as like: FILE under options, or after --like"
    )


def tokenizer_metadata(tokenizer: Any, rows: int, folder: Path | None = None) -> dict[str, Any]:
    """Return the metadata, by key, with which llama.cpp makes the tokens that a tokenizer makes.

    Args:
        tokenizer: of transformers. One that llama.cpp cannot do is an `UnsupportedModelError`.
        rows: of the embedding; those of no token are padding.
        folder: with the settings of generation, if they are known.
    """
    model, added = _model_of(tokenizer), tokenizer.added_tokens_decoder
    ours, whole = {i: token for token, i in tokenizer.get_vocab().items()}, model["byte_fallback"]
    if max(ours) >= rows:
        raise _refused(f"token {max(ours)}, {ours[max(ours)]!r}, has no row in the embedding of {rows}")
    kinds = [_CONTROL if i in added and added[i].special else _USER if i in added else
             _UNUSED if i not in ours else _BYTE if whole and ours[i] in _BYTES else _NORMAL
             for i in range(rows)]  # fmt: skip
    found = _ends(tokenizer) | {f"{_KEY}token_type": kinds}
    found[f"{_KEY}tokens"] = [ours.get(i, f"[PAD{i}]") for i in range(rows)]
    if whole:
        prefix, scores = _as_sentencepiece(tokenizer.backend_tokenizer, model, added.values())
        found |= {f"{_KEY}model": "llama", f"{_KEY}pre": "default", f"{_KEY}add_space_prefix": prefix,
                  f"{_KEY}scores": [scores.get(ours.get(i, ""), -1e9) for i in range(rows)]}  # fmt: skip
    else:
        merges = [" ".join(x.replace(" ", "Ġ") for x in pair) for pair in model["merges"]]
        found |= {f"{_KEY}model": "gpt2", f"{_KEY}pre": _way_of(tokenizer.backend_tokenizer, model),
                  f"{_KEY}merges": merges}  # fmt: skip
    return found | _roles(tokenizer, found, kinds, folder)


def _model_of(tokenizer: Any) -> Any:
    """Return the model in tokenizer.json, a BPE that llama.cpp has; refuse others."""
    if not getattr(tokenizer, "is_fast", False):
        raise _refused(f"{type(tokenizer).__name__} has no tokenizer.json to write")
    for token in tokenizer.added_tokens_decoder.values():
        if token.lstrip or token.rstrip or token.single_word:
            raise _refused(f"the token {token.content!r} takes spaces beside it, or whole words, unlike in llama.cpp")
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE":
        raise _refused(f"the tokenizer is a {model['type']}, and a BPE is written")
    other = [name for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout") if model[name]]
    other += ["ignore_merges"] * (model["byte_fallback"] and model["ignore_merges"])
    if other:
        raise _refused(f"the tokenizer's BPE has {other[0]}, which llama.cpp has not")
    return model


def _ends(tokenizer: Any) -> dict[str, Any]:
    """Return the metadata of BOS, EOS, the unknown token and padding, and of what is put around a text."""
    bos, eos, ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer("a")["input_ids"]
    if eos is None:
        raise _refused("the tokenizer has no eos_token, at which a text ends")
    begins, ends = ids[:1] == [bos], ids[-1:] == [eos]
    if ids != [bos] * begins + tokenizer("a", add_special_tokens=False)["input_ids"] + [eos] * ends:
        raise _refused("the tokenizer puts other tokens than BOS and EOS around a text")
    roles = {"bos": eos if bos is None else bos, "eos": eos, "unknown": tokenizer.unk_token_id}
    said = {f"{name}_token_id": own for name, own in {**roles, "padding": tokenizer.pad_token_id}.items()}
    return {f"{_KEY}{name}": own for name, own in {**said, "add_bos_token": begins, "add_eos_token": ends}.items()}


def _way_of(backend: Any, model: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way in which a byte-level tokenizer splits text: by what it does."""
    if backend.normalizer is not None:
        changed = [backend.normalizer.normalize_str(text) for text in TEXTS]
        if changed == [unicodedata.normalize("NFC", text) for text in TEXTS]:
            _log.warning("gguf: the tokenizer composes accents with their letters (NFC), and llama.cpp does not")
        elif changed != [*TEXTS]:
            raise _refused("the tokenizer changes text before it splits it, and llama.cpp does not")
    own, whole = _pieces(backend.pre_tokenizer), bool(model["ignore_merges"])
    names = [name for names, splits in SPLITS.items() if _pieces(splitter(splits)) == own for name in names.split()]
    fitting = [name for name in names if (name in WHOLE_WORDS) == whole]
    if not fitting:
        raise _refused("the tokenizer splits text, or takes whole words, in a way that has no name in llama.cpp")
    return fitting[0]


def _pieces(pre: Any, normalize: Callable[[str], str] = str) -> list[list[str]]:
    """Return the parts into which each text of a sample is split."""
    return [[x for x, _ in pre.pre_tokenize_str(text)] if pre else [text] for text in map(normalize, TEXTS)]


def _as_sentencepiece(backend: Any, model: Any, added: Iterable[Any]) -> tuple[bool, dict[str, float]]:
    """Return whether a BPE whose bytes fall back puts a space before texts, and the scores of tokens."""
    pieces = _pieces(backend.pre_tokenizer, str if backend.normalizer is None else backend.normalizer.normalize_str)
    joined, plain = ["".join(x) for x in pieces], [text.replace(" ", _SPACE) for text in TEXTS]
    prefix = any(x[:1] != y[:1] for x, y in zip(joined, plain, strict=True))
    for text, here, there in zip(TEXTS, joined, plain, strict=True):
        if here != (there and _SPACE * prefix + there):
            raise _refused(f"the tokenizer reads {text[:30]!r} as {here[:30]!r}, which llama.cpp does not")
    if any(len(x) > 1 for x in pieces) and any(_SPACE in token[1:] for token in model["vocab"]):
        raise _refused("the tokenizer splits text at spaces, and has tokens with spaces inside")
    if not model["vocab"].keys() >= _BYTES:
        raise _refused("the tokenizer has no token for some bytes")
    never = {x.content for x in added if _SPACE not in x.content} | _BYTES
    return prefix, _scores(model["vocab"], [(x, y) for x, y in model["merges"]], never)


def _scores(vocabulary: Collection[str], merges: Sequence[tuple[str, str]], never: set[str]) -> dict[str, float]:
    """Return the scores of tokens by which llama.cpp joins the same neighbours as merges in their order do.

    It joins the two that make the token of the highest score, whichever they are, so all pairs that make a token have
    to be merges, one after the other. Only those of runs of one letter may be mixed, the longest first. Tokens that
    are `never` made are found as a whole.
    """
    kept = [pair for pair in merges if "".join(pair) not in never]
    made, usable, known = ["".join(pair) for pair in kept], {*vocabulary} - never, {*kept}
    starts = ((token, i) for token in usable for i in range(1, len(token)) if token[:i] in usable)
    wrong = next((x for x, i in starts if x[i:] in usable and (x[:i], x[i:]) not in known), None)
    last = {token: i for i, token in enumerate(made)}
    first = dict(zip(reversed(made), range(len(made) - 1, -1, -1), strict=True))
    mixed = {token for token, count in Counter(made).items() if last[token] - first[token] >= count}
    until = -1
    for i, token in enumerate(made):
        if token in mixed:
            until = max(until, last[token])
        elif i <= until:
            wrong = wrong or token
    runs = [(-len(left), -len(right)) for left, right in kept if left + right in mixed]
    if runs != sorted(runs) or any(len({*token}) > 1 for token in mixed):
        wrong = wrong or min(mixed)
    if wrong is not None:
        raise _refused(f"the tokenizer merges {wrong!r} otherwise than by a score of that token, as llama.cpp does")
    return {token: -float(i) for token, i in first.items()}


def own_tokenizer(header: GgufHeader, tokenizer: Any, folder: Path | None = None) -> dict[str, Any]:
    """Return the metadata in which a model's tokenizer differs from a file's, by key; None for what it lacks.

    An added token is matched as a whole, so it can take the place of another one or of padding. Other tokens, or
    merges, that differ are an `ArtifactError`, which names the first. Without a tokenizer nothing is known to differ.
    The settings of generation are those of `folder`, if there is one.
    """
    key, path, found = _KEY, header.path, dict[str, Any]()
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
    return found | _roles(tokenizer, header.values, kinds, folder)


def _roles(tokenizer: Any, values: Mapping[str, Any], kinds: Sequence[int], folder: Path | None) -> dict[str, Any]:
    """Return the metadata of BOS, EOS, padding, chat templates and where generation stops that is not so already."""
    key, found = _KEY, dict[str, Any]()
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if values.get(f"{key}add_bos_token", begins) != begins and values[f"{key}model"] != "gemma4":
        found[f"{key}add_bos_token"] = begins
    for name, role in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        given, own_id = values.get(f"{key}{name}_token_id"), getattr(tokenizer, f"{role}_token_id")
        if own_id not in {None, given} and own_id < len(kinds) and (given is not None or name in {"bos", "eos"}):
            found[f"{key}{name}_token_id"] = own_id
    stops = []
    if folder is not None and (settings := folder / "generation_config.json").is_file():
        stopping = json.loads(settings.read_text("utf-8")).get("eos_token_id")
        stops = stopping if isinstance(stopping, list) else [stopping]
    # Beside the end of a text there are two more tokens at which llama.cpp stops.
    free = [x for x in (f"{key}eot_token_id", f"{key}eom_token_id") if values.get(x) not in stops]
    known = [{**values, **found}.get(f"{key}{name}_token_id") for name in ("eos", "eot", "eom")]
    others = [i for i in stops if isinstance(i, int) and i not in known and i < len(kinds) and kinds[i] != _UNUSED]
    found |= dict(zip(free, others, strict=False))
    if len(others) > len(free):
        _log.warning("gguf: llama.cpp may not stop at tokens %s of generation_config.json", others[len(free) :])
    template, start = tokenizer.chat_template, "tokenizer.chat_template"
    every = {"default": template} if isinstance(template, str) else dict(template or {})
    if every.get("default") != values.get(start) or len(every) > 1:
        found |= dict.fromkeys(x for x in values if x.startswith(start))
        found |= {start if name == "default" else f"{start}.{name}": text for name, text in every.items()}
        found |= {f"{start}s": [*every]} if len(every) > 1 else {}
    return found


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
