"""Every pruner that is shipped on a pretended accelerator: the CPU's masks and weights, and how often it waits."""

from __future__ import annotations

import pytest
import torch
from tests.compressx.architectures import KINDS
from tests.compressx.built_in import BUILT_IN

from compressx.api.patterns import NM, Unstructured
from compressx.testing import pretended_accelerator
from compressx.testing.subject import Subject

ON = {
    "alps": ("gpt2", "bloom"),
    "attnprune": ("gpt2", "phi3"),
    "magnitude": ("mixtral", "opt"),
    "sensitivity": ("opt", "llama"),
    "sparsegpt": ("gemma3", "mixtral"),
    "wanda": ("llama", "stablelm"),
}
"""Each pruner on two architectures, which share its patterns; together they are all kinds."""


def patterns(subject: Subject, share: int, of: int) -> list[Unstructured | NM]:
    """Return every group at half, and N:M; of an architecture its share of them."""
    whole = [p for p in subject.patterns if isinstance(p, NM) or p.sparsity == 0.5]
    assert whole == [p for p in subject.claimed if p in whole], "an architecture that takes every pattern"
    return whole[share::of]


def test_every_pruner_and_architecture_is_tried():
    assert {*ON} == {*BUILT_IN}
    assert {kind for kinds in ON.values() for kind in kinds} == {*KINDS}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in ON.items() for kind in kinds])
def test_masks_and_weights_are_those_of_the_cpu_for_every_pattern(name, kind):
    subject = Subject(BUILT_IN[name], BUILT_IN[name].options(), kind)
    tried = patterns(subject, ON[name].index(kind), len(ON[name]))
    scene = subject.scene()
    stats, kept = subject.gathered(scene), {}
    expected = {pattern: subject.decided(scene, pattern, stats, kept=kept) for pattern in tried}
    with pretended_accelerator():
        scene = subject.scene(device="cuda")
        stats, kept = subject.gathered(scene), {}
        for pattern, results in expected.items():
            for linear, result in subject.decided(scene, pattern, stats, kept=kept).items():
                assert result.keep.device.type == "cuda", (pattern, linear)
                assert torch.equal(result.keep.cpu(), results[linear].keep), (pattern, linear)
                assert (result.weight is None) == (results[linear].weight is None)
                if result.weight is not None:
                    assert torch.equal(result.weight.cpu(), results[linear].weight), (pattern, linear)
