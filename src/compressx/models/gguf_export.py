"""GGUF files of pruned models, for llama.cpp: how each tensor is stored, and what that takes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"]
KINDS: tuple[str, ...] = get_args(Kind)
"""The types that the package `gguf` quantizes to."""

ROW = 32
"""Weights of a row that Q8_0 to Q4_1 store together: other rows stay in float16."""

_BLOCK_BYTES: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (ROW, 34), "Q5_0": (ROW, 22), "Q5_1": (ROW, 24),
    "Q4_0": (ROW, 18), "Q4_1": (ROW, 20),
}  # fmt: skip
"""Weights that are stored together, and their bytes, scales included."""
_IN_FLOAT = re.compile(r"norm|ffn_gate_inp|position_embd|token_types|conv")


def stored_type(name: str, shape: Sequence[int], kind: str, *, tied: bool) -> str:
    """Return the type in which a file of a kind stores a tensor, as llama.cpp's llama-quantize does.

    That takes Q6_K for the output matrix of files of 4 and 5 bits, which the package `gguf` cannot write; here it is
    Q8_0, as there where rows are no multiples of 256.

    Args:
        name: in the file, such as `blk.0.ffn_up.weight`.
        shape: rows first.
        kind: one of `KINDS`.
        tied: whether the embedding is the output matrix, too.
    """
    if len(shape) == 1 or _IN_FLOAT.search(name):
        return "F32"
    if shape[-1] % _BLOCK_BYTES[kind][0]:
        return "F16"
    output = name == ("token_embd.weight" if tied else "output.weight")
    return "Q8_0" if output and kind[:2] in {"Q4", "Q5"} else kind


def stored_bytes(shape: Sequence[int], stored: str) -> int:
    """Return the bytes of a tensor in a file, where it begins at a multiple of 32."""
    weights, size = _BLOCK_BYTES[stored]
    return -(math.prod(shape) // weights * size // -32) * 32
