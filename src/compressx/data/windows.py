"""Windows of tokens: drawn at random for calibration, in order for evaluation.

Documents are joined by blank lines and tokenized once, as GPTQ, SparseGPT and Wanda do for WikiText, so a window may
span documents; a truncated window is the beginning of one document. Every window is full. Text that is too short, and
what the tokenizer lacks, is a `CalibrationError`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from compressx.data.documents import Document, are_chats, documents, rendered, rendered_one
from compressx.data.prompts import requests
from compressx.recipe.sources import Bos, Draw, Generate
from compressx.runtime.errors import CalibrationError

Generated: TypeAlias = Callable[[Generate, Draw], Tensor]
"""Returns sequences of the model's own text, int64 [samples, sequence_length], for the settings and the draw."""


def token_ids(documents: Sequence[Document], tokenizer: Any) -> Tensor:
    """Join documents and tokenize them once, int64 [tokens].

    Text is joined by blank lines and gets the tokenizer's own special tokens. Chats follow one another as the chat
    template writes them, special tokens included.
    """
    if are_chats(documents):
        ids = _encoded("".join(rendered(documents, tokenizer)), tokenizer, special=False)
    else:
        ids = _encoded("\n\n".join(map(str, documents)), tokenizer, special=True)
    if ids.numel() == 0:
        raise CalibrationError("the text has no tokens: it is empty, or unknown to the tokenizer")
    return ids


