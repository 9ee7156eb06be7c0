"""Seconds of decisions, and what several processes make of statistics and decisions: the same as one."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from tests.compressx.plans import plan_all, spec_of
from tests.compressx.processes import in_two, joined

from compressx import NoOptions, PruneResult
from compressx.api.patterns import Unstructured, keep_mask
from compressx.api.statistics import FeatureNorms, Hessian, SequenceSample
from compressx.blocks import prune, select
from compressx.blocks.observe import SharedStatistic
from compressx.blocks.prune import prune_model
from compressx.blocks.select import combined, decide_all
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import each_block
from compressx.planning.plan import PlannedRule
from compressx.runtime.ranks import Ranks
from compressx.testing import tiny_model, tiny_tokens


class Gpu:
    """A clock of which work that was asked for takes its time only when it is waited for."""

    def __init__(self) -> None:
        self.now, self.asked, self.waits = 0.0, 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def synchronize(self, device: object) -> None:
        assert isinstance(device, torch.device)
        self.now, self.asked, self.waits = self.now + self.asked, 0.0, self.waits + 1


class Asking:
    """A pruner that asks for ten seconds of work for each linear, and a hundred to observe one."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def observe(self, block: Any, name: str) -> FeatureNorms:
        self.gpu.asked += 100.0
        return FeatureNorms(block.linears[name].in_features)

    def prune(self, block: Any, patterns: Any, stats: Any) -> dict[str, PruneResult]:
        self.gpu.asked += 10.0 * len(patterns)
        return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}


@pytest.mark.parametrize("separable", [False, True])
def test_seconds_of_a_linear_are_those_of_its_work_and_not_of_asking_for_it(separable, monkeypatch):
    gpu = Gpu()
    for module in (select, prune):
        monkeypatch.setattr(module, "time", gpu)
        monkeypatch.setattr(module, "synchronize", gpu.synchronize)
    model = tiny_model("llama")
    spec = spec_of(Asking(gpu), separable=separable)
    blocks = list(prune_model(InMemory(model), plan_all(model, spec, Unstructured(0.5)), [tiny_tokens()]))
    for block in blocks:
        layers = block.report.layers
        assert sum(layer.seconds for layer in layers) == pytest.approx(10.0 * len(layers))
        assert block.report.seconds == pytest.approx(110.0 * len(layers))
    assert gpu.waits <= sum(len(block.report.layers) for block in blocks), "once a linear at most"


# --- several processes


def inputs() -> torch.Tensor:
    return torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))


class Highest:
    """A statistic with the highest input."""

    def __init__(self) -> None:
        self.highest = torch.full((4,), -torch.inf)

    def update(self, x: torch.Tensor) -> None:
        torch.maximum(self.highest, x.amax(dim=(0, 1)), out=self.highest)

    def tensors(self) -> dict[str, tuple[torch.Tensor, str]]:
        return {"highest": (self.highest, "max")}


KINDS = {
    "norms": partial(FeatureNorms, 4), "hessian": partial(Hessian, 4), "sample": partial(SequenceSample, 4),
    "few": partial(SequenceSample, 4, limit=4), "highest": Highest,
}  # fmt: skip


def gathered(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the tensors of statistics of all processes, each of which sees its share of the inputs."""
    stats = {"fc": {name: SharedStatistic(kind(), "mine", kind) for name, kind in KINDS.items()}}
    select._place_after(stats, 3 * ranks.rank)
    for observed in stats["fc"].values():
        for batch in ranks.share(inputs()).split(2):
            observed.statistic.update(batch)
    found = {} if ranks.size == 1 else {"kept": torch.tensor(len(stats["fc"]["few"].statistic.sequences))}
    for name, observed in stats["fc"].items():
        merged = observed if ranks.size == 1 else combined(ranks, observed)
        found |= {f"{name} {part}": x.clone() for part, (x, _) in merged.statistic.tensors().items()}
    return found


class Telling:
    """Magnitude, with new weights and everything that can be shown, from the process that was asked."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def observe(self, block: Any, name: str) -> None: ...

    def prune(self, block: Any, patterns: Any, stats: Any) -> dict[str, PruneResult]:
        def told(weight: torch.Tensor, pattern: Any) -> PruneResult:
            keep, image = keep_mask(weight.abs(), pattern), torch.arange(4).view(2, 2).T.bfloat16()
            return PruneResult(keep, 2 * weight, {"rank": self.rank}, {"map": image}, {"loss": (1.0, 0.5)}, group="all")

        return {n: told(block.linears[n].weight, p) for n, p in patterns.items()}


def decided(ranks: Ranks) -> list[Any]:
    access = InMemory(tiny_model("llama"))
    architecture = architecture_of(access.model)
    block, _ = next(each_block(access, architecture, dict.fromkeys(architecture.blocks, ())))
    rule = PlannedRule(0, ((spec_of(None, separable=True), NoOptions()),))
    patterns = dict.fromkeys(block.linears, Unstructured(0.5))
    pruners = {rule: (Telling(ranks.rank), None)}
    found = decide_all(block, {rule: patterns}, pruners, {n: {} for n in patterns}, ranks)
    return [(name, *astuple(of.result)) for name, of in found]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return in_two(
        partial(joined, lambda ranks: (gathered(ranks), decided(ranks))), tmp_path_factory.mktemp("two"), start="fork"
    )


def test_statistics_of_two_processes_are_those_of_one(both: list[Any]):
    alone = gathered(Ranks())
    assert [int(found.pop("kept")) for found, _ in both] == [3, 1]
    for found, _ in both:
        assert found.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)  # batches of other sizes


def test_every_process_gets_every_decision_and_all_that_it_shows(both: list[Any]):
    alone = decided(Ranks())
    assert {row[3]["rank"] for row in both[0][1]} == {0, 1}
    for told in both:
        for mine, theirs, one in zip(told[1], both[0][1], alone, strict=True):
            assert mine[3] == theirs[3]
            assert torch.equal(mine[1], one[1])
            assert torch.equal(mine[2], one[2])
            assert torch.equal(mine[4]["map"], one[4]["map"])
            assert (mine[0], [*mine[5]["loss"]], mine[7]) == (one[0], [1.0, 0.5], "all")
