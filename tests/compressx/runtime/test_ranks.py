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

from compressx.runtime.errors import CalibrationError, CompressxError
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
def test_windows_are_shared_out_in_order_and_evenly(windows: int, size: int):
    tokens = torch.arange(windows)[:, None]
    if windows < size:
        with pytest.raises(CalibrationError, match=f"{windows} calibration windows are fewer than the {size} proc"):
            Ranks(0, size).share(tokens)
        return
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
    assert ranks.gather_tensors(tensor)[0] is tensor
    ranks.all_reduce_(tensor)
    ranks.broadcast_(tensor, 0)
    ranks.barrier()
    assert tensor.tolist() == [1.0, 1.0]


NAMES = ("bool", "uint8", "int16", "int64", "bfloat16", "float16", "float32", "float64")
DTYPES = [getattr(torch, name) for name in NAMES]


def of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(6).add(rank).remainder(2).view(2, 3).to(dtype).T  # whose memory is not in its order


def collectives(ranks: Ranks) -> dict[str, Any]:
    """Use every collective; what a tensor holds of another process's is checked here."""
    rank, total, highest = ranks.rank, torch.tensor([1.0, 2.0 + ranks.rank]), torch.tensor(ranks.rank)
    ranks.all_reduce_(total)
    ranks.all_reduce_(highest, "max")
    for dtype in DTYPES:
        tensor = of_rank(rank, dtype)
        ranks.broadcast_(tensor, 1)
        assert torch.equal(tensor, of_rank(1, dtype)), dtype
    one_for_all = torch.tensor(3.5 + rank).expand(4)  # no memory of its own to be written
    if rank == 0:
        ranks.broadcast_(one_for_all, 0)
    else:
        ranks.broadcast_(received := torch.empty(4), 0)
        assert received.tolist() == [3.5] * 4
    parts = ranks.gather_tensors(torch.full((rank, 2), float(rank)).T.contiguous().T)
    ranks.barrier()
    return {
        "total": total,
        "highest": highest,
        "parts": parts,
        "told": [ranks.broadcast(PLAIN if rank == source else {}, source) for source in range(2)],
        "gathered": ranks.all_gather([rank, "x" * rank, {"nan": math.nan}]),
    }


@pytest.mark.slow
def test_what_processes_tell_one_another_arrives_as_it_was(tmp_path: Path):
    for found in in_two(partial(joined, collectives), tmp_path):
        assert found["total"].tolist() == [2.0, 5.0]
        assert found["highest"] == 1
        assert [part.tolist() for part in found["parts"]] == [[], [[1.0, 1.0]]]
        assert found["told"] == [PLAIN, PLAIN]
        (first, nothing, nan), (second, text, _) = found["gathered"]
        assert (first, nothing, second, text) == (0, "", 1, "x")
        assert math.isnan(nan["nan"])


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
    ranks.broadcast_(torch.zeros(1), 1)


def abandoned() -> str:
    with pytest.raises(CompressxError) as told:
        joined(left_alone)
    return str(told.value)


@pytest.mark.slow
def test_a_process_whose_fellow_is_gone_says_so(tmp_path: Path):
    (told, _) = in_two(abandoned, tmp_path, ends=(0, -signal.SIGKILL))
    assert told == "another process of this run has ended; see its own message for the reason"
