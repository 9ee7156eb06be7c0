"""What processes hand to one another, held against the bytes that two processes hand to torch's collectives."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.compressx.pipeline.runs import recipe
from tests.compressx.processes import in_two
from tests.compressx.saved import save_tiny, save_wide

from compressx.costs.estimate import Estimate
from compressx.costs.exchanged import windows_of
from compressx.costs.machine import assumed
from compressx.costs.recipe import estimate
from compressx.pipeline.preparation import loaded_recipe, prepare
from compressx.pipeline.run import run
from compressx.plugins.manager import load_plugins
from compressx.runtime.errors import CalibrationError

HALF: dict[str, Any] = {"sparsity": 0.5}
ATTENTION = {
    "targets": ["*.q_proj", "*.k_proj"], "pruner": "attnprune", "options": {"heat_map": False, "sequences": 6}, **HALF,
}  # fmt: skip
RECIPES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "masks alone": ([{"targets": ["*"], "pruner": "magnitude", **HALF}], {"calibration": None}),
    "attention and the rest": (
        [ATTENTION, {"targets": ["*.v_proj"], "pruner": "wanda", "pattern": "2:4"},
         {"targets": ["*.o_proj", "*.up_proj"], "pruner": "wanda", **HALF, "reconstruct": "sparsegpt"},
         {"targets": ["*"], "pruner": "sparsegpt", **HALF}], {},
    ),
    "whole units": (
        [{"targets": ["*.mlp.*"], "pruner": "ziplm", "pattern": "neurons", **HALF},
         {"targets": ["*"], "pruner": "alps", **HALF}], {},
    ),
    "trained blocks": (
        [{"targets": ["*"], "pruner": "sensitivity", **HALF}],
        {"reconstruct_block": {"passes": 2, "batch_size": 4}, "compute_dtype": "float32"},
    ),
    "whole blocks": ([{"targets": ["*"], "pruner": "shortgpt", "pattern": "blocks", **HALF}], {}),
    "experts": (
        [{"targets": ["*.experts.*"], "pruner": "reap", "pattern": "experts", **HALF},
         {"targets": ["*"], "pruner": "sparsegpt", **HALF}], {"shrink": True},
    ),
}  # fmt: skip
"""Rules, and sections."""


def planned(written: dict[str, Any], processes: int = 2) -> Estimate:
    known = load_plugins()
    loaded = loaded_recipe(written, (), known)
    made = prepare(loaded, known, processes)
    machine = assumed("cpu:250GF,20GB/s", processes)
    return estimate(loaded.recipe, made.plan, made.checkpoint, lambda: machine, processes)


def _kind() -> str:
    """Say what a collective is given, by who called it."""
    frame, callers, given = sys._getframe(2), {}, None
    while frame is not None:
        callers[frame.f_code.co_name] = frame
        if frame.f_code.co_name in ("broadcast_", "all_reduce_") and given is None:
            given = frame.f_locals["tensor"]
        frame = frame.f_back
    if "reduce_" in callers:
        return "statistics"
    if {"_share_gradients", "_total_share"} & callers.keys() or ("means" in callers and "all_gather" not in callers):
        return "gradients"
    if "combine" in callers:
        return "lengths" if given.dtype == torch.int64 else "states"
    if "exchange" in callers and "broadcast" not in callers:
        return "masks" if given.dtype == torch.bool else "weights"
    return "messages"


def handed_over(written: dict[str, Any]) -> dict[str, int]:
    """Run a recipe in this process, one of two, and return the bytes that it hands to collectives."""
    from torch import distributed

    counts: Counter[str] = Counter()

    def counted(collective: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[_kind()] += tensor.nbytes
            return collective(tensor, *args, **kwargs)

        return call

    with (
        patch.object(distributed, "all_reduce", counted(distributed.all_reduce)),
        patch.object(distributed, "broadcast", counted(distributed.broadcast)),
        patch("compressx.report.figures.draw", lambda *_: ()),
    ):
        run(written)
    return dict(counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_two_processes_hand_over_what_is_planned(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESSX_CACHE", str(tmp_path / "cache"))
    rules, sections = RECIPES[name]
    dtype = torch.float32 if name == "trained blocks" else torch.bfloat16
    if small := name == "experts":
        model = save_tiny(tmp_path / "model", "mixtral", dtype)
    else:
        model = save_wide(tmp_path / "model", 256, dtype=dtype, num_key_value_heads=2)
    written = recipe(model, *rules, **sections)
    if written["calibration"] is not None:  # shares of four and three windows, the last batches of one
        written["calibration"] = {**written["calibration"], "samples": 7, "batch_size": 2}
    expected = {kind: size for kind, size in planned(written).exchanged.whole.items() if size}
    for found in in_two(partial(handed_over, written), tmp_path):
        told = {kind: found.pop(kind, 0) for kind in expected}
        assert told == expected
        assert found.keys() <= {"messages", "lengths"}
        assert sum(found.values()) < 0.02 * sum(expected.values()) or small or name == "whole blocks"


def test_windows_are_shared_out_as_torch_splits_them():
    for samples in range(1, 12):
        for processes in range(1, samples + 1):
            parts = torch.tensor_split(torch.arange(samples), processes)
            assert windows_of(processes, samples) == [len(part) for part in parts]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save_tiny(tmp_path / "model", "llama")


def test_a_process_alone_hands_over_nothing(model):
    found = planned(recipe(model), 1)
    assert (found.exchanged.whole, found.exchanged.block) == ({}, {})
    assert found.unknown == ()


def test_what_a_block_takes_is_the_most_that_one_takes(model):
    rules = [
        {"targets": ["*.layers.1.*"], "pruner": "sparsegpt", **HALF},
        {"targets": ["*"], "pruner": "wanda", **HALF},
    ]
    found = planned(recipe(model, *rules)).exchanged
    weights = 64 * (64 + 32 + 32 + 64 + 3 * 96)
    assert found.block["weights"] == found.whole["weights"] == 4 * weights
    assert (found.block["masks"], found.whole["masks"]) == (weights, 3 * weights)
    # Hessians of three inputs of 64 features and one of 96, norms of the same in two blocks, and how many tokens.
    hessians, norms = 3 * 64**2 + 96**2 + 4, 3 * 64 + 96 + 4
    assert (found.block["statistics"], found.whole["statistics"]) == (8 * hessians, 8 * (hessians + 2 * norms))


def test_of_inputs_that_are_kept_whole_all_processes_together_hand_over_the_first_up_to_the_limit(model):
    for limit, kept in ((2, 2), (6, 6), (16, 7)):  # of four windows and three
        written = recipe(model, {**ATTENTION, "options": {"sequences": limit}})
        written["calibration"] = {**written["calibration"], "samples": 7}
        assert planned(written).exchanged.block["states"] == 4 * kept * 32 * 64


def test_the_first_process_prunes_on_its_share_of_the_windows_and_evaluates_alone(model):
    written = recipe(model, {"targets": ["*"], "pruner": "sparsegpt", **HALF}, evaluated=True)
    stages = [{stage.name: stage for stage in planned(written, n).stages} for n in (1, 2, 4)]
    passes = [found["prune: passes and statistics"].work["float32"] for found in stages]
    # The whole of the first batch is run, of others what comes before the last linear.
    assert passes == pytest.approx([passes[0], passes[0] / 2, passes[0] / 4], rel=0.03)
    decided = [found["prune: sparsegpt"].work.flops for found in stages]
    assert decided[0] > decided[1] > decided[2]
    assert len({found["evaluate dense"].work["float32"] for found in stages}) == 1
    assert planned(written, 4).disk == planned(written, 1).disk


def test_attention_is_pruned_on_the_sequences_of_all_processes(model):
    written = recipe(model, ATTENTION)
    alone, together = ({s.name: s for s in planned(written, n).stages}["prune: attnprune"] for n in (1, 4))
    assert together.work.counts == alone.work.counts
    outputs = 4 * 6 * 32 * 64  # of the block, of eight windows or of two
    assert together.memory["statistics and pruners"] == alone.memory["statistics and pruners"] - outputs


def test_an_allocation_measures_on_the_windows_of_all_processes(model):
    rules = [{"targets": ["*"], "pruner": "wanda"}]
    written = recipe(model, *rules, allocation={"method": "owl", "target": 0.5})
    alone, together = ({s.name: s for s in planned(written, n).stages}["allocate"] for n in (1, 2))
    assert together.work.counts == alone.work.counts


def test_a_statistic_that_reads_numbers_is_named_and_not_taken_for_nothing(model, tmp_path):
    Path("reading.py").write_text(READING)
    known = load_plugins(modules=["reading.py"])
    loaded = loaded_recipe(recipe(model, {"targets": ["*"], "pruner": "reading", **HALF}), (), known)
    made = prepare(loaded, known, 2)
    found = estimate(loaded.recipe, made.plan, made.checkpoint, lambda: assumed("h100"), 2)
    assert "what processes exchange of Reading" in found.unknown


READING = """
from dataclasses import dataclass
from pydantic import BaseModel
from compressx import PruneResult, PrunerSpec, Work, hookimpl, keep_mask

class NoOptions(BaseModel):
    pass

@dataclass
class Reading:
    highest: float = 0.0
    def update(self, x):
        self.highest = max(self.highest, float(x.max()))
    def tensors(self):
        return {}
    def work(self, text):
        return Work()

class Pruner:
    def observe(self, block, name):
        return Reading()
    def prune(self, block, patterns, stats):
        return {n: PruneResult(keep_mask(block.linears[n].weight.abs(), p)) for n, p in patterns.items()}
    def work(self, block, patterns, text):
        return Work()

@hookimpl
def compressx_pruners():
    return [PrunerSpec("reading", "for a test", NoOptions, lambda _: Pruner(), separable=True)]
"""


def test_fewer_windows_than_processes_are_refused(model):
    with pytest.raises(CalibrationError, match="8 calibration windows are fewer than the 9 processes"):
        planned(recipe(model), 9)
