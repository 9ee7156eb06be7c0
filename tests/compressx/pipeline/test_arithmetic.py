"""Which dtype a run multiplies in, and where that is told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.compressx.pipeline.runs import MAGNITUDE, artifacts, recipe, stopped

from compressx.masks.maskset import MaskSet
from compressx.models import arithmetic
from compressx.pipeline.run import run
from compressx.runtime.errors import ArtifactError

TRAINED = {"reconstruct_block": {"passes": 1}}
FAST_IN_16_BITS = {"float32": 10e9, "bfloat16": 40e9, "float16": 1e9}
SLOW_IN_16_BITS = {"float32": 10e9, "bfloat16": 1e9, "float16": 1e9}


@pytest.fixture
def machine(monkeypatch):
    """Return a function that decides how fast this machine is."""
    return lambda products: monkeypatch.setattr(arithmetic, "rates", lambda _: products)


def report(folder="out"):
    return json.loads(Path(folder, "report.json").read_text())


def test_a_run_that_trains_says_which_dtype_it_took_and_why(model, machine):
    machine(FAST_IN_16_BITS)
    run({**recipe(model), **TRAINED})
    told = report()["arithmetic"]
    assert (told["dtype"], told["reason"]) == ("bfloat16", "the fastest here")
    assert told["rates"]["bfloat16"] == 40e9
    named = re.compile(r"bfloat16, the fastest here; GFLOP/s: float32 \d+, bfloat16 \d+")
    assert named.search(Path("out/report.md").read_text())
    assert named.search(Path("out/run.log").read_text())
    assert yaml.safe_load(Path("out/recipe.yaml").read_text())["compute_dtype"] == "bfloat16", (
        "so that it can be repeated"
    )
    assert "compute_dtype: bfloat16" in Path("out/model/README.md").read_text()


def test_pruners_and_fine_tuning_see_narrow_products(model):
    losses, masks = [], []
    for dtype in ("float32", "bfloat16"):
        run({**recipe(model), "finetune": {"steps": 1}, "compute_dtype": dtype, "output": dtype})
        masks.append(MaskSet.load(f"{dtype}/masks.safetensors"))
        run({**recipe(model, MAGNITUDE), "finetune": {"steps": 1}, "compute_dtype": dtype, "output": f"{dtype}-2"})
        losses += report(f"{dtype}-2")["finetune"]["losses"]
    wide, narrow = masks
    same = [float((wide[name].keep == narrow[name].keep).float().mean()) for name in wide]
    assert 0.9 < sum(same) / len(same) < 1
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_without_training_a_float32_model_is_pruned_alike_on_every_machine(model, machine):
    for name, products in (("one", FAST_IN_16_BITS), ("other", SLOW_IN_16_BITS)):
        machine(products)
        run({**recipe(model), "output": name})
        assert report(name)["arithmetic"] == {"dtype": "float32", "reason": "as the weights", "rates": {}}
    one, other = artifacts("one"), artifacts("other")
    assert one["masks.safetensors"] == other["masks.safetensors"]


def test_a_run_that_multiplies_nothing_measures_nothing(model, monkeypatch):
    monkeypatch.setattr(arithmetic, "rates", None)
    run({k: v for k, v in recipe(model, MAGNITUDE).items() if k != "calibration"})
    assert report()["arithmetic"] is None


def test_an_interrupted_run_goes_on_in_the_dtype_that_it_began_with(model, machine):
    machine(FAST_IN_16_BITS)
    asked = {**recipe(model), **TRAINED}
    run({**asked, "output": "whole"})
    stopped(asked, 2)
    machine(SLOW_IN_16_BITS)
    with pytest.raises(ArtifactError, match=r'compute_dtype: was "bfloat16", is "float32"'):
        run({**asked, "compute_dtype": "float32"}, resume=True)
    run(asked, resume=True)
    assert report()["arithmetic"] == report("whole")["arithmetic"]
    whole, resumed = artifacts("whole"), artifacts("out")
    assert whole["model/model.safetensors"] == resumed["model/model.safetensors"]
