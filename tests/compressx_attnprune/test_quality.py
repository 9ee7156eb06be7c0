"""What attention-aware pruning gains on a real model, on text that it was not calibrated on."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks
from torch import Tensor

from compressx import Hessian, Unstructured
from compressx.obs import inverse_cholesky, sweep
from compressx.patterns import keep_mask
from compressx_attnprune import layer, plugin, solver

HELD_OUT = 4


@pytest.fixture(scope="module")
def recorded(smollm2: Any) -> tuple[Any, Tensor]:
    """Block 10 of SmolLM2 and the input of its query projection on twenty sequences of Python's documentation."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // 256 * 256].view(-1, 256)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    block, x, _ = blocks.run_recorded(smollm2.model, 10, windows[order[: 16 + HELD_OUT]])
    return block, x


def held_out_error(recorded: tuple[Any, Tensor], pruned: tuple[Tensor, ...]) -> float:
    block, x = recorded
    query, key = pruned
    return solver.relative_error(layer.describe(block), x[-HELD_OUT:], blocks.weights(block), (query, key))


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.5, 0.7])
def test_gauss_newton_is_closer_to_the_dense_attention_than_wanda_and_sparsegpt(
    recorded: tuple[Any, Tensor], sparsity: float
):
    block, x = recorded
    names, dense, calibration = blocks.targets(block), blocks.weights(block), x[:-HELD_OUT]
    pruner = plugin.AttnPrune(plugin.AttnPruneOptions())
    sample = pruner.observe(block, names[0])
    sample.update(calibration)
    results = pruner.prune(block, dict.fromkeys(names, Unstructured(sparsity, "joint")), dict.fromkeys(names, sample))
    ours = held_out_error(recorded, tuple(results[n].weight for n in names))

    rows = Unstructured(sparsity, "row")
    norms = calibration.flatten(0, 1).norm(dim=0)
    wanda = held_out_error(recorded, tuple(w * keep_mask(w.abs() * norms, rows) for w in dense))
    hessian = Hessian(x.shape[-1])
    hessian.update(calibration)
    factor, _ = inverse_cholesky(hessian.matrix)
    sparsegpt = held_out_error(recorded, tuple(sweep(w, factor, rows)[1] for w in dense))
    assert ours < min(wanda, sparsegpt)


@pytest.mark.slow
def test_learnt_masks_hold_the_attention_at_high_sparsity(recorded: tuple[Any, Tensor]):
    block, x = recorded
    names, dense, calibration = blocks.targets(block), blocks.weights(block), x[:-HELD_OUT]
    pruner = plugin.AttnPrune(plugin.AttnPruneOptions(mode="mask"))
    sample = pruner.observe(block, names[0])
    sample.update(calibration)
    results = pruner.prune(block, dict.fromkeys(names, Unstructured(0.9, "joint")), dict.fromkeys(names, sample))
    ours = held_out_error(recorded, tuple(w * results[n].keep for w, n in zip(dense, names, strict=True)))
    norms = calibration.flatten(0, 1).norm(dim=0)
    wanda = held_out_error(recorded, tuple(w * keep_mask(w.abs() * norms, Unstructured(0.9, "row")) for w in dense))
    assert ours < 0.8 * wanda
