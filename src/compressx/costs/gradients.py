"""What gradients of the dense model's loss cost, by the steps of `blocks/fisher.py`."""

from __future__ import annotations

from collections.abc import Mapping

from compressx.api.work import Work
from compressx.blocks.fisher import TOKENS_AT_ONCE
from compressx.costs.basis import Basis
from compressx.costs.estimate import largest
from compressx.costs.forward import LOGIT_BYTES, backwards

_F32, _F64 = 4, 8


def work(of: Basis, after: int = -1) -> Work:
    """Count one window through the model and back, to what leaves block `after`: each block forwards once more."""
    one = 1 / of.text.batch
    behind = [b.work for b in of.batch.blocks.values()][after + 1 :]
    blocks = sum((b.work for b in of.batch.blocks.values()), Work())
    blocks = blocks + sum((work + backwards(work, weights=False) for work in behind), Work())
    logits = of.text.length * of.vocabulary
    head = of.batch.outside.work + backwards(of.batch.outside.work, weights=False)
    return one * (blocks + head) + Work.of(moved=LOGIT_BYTES * logits)


def memory(of: Basis, windows: int) -> Mapping[str, float]:
    """Return the most bytes at once, by what holds them, while gradients of some windows are measured."""
    # Of a streamed model all windows go through a block before the next one is loaded.
    together = windows if of.streamed else min(of.text.batch, windows)
    # What enters each block and leaves the last one, and a gradient of it.
    states = {"hidden states": (len(of.batch.blocks) + 2) * of.states(together * of.text.length)}
    logits = float(of.text.length * of.vocabulary)  # of one window
    # Logits, the logarithms of their softmax, and two gradients; or what labels are drawn by.
    drawn = (_F32 + _F64) * min(TOKENS_AT_ONCE, of.text.length) * of.vocabulary
    likelihood = _F32 * logits + max(3 * _F32 * logits, drawn)
    # A gradient on its way through the widest linear, and its squares.
    inside = (x for fqn in of.found.blocks for x in of.found.inside(fqn).values())
    widest = max((max(x.in_features, x.out_features) for x in inside), default=0)
    behind = 2.0 * _F32 * of.text.batch * of.text.length * widest
    return largest(
        {"weights": of.around, **states, "logits": likelihood},
        {"weights": of.weights, **states, "activations": max(of.graphs.values()) + behind},
    )
