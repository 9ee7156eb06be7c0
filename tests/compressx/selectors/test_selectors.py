"""The built-in token selectors and what they compute with, against slow float64 readings of the definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compressx.built_in import SELECTORS
from torch import Tensor

from compressx import ModelFacts, Needle
from compressx.numerics.tokens import attention_mass, first_good_block, highest, needles_kept, pooled

quick = settings(max_examples=60)
whole_numbers = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=40)


def built(name: str, **options: Any) -> Any:
    return SELECTORS[name].build(SELECTORS[name].options(**options))


# --- readings of the definitions


def mean_of_neighbours(scores: Sequence[float], width: int) -> list[float]:
    """`width` neighbours around each place, itself among them, those that are there; more before it if it is even."""
    means = []
    for place in range(len(scores)):
        window = [scores[i] for i in range(place - width // 2, place - width // 2 + width) if 0 <= i < len(scores)]
        means.append(sum(window) / len(window))
    return means


def first_of_the_highest(scores: Sequence[float], keep: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:keep])


def attention_that_tokens_get(scores: Tensor) -> list[float]:
    """The mean over heads [heads, queries, n] and queries of the softmax; a query that sees nothing gives nothing."""
    heads, queries, n = scores.shape
    given = [0.0] * n
    for head in range(heads):
        for query in range(queries):
            powers = [math.exp(x) for x in scores[head, query].double().tolist()]
            for token in range(n):
                given[token] += powers[token] / sum(powers) / heads / queries if sum(powers) else 0.0
    return given


def causal(scores: Tensor) -> Tensor:
    """Hide from each of the last queries the tokens after it."""
    queries, n = scores.shape[-2:]
    hidden = torch.arange(n) > torch.arange(n - queries, n)[:, None]
    return scores.masked_fill(hidden, -torch.inf)


# --- what selectors compute with


@quick
@given(scores=whole_numbers, width=st.integers(1, 90))
def test_pooled_scores_are_means_of_the_neighbours_that_are_there(scores: list[float], width: int) -> None:
    found = pooled(torch.tensor(scores), width).tolist()
    assert found == pytest.approx(mean_of_neighbours(scores, width), abs=1e-6)


@quick
@given(scores=whole_numbers, share=st.floats(0, 1))
def test_the_highest_scores_are_kept_in_order_and_of_equal_ones_the_first(scores: list[float], share: float) -> None:
    keep = round(share * len(scores))
    assert highest(torch.tensor(scores), keep).tolist() == first_of_the_highest(scores, keep)


@pytest.mark.parametrize("queries", [1, 9])
def test_attention_mass_is_the_mean_softmax_of_heads_and_queries_that_see_a_token(queries: int) -> None:
    scores = causal(3 * torch.randn(2, queries, 9))
    assert float(attention_mass(scores).sum()) == pytest.approx(1)
    scores[:, queries // 2] = -torch.inf
    assert attention_mass(scores).tolist() == pytest.approx(attention_that_tokens_get(scores), abs=1e-6)


def test_a_needle_counts_by_the_share_of_its_tokens_among_the_highest_eighth() -> None:
    places = [torch.tensor(p) for p in ([3, 4, 5, 6], [20, 21], [0, 1])]
    needles = [Needle(torch.empty(0), (), p) for p in places]
    scores = [torch.arange(32.0), -torch.arange(32.0).sub(20).abs(), torch.zeros(7)]  # keep 28 to 31; 19 to 22; 0
    given = {id(needle): score for needle, score in zip(needles, scores, strict=True)}
    assert needles_kept(needles, lambda needle: given[id(needle)]) == pytest.approx((0 + 1 + 1 / 2) / 3)


@pytest.mark.parametrize(
    ("shares", "first", "said"),
    [
        ({1: 0.2, 4: 0.94, 5: 0.96, 9: 1.0}, 5, "96%{}; the best, block 9, 100%"),
        ({2: 0.5, 3: 0.5}, 2, "50%{}"),
    ],
)
def test_the_first_block_that_keeps_nearly_as_much_as_the_best_is_chosen(
    shares: dict[int, float], first: int, said: str
) -> None:
    facts = ModelFacts(12, 4, tuple(shares), None, (Needle(torch.empty(0), (), torch.empty(0)),) * 3)
    prompts = " of the hidden sentences of 3 synthetic prompts at 1/8 of their tokens"
    assert first_good_block(facts, shares) == (first, f"block {first} of 12 keeps {said.format(prompts)}")


# --- selectors that read scores


@pytest.mark.parametrize(("name", "pool"), [("gemfilter", 5), ("snapkv", 5), ("retrieval-heads", 25)])
@pytest.mark.parametrize("keep", [4, 29])
def test_the_highest_means_of_neighbours_are_kept_of_the_last_tokens_scores_or_of_attention(name, pool, keep) -> None:
    scores = causal(3 * torch.randn(1, 2, 8, 30))
    each = [sum(float(scores[0, head, -1, token]) for head in range(2)) for token in range(30)]
    each = each if name == "gemfilter" else attention_that_tokens_get(scores[0])
    assert built(name).select(scores, keep).tolist() == first_of_the_highest(mean_of_neighbours(each, pool), keep)


HEADS, BLOCKS, TOKENS = 4, (0, 2, 3, 5), 400


def facts_where(found: dict[tuple[int, int], float], queries: int) -> ModelFacts:
    """Facts with needles that only some heads look at, by block and head: each at the share of the needles given."""
    needles = []
    for number in range(10):
        places = torch.arange(12) + 35 * number
        scores = 0.1 * torch.randn(len(BLOCKS), HEADS, queries, TOKENS)
        for (block, head), share in found.items():
            there = places if number < share * 10 else (places + TOKENS // 2) % TOKENS
            scores[BLOCKS.index(block), head, :, there] = 12.0
        needles.append(Needle(scores, BLOCKS, places))
    return ModelFacts(6, HEADS, BLOCKS, None, tuple(needles))


@pytest.mark.parametrize(
    ("found", "options", "block", "head"),
    [
        ({(2, 1): 1.0, (5, 3): 1.0}, {}, 2, 1),
        ({(2, 1): 0.9, (5, 3): 1.0}, {}, 5, 3),
        ({(2, 1): 0.5, (2, 3): 1.0, (3, 0): 1.0}, {}, 2, 3),
        ({(2, 1): 1.0, (5, 3): 1.0, (5, 0): 0.8}, {"block": 5}, 5, 3),
    ],
)  # fmt: skip
def test_the_retrieval_head_is_the_one_that_looks_at_the_needles_in_the_first_good_block(
    found: dict[tuple[int, int], float], options: dict[str, int], block: int, head: int
) -> None:
    rows = built("retrieval-heads", **options).observe(facts_where(found, queries=16))
    assert (rows.blocks, rows.heads, rows.queries) == ((block,), (head,), 16)
    assert rows.reason.startswith(f"head {head}: block {block} of 6 keeps")


@pytest.mark.parametrize(
    ("name", "queries", "named"), [("gemfilter", 1, 0), ("snapkv", 32, 0), ("retrieval-heads", 16, 16)]
)
def test_a_block_that_is_named_is_taken_and_otherwise_the_first_that_keeps_the_needles(name, queries, named) -> None:
    asked, options = SELECTORS[name].needles, SELECTORS[name].options
    assert asked is not None
    assert (asked(options()), asked(options(block=3))) == (queries, named)
    assert built(name, block=4).observe(facts_where({}, queries)).blocks == (4,)
    rows = built(name).observe(facts_where({(3, head): 1.0 for head in range(HEADS)}, queries))
    assert (rows.blocks, rows.queries) == ((3,), queries)
    assert "block 3 of 6 keeps 100% of the hidden sentences of 10 synthetic prompts" in rows.reason
    assert (rows.heads is None) == (name != "retrieval-heads")


# --- selectors that read none


def without_scores(n: int) -> Tensor:
    return torch.empty(0, 0, 1, n)


@pytest.mark.parametrize(("n", "keep"), [(2, 1), (50, 1), (50, 49)])
def test_recent_keeps_the_last_tokens(n: int, keep: int) -> None:
    assert built("recent").select(without_scores(n), keep).tolist() == [*range(n)][n - keep :]
    assert SELECTORS["recent"].needles is None


def test_random_tokens_are_drawn_alike_for_one_length_and_every_place_as_often_over_many() -> None:
    counts = torch.zeros(20)
    for n in range(20, 4020, 20):
        places = built("random").select(without_scores(n), n // 4)
        assert torch.equal(places, built("random").select(without_scores(n), n // 4))
        assert len(places.unique()) == n // 4, "no place twice"
        counts.index_add_(0, places * 20 // n, torch.full((n // 4,), 20 / n))
    assert 40 < counts.min() <= counts.max() < 60  # 50 expected