def _encoded(text: str, tokenizer: Any, *, special: bool) -> Tensor:
    if _calls_backend(tokenizer):
        tokenizer("")  # takes the file's truncation and padding out of the backend, as every call does
        (fast,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return torch.tensor(fast.ids, dtype=torch.int64)
    # verbose=False: no warning that the text is longer than the model; it is cut into sequences afterwards
    encoded = tokenizer(text, verbose=False, return_attention_mask=False, add_special_tokens=special)
    return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def prompt_ids(settings: Generate, tokenizer: Any, count: int) -> list[list[int]]:
    """Return the token ids of `count` prompts, or of all that there are, in an order that the seed decides.

    A chat loses its last answer; text is continued. What the program writes is a chat if there is a chat template.
    """
    read: Sequence[Document] = requests(count, settings.seed)
    if settings.prompts is not None and settings.prompts.name != "prompts":
        read = [x for x in documents(settings.prompts, "calibration") if not isinstance(x, str) or x.strip()]
    elif tokenizer.chat_template:
        read = [[{"role": "user", "content": x}] for x in read]
    found = []
    for i in _order(len(read), settings.seed)[:count].tolist():
        text = asked = read[i]
        if not isinstance(asked, str):
            del asked[len(asked) - (asked[-1]["role"] == "assistant") :]
            text = rendered_one(asked, tokenizer, f"chat {i} of {len(read)}", answered=False)
        ids = _encoded(str(text), tokenizer, special=text is asked).tolist()
        found.append(ids[:-1] if text is asked and ids[-1:] == [tokenizer.eos_token_id] else ids)  # as some end a text
    if not any(found):
        raise CalibrationError("generate.prompts have no tokens: they are unknown to the tokenizer")
    return [ids for ids in found if ids]


def _calls_backend(tokenizer: Any) -> bool:
    """Return whether a call of the tokenizer only hands text to its backend, which is faster without the offsets."""
    from transformers import PreTrainedTokenizerFast as Fast

    own: Any = type(tokenizer)
    return isinstance(tokenizer, Fast) and own.__call__ is Fast.__call__ and own._encode_plus is Fast._encode_plus


def beginning(tokenizer: Any, bos: Bos, model: Any | None = None) -> int | None:
    """Return the id of the BOS token that each window begins with, or None.

    `auto` means for Gemma only: by the type of the model, if it is known, or the class of the tokenizer.
    """
    if bos == "auto":
        from transformers import GemmaTokenizer

        configs = () if model is None else (model.config, model.config.get_text_config(decoder=True))
        gemma = isinstance(tokenizer, GemmaTokenizer) or any("gemma" in x.model_type for x in configs)
        bos = gemma and tokenizer.bos_token_id is not None
    if not bos:
        return None
    if tokenizer.bos_token_id is None:
        raise CalibrationError("bos: the tokenizer has no BOS token; leave bos out")
    return int(tokenizer.bos_token_id)


def read_calibration(draw: Draw, tokenizer: Any, generated: Generated | None = None, model: Any = None) -> Tensor:
    """Read the calibration split of each source and draw its share of sequences, int64 [samples, sequence_length].

    Windows of several sources take turns: every stretch of them, such as what is held out, has of each its share, give
    or take one. `generated` returns the model's own text, and `bos: auto` asks for the model.
    """
    many, drawn = len(draw.sources) > 1, []
    for i, ((source, _), share) in enumerate(zip(draw.sources, draw.shares, strict=True)):
        try:
            if source.generate is None:
                part = sequences_of(documents(source, "calibration"), share, draw, tokenizer, model)
            else:
                assert generated is not None  # noqa: S101 - who has such a recipe passes it
                part = generated(source.generate, draw)
                part = part[_order(len(part), draw.seed)[:share]]
        except CalibrationError as error:
            raise type(error)(f"datasets[{i}]: {error}" if many else str(error)) from error
        drawn.append(part)
    turns = torch.cat([(torch.arange(len(part)) + 0.5) / len(part) for part in drawn])
    return torch.cat(drawn)[turns.argsort(stable=True)]


def sequences_of(documents: Sequence[Document], samples: int, draw: Draw, tokenizer: Any, model: Any = None) -> Tensor:
    """Draw sequences of documents as `draw` says, int64 [samples, sequence_length]; its own sources are not read."""
    length, seed, bos = draw.sequence_length, draw.seed, beginning(tokenizer, draw.bos, model)
    return calibration_sequences(token_ids(documents, tokenizer), samples, length, seed, bos=bos)


def _order(count: int, seed: int) -> Tensor:
    """Return a permutation that depends on the seed alone, int64 [count]."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def calibration_sequences(
    ids: Tensor, samples: int, sequence_length: int, seed: int, *, bos: int | None = None
) -> Tensor:
    """Draw non-overlapping sequences of text int64 [tokens] without replacement, int64 [samples, sequence_length].

    With `bos`, from `beginning`, each window begins with that token, which counts in its length.
    """
    found = full_windows(ids, samples, sequence_length, bos, "calibration")
    return found[_order(len(found), seed)[:samples]]


def evaluation_windows(
    ids: Tensor, samples: int | None, sequence_length: int, *, bos: int | None = None, limit: int = sys.maxsize
) -> Tensor:
    """Return the first non-overlapping windows of text, int64 [windows, sequence_length]; all are whole.

    `samples` are the windows wanted, None for all, and `limit` the model's positions.
    """
    if sequence_length > limit:
        raise CalibrationError(
            f"evaluation: sequence_length {sequence_length} is longer than the model's {limit} positions; set "
            f"evaluate.token_perplexity.sequence_length to {limit} or less"
        )
    return full_windows(ids, samples or 1, sequence_length, bos, "evaluation")[:samples]


def fingerprint(ids: Tensor) -> str:
    """Hash token ids and their shape: sha256, hexadecimal, the same on every machine."""
    digest = hashlib.sha256(str(list(ids.shape)).encode())
    digest.update(ids.to(device="cpu", dtype=torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def full_windows(ids: Tensor, needed: int, length: int, bos: int | None, purpose: str) -> Tensor:
    """Cut text, int64 [tokens], into all its windows, int64 [windows, length]; refuse fewer than `needed`."""
    own = length  # tokens of text in a window
    if bos is not None:
        own -= 1
        ids = ids[1:] if ids[0] == bos else ids  # many tokenizers put BOS before the whole text
    count = ids.numel() // own
    if count < needed:
        raise CalibrationError(
            f"{purpose} needs {needed} sequences of {length} tokens; the text has {ids.numel()} tokens, which is "
            f"{count} sequences; lower samples or sequence_length, or provide more text"
        )
    windows = ids[: count * own].view(count, own)
    return windows if bos is None else torch.cat([windows.new_full((count, 1), bos), windows], dim=1)
