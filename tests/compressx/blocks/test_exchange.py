"""What processes exchange about a block: statistics add up, and results arrive as they were sent."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.compressx.processes import in_two, joined

from compressx import PruneResult
from compressx.api.statistics import FeatureNorms, Hessian, SequenceSample
from compressx.blocks.exchange import combine, exchange
from compressx.blocks.observe import place_after
from compressx.runtime.ranks import Ranks


def test_a_process_alone_has_its_own_statistics_and_results():
    norms = FeatureNorms(3)
    assert combine(Ranks(), norms, lambda: None) is norms
    result = PruneResult(torch.ones(1, 1) > 0)
    assert list(exchange(Ranks(), [0], {0: {"a": result}}, torch.device("cpu"))) == [{"a": result}]


class Gathered:
    """A statistic with a sum and a highest."""

    def __init__(self) -> None:
        self.sum, self.highest = torch.tensor([1.0, 5.0]), torch.tensor([1.0, 5.0])

    def tensors(self) -> dict[str, tuple[torch.Tensor, str]]:
        return {"sum": (self.sum, "sum"), "highest": (self.highest, "max")}


def test_statistics_become_the_sum_and_the_highest_of_all_processes(monkeypatch: pytest.MonkeyPatch):
    others = torch.tensor([3.0, 2.0])
    reduce = {"sum": torch.add, "max": torch.maximum}
    monkeypatch.setattr(Ranks, "all_reduce_", lambda self, x, by="sum": x.copy_(reduce[by](x, others)))
    combined = combine(Ranks(0, 2), Gathered(), Gathered)  # type: ignore[arg-type]
    assert combined.sum.tolist() == [4.0, 7.0]
    assert combined.highest.tolist() == [3.0, 5.0]


def inputs() -> torch.Tensor:
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))


def _combined(ranks: Ranks) -> dict[str, torch.Tensor]:
    mine = torch.tensor_split(inputs(), 2)[ranks.rank] if ranks.size > 1 else inputs()
    found = {}
    for kind in (FeatureNorms, Hessian, SequenceSample):
        statistic = kind(4)
        for batch in mine.split(2):
            statistic.update(batch)
        merged = combine(ranks, statistic, lambda kind=kind: kind(4))
        found |= {f"{kind.__name__}.{name}": t.clone() for name, (t, _) in merged.tensors().items()}
        if kind is not SequenceSample:
            assert merged.tokens == 30
    return found


def _kept(ranks: Ranks) -> tuple[int, torch.Tensor]:
    """Return how many sequences this process keeps of the first four, and those of all."""
    mine = torch.tensor_split(inputs(), 2)[ranks.rank]
    sample = SequenceSample(4, limit=4)
    place_after(sample, 3 * ranks.rank)
    for batch in mine.split(2):
        sample.update(batch)
    merged: Any = combine(ranks, sample, lambda: SequenceSample(4, limit=4))
    return len(sample.sequences), merged.sequences


def _exchanged(ranks: Ranks) -> list[Any]:
    info = {"error": 0.5}
    decided = {}
    for task in range(3):
        if task % 2 == ranks.rank:
            keep = torch.arange(6).view(2, 3) % (task + 2) == 0
            weight = None if task == 1 else torch.full((2, 3), float(task))
            images, history = {"map": torch.arange(4).view(2, 2).T.bfloat16()}, {"loss": (1.0, 0.5)}
            decided[task] = dict.fromkeys("ab", PruneResult(keep, weight, info, images, history, group="both"))
    told = []
    for results in exchange(ranks, [0, 1, 0], decided, torch.device("cpu")):
        assert results["a"].group == results["b"].group == "both"
        told.append([[n, r.keep, r.weight, dict(r.info), r.images["map"], list(r.history["loss"])]
                     for n, r in results.items()])  # fmt: skip
    return told


def _both(ranks: Ranks) -> list[Any]:
    return [_combined(ranks), _exchanged(ranks), _kept(ranks)]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return in_two(partial(joined, _both), tmp_path_factory.mktemp("two"), start="fork")


def test_statistics_of_two_processes_are_those_of_one(exchanged: list[Any]):
    alone = _combined(Ranks())
    for found, *_ in exchanged:
        assert found.keys() == alone.keys()
        assert torch.equal(found["SequenceSample.sequences"], inputs())
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)  # batches of other sizes


def test_two_processes_keep_in_all_what_one_would(exchanged: list[Any]):
    (first, one), (second, other) = (kept for *_, kept in exchanged)
    assert (first, second) == (3, 1)
    assert torch.equal(one, inputs()[:4])
    assert torch.equal(other, inputs()[:4])


def test_every_process_gets_every_result_and_its_group(exchanged: list[Any]):
    (_, first, _), (_, second, _) = exchanged
    assert len(first) == 3
    for task, (one, other) in enumerate(zip(first, second, strict=True)):
        for mine, theirs in zip(one, other, strict=True):
            assert mine[0] == theirs[0]
            assert torch.equal(mine[1], theirs[1])
            assert torch.equal(mine[1], torch.arange(6).view(2, 3) % (task + 2) == 0)
            assert (mine[2] is None and theirs[2] is None) if task == 1 else torch.equal(mine[2], theirs[2])
            assert mine[3] == theirs[3] == {"error": 0.5}
            assert torch.equal(mine[4], theirs[4])
            assert mine[5] == theirs[5] == [1.0, 0.5]
