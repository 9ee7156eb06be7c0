"""Mean squared gradients of the dense model's loss with respect to the outputs of its linears and blocks.

The loss is the negative log-likelihood of labels drawn from the model's own predictions, so these means are diagonals
of its Fisher matrix, the curvature of the divergence from the dense model. A linear's are the diagonal of the output
factor in the Kronecker-factored Fisher matrix of its weight (K-FAC, Martens and Grosse, arXiv 1503.05671).

The backward pass runs one block at a time: memory holds the activations of one block and, for one batch, the hidden
states between all blocks. `gradients` also keeps what it returns. Of a streamed model as many batches as memory has
room for go through the blocks together, because each pass reads the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressx.api.pruner import Linear
from compressx.blocks.observe import linears_watched
from compressx.models.access import Access
from compressx.models.architecture import Architecture, text_config
from compressx.models.arithmetic import matmuls_in
from compressx.models.blockwise import BlockwiseBackward, KeepStates, capture, each_block, in_memory, run_around
from compressx.models.shards import OUTSIDE
from compressx.models.streaming import StreamedModel, free_memory, local_processes
from compressx.numerics.output_error import shares_of
from compressx.runtime.errors import CalibrationError, UnsupportedModelError
from compressx.runtime.finite import all_finite, finite, refuse_damage
from compressx.runtime.ranks import ALONE, Ranks
from compressx.runtime.transfer import to_device, written_behind

ROW_SEQUENCES = 32
"""Windows for linears' outputs: enough for a mean over thousands of tokens."""

CHANNEL_SEQUENCES = 8
"""Sequences for channels when no sensitivities of linears are measured; 24 other sequences differ by 3%."""

_STATES_SHARE = 0.25
"""Fraction of the free memory that the hidden states between all blocks of a streamed model may take."""

TOKENS_AT_ONCE = 64
"""Tokens whose distribution functions, float64 [tokens, vocabulary], are in memory at a time."""


@dataclass(frozen=True, eq=False)
class FisherDiagonal:
    """Mean squared gradients of the dense model's loss: diagonals of its Fisher matrix.

    Attributes:
        linears: for each linear, the mean over tokens of its squared output gradients, float32 [out_features].
        channels: for each block, each output channel's share of a token's squared gradient, the mean over tokens,
            float32 [width]. Shares, because the gradients of a few tokens are thousands of times larger or smaller
            than the others'. Holds all blocks, or none if they were not measured.
    """

    linears: Mapping[str, Tensor] = field(default_factory=dict)
    channels: Mapping[str, Tensor] = field(default_factory=dict)


