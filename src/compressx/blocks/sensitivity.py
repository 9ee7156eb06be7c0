"""How strongly a loss reacts to what each linear gives: the weights that sensitivity-weighted pruning puts on errors.

For a linear with output gradients g [tokens, out_features] the Fisher matrix of its weight is taken for a product of a
factor for tokens, a factor for outputs and the inputs (after K-FAC, Martens and Grosse, arXiv 1503.05671): what is kept
is the mean of g^2 of each token and of each output.

Two losses: the model's likelihood (`blocks.fisher`), and the block's own, the error of its output
(`numerics.output_error`), by random probes (Hutchinson's estimator). For either the activations of one block are held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from compressx.api.pruner import Linear, Loss, Sensitivity
from compressx.blocks.hooks import outputs_watched
from compressx.numerics.output_error import channel_weights
from compressx.runtime.errors import CalibrationError, UnsupportedModelError
from compressx.runtime.finite import all_finite
from compressx.runtime.ranks import ALONE, Ranks


class _Sums:
    """What is gathered for one linear; where it is not handed each batch's tokens, as behind a router, only outputs.

    The means of tokens outlive every batch. All have their room from the beginning: small tensors that stay, each made
    among large ones that go, would leave the heap full of holes, gigabytes of them.
    """

    def __init__(self, linear: Linear, shapes: Sequence[torch.Size], device: torch.device) -> None:
        self.rows = torch.zeros(linear.out_features, dtype=torch.float64, device=device)  # sum over tokens of g^2
        self.count = 0
        shapes = shapes if linear.expert is None else ()
        room = torch.empty(sum(shape.numel() for shape in shapes), device=device)
        parts = torch.split(room, [shape.numel() for shape in shapes])
        self.tokens = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]  # mean over outputs of g^2
        self.filled = 0

    def add(self, gradient: Tensor) -> None:
        """Take in the gradient of an output, [batch, tokens, out_features] or [tokens, out_features]."""
        squares = gradient.float().square()
        self.rows += squares.reshape(-1, squares.shape[-1]).sum(dim=0, dtype=torch.float64)
        self.count += squares.shape[:-1].numel()
        if self.filled < len(self.tokens) and squares[..., 0].numel() == self.tokens[self.filled].numel():
            tokens = self.tokens[self.filled]  # OPT's MLP sees them without their batch, in the same order
            torch.mean(squares.reshape(*tokens.shape, -1), dim=-1, out=tokens)
            self.filled += 1
        else:
            self.tokens = []


class Gathering:
    """Adds up sensitivities batch by batch.

    Args:
        linears: by name.
        shapes: [batch, tokens] of each batch that will come; none where tokens are not wanted.
        device: where to add up.
    """

    def __init__(self, linears: Mapping[str, Linear], shapes: Sequence[torch.Size], device: torch.device) -> None:
        self.linears = linears
        self.sums = {name: _Sums(linear, shapes, device) for name, linear in linears.items()}

    @property
    def reached(self) -> bool:
        """Whether a token has come through every linear; experts may wait for theirs."""
        return all(sums.count for sums in self.sums.values())

    def backward(self, run: Callable[[Tensor], Tensor], enters: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """Go through a block forwards and backwards, and take in the gradients of its linears' outputs.

        Args:
            run: computes what leaves the block from what enters it.
            enters: [batch, tokens, width].
            gradient: from what leaves the block to the loss's gradient with respect to that.

        Returns:
            The gradient with respect to what enters.
        """
        x = enters.detach().requires_grad_(True)

        def watch(name: str, output: Tensor) -> None:
            output.register_hook(self.sums[name].add)  # type: ignore[no-untyped-call]

        with torch.enable_grad(), outputs_watched(self.linears, watch):
            out = run(x)
        # Of the input alone: no gradient of a weight is computed.
        return torch.autograd.grad(out, x, gradient(out.detach()).to(out.dtype))[0]

    def result(self, ranks: Ranks = ALONE) -> dict[str, Sensitivity]:
        """Return the sensitivities by linear name; rows are means over all processes' tokens, tokens this one's.

        Raises:
            CalibrationError: a linear that no token came through: it would seem to matter to nothing.
            UnsupportedModelError: gradients that are not finite.
        """
        found = {}
        for name, sums in self.sums.items():
            ranks.all_reduce_(sums.rows)
            count = sum(ranks.all_gather(sums.count))
            if count == 0:
                raise CalibrationError(
                    f"no calibration token reached {name}, so that its sensitivity is not known; use more samples, or "
                    "prune it by another pruner"
                )
            if not all_finite(sums.rows):
                raise UnsupportedModelError(
                    f"{name}: the gradient of the loss with respect to its output has NaN or infinite values on the "
                    "calibration text; model.dtype may be too narrow"
                )
            tokens = tuple(sums.tokens) if sums.filled == len(sums.tokens) else ()
            found[name] = Sensitivity((sums.rows / count).float(), tokens)
        return found


def of_block(
    linears: Mapping[str, Linear], runs: Sequence[Callable[[Tensor], Tensor]], states: Sequence[Tensor],
    ranks: Ranks = ALONE,
) -> dict[str, Sensitivity]:  # fmt: skip
    """Return the sensitivities of a block's own loss, the mean over tokens of the `relative_errors` of its output.

    Args:
        linears: of the block, by name.
        runs: of each calibration batch, from what enters the block to what leaves it.
        states: what enters it, of each batch [batch, tokens, width].
        ranks: the processes.
    """
    device = next(iter(linears.values())).weight.device
    gathering = Gathering(linears, [state.shape[:2] for state in states], device)
    with torch.no_grad():
        roots = channel_weights((run(x) for run, x in zip(runs, states, strict=True)), ranks).to(device).sqrt()
    generator = torch.Generator().manual_seed(0)
    for run, state in zip(runs, states, strict=True):

        def probe(out: Tensor) -> Tensor:
            signs = torch.randint(0, 2, out.shape, generator=generator, dtype=torch.float32).to(out.device) * 2 - 1
            size = (roots * out.float()).norm(dim=-1, keepdim=True)
            return roots * signs / torch.where(size > 0, size, 1.0)

        gathering.backward(run, state, probe)
    return gathering.result(ranks)


def by_loss(
    of_model: Mapping[str, Sensitivity], reacting: Mapping[str, Linear], runs: Sequence[Callable[[Tensor], Tensor]],
    states: Sequence[Tensor], ranks: Ranks = ALONE,
) -> dict[Loss, Mapping[str, Sensitivity]]:  # fmt: skip
    """Return what `Block.sensitivities` holds: those of the model's loss as given, those of the block's gathered now.

    Args:
        of_model: of the linears, `Fisher.linears`, or nothing.
        reacting: the linears of the block whose pruners read the sensitivities of its own loss.
        runs: as for `of_block`.
        states: as for `of_block`.
        ranks: the processes.
    """
    return {"model": of_model, "block": of_block(reacting, runs, states, ranks) if reacting else {}}
