"""Windows of tokens: drawn at random for calibration, in order for evaluation.

Documents are joined by blank lines and tokenized once, as GPTQ, SparseGPT and Wanda do for WikiText. A window may
span documents, and every window is full.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from compressx.data.documents import documents
from compressx.recipe.sources import Bos, DatasetSource
from compressx.runtime.errors import CalibrationError


def token_ids(documents: Iterable[str], tokenizer: Any) -> Tensor:
    """Join documents by blank lines and tokenize them once, with the tokenizer's own special tokens.

    Returns:
        int64 [tokens].

    Raises:
        CalibrationError: the text has no tokens.
    """
    # verbose=False: no warning that the text is longer than the model; it is cut into windows afterwards
    encoded = tokenizer("\n\n".join(documents), verbose=False, return_attention_mask=False)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    if ids.numel() == 0:
        raise CalibrationError("the text has no tokens: it is empty, or unknown to the tokenizer")
    return ids


def beginning(tokenizer: Any, bos: Bos) -> int | None:
    """Return the id of the BOS token that each window begins with, or None.

    Args:
        tokenizer: the model's.
        bos: whether windows begin with BOS; `auto` means for Gemma only.

    Raises:
        CalibrationError: the tokenizer has no BOS token.
    """
    if bos == "auto":
        from transformers import GemmaTokenizer

        bos = isinstance(tokenizer, GemmaTokenizer)
    if not bos:
        return None
    if tokenizer.bos_token_id is None:
        raise CalibrationError("bos: the tokenizer has no BOS token; leave bos out")
    return int(tokenizer.bos_token_id)


def read_calibration(
    dataset: DatasetSource, tokenizer: Any, *, samples: int, sequence_length: int, seed: int, bos: Bos
) -> Tensor:
    """Read a dataset's calibration split and draw `calibration_windows` from it, int64 [samples, tokens].

    Raises:
        CalibrationError: text that is missing or too short, or a tokenizer without the required BOS token.
    """
    ids = token_ids(documents(dataset, "calibration"), tokenizer)
    return calibration_windows(ids, samples, sequence_length, seed, bos=beginning(tokenizer, bos))


def calibration_windows(
    ids: Tensor, samples: int, sequence_length: int, seed: int, *, bos: int | None = None,
    max_positions: int | None = None,
) -> Tensor:  # fmt: skip
    """Draw non-overlapping windows of text, without replacement.

    Args:
        ids: int64 [tokens].
        samples: number of windows.
        sequence_length: tokens in a window, BOS included.
        seed: of the draw; the same seed gives the same windows in the same order.
        bos: first token of each window, from `beginning`; None for windows of text only.
        max_positions: number of the model's positions, if known.

    Returns:
        int64 [samples, sequence_length].

    Raises:
        CalibrationError: fewer windows than samples, or a window longer than the model.
    """
    windows = _windows(ids, samples, sequence_length, bos, max_positions, "calibration")
    generator = torch.Generator().manual_seed(seed)
    return windows[torch.randperm(len(windows), generator=generator)[:samples]]


def evaluation_windows(
    ids: Tensor, samples: int | None, sequence_length: int, *, bos: int | None = None, max_positions: int | None = None
) -> Tensor:
    """Return the first non-overlapping windows of text; an incomplete last one is dropped.

    Args:
        ids: int64 [tokens].
        samples: number of windows; None for all.
        sequence_length: tokens in a window, BOS included.
        bos: as for `calibration_windows`.
        max_positions: number of the model's positions, if known.

    Returns:
        int64 [windows, sequence_length].

    Raises:
        CalibrationError: fewer windows than samples, none at all, or a window longer than the model.
    """
    return _windows(ids, samples or 1, sequence_length, bos, max_positions, "evaluation")[:samples]


def fingerprint(ids: Tensor) -> str:
    """Hash token ids and their shape: sha256, hexadecimal, the same on every machine."""
    digest = hashlib.sha256(str(list(ids.shape)).encode())
    digest.update(ids.to(device="cpu", dtype=torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _windows(
    ids: Tensor, needed: int, length: int, bos: int | None, max_positions: int | None, purpose: str
) -> Tensor:  # fmt: skip
    if max_positions is not None and length > max_positions:
        raise CalibrationError(
            f"{purpose}: sequence_length {length} is longer than the model's {max_positions} positions; lower it"
        )
    own = length  # tokens of text in a window
    if bos is not None:
        own -= 1
        ids = ids[1:] if ids[0] == bos else ids  # many tokenizers put BOS before the whole text
    count = ids.numel() // own
    if count < needed:
        raise CalibrationError(
            f"{purpose} needs {needed} windows of {length} tokens; the text has {ids.numel()} tokens, which is {count} "
            "windows; lower samples or sequence_length, or provide more text"
        )
    windows = ids[: count * own].view(count, own)
    return windows if bos is None else torch.cat([windows.new_full((count, 1), bos), windows], dim=1)