def fisher_diagonal(
    access: Access, found: Architecture, names: Collection[str], batches: Sequence[Tensor], ranks: Ranks = ALONE,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> FisherDiagonal:  # fmt: skip
    """Measure mean squared gradients of the likelihood of labels drawn from the model.

    Args:
        access: the model, with dense weights.
        found: its blocks and linears.
        names: linears to measure, all inside the blocks.
        batches: token ids, each [batch, tokens]. Reads the first `ROW_SEQUENCES` ones, and more until every linear has
            received a token; without names, `CHANNEL_SEQUENCES`.
        ranks: the processes.
        progress: called with the sequences done and the minimum total.
    """
    device = access.device
    wanted = {n: x for n, x in found.linears.items() if n in names}  # in the model's order, the same in all processes
    at = {
        fqn: SquaredGradients({n: x for n, x in wanted.items() if n.startswith(f"{fqn}.")}, device)
        for fqn in found.blocks
    }
    width = text_config(access.model).hidden_size
    shares = {fqn: torch.zeros(width, dtype=torch.float64, device=device) for fqn in found.blocks}
    generator = torch.Generator(device).manual_seed(0)  # on the device: numbers from the host would be waited for
    enough = max(1, (ROW_SEQUENCES if wanted else CHANNEL_SEQUENCES) // ranks.size)
    enough, seen = min(enough, sum(map(len, batches))), 0
    first, further = _first_sequences(batches, enough)
    for group in chain(groups(access, found, first), ([batch] for batch in further)):
        if seen >= enough and all(squares.reached for squares in at.values()):
            break
        progress(min(seen, enough), enough)
        seen += sum(map(len, group))
        for fqn, at_outputs in _backwards(access, found, group, generator, at):
            for gradient in at_outputs:
                shares[fqn] += shares_of(gradient.float()).sum(dim=(0, 1), dtype=torch.float64)
    linears = {name: mean for squares in at.values() for name, mean in squares.means(ranks).items()}
    return FisherDiagonal(linears, {fqn: _total_share(fqn, sums, ranks) for fqn, sums in shares.items()})


def gradients(
    access: Access, found: Architecture, wanted: Collection[str], batches: Sequence[Tensor],
    keep: KeepStates = in_memory, progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Return the gradients of the same loss with respect to the outputs of some blocks.

    Args:
        access: the model, with dense weights.
        found: its blocks.
        wanted: names of the blocks.
        batches: token ids, each [batch, tokens].
        keep: where to keep the gradients; each block's take as much space as the hidden states of all batches.
        progress: called with the sequences done and their total.

    Returns:
        By block, for each batch [batch, tokens, width] in the model's dtype on the CPU.
    """
    at = {fqn: SquaredGradients({}, access.device) for fqn in found.blocks}
    generator = torch.Generator(access.device).manual_seed(0)
    names = [fqn for fqn in found.blocks if fqn in wanted]
    shape, dtype = (text_config(access.model).hidden_size,), access.model.dtype
    # Allocated up front: long-lived tensors among freed large ones would fragment the heap.
    kept = {fqn: [keep(torch.empty(batch.shape + shape, dtype=dtype)) for batch in batches] for fqn in names}
    done = 0
    for group in groups(access, found, batches) if names else ():
        progress(sum(map(len, batches[:done])), sum(map(len, batches)))
        for fqn, at_outputs in _backwards(access, found, group, generator, at):
            with written_behind() as put:
                for room, gradient in zip(kept[fqn][done:] if fqn in kept else (), at_outputs, strict=False):
                    put(room, gradient)
            if fqn == names[0]:
                break
        done += len(group)
    for fqn, parts in kept.items():
        reached, tokens = sum(int(x.any(dim=-1).sum()) for x in parts), sum(batch.numel() for batch in batches)
        if 2 * reached <= tokens:
            raise UnsupportedModelError(
                f"{fqn}: the gradient of the model's loss with respect to its output is zero at {tokens - reached} of "
                f"{tokens} calibration tokens, so the cost of its errors cannot be measured; if the model is not "
                "broken, model.dtype may be too narrow"
            )
    return kept


def divergences(change: Tensor, gradient: Tensor) -> Tensor:
    """Estimate the divergence of the model's predictions caused by a change of a block's output, to second order.

    For a small change d of the output, the Kullback-Leibler divergence of the predictions is d^T F d / 2 (Kullback,
    "Information Theory and Statistics", 1959, section 2.6). The Fisher matrix F is the mean of the gradients' outer
    products over labels drawn from the predictions. Here each token has a single draw, and interactions between tokens
    are neglected, so only the mean over thousands of tokens is meaningful.

    Args:
        change: change of the block's output, [batch, tokens, width].
        gradient: of the loss with respect to the output, as from `gradients`.

    Returns:
        float32 [batch, tokens], in nats.
    """
    return (change.float() * to_device(gradient, change.device).float()).sum(dim=-1).square() / 2


def drawn_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a label for each token from a model's predictions, int64 [tokens].

    Equivalent to `torch.multinomial` in less than half of its time: that draws a number for each entry of the
    vocabulary, this one per token, which is looked up in the distribution function.

    Args:
        logits: float32 [tokens, vocabulary].
        generator: on the same device.
    """
    drawn = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64, device=logits.device)
    labels = []
    for some, numbers in zip(torch.split(logits, TOKENS_AT_ONCE), torch.split(drawn, TOKENS_AT_ONCE), strict=True):
        below = some.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        labels.append(torch.searchsorted(below, numbers * below[:, -1:])[:, 0])
    return torch.cat(labels)


def _first_sequences(batches: Sequence[Tensor], first: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the first sequences in batches of the same size, and each of the others as a batch of one."""
    sequences = torch.cat(list(batches)) if batches else torch.empty(0)
    if len(sequences) <= first:
        return list(batches), []
    return list(torch.split(sequences[:first], len(batches[0]))), list(torch.split(sequences[first:], 1))


def groups(access: Access, found: Architecture, batches: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield batches that go through the blocks together: of a model in memory each by itself, which costs nothing."""
    each = text_config(access.model).hidden_size * access.model.dtype.itemsize * (len(found.blocks) + 1)  # of a token
    room = _STATES_SHARE * free_memory(access.device, local_processes()) if isinstance(access, StreamedModel) else 0.0
    group: list[Tensor] = []
    for batch in batches:
        if group and each * sum(x.numel() for x in (*group, batch)) > room:
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def _total_share(fqn: str, sums: Tensor, ranks: Ranks) -> Tensor:
    """Return each channel's share of the squared gradients, summed over all processes."""
    ranks.all_reduce_(sums)
    if not sums.any():
        raise UnsupportedModelError(
            f"{fqn}: the model's loss does not depend on its output: all gradients on the calibration text are zero; "
            "if the model is not broken, model.dtype may be too narrow"
        )
    return (sums / sums.sum()).float()


def _backwards(
    access: Access, found: Architecture, batches: Sequence[Tensor], generator: torch.Generator,
    at: Mapping[str, SquaredGradients],
) -> Iterator[tuple[str, list[Tensor]]]:  # fmt: skip
    """Yield each block from last to first, with the gradient of each batch's loss with respect to its output."""
    order = list(found.blocks)
    ids = [batch.to(access.device) for batch in batches]
    entering, calls = capture(access, found, ids)
    states = [entering]  # those that enter each block, and those that leave the last
    for block, runs in each_block(access, found, calls):
        with torch.no_grad():
            left = [finite(run(x), block.fqn, block.module) for run, x in zip(runs, states[-1], strict=True)]
        states.append(left)
    with access.materialise(OUTSIDE):
        leaving = zip(ids, states.pop(), strict=True)
        at_outputs = [_of_likelihood(access, found.blocks, sequences, state, generator) for sequences, state in leaving]
    yield order[-1], _checked(at_outputs, order[-1])
    of_batches = [BlockwiseBackward(call) for call in calls[order[-1]]]
    for block, runs in each_block(access, found, calls, reversed(order)):
        parts = zip(runs, states.pop(), at_outputs, of_batches, strict=True)
        at_outputs = [at[block.fqn].backward(*part) for part in parts]
        if block.index > 0:
            before = order[block.index - 1]
            yield before, _checked(at_outputs, before)


def _checked(gradients: list[Tensor], fqn: str) -> list[Tensor]:
    """Return the gradients with respect to a block's output if they are finite."""
    if not all_finite(*gradients):
        raise UnsupportedModelError(
            f"{fqn}: the gradient of the model's loss with respect to its output has NaN or infinite values on the "
            "calibration text; model.dtype may be too narrow"
        )
    return gradients


def _of_likelihood(
    access: Access, blocks: Mapping[str, nn.Module], ids: Tensor, state: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the gradient of the loss with respect to the last block's output [batch, tokens, width]."""
    of_sequences, model = [], access.model
    # One sequence at a time: its logits are large.
    for sequence, hidden in zip(torch.split(ids, 1), torch.split(state, 1), strict=True):
        x = hidden.detach().requires_grad_(True)
        with torch.enable_grad():
            with matmuls_in(access.matmul_dtype, model, access.device):
                logits = run_around(model, blocks, sequence, x).logits[0]
            logits = logits.float()
            if not all_finite(logits.detach()):
                refuse_damage(model, "")
                raise UnsupportedModelError(
                    f"{type(model).__name__}: its logits have NaN or infinite values on the calibration text; "
                    "model.dtype may be too narrow"
                )
            labels = drawn_labels(logits.detach(), generator)
            loss = functional.cross_entropy(logits, labels, reduction="sum")
        of_sequences.append(torch.autograd.grad(loss, x)[0])
    return torch.cat(of_sequences)


class SquaredGradients:
    """Sums over tokens of the squared gradients at the outputs of a block's linears.

    Args:
        linears: by name.
        device: of the sums.
    """

    def __init__(self, linears: Mapping[str, Linear], device: torch.device) -> None:
        self.linears = linears
        self.sums = {n: torch.zeros(x.out_features, dtype=torch.float64, device=device) for n, x in linears.items()}
        self.tokens = dict.fromkeys(linears, 0)

    @property
    def reached(self) -> bool:
        """Whether every linear has received a token; experts may not have."""
        return all(self.tokens.values())

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient at a linear's output, [batch, tokens, out_features] or [tokens, out_features]."""
        squares = gradient.float().square().flatten(0, -2)
        self.sums[name] += squares.sum(dim=0, dtype=torch.float64)
        self.tokens[name] += len(squares)

    def backward(
        self, run: Callable[[Tensor], Tensor], enters: Tensor, gradient: Tensor, backwards: BlockwiseBackward
    ) -> Tensor:
        """Run a block forwards and backwards, and add the gradients at its linears' outputs.

        Args:
            run: computes the block's output from its input.
            enters: the input, [batch, tokens, width].
            gradient: of the loss with respect to the output.
            backwards: the batch's, for all blocks.

        Returns:
            The gradient with respect to the input.
        """
        x = enters.detach().requires_grad_(True)

        def watch(name: str, given: Any) -> None:
            output = given[0] if isinstance(given, tuple) else given
            if not output.requires_grad:
                raise UnsupportedModelError(
                    f"{name}: no gradient reaches its output, so its sensitivity is unknown; prune it with another "
                    "pruner, or leave it out by `ignore`"
                )
            output.register_hook(lambda grad: self.add(name, grad))

        with torch.enable_grad(), linears_watched(self.linears, after=watch):
            out = backwards.run(run, x)
        return backwards.gradient(out, x, gradient)

    def means(self, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        """Return the means over all processes' tokens by linear name, float32 [out_features]."""
        found = {}
        for name, sums in self.sums.items():
            ranks.all_reduce_(sums)
            tokens = sum(ranks.all_gather(self.tokens[name]))
            if tokens == 0:
                raise CalibrationError(
                    f"no calibration token reached {name}, so its sensitivity is unknown; use more samples, or "
                    "prune it with another pruner"
                )
            if not all_finite(sums):
                raise UnsupportedModelError(
                    f"{name}: the gradient of the loss with respect to its output has NaN or infinite values on the "
                    "calibration text; model.dtype may be too narrow"
                )
            found[name] = (sums / tokens).float()
        return found
