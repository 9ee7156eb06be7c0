"""Every selector with every reconstructor: the one's mask and the other's weights, nearer to the dense ones."""

from __future__ import annotations

import pytest
import torch
from tests.compressx.blocks.test_prune import batches
from tests.compressx.built_in import BUILT_IN

from compressx.api.patterns import NM, Unstructured
from compressx.blocks.fisher import fisher_diagonal
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.models.architecture import architecture_of
from compressx.models.blockwise import capture, each_block, passes
from compressx.planning.plan import Plan, PlannedLinear, PlannedRule
from compressx.testing import tiny_model

RECONSTRUCTORS = [name for name, spec in BUILT_IN.items() if spec.reconstructs]
PATTERNS = [Unstructured(0.5, "layer"), Unstructured(0.5, "row"), NM(2, 4)]
SELECTORS = [name for name, spec in BUILT_IN.items() if spec.groups]
CASES = [(s, r, PATTERNS[(i + j) % 3]) for i, s in enumerate(SELECTORS) for j, r in enumerate(RECONSTRUCTORS)]
FQN = "model.layers.0"


def pruned(selector, reconstructor, pattern):
    """Prune query and key of the first block; returns the masks, the model, how to run the block, and what it gave."""
    model, tokens = tiny_model("llama"), batches()
    access, found = InMemory(model), architecture_of(model)
    states, calls = capture(access, found, tokens)
    _, runs = next(each_block(access, found, calls))
    running = passes(runs, states)
    with torch.no_grad():
        dense = [run() for run in running]
    rule = PlannedRule(0, tuple((BUILT_IN[x], BUILT_IN[x].options()) for x in (selector, reconstructor) if x))
    names = [f"{FQN}.self_attn.{x}_proj" for x in "qk"]
    linears = tuple(PlannedLinear(n, FQN, tuple(found.linears[n].weight.shape), rule, pattern) for n in names)
    plan = Plan(linears, {}, (rule,), needs_calibration=True)
    fisher = fisher_diagonal(access, found, plan.sensitive, tokens) if plan.sensitive else None
    (first,) = prune_model(access, plan, tokens, fisher=fisher)
    return first.masks, model, running, dense


def errors(model, running, dense) -> tuple[float, float]:
    """Return the squared error of what query and key give on the dense block's inputs, and of the block's output."""
    found, untouched = architecture_of(model), architecture_of(tiny_model("llama")).linears
    names = [f"{FQN}.self_attn.{x}_proj" for x in "qk"]
    inputs: list[torch.Tensor] = []
    hook = found.linears[names[0]].module.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    with torch.no_grad():
        outputs = [run() for run in running]
    hook.remove()
    changes = [found.linears[n].weight - untouched[n].weight for n in names]
    linear = sum(float((x @ change.T).square().sum()) for x in inputs for change in changes)
    return linear, sum(float((o - d).square().sum()) for o, d in zip(outputs, dense, strict=True))


@pytest.mark.parametrize(("selector", "reconstructor", "pattern"), CASES, ids=str)
def test_the_mask_is_the_selectors_and_what_the_reconstructor_cares_for_is_nearer(selector, reconstructor, pattern):
    alone, *_ = pruned(selector, None, pattern)
    masks, model, *stream = pruned(selector, reconstructor, pattern)
    linears, untouched = architecture_of(model).linears, architecture_of(tiny_model("llama")).linears
    for name, entry in masks.items():
        assert torch.equal(entry.keep, alone[name].keep)
        assert torch.equal(linears[name].weight != 0, entry.keep)
    linear, output = errors(model, *stream)
    for name, entry in masks.items():  # the same masks on the dense weights
        linears[name].weight.copy_(untouched[name].weight * entry.keep)
    masked_linear, masked_output = errors(model, *stream)
    if reconstructor == "attnprune":  # holds to the attention, whatever queries and keys are
        assert output <= masked_output  # equal where nothing was better on the text it holds out
    else:
        assert linear < 0.9 * masked_linear
