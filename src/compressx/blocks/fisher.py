"""How the dense model's loss reacts to what its linears and its blocks give.

The loss is the model's likelihood, labels drawn from its own predictions, so that its Fisher matrix is the curvature of
the model's divergence from itself. Gradients go backwards through one block at a time: the activations of one block
are held, and of one batch the hidden states between all blocks. `gradients` keeps those it returns besides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressx.api.pruner import Sensitivity
from compressx.blocks.sensitivity import Gathering
from compressx.models.access import Access
from compressx.models.architecture import Architecture, text_config
from compressx.models.capture import capture_calls, replay, run_around
from compressx.models.hidden import Keep, in_memory
from compressx.models.shards import OUTSIDE
from compressx.numerics.output_error import shares_of
from compressx.runtime.errors import UnsupportedModelError
from compressx.runtime.finite import all_finite, finite, refuse_damage
from compressx.runtime.ranks import ALONE, Ranks

ROW_WINDOWS = 32
"""Windows that rows of the model's loss are measured on where nobody reads tokens."""

CHANNEL_WINDOWS = 8
"""Windows that channels are measured on where nobody reads sensitivities of linears; 24 others differ by 3%."""

_TOKENS_AT_ONCE = 64
"""Tokens whose distribution functions, float64 [tokens, vocabulary], are in memory at once."""


@dataclass(frozen=True, eq=False)
class Fisher:
    """How strongly the dense model's loss reacts to what its parts give.

    Attributes:
        linears: sensitivities, by linear.
        channels: of what leaves each block, by block: each channel's share of a token's squared gradient, the mean
            over tokens, float32 [width]. Of shares, since the gradients of a few tokens are thousands of times larger
            or smaller than the others'. Of all blocks, or of none where they were not measured.
    """

    linears: Mapping[str, Sensitivity] = field(default_factory=dict)
    channels: Mapping[str, Tensor] = field(default_factory=dict)


