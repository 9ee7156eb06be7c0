"""Block reconstruction: a pruned block's survivors are trained so that its output is what the dense block's was.

The pruned block reads what the already pruned blocks before it give (the pruned stream), and is trained towards what
the dense block makes of the dense blocks' output (the dense stream), so that it also mends what came before it. Masks
are held by torch.ao's parametrization, weights are float32 while they are trained, and calibration text that is held
out decides which weights are kept: those from before the training, if none are better.
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
from compressx.recipe.schema import ReconstructBlock
from compressx.runtime.ranks import ALONE, Ranks
from compressx.training.trainable import trainable

_BETAS = (0.9, 0.95)
"""Of Adam. A pass is a few dozen steps: too few for the usual second one of 0.999."""

_WARM_UP = 0.05
"""Fraction of the steps over which the learning rate rises."""


@dataclass(frozen=True, eq=False)
class Passage:
    """One calibration batch on its way through a block.

    Attributes:
        enters: what the pruned blocks before give [batch, tokens, width].
        target: what leaves the dense block on the dense stream [batch, tokens, width].
        run: computes what leaves the block, as it now is, from what enters it.
    """

    enters: Tensor
    target: Tensor
    run: Callable[[Tensor], Tensor]

    @property
    def tokens(self) -> int:
        """How many there are in the batch."""
        return self.enters.shape[:-1].numel()

    def errors(self, channels: Tensor) -> Tensor:
        """Return `relative_errors` of the block as it now is, [batch, tokens]."""
        return relative_errors(self.run(self.enters.float()), self.target, channels)


def reconstruct(
    model: nn.Module, fqn: str, masks: Mapping[str, MaskEntry], passages: Sequence[Passage],
    settings: ReconstructBlock, ranks: Ranks = ALONE, channels: Tensor | None = None,
) -> ReconstructionReport:  # fmt: skip
    """Train what survived in a block, in place.

    Args:
        model: the model; only this block of it changes.
        fqn: the block's name.
        masks: of its pruned linears, by name in the model: these weights are trained, and dropped ones stay zero.
        passages: this process's calibration text, two at least; the last of it is held out.
        settings: as the recipe has them.
        ranks: the processes; gradients and errors are those of all, and all end with the same weights.
        channels: what an error in each channel of the block's output counts [width]; `channel_weights` when absent.

    Returns:
        What became of the held-out error; it is never higher afterwards.
    """
    started = time.perf_counter()
    module = model.get_submodule(fqn)
    held_out = min(math.ceil(len(passages) * settings.held_out), len(passages) - 1)
    seen, unseen = passages[:-held_out], passages[-held_out:]
    wide = all(p.dtype == torch.float32 for p in module.parameters())
    narrow = settings.dtype == "bfloat16" or (settings.dtype == "auto" and not wide)
    device = next(module.parameters()).device
    with (
        trainable(model, module, MaskSet(masks), norms=settings.norms, biases=settings.biases) as parameters,
        # Autocast would keep narrow copies of what is trained, as it was at the first step.
        torch.autocast(device.type, torch.bfloat16, enabled=narrow, cache_enabled=False),
    ):
        weights = channel_weights((p.target for p in passages), ranks) if channels is None else channels
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
    """The parameters of a block that are trained, float32, each with the dtype that it came in."""

    parameters: Mapping[nn.Parameter, torch.dtype]
    settings: ReconstructBlock
    channels: Tensor

    def passes(self, passages: Sequence[Passage], ranks: Ranks) -> Iterator[int]:
        """Train; yields after each pass over the text."""
        settings = self.settings
        per_step = max(1, settings.batch_size // (len(passages[0].enters) * ranks.size))
        per_pass = max(ranks.all_gather(math.ceil(len(passages) / per_step)))  # all take as many steps
        steps = per_pass * settings.passes
        groups = [
            {"params": [p], "lr": settings.learning_rate * size}
            for p, size in zip(self.parameters, self.sizes(), strict=True)
        ]
        optimizer = torch.optim.Adam(groups, betas=_BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / steps))
        generator = torch.Generator().manual_seed(settings.seed)
        for number in range(settings.passes):
            drawn = torch.randperm(len(passages), generator=generator).tolist()
            for i in range(per_pass):
                mine = [passages[j] for j in drawn[i * per_step : (i + 1) * per_step]]
                tokens = sum(ranks.all_gather(sum(passage.tokens for passage in mine)))
                with torch.enable_grad():
                    for passage in mine:
                        (passage.errors(self.channels).sum() / tokens).backward()
                self._share_gradients(ranks)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            yield number

    def sizes(self) -> list[float]:
        """Return the root mean square of the entries of each parameter that are not zero; the mean of all for none."""
        entries = [p.detach()[p.detach() != 0] for p in self.parameters]
        found = [float(x.square().mean().sqrt()) if len(x) else 0.0 for x in entries]
        mean = math.fsum(found) / max(1, sum(size > 0 for size in found))
        return [size or mean for size in found]

    @torch.no_grad()
    def error(self, passages: Sequence[Passage], ranks: Ranks) -> float:
        """Return the mean over all processes' tokens, of the weights rounded to the dtypes that they came in."""
        exact = [p.clone() for p in self.parameters]
        for parameter, dtype in self.parameters.items():
            parameter.copy_(parameter.to(dtype))
        mine = [float(p.errors(self.channels).sum(dtype=torch.float64)) for p in passages]
        everyones = ranks.all_gather([math.fsum(mine), sum(p.tokens for p in passages)])
        for parameter, value in zip(self.parameters, exact, strict=True):
            parameter.copy_(value)
        return math.fsum(error for error, _ in everyones) / sum(tokens for _, tokens in everyones)

    def _share_gradients(self, ranks: Ranks) -> None:
        if ranks.size > 1:
            for parameter in self.parameters:
                if parameter.grad is None:  # this process had no text left
                    parameter.grad = torch.zeros_like(parameter)
                ranks.all_reduce_(parameter.grad)


def _rate(done: float) -> float:
    """Return the learning rate's factor when a fraction of the steps is done: a linear rise, then a cosine to zero."""
    return min(1.0, 0.1 + done / _WARM_UP) * 0.5 * (1.0 + math.cos(math.pi * done))
