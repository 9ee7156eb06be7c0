"""What each unit's sparsity costs its decoder block's output, measured on the dense model, block by block.

The machinery is the walk's: observe the block, let the unit's own pruner decide, write, run the block. Then the weights
are put back, so that the next block's input is the dense block's output and every unit is measured alone.

Every token counts against its own size, as it does for the norm that the next block begins with. Else the few tokens
whose activations are thousands of times larger (Sun et al., "Massive Activations in Large Language Models", arXiv
2402.17762) would be all that is measured, and the blocks that make them would look as if they could do without weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compressx.access import Access
from compressx.architecture import survey, text_config
from compressx.capture import replay
from compressx.decide import decide, gather, write
from compressx.errors import CalibrationError
from compressx.patterns import Unstructured
from compressx.pruner import Block, Linear, Loss, PruneResult, Sensitivity
from compressx.sensitivity import of_block, of_model
from compressx.units import Unit
from compressx.walk import capture, finite


@dataclass(frozen=True, eq=False)
class Measured:
    """What the sparsities of one unit cost, each measured with everything else dense.

    Attributes:
        unit: the unit.
        sparsities: that it was pruned to.
        update_errors: ||out~ - out||^2 / ||out - in||^2 of the block: against what it adds to the residual stream. Both
            are sums over tokens, each token's vectors divided by its ||out||.
        output_errors: ||out~ - out||^2 / ||out||^2 of a token, the mean over tokens.
    """

    unit: Unit
    sparsities: tuple[float, ...]
    update_errors: tuple[float, ...]
    output_errors: tuple[float, ...]


def measure(
    access: Access, units: Sequence[Unit], seen: Sequence[Tensor], held_out: Sequence[Tensor],
    sparsities: Sequence[float],
) -> Iterator[tuple[Measured, ...]]:  # fmt: skip
    """Measure every unit in the decoder blocks; afterwards, and whatever happens, all weights are as they were.

    Args:
        access: a transformers causal language model in evaluation mode, with its dense weights.
        units: the units of a plan; those outside the blocks are left out.
        seen: token ids that the pruners learn from, each [batch, tokens].
        held_out: those that errors are measured on; on its own text a pruner that overfits looks too good.
        sparsities: to measure.

    Yields:
        For each block with units, one value for each of them.

    Raises:
        ArtifactError: a weight that is not finite.
        PluginError: a pruner that returns what it must not.
        CalibrationError: an error that is not finite, or a linear that no token reached.
        UnsupportedModelError: a model whose blocks cannot be run one at a time, or whose numbers are not finite.
    """
    model = access.model
    found = survey(model)
    states, calls = capture(access, found, [b.to(access.device) for b in (*seen, *held_out)])
    of_interest = {x.name for u in units if u.block and "model" in u.rule.losses for x in u.linears}
    of_model_loss = of_model(access, found, of_interest, seen) if of_interest else {}
    pruners = {rule: rule.build() for rule in dict.fromkeys(u.rule for u in units)}
    last = max((i for i, fqn in enumerate(found.blocks) if any(u.block == fqn for u in units)), default=-1)
    for index, fqn in enumerate(list(found.blocks)[: last + 1]):
        mine = [u for u in units if u.block == fqn]
        with torch.no_grad(), access.materialise(fqn) as module:
            linears = {n: x for n, x in found.linears.items() if n.startswith(f"{fqn}.")}
            runs = [partial(replay, module, call=c) for c in calls[fqn]]
            passes = [partial(run, x) for run, x in zip(runs, states, strict=True)]
            learnt = len(seen)
            reacting = {x.name: linears[x.name] for u in mine if "block" in u.rule.losses for x in u.linears}
            sensitive: dict[Loss, Mapping[str, Sensitivity]] = {
                "model": of_model_loss,
                "block": of_block(reacting, runs[:learnt], states[:learnt]) if reacting else {},
            }
            block = Block(index, fqn, module, linears, tuple(calls[fqn]), text_config(model), sensitive)
            names = {u.rule: [x.name for x in u.linears] for u in mine}
            stats = gather(block, names, pruners, passes[:learnt])
            outputs = [finite(run(), fqn) for run in passes]
            stream = _Stream(passes[learnt:], states[learnt:], outputs[learnt:])
            measured = []
            for unit in mine:
                ask = partial(decide, unit.rule, pruners[unit.rule], block, stats=stats)
                measured.append(_measure(unit, sparsities, block.linears, ask, stream))
        states = outputs
        if measured:
            yield tuple(measured)


@dataclass(frozen=True, eq=False)
class _Stream:
    """How to run a block on each held-out batch, and what enters and leaves it while it is dense."""

    passes: Sequence[Callable[[], Tensor]]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    def changed(self) -> float:
        """Return the mean over tokens of ||out~ - out||^2 / ||out||^2, of the block as it now is."""
        return _mean(_relative(run(), out) for run, out in zip(self.passes, self.outputs, strict=True))

    def added(self) -> float:
        """Return the mean over tokens of ||out - in||^2 / ||out||^2, of the dense block."""
        return _mean(_relative(x, out) for x, out in zip(self.inputs, self.outputs, strict=True))


def _measure(
    unit: Unit,
    sparsities: Sequence[float],
    linears: Mapping[str, Linear],
    ask: Callable[[Mapping[str, Unstructured]], Mapping[str, PruneResult]],
    stream: _Stream,
) -> Measured:
    """Prune a unit to one sparsity after the other, each time from its dense weights."""
    changes = []
    for sparsity in sparsities:
        results = ask({x.name: Unstructured(sparsity, unit.group) for x in unit.linears})
        with _restored([linears[name] for name in results]):
            for name, result in results.items():
                write(linears[name], result)
            changes.append(stream.changed())
        if not math.isfinite(changes[-1]):
            raise CalibrationError(
                f"{unit.block}: with {unit.linears[0].name} at sparsity {sparsity} ({unit.rule.label}) its output has "
                "NaN or infinite values; leave that sparsity out of allocation.sparsities"
            )
    added = stream.added()
    return Measured(unit, tuple(sparsities), tuple(c / added if c else 0.0 for c in changes), tuple(changes))


@contextmanager
def _restored(linears: Sequence[Linear]) -> Iterator[None]:
    """Put weights back to the bit at the end, whatever happens."""
    kept = [x.weight.clone() for x in linears]
    try:
        yield
    finally:
        for linear, weight in zip(linears, kept, strict=True):
            linear.weight.copy_(weight)


def _relative(other: Tensor, out: Tensor) -> Tensor:
    """Return ||other - out||^2 / ||out||^2 of each token, float64 [batch, tokens]."""
    change = (other.float() - out.float()).square().sum(dim=-1, dtype=torch.float64)
    size = out.float().square().sum(dim=-1, dtype=torch.float64)
    return change / size.clamp_min(torch.finfo(torch.float32).tiny)


def _mean(batches: Iterable[Tensor]) -> float:
    return float(torch.cat([x.flatten() for x in batches]).mean())
