"""What attention-aware pruning gains on a real model, on text that it was not calibrated on.

The text is Python's own documentation, which every installation has; the figures in docs/results.md are of other text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from tests.compressx_attnprune import blocks
from tests.compressx_attnprune.pruning import asked
from torch import Tensor, nn

from compressx import Block, PruneResult, SequenceSample, Unstructured
from compressx.api.pruner import BlockCall
from compressx.blocks.observe import Observed
from compressx_attnprune import plugin

LAYERS = (3, 10)
SEQUENCES, HELD_OUT, LENGTH = 40, 8, 256


class _Enough(Exception):  # noqa: N818 - ends a forward pass that needs no more layers
    pass


@pytest.fixture(scope="module")
def recorded(smollm2: Any) -> dict[int, tuple[Block, Tensor]]:
    """Two blocks of SmolLM2 with the inputs of their query projections; no layer after them is run."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = smollm2.tokenizer(text, return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    calls: dict[int, BlockCall] = {}
    inputs: dict[int, list[Tensor]] = {index: [] for index in LAYERS}
    hooks = []
    for index in LAYERS:

        def entering_block(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], index: int = index) -> None:
            calls[index] = BlockCall(args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})

        def entering_query(_: nn.Module, args: tuple[Any, ...], index: int = index) -> None:
            inputs[index].append(args[0].clone())
            if index == LAYERS[-1]:
                raise _Enough

        module = smollm2.model.model.layers[index]
        hooks.append(module.register_forward_pre_hook(entering_block, with_kwargs=True))
        hooks.append(module.self_attn.q_proj.register_forward_pre_hook(entering_query))
    for batch in windows[order[:SEQUENCES]].split(8):
        with torch.no_grad(), pytest.raises(_Enough):
            smollm2.model(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return {i: (blocks.find_block(smollm2.model, i, (calls[i],)), torch.cat(inputs[i])) for i in LAYERS}


@pytest.fixture(scope="module")
def samples(recorded: dict[int, tuple[Block, Tensor]]) -> dict[int, SequenceSample]:
    made = {index: SequenceSample(x.shape[-1]) for index, (_, x) in recorded.items()}
    for index, (_, x) in recorded.items():
        made[index].update(x)
    return made


@pytest.fixture(scope="module")
def pruners() -> dict[int, plugin.AttnPrune]:
    """One for each layer, so that its curvature is measured once for all sparsities."""
    return {index: pruner() for index in LAYERS}


def pruner(**options: Any) -> plugin.AttnPrune:
    fraction = HELD_OUT / SEQUENCES
    return plugin.AttnPrune(plugin.AttnPruneOptions(objective="attention-matrix", held_out=fraction, **options))


def figures(results: Mapping[str, PruneResult]) -> tuple[float, float]:
    """Return the held-out attention error, alone and over the better of Wanda's and SparseGPT's."""
    info = next(iter(results.values())).info
    assert "fell_back" not in info
    own = info["attention_error"]
    return own, own / min(info["attention_error.wanda"], info["attention_error.sparsegpt"])


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("sparsity", "at_most"), [(0.5, 0.25), (0.7, 0.25), (0.9, 0.35)])
def test_the_closed_form_leaves_a_fraction_of_the_attention_error_of_wanda_and_sparsegpt(
    recorded: Any, samples: Any, pruners: Any, layer: int, sparsity: float, at_most: float
):
    block = recorded[layer][0]
    names = blocks.targets(block)
    pattern = Unstructured(sparsity, "joint")
    results = asked(
        pruners[layer], block, dict.fromkeys(names, pattern), dict.fromkeys(names, Observed(samples[layer]))
    )
    assert figures(results)[1] <= at_most
    zeros = sum(int((~r.keep).sum()) for r in results.values())
    assert zeros == round(sparsity * sum(r.keep.numel() for r in results.values()))


@pytest.mark.slow
def test_a_refit_lowers_the_attention_error_on_text_it_has_not_seen(recorded: Any, samples: Any, pruners: Any):
    layer = LAYERS[-1]
    block = recorded[layer][0]
    names = blocks.targets(block)
    patterns, stats = dict.fromkeys(names, Unstructured(0.9, "joint")), dict.fromkeys(names, Observed(samples[layer]))
    without, refitted = (asked(of, block, patterns, stats) for of in (pruners[layer], pruner(refit=30)))
    for name in names:
        assert torch.equal(refitted[name].keep, without[name].keep)
    assert figures(refitted)[0] < 0.85 * figures(without)[0]
    losses = next(iter(refitted.values())).history["refit"]
    assert sum(losses[-5:]) < sum(losses[:5])
