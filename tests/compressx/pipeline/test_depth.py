"""Runs that drop whole blocks: streamed, interrupted, by several processes, fine-tuned, in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.compressx.architectures import KINDS
from tests.compressx.depths import THIRD
from tests.compressx.pipeline.runs import artifacts, recipe, stopped, weights
from tests.compressx.pipeline.test_processes import alone_and_together
from tests.compressx.saved import save_tiny
from transformers import AutoModelForCausalLM

from compressx import UnsupportedModelError, prune
from compressx.masks.maskset import MaskSet
from compressx.models.architecture import find_blocks
from compressx.models.blockwise import skipped
from compressx.pipeline.memory import PrunedModel
from compressx.pipeline.run import run
from compressx.testing import tiny_model, tiny_tokens

HALF = {"targets": ["*.up_proj"], "pruner": "wanda", "sparsity": 0.5}


def gone(folder: Path | str = "out") -> list[str]:
    plan = json.loads(Path(folder, "plan.json").read_text())
    dropped: list[str] = plan["blocks"]["dropped"]
    return dropped


def test_a_run_zeroes_the_block_and_its_files_say_which(model):
    report = run(recipe(model, THIRD, HALF))
    (block,) = gone()
    masks = MaskSet.load("out/masks.safetensors")
    left = {name: bool(masks[name].keep.any()) for name in masks}
    assert [n for n, some in left.items() if not some] == [n for n in left if n.startswith(f"{block}.")]
    saved = weights("out/model")
    assert not any(x.any() for n, x in saved.items() if n.startswith(f"{block}.") and "norm" not in n)
    told = {layer.info.get("importance") for b in report.blocks for layer in b.layers if layer.pruner == "shortgpt"}
    assert len(told) == 3
    assert block in Path("out/run.log").read_text()


def test_a_streamed_run_ends_as_one_in_memory(model):
    run(recipe(model, THIRD, HALF))
    streaming = {"path": str(model), "streaming": True}
    run({**recipe(model, THIRD, HALF, output="streamed"), "model": streaming})
    assert gone() == gone("streamed")
    streamed = weights("streamed/model")
    assert all(torch.equal(x, streamed[n]) for n, x in weights("out/model").items())


def test_a_resumed_run_drops_the_same_blocks_without_measuring_again(model):
    asked = recipe(model, THIRD, HALF)
    run({**asked, "output": "whole"})
    left = stopped(asked, 2)
    assert len(json.loads((left / "state.json").read_text())["scores"]) == 3
    told: list[str] = []
    run(asked, resume=True, progress=lambda _stage, _done, _total, note: told.append(note))
    assert "blocks scored" not in told
    assert artifacts("out") == artifacts("whole")


@pytest.mark.slow
def test_two_processes_drop_the_blocks_that_one_does(model, tmp_path):
    alone_and_together(model, tmp_path, [THIRD])
    assert gone(tmp_path / "1/out") == gone(tmp_path / "2/out")


def test_fine_tuning_trains_the_blocks_that_stay_and_leaves_the_others_out(tmp_path):
    saved = save_tiny(tmp_path / "opt" / "model", "opt")
    run(recipe(saved, THIRD, output="pruned"))
    run(recipe(saved, THIRD, finetune={"steps": 4, "norms": True}))
    (block,) = gone()
    pruned, tuned = weights("pruned/model"), weights("out/model")
    inside = {n: x for n, x in tuned.items() if n.startswith(f"{block}.") and "norm" not in n}
    assert len(inside) == 12  # weights and biases of six linears
    assert not any(x.any() for x in inside.values())
    others = [n for n in tuned if ".layers." in n and not n.startswith(f"{block}.")]
    assert all(not torch.equal(tuned[n], pruned[n]) for n in others if n.endswith(("fc1.weight", "fc2.weight")))


@pytest.mark.parametrize("architecture", KINDS)
def test_blocks_that_are_skipped_in_training_give_the_gradients_of_blocks_of_zeros(architecture):
    model = tiny_model(architecture)
    (fqn, block) = list(find_blocks(model).items())[1]
    with torch.no_grad():
        for name, x in block.named_parameters():
            if "norm" not in name and "ln_" not in name:
                x.zero_()
    expected, found = gradients(model), {}
    with skipped({fqn: block}):
        found = gradients(model)
    assert not any(name.startswith(f"{fqn}.") for name in found)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):  # OPT's, which is a number
            module.dropout = 0.0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model(tiny_tokens(), use_cache=False).logits.square().mean().backward()
    model.eval()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("tuned", [False, True])
def test_the_smaller_model_is_evaluated_as_the_masked_one_and_loads_in_plain_transformers(model, tuned):
    more: dict[str, Any] = {"finetune": {"steps": 3, "norms": True}} if tuned else {}
    masked = run(recipe(model, THIRD, HALF, evaluated=True, output="masked", **more))
    report = run(recipe(model, THIRD, HALF, evaluated=True, shrink=True, **more))
    for name, figures in report.evaluation.items():
        assert figures["token_perplexity"] == pytest.approx(masked.evaluation[name]["token_perplexity"], rel=1e-5)
    assert report.shrink["config"] == {"num_hidden_layers": [3, 2]}
    small = AutoModelForCausalLM.from_pretrained("out/model")
    assert len(small.model.layers) == 2


def in_memory(model: Any, *rules: Any) -> PrunedModel:
    asked = {"calibration": {}, "prune": list(rules)}
    return prune(model, None, asked, calibration=tiny_tokens())


def test_a_model_in_memory_computes_what_it_does_without_the_block():
    model = tiny_model("llama")
    pruned = in_memory(model, THIRD)
    (index,) = {int(name.split(".")[2]) for name, entry in pruned.masks.items() if not entry.keep.any()}
    without = tiny_model("llama")
    del without.model.layers[index]
    without.config.num_hidden_layers = 2
    with torch.no_grad():
        expected = without(tiny_tokens(), use_cache=False).logits
        torch.testing.assert_close(pruned.model(tiny_tokens(), use_cache=False).logits, expected, rtol=0, atol=0)


def test_a_block_whose_keys_and_values_another_uses_again_is_not_dropped(tmp_path, monkeypatch):
    asked = recipe(save_tiny(tmp_path / "model", "gemma4"), THIRD, output=str(tmp_path / "out"))
    scores = {"model.layers.0": 0.9, "model.layers.1": 0.1, "model.layers.2": 0.5}
    monkeypatch.setattr("compressx.blocks.stage.score_blocks", lambda *_: scores)
    told = r"prune\[0\]: model\.layers\.1 has .* but model\.layers\.2 uses its keys .* by ignore: \[layers: 1\]"
    with pytest.raises(UnsupportedModelError, match=told):
        run(asked)
    more = str(tmp_path / "more")
    run(asked | {"prune": [THIRD | {"sparsity": 0.67}], "output": more})
    assert gone(more) == ["model.layers.1", "model.layers.2"], "without the one that uses them it may go"
