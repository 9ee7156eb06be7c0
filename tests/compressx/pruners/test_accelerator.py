"""Every pruner that is shipped on a pretended accelerator: the CPU's masks and weights, and what is counted."""

from __future__ import annotations

import math

import pytest
import torch
from tests.accelerator import pretended_accelerator
from tests.compressx.architectures import KINDS
from tests.compressx.blocks.test_prune import plan_all
from tests.compressx.built_in import BUILT_IN

from compressx.api.patterns import NM, Structured, Unstructured
from compressx.blocks.prune import prune_model
from compressx.models.access import InMemory
from compressx.testing import tiny_model, tiny_tokens
from compressx.testing.subject import Claim, Subject, Whole

ON = {
    "magnitude": ("mixtral", "opt"),
    "wanda": ("llama", "stablelm"),
    "sparsegpt": ("gemma3", "mixtral"),
    "sensitivity": ("opt", "llama"),
    "attnprune": ("gpt2", "phi3", "gemma3"),
    "alps": ("gpt2", "bloom"),
    "ziplm": ("opt", "llama"),
    "reap": ("mixtral",),
    "dare": ("gpt2", "mixtral"),
}
"""Each pruner of linears on two architectures, which share its patterns; together they are all kinds."""
ON |= {name: ("llama",) for name, spec in BUILT_IN.items() if name not in ON and spec.units != ("blocks",)}

QUICK = {"magnitude", "wanda"}
"""Pruners that fast tests try on both."""


def patterns(subject: Subject, share: int, of: int) -> list[Claim]:
    """Return every group and kind of units at half, and N:M; of an architecture its share of them."""
    whole = [p for p in subject.patterns if isinstance(p, NM) or p.sparsity == 0.5]
    assert whole == [p for p in subject.claimed if p in whole], "an architecture that takes every pattern"
    return whole[share::of]


def test_every_architecture_is_tried():
    assert {kind for kinds in ON.values() for kind in kinds} == {*KINDS}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] if place and name not in QUICK else [])
        for name, kinds in ON.items()
        for place, kind in enumerate(kinds)
    ],
)
def test_masks_and_weights_are_those_of_the_cpu_for_every_pattern(name, kind):
    subject = Subject(BUILT_IN[name], BUILT_IN[name].options(), kind)
    tried = patterns(subject, ON[name].index(kind), len(ON[name]))
    scene = subject.scene()
    stats, kept = subject.statistics(scene), {}
    expected = {pattern: subject.decided(scene, pattern, stats, kept=kept) for pattern in tried}
    with pretended_accelerator():
        scene = subject.scene(device="cuda")
        stats, kept = subject.statistics(scene), {}
        for pattern, results in expected.items():
            for linear, result in subject.decided(scene, pattern, stats, kept=kept).items():
                assert result.keep.device.type == "cuda", (pattern, linear)
                assert torch.equal(result.keep.cpu(), results[linear].keep), (pattern, linear)
                assert (result.weight is None) == (results[linear].weight is None)
                if result.weight is not None:
                    assert torch.equal(result.weight.cpu(), results[linear].weight), (pattern, linear)


WAITS = {"alps": 18, "attnprune": 24, "magnitude": 1, "sensitivity": 11, "sparsegpt": 2, "wanda": 1}
"""For each linear of a block. `alps` and `sensitivity` look every few steps whether they are done; attnprune's are most
of a whole solve."""


@pytest.mark.parametrize("name", WAITS)
def test_the_host_seldom_waits_for_a_block_and_copies_no_weights(name):
    subject = Subject(BUILT_IN[name], BUILT_IN[name].options(), "llama")
    with pretended_accelerator() as device:
        scene = subject.scene(device="cuda")
        with device.counted() as counts:
            subject.decided(scene, [p for p in subject.patterns if not isinstance(p, Whole)][-1])
    host = 5  # what the host itself looks at, once a block
    assert counts.synchronisations <= WAITS[name] * len(subject.names) + host, counts.places()
    assert counts.to_device_bytes == 0
    assert counts.to_host_bytes < 4096, "numbers, and nothing of a weight's size"


@pytest.mark.parametrize(("name", "waits"), [("magnitude", 7), ("wanda", 8), ("ziplm", 12)])
@pytest.mark.parametrize("unit", ["neurons", "kv-groups"])
def test_units_cost_few_waits_and_of_each_row_or_column_a_number_is_copied(name, waits, unit):
    subject = Subject(BUILT_IN[name], BUILT_IN[name].options(), "llama")
    claim = Whole(unit, 0.5)
    asked = subject.by_linear(subject.scene(weights=False).block, claim)
    with pretended_accelerator() as device:
        scene = subject.scene(device="cuda")
        stats = subject.statistics(scene)
        with device.counted() as counts:
            subject.decided(scene, claim, stats)
    assert counts.synchronisations <= waits * len(asked), counts.places()
    numbers = sum(len(p.units.owners[name].unit) for name, p in asked.items() if isinstance(p, Structured))
    assert counts.to_device_bytes <= 8 * 8 * numbers
    assert counts.to_host_bytes < 4096


def test_of_a_pruned_block_masks_are_copied_to_the_host_and_weights_once_to_be_hashed():
    model, spec = tiny_model("llama"), BUILT_IN["sparsegpt"]
    plan = plan_all(model, spec, Unstructured(0.5, "layer"))
    weights = sum(math.prod(x.shape) for x in plan.linears if x.block == "model.layers.0")
    with pretended_accelerator() as device:
        blocks = prune_model(InMemory(model.to("cuda")), plan, torch.split(tiny_tokens(), 4))
        next(blocks)
        with device.counted() as counts:
            next(blocks)
    assert (1 + 4) * weights <= counts.to_host_bytes < (1 + 4) * weights + 2048, "bool, and float32"
    assert weights <= counts.to_device_bytes <= weights + 4 * 64, "masks, to be compared, and the output's channels"
    assert counts.synchronisations <= 9 * 7, counts.places()
