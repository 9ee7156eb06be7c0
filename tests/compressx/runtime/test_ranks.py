"""Several processes: how work is shared out, and their collectives."""

from __future__ import annotations

import math
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.compressx.processes import in_two, joined

from compressx.runtime.errors import CompressxError
from compressx.runtime.ranks import Ranks, assign


@pytest.mark.slow
@given(weights=st.lists(st.integers(1, 1000), max_size=30), size=st.integers(1, 8))
def test_tasks_are_spread_so_that_no_process_has_much_more_than_its_share(weights: list[int], size: int):
    owners = assign(weights, size)
    loads = [sum(w for w, o in zip(weights, owners, strict=True) if o == rank) for rank in range(size)]
    assert all(0 <= o < size for o in owners)
    assert max(loads, default=0) <= sum(weights) / size + max(weights, default=0)


def test_the_heaviest_task_is_given_out_first():
    assert assign([1, 1, 1, 1, 4], 2) == [1, 1, 1, 1, 0]


@given(windows=st.integers(1, 50), size=st.integers(1, 8))
def test_sequences_are_shared_out_in_order_and_evenly(windows: int, size: int):
    tokens = torch.arange(windows)[:, None]
    parts = [Ranks(rank, size).share(tokens) for rank in range(size)]
    assert torch.equal(torch.cat(parts), tokens)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


FLOATS = [0.1, math.inf, -math.inf]
PLAIN = {"text": "é", "none": None, "yes": True, "counts": [1, 2**40], "floats": FLOATS, "in": {"": []}}


def test_a_process_alone_tells_itself():
    ranks, tensor = Ranks(), torch.ones(2)
    assert ranks.first
    assert ranks.broadcast(PLAIN) is PLAIN
    assert ranks.all_gather(PLAIN) == [PLAIN]
    assert next(ranks.divided([3, 5], [1, 1], lambda x: 2 * x)) == 6
    ranks.all_reduce_(tensor)
    ranks.barrier()
    assert tensor.tolist() == [1.0, 1.0]


def collectives(ranks: Ranks) -> dict[str, Any]:
    rank, total, highest = ranks.rank, torch.tensor([1.0, 2.0 + ranks.rank]), torch.tensor(ranks.rank)
    ranks.all_reduce_(total)
    ranks.all_reduce_(highest, "max")
    ranks.barrier()
    return {
        "total": total,
        "highest": highest,
        "told": [ranks.broadcast(PLAIN if rank == source else {}, source) for source in range(2)],
        "gathered": ranks.all_gather([rank, "x" * rank, torch.full((rank, 2), 1.0).bfloat16()]),
        "divided": list(ranks.divided([3, 5, 7], [1, 1, 1], lambda x: (x, rank))),
    }


@pytest.mark.slow
def test_what_processes_tell_one_another_arrives_as_it_was(tmp_path: Path):
    for found in in_two(partial(joined, collectives), tmp_path):
        assert found["total"].tolist() == [2.0, 5.0]
        assert found["highest"] == 1
        assert found["told"] == [PLAIN, PLAIN]
        (*first, empty), (*second, ones) = found["gathered"]
        assert (first, second, empty.shape, ones.tolist()) == ([0, ""], [1, "x"], (0, 2), [[1.0, 1.0]])
        assert [tuple(x) for x in found["divided"]] == [(3, 0), (5, 1), (7, 0)]


def summed(ranks: Ranks) -> torch.Tensor:
    tensor = torch.arange(6.0).view(2, 3)
    tensor = tensor if ranks.first else tensor.T.contiguous().T
    ranks.all_reduce_(tensor)
    return tensor


def test_entries_are_added_by_their_place_whatever_their_order_in_memory(tmp_path: Path):
    """A plugin's statistic may be transposed in one process, and still be zeros in another."""
    for found in in_two(partial(joined, summed), tmp_path, start="fork"):
        assert found.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]


def left_alone(ranks: Ranks) -> None:
    ranks.barrier()
    if ranks.rank == 1:
        signal.raise_signal(signal.SIGKILL)
    ranks.broadcast(torch.zeros(1), 1)


def abandoned() -> str:
    with pytest.raises(CompressxError) as told:
        joined(left_alone)
    return str(told.value)


@pytest.mark.slow
def test_a_process_whose_fellow_is_gone_says_so(tmp_path: Path):
    (told, _) = in_two(abandoned, tmp_path, ends=(0, -signal.SIGKILL))
    assert told == "another process of this run has ended; see its own message for the reason"
