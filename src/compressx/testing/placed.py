"""The check that a pruner works on an accelerator, which is pretended: the same masks, and it seldom waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch

from compressx.testing.accelerator.counts import Counts, Record
from compressx.testing.accelerator.pretended import pretended_accelerator
from compressx.testing.agreement import CLOSE, apart
from compressx.testing.subject import Subject, expect

WAITS = 6
"""How often a pruner may wait for each linear, statistics of two batches included: the first batch's move, a check for
infinities, a factorisation that is tried again with more damping."""

KERNELS = 50
"""Kernels for each further wait. A wait costs a GPU what a few launches cost, so a loop that looks whether it is done
may, and one that reads a number at every column may not."""


def accelerator(subject: Subject) -> None:
    """Ask on a pretended accelerator: the same masks, and no wait in a loop; the host refuses answers elsewhere."""
    for pattern in subject.few:
        expected = subject.decided(subject.scene(), pattern)
        with pretended_accelerator() as device:
            scene = subject.scene(device="cuda")
            with counted(device, subject, scene) as counts:
                results = subject.decided(scene, pattern)
            for name, result in results.items():
                same = torch.equal(result.keep.cpu(), expected[name].keep)
                expect(same, f"{name}, {pattern}: another mask than on the CPU, whose numbers are the same")
                moved = apart(expected[name], result)
                expect(moved <= CLOSE, f"{name}, {pattern}: new weights are {moved:.1%} apart from those on the CPU")
        allowed = WAITS * len(subject.names) + counts.launches // KERNELS
        expect(
            counts.synchronisations <= allowed,
            f"{pattern}: the host waited {counts.synchronisations} times for the device, expected {allowed} at most, "
            f"{WAITS} for each linear and one for every {KERNELS} of {counts.launches} kernels: {counts.places()}; "
            "each stops a GPU, so keep numbers on the device, and read several at once with tolist()",
        )


@contextmanager
def counted(device: Record, subject: Subject, scene: Any) -> Iterator[Counts]:
    """Count what a pruner and its statistics do, and not what the host does around them."""
    pruner, _ = scene.pruners(subject.rule)
    statistics = (pruner.observe(scene.block, name) for name in subject.names)
    methods: Mapping[type, set[str]] = {
        **{type(statistic): {"update"} for statistic in statistics if statistic is not None},
        type(pruner): {"observe", "prepare", "prune"},
    }
    counts = Counts()

    def counting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def counts_it(*args: Any, **kwargs: Any) -> Any:
            with device.counted(counts):
                return method(*args, **kwargs)

        return counts_it

    with ExitStack() as stack:
        for owner, names in methods.items():
            for name in names:
                if callable(method := getattr(owner, name, None)):
                    stack.enter_context(mock.patch.object(owner, name, counting(method)))
        yield counts