def fisher_of(
    access: Access, found: Architecture, names: Collection[str], batches: Sequence[Tensor], ranks: Ranks = ALONE,
    *, tokens: bool = True, progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Fisher:  # fmt: skip
    """Return diagonals of the Fisher matrix: mean squared gradients of the likelihood of labels drawn from the model.

    Args:
        access: the model, its weights still dense.
        found: its blocks and linears.
        names: of the linears whose sensitivities are wanted, all inside the blocks.
        batches: token ids, each [batch, tokens].
        ranks: the processes.
        tokens: whether those of tokens are wanted. Without them the first `ROW_WINDOWS` windows do, or as many more as
            it takes to reach every linear: a row's value is a mean over tokens, of which these hold thousands. Without
            names `CHANNEL_WINDOWS` do.
        progress: called with how many windows are done, and how many there are at least.

    Raises:
        ArtifactError: a weight that is not finite.
        CalibrationError: a linear that no token of any process came through.
        UnsupportedModelError: a model whose blocks cannot be run one at a time, whose numbers or gradients are not
            finite, or whose loss does not react to a block at all.
    """
    wanted = {n: x for n, x in found.linears.items() if n in names}  # in the model's order, so that processes agree
    tokens = tokens and bool(wanted)
    windows = ROW_WINDOWS if wanted else CHANNEL_WINDOWS
    enough = sum(map(len, batches)) if tokens else max(1, windows // ranks.size)
    if not tokens:  # the same windows for every batch size
        batches = [part for batch in _parted(batches, enough) for part in torch.split(batch, len(batches[0]))]
    shapes = [batch.shape for batch in batches] if tokens else []
    gatherings = {
        fqn: Gathering({n: x for n, x in wanted.items() if n.startswith(f"{fqn}.")}, shapes, access.device)
        for fqn in found.blocks
    }
    width = text_config(access.model).hidden_size
    shares = {fqn: torch.zeros(width, dtype=torch.float64, device=access.device) for fqn in found.blocks}
    generator = torch.Generator(access.device).manual_seed(0)
    seen = 0
    for batch in batches:
        if seen >= enough and all(gathering.reached for gathering in gatherings.values()):
            break
        progress(min(seen, enough), enough)
        seen += len(batch)
        for fqn, gradient in _backwards(access, found, batch, generator, gatherings):
            shares[fqn] += shares_of(gradient.float()).sum(dim=(0, 1), dtype=torch.float64)
    linears = {name: its for gathering in gatherings.values() for name, its in gathering.result(ranks).items()}
    for fqn, sums in shares.items():
        ranks.all_reduce_(sums)
        if not sums.any():
            raise UnsupportedModelError(
                f"{fqn}: the model's loss does not react to its output on the calibration text, all gradients are "
                "zero; if the model is not broken, model.dtype may be too narrow"
            )
    return Fisher(linears, {fqn: (sums / sums.sum()).float() for fqn, sums in shares.items()})


def gradients(
    access: Access, found: Architecture, wanted: Collection[str], batches: Sequence[Tensor], keep: Keep = in_memory,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, list[Tensor]]:  # fmt: skip
    """Return the gradients of the same loss with respect to what leaves some blocks.

    Args:
        access: the model, its weights still dense.
        found: its blocks.
        wanted: names of those whose gradients are wanted.
        batches: token ids, each [batch, tokens].
        keep: where they are kept: for each block as many numbers as the hidden states of all batches.
        progress: called with how many windows are done, and how many there are.

    Returns:
        By block, batch by batch, [batch, tokens, width] in the model's dtype and on the CPU.

    Raises:
        ArtifactError: a weight that is not finite, or no room for a file.
        UnsupportedModelError: a model whose blocks cannot be run one at a time, whose numbers or gradients are not
            finite, or a block with gradients that are zero at half of the tokens or more.
    """
    nothing_gathered = {fqn: Gathering({}, (), access.device) for fqn in found.blocks}
    generator = torch.Generator(access.device).manual_seed(0)
    names = [fqn for fqn in found.blocks if fqn in wanted]
    shape, dtype = (text_config(access.model).hidden_size,), access.model.dtype
    # All room at once, as in `sensitivity`.
    kept = {fqn: [keep(torch.empty(batch.shape + shape, dtype=dtype)) for batch in batches] for fqn in names}
    for number, batch in enumerate(batches if names else ()):
        progress(sum(map(len, batches[:number])), sum(map(len, batches)))
        for fqn, gradient in _backwards(access, found, batch, generator, nothing_gathered):
            if fqn in kept:
                kept[fqn][number].copy_(gradient)
            if fqn == names[0]:
                break
    for fqn, its in kept.items():
        reached, tokens = sum(int(x.any(dim=-1).sum()) for x in its), sum(batch.numel() for batch in batches)
        if 2 * reached <= tokens:
            raise UnsupportedModelError(
                f"{fqn}: the gradient of the model's loss with respect to its output is zero at {tokens - reached} of "
                f"{tokens} calibration tokens, so that what its errors cost cannot be told; if the model is not "
                "broken, model.dtype may be too narrow"
            )
    return kept


def divergences(change: Tensor, gradient: Tensor) -> Tensor:
    """Return by how much the model's predictions diverge when what leaves a block changes, to second order.

    The Kullback-Leibler divergence of predictions that change by little is half of the change's square in the Fisher
    matrix (Kullback, "Information Theory and Statistics", 1959, section 2.6), which is the mean of the gradient's outer
    product over labels drawn from the predictions. Of each token a single draw is taken, and that changes of different
    tokens go together is left out: their mean over thousands of tokens is what means something.

    Args:
        change: of what leaves the block, [batch, tokens, width].
        gradient: of the loss at it, as `gradients` gives it.

    Returns:
        float32 [batch, tokens], in nats.
    """
    return (change.float() * gradient.to(change.device, torch.float32)).sum(dim=-1).square() / 2


def drawn_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return a label for each token, drawn from a model's predictions, int64 [tokens].

    What `torch.multinomial` does, in less than half of its time: it draws a number for each entry of the vocabulary,
    here a token has one, which is looked up in the distribution function.

    Args:
        logits: float32 [tokens, vocabulary].
        generator: of their device.
    """
    drawn = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64, device=logits.device)
    labels = []
    for some, numbers in zip(torch.split(logits, _TOKENS_AT_ONCE), torch.split(drawn, _TOKENS_AT_ONCE), strict=True):
        below = some.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        labels.append(torch.searchsorted(below, numbers * below[:, -1:])[:, 0])
    return torch.cat(labels)


def _parted(batches: Sequence[Tensor], first: int) -> list[Tensor]:
    """Return the first windows, and then each of the others by itself."""
    windows = torch.cat(list(batches)) if batches else torch.empty(0)
    return [windows[:first], *torch.split(windows[first:], 1)] if len(windows) > first else list(batches)


def _backwards(
    access: Access, found: Architecture, batch: Tensor, generator: torch.Generator, gatherings: Mapping[str, Gathering]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each block, the last first, with the gradient of a batch with respect to what leaves it.

    Raises:
        UnsupportedModelError: numbers or gradients that are not finite.
    """
    ids = batch.to(access.device)
    with access.materialise(OUTSIDE):
        (state,), calls = capture_calls(access.model, found.blocks, [ids])
    runs = {fqn: partial(replay, module, call=calls[fqn][0]) for fqn, module in found.blocks.items()}
    states = [state]
    for fqn, run in runs.items():
        with torch.no_grad(), access.materialise(fqn):
            states.append(finite(run(states[-1]), fqn, found.blocks[fqn]))
    with access.materialise(OUTSIDE):
        gradient = _of_likelihood(access.model, found.blocks, ids, states.pop(), generator)
    for fqn, run in reversed(runs.items()):
        if not all_finite(gradient):
            raise UnsupportedModelError(
                f"{fqn}: the gradient of the model's loss with respect to its output has NaN or infinite values on "
                "the calibration text; model.dtype may be too narrow"
            )
        yield fqn, gradient
        with access.materialise(fqn):
            gradient = gatherings[fqn].backward(run, states.pop(), partial(_given, gradient))


def _given(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient


def _of_likelihood(
    model: nn.Module, blocks: Mapping[str, nn.Module], ids: Tensor, state: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the gradient of the loss with respect to what leaves the last block [batch, tokens, width]."""
    of_windows = []
    for window, hidden in zip(
        torch.split(ids, 1), torch.split(state, 1), strict=True
    ):  # the logits of one are large enough
        x = hidden.detach().requires_grad_(True)
        with torch.enable_grad():
            logits = run_around(model, blocks, window, x).logits[0].float()
            if not all_finite(logits.detach()):
                refuse_damage(model, "")
                raise UnsupportedModelError(
                    f"{type(model).__name__}: its logits have NaN or infinite values on the calibration text; "
                    "model.dtype may be too narrow"
                )
            labels = drawn_labels(logits.detach(), generator)
            loss = functional.cross_entropy(logits, labels, reduction="sum")
        of_windows.append(torch.autograd.grad(loss, x)[0])
    return torch.cat(of_windows)
