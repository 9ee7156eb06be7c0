"""Scores of a prompt's tokens, for token selectors, and the choice of blocks and heads by synthetic prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from compressx.api.selector import AttentionRows, ModelFacts, Needle, share_kept

KEPT_OF_NEEDLES = 0.125
"""Share of a synthetic prompt's tokens that is kept when a block or head is chosen."""

_ENOUGH = 0.95
"""A block is good enough if it keeps this share of what the best one keeps."""


def attention_mass(scores: Tensor) -> Tensor:
    """Return the mean attention that tokens get from queries and heads [n], for scores [heads, queries, n]."""
    return scores.softmax(-1).nan_to_num(0.0).mean((0, 1))  # a query may see none of the tokens


def pooled(scores: Tensor, width: int) -> Tensor:
    """Return the mean of each score [n] and its neighbours; at the edges, of those that are there.

    The width counts itself, and is one more before than after it if even.
    """
    mean = functional.avg_pool1d(scores[None, None], width, 1, width // 2, count_include_pad=False)
    return mean[0, 0, : len(scores)]


def highest(scores: Tensor, keep: int) -> Tensor:
    """Return the positions of the highest scores [n], ascending, int64 [keep]; of equal ones, the first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:keep].sort().values


def needles_kept(needles: Sequence[Needle], score: Callable[[Needle], Tensor]) -> float:
    """Return the mean share of the hidden sentences' tokens among the eighth of each prompt with the highest scores.

    `score` returns those of a prompt's tokens, [n].
    """
    shares = []
    for needle in needles:
        scores = score(needle)
        shares.append(share_kept(needle.places, highest(scores, max(1, int(len(scores) * KEPT_OF_NEEDLES)))))
    return sum(shares) / len(shares)


def first_good_block(facts: ModelFacts, shares: Mapping[int, float]) -> tuple[int, str]:
    """Choose the first block that keeps nearly as much of the needles as the best one, and say how.

    `shares` are from `needles_kept`, by index of the block.
    """
    best = max(shares, key=lambda block: shares[block])
    first = min(block for block, share in shares.items() if share >= _ENOUGH * shares[best])
    told = (
        f"block {first} of {facts.blocks} keeps {shares[first]:.0%} of the hidden sentences of "
        f"{len(facts.needles)} synthetic prompts at 1/{round(1 / KEPT_OF_NEEDLES)} of their tokens"
    )
    return first, told if first == best else f"{told}; the best, block {best}, {shares[best]:.0%}"


def all_heads_of(
    facts: ModelFacts, block: int | Literal["auto"], score: Callable[[Tensor], Tensor], queries: int = 1
) -> AttentionRows:
    """Ask for all heads of one block: the one that an option names, or the first good one.

    `score` is from scores of one block [heads, queries, n] to scores of tokens [n].
    """
    if block != "auto":
        return AttentionRows((block,), queries=queries)
    shares = {
        index: needles_kept(facts.needles, lambda needle, i=i: score(needle.scores[i]))  # type: ignore[misc]
        for i, index in enumerate(facts.needles[0].blocks)
    }
    first, reason = first_good_block(facts, shares)
    return AttentionRows((first,), queries=queries, reason=reason)
