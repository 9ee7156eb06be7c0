"""Block reconstruction: train a pruned block's remaining weights to reproduce the dense block's output.

The input is the output of the pruned blocks before it. The target is the dense block's output on inputs from dense
blocks, so the block also corrects the errors of earlier ones. Dropped weights stay zero, and
weights are trained in float32. The weights with the lowest error on held-out calibration text are kept, which may be
the ones from before training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressx.api.record import ReconstructionReport
from compressx.masks.maskset import MaskEntry, MaskSet
from compressx.numerics.output_error import channel_weights, relative_errors
from compressx.recipe.sections import ReconstructBlock
from compressx.runtime.ranks import ALONE, Ranks
from compressx.training.trainable import rms_of, trainable

_BETAS = (0.9, 0.95)
"""Adam's. A pass has a few dozen steps, too few for the usual second value of 0.999."""

HELD_OUT = 1 / 16
"""Fraction of the batches, rounded up, that are not trained on and decide which weights are kept."""

_WARM_UP = 0.05
"""Fraction of the steps over which the learning rate rises."""


@dataclass(frozen=True, eq=False)
class BlockBatch:
    """One calibration batch of a block.

    Attributes:
        enters: input, the output of the pruned blocks before [batch, tokens, width].
        target: output of the dense block after dense blocks [batch, tokens, width].
        run: computes the output of the block in its current state from its input, whatever the dtype of its weights.
    """

    enters: Tensor
    target: Tensor
    run: Callable[[Tensor], Tensor]

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return self.enters.shape[:-1].numel()

    def errors(self, channels: Tensor) -> Tensor:
        """Return `relative_errors` of the block in its current state, [batch, tokens]."""
        wide = torch.promote_types(self.enters.dtype, torch.float32)  # the dtype of the block while it is trained
        return relative_errors(self.run(self.enters.to(wide)), self.target, channels)


def reconstruct(
    model: nn.Module, fqn: str, masks: Mapping[str, MaskEntry], passages: Sequence[BlockBatch],
    settings: ReconstructBlock, ranks: Ranks = ALONE, channels: Tensor | None = None,
) -> ReconstructionReport:  # fmt: skip
    """Train the remaining weights of a pruned block in place.

    Args:
        model: the model; only this block changes.
        fqn: the block's name.
        masks: of its pruned linears, by name in the model; these weights are trained, and dropped ones stay zero.
        passages: this process's calibration batches, at least two; the last ones are held out.
        settings: the recipe's `reconstruct_block` section.
        ranks: the processes; gradients and errors are summed over all, and all end with the same weights.
        channels: weight of each output channel in the error [width]; `channel_weights` when absent.
    """
    started = time.perf_counter()
    module = model.get_submodule(fqn)
    held_out = min(math.ceil(len(passages) * HELD_OUT), len(passages) - 1)
    seen, unseen = passages[:-held_out], passages[-held_out:]
    with trainable(model, module, MaskSet(masks), biases=True) as parameters:
        weights = channel_weights((p.target for p in passages), ranks.all_reduce_) if channels is None else channels
        trained = _Trained(parameters, settings, weights)
        best, errors = [p.detach().clone() for p in trained.parameters], [trained.error(unseen, ranks)]
        for _ in trained.passes(seen, ranks):
            errors.append(trained.error(unseen, ranks))
            if errors[-1] < min(errors[:-1]):
                best = [p.detach().clone() for p in trained.parameters]
        with torch.no_grad():
            for parameter, value in zip(trained.parameters, best, strict=True):
                parameter.copy_(value)
    return ReconstructionReport(errors[0], min(errors), tuple(errors), time.perf_counter() - started)


@dataclass(frozen=True, eq=False)
class _Trained:
    """The trained parameters of a block, in float32, each with its original dtype."""

    parameters: Mapping[nn.Parameter, torch.dtype]
    settings: ReconstructBlock
    channels: Tensor

    def passes(self, passages: Sequence[BlockBatch], ranks: Ranks) -> Iterator[int]:
        """Train; yield after each pass over the text."""
        settings = self.settings
        per_step = max(1, settings.batch_size // (len(passages[0].enters) * ranks.size))
        per_pass = max(ranks.all_gather(math.ceil(len(passages) / per_step)))  # the same number of steps on all
        steps = per_pass * settings.passes
        groups = [
            {"params": [p], "lr": settings.learning_rate * size}
            for p, size in zip(self.parameters, rms_of(self.parameters), strict=True)
        ]
        optimizer = torch.optim.Adam(groups, betas=_BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / steps))
        generator = torch.Generator().manual_seed(0)
        for number in range(settings.passes):
            drawn = torch.randperm(len(passages), generator=generator).tolist()
            for i in range(per_pass):
                mine = [passages[j] for j in drawn[i * per_step : (i + 1) * per_step]]
                tokens = sum(ranks.all_gather(sum(passage.tokens for passage in mine)))
                with torch.enable_grad():
                    for passage in mine:
                        (passage.errors(self.channels).sum() / tokens).backward()
                for parameter in self.parameters if ranks.size > 1 else ():
                    if parameter.grad is None:  # this process had no batch in this step
                        parameter.grad = torch.zeros_like(parameter)
                    ranks.all_reduce_(parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            yield number

    @torch.no_grad()
    def error(self, passages: Sequence[BlockBatch], ranks: Ranks) -> float:
        """Return the mean error over all processes' tokens, with weights rounded to their original dtypes."""
        exact = [p.clone() for p in self.parameters]
        for parameter, dtype in self.parameters.items():
            parameter.copy_(parameter.to(dtype))
        mine = [float(p.errors(self.channels).sum(dtype=torch.float64)) for p in passages]
        totals = ranks.all_gather([math.fsum(mine), sum(p.tokens for p in passages)])
        for parameter, value in zip(self.parameters, exact, strict=True):
            parameter.copy_(value)
        return math.fsum(error for error, _ in totals) / sum(tokens for _, tokens in totals)


def _rate(done: float) -> float:
    """Return the learning rate's factor after a fraction of the steps: a linear warm-up, then a cosine to zero."""
    return min(1.0, 0.1 + done / _WARM_UP) * 0.5 * (1.0 + math.cos(math.pi * done))
