"""Runs that drop experts: streamed, interrupted, fine-tuned, in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.mixtures import mixture
from tests.compressx.pipeline.runs import recipe, stopped, weights

from compressx import RecipeError, prune
from compressx.masks.maskset import MaskSet
from compressx.pipeline.run import run
from compressx.testing import tiny_tokens

HALF = {"targets": ["*"], "pruner": "reap", "pattern": "experts", "sparsity": 0.5}


@pytest.fixture(scope="module")
def mixtral(models: Any) -> Path:
    saved: Path = models("mixtral")
    return saved


def same(one: str, other: str) -> None:
    """Compare the masks and weights of two outputs."""
    first, second = (MaskSet.load(f"{folder}/masks.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[n].keep, second[n].keep) for n in first)
    expected = weights(f"{other}/model")
    assert all(torch.equal(x, expected[n]) for n, x in weights(f"{one}/model").items())


def test_a_streamed_run_ends_as_one_in_memory(mixtral):
    run(recipe(mixtral, HALF, shrink=True))
    run({**recipe(mixtral, HALF, output="streamed", shrink=True), "model": {"path": str(mixtral), "streaming": True}})
    same("streamed", "out")


def test_experts_are_scored_where_blocks_multiply_in_bfloat16(mixtral):
    for dtype in ("float32", "bfloat16"):
        run(recipe(mixtral, HALF, output=dtype, compute_dtype=dtype, shrink=True))
    exact, narrow = (MaskSet.load(f"{dtype}/masks.safetensors") for dtype in ("float32", "bfloat16"))
    first = min(exact)
    assert torch.equal(exact[first].keep, narrow[first].keep), "the first block's inputs differ by their rounding alone"


def test_a_resumed_run_evaluates_the_model_that_its_routers_make(mixtral):
    asked = recipe(mixtral, HALF, evaluated=True, shrink=True)
    whole = run({**asked, "output": "whole"})
    stopped(asked, 2)
    report = run(asked, resume=True)
    same("out", "whole")
    assert report.evaluation == whole.evaluation
    assert report.evaluation["pruned"] != report.evaluation["dense"]


@pytest.mark.slow
def test_fine_tuning_trains_the_experts_that_are_left(mixtral):
    run(recipe(mixtral, HALF, output="pruned", shrink=True))
    report = run(recipe(mixtral, HALF, finetune={"steps": 3}, shrink=True))
    assert report.finetune is not None
    pruned, tuned = weights("pruned/model"), weights("out/model")
    for name in (n for n in tuned if ".experts." in n):
        assert tuned[name].shape[0] == 2
        assert all(not torch.equal(*both) for both in zip(tuned[name], pruned[name], strict=True))


def test_a_model_in_memory_keeps_its_experts():
    asked: dict[str, Any] = {"calibration": {}, "prune": [HALF]}
    with pytest.raises(RecipeError, match="experts go with shrink: true only, in a run that writes its output"):
        prune(mixture("mixtral"), None, asked, calibration=tiny_tokens())
