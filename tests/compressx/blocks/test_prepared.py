"""What a pruner prepares of its statistics: when, for whom, and how long it is held."""

from __future__ import annotations

import weakref

import pytest
import torch
from tests.compressx.blocks.test_prune import Spy, pruned, spec_of

from compressx import FeatureNorms, PluginError, PruneResult, keep_masks
from compressx.blocks.contract import Prepared
from compressx.blocks.observe import Observed
from compressx.testing import tiny_model


class Norms:
    """What is prepared, so that it can be counted and seen to go."""

    def __init__(self, norms: torch.Tensor) -> None:
        self.norms = norms


class Preparing(Spy):
    """Wanda, its norms prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[str] = []
        self.held: list[int] = []
        self._made: list[weakref.ref[Norms]] = []

    def prepare(self, block, name, statistic):
        self.prepared.append(name.rpartition(".")[2])
        self.held.append(sum(of() is not None for of in self._made))
        made = Norms(statistic.norms)
        self._made.append(weakref.ref(made))
        return made

    def prune(self, block, patterns, stats, prepared):
        scores = {n: block.linears[n].weight.abs() * of.norms for n, of in prepared.items()}
        return {n: PruneResult(keep) for n, keep in keep_masks(scores, patterns).items()}


@pytest.mark.parametrize("separable", [True, False])
def test_each_statistic_of_a_block_is_prepared_once_and_one_is_held_at_a_time(separable):
    pruner = Preparing()
    pruned(tiny_model("llama"), spec_of(pruner, separable=separable), only="layers.0.")
    assert pruner.prepared == ["q_proj", "o_proj", "gate_proj", "down_proj"]
    assert max(pruner.held) == int(not separable)  # that of the loop, when the next one is asked for
    assert pruner._made[-1]() is None


def observed(**statistics: int) -> dict[str, Observed]:
    of = {size: Observed(FeatureNorms(size)) for size in statistics.values()}
    return {name: of[size] for name, size in statistics.items()}


def test_what_is_kept_is_not_prepared_again_and_what_is_not_is():
    pruner, stats, kept = Preparing(), observed(q=4, o=5), {}
    for _ in range(2):
        assert len(list(Prepared("mine", pruner, None, stats, kept).values())) == 2
    assert pruner.prepared == ["q", "o"]
    alone = Prepared("mine", pruner, None, stats)
    for name in "qoq":
        assert alone[name] is alone[name]
    assert pruner.prepared == ["q", "o", *"qoq"]


def test_a_failure_to_prepare_names_the_plugin_the_linear_and_the_line():
    class Broken(Preparing):
        def prepare(self, block, name, statistic):
            raise ZeroDivisionError("boom")

    with pytest.raises(
        PluginError,
        match=r"^prepare of pruner 'other' failed on model\.layers\.0\.self_attn\.q_proj: "
        r"ZeroDivisionError: boom \(.*test_prepared\.py, line \d+\)$",
    ):
        pruned(tiny_model("llama"), spec_of(Broken()))
