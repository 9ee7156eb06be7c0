"""Seconds of pruners on a device that works while the program goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import BaseModel

from compressx import PruneResult, PrunerSpec
from compressx.api.patterns import Unstructured, keep_mask
from compressx.api.statistics import FeatureNorms
from compressx.blocks import prune, select
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import survey
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.testing import tiny_model, tiny_tokens


class NoOptions(BaseModel):
    pass


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
    spec = PrunerSpec("asking", "for a test", NoOptions, lambda _: Asking(gpu), separable=separable)
    rule, found = PlannedRule(0, spec, NoOptions(), None, None), survey(model)
    linears = tuple(
        PlannedLinear(n, found.block_of(n), tuple(x.weight.shape), rule, Unstructured(0.5))
        for n, x in found.linears.items()
    )
    blocks = list(prune_model(InMemory(model), Plan(linears, {}, (rule,), True), [tiny_tokens()]))
    for block in blocks:
        layers = block.report.layers
        assert sum(layer.seconds for layer in layers) == pytest.approx(10.0 * len(layers))
        assert block.report.seconds == pytest.approx(110.0 * len(layers))
    assert gpu.waits <= sum(len(block.report.layers) for block in blocks), "once a linear at most"
