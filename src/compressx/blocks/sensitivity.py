"""How strongly a loss reacts to what linears and blocks give: the weights that pruning and training put on errors.

For a linear with output gradients g [tokens, out_features] the Fisher matrix of its weight is taken for a product of a
factor for tokens, a factor for outputs and the inputs (after K-FAC, Martens and Grosse, arXiv 1503.05671): what is kept
is the mean of g^2 of each token and of each output.

Two losses. The model's: its likelihood, labels drawn from its own predictions, so that this is the curvature of its
divergence from itself. The block's: the error of its output (`compressx.relative`), by random probes (Hutchinson's
estimator). Both go through one block at a time and hold the activations of one block only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressx.architecture import Architecture, text_config
from compressx.blocks.watch import outputs_watched
from compressx.errors import CalibrationError, UnsupportedModelError
from compressx.finite import all_finite, finite, refuse_damage
from compressx.models.access import Access
from compressx.models.capture import capture_calls, replay, run_around
from compressx.models.shards import OUTSIDE
from compressx.pruner import Linear, Loss, Sensitivity
from compressx.ranks import ALONE, Ranks
from compressx.relative import channel_weights, shares_of

ROW_WINDOWS = 32
"""Windows that rows of the model's loss are measured on where nobody reads tokens."""

_TOKENS_AT_ONCE = 64
"""Tokens whose distribution functions, float64 [tokens, vocabulary], are in memory at once."""


@dataclass(frozen=True, eq=False)
class Reactions:
    """How strongly the dense model's loss reacts to what its parts give.

    Attributes:
        linears: sensitivities, by linear.
        channels: each channel's share of a token's squared gradient, of what leaves a block; the mean over tokens,
            float32 [width], by block. Of shares, since a few tokens have gradients thousands of times smaller or larger
            than the others'. Errors weighed by it are those that the loss sees.
    """

    linears: Mapping[str, Sensitivity] = field(default_factory=dict)
    channels: Mapping[str, Tensor] = field(default_factory=dict)


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
        """
        found = {}
        for name, sums in self.sums.items():
            ranks.add(sums.rows)
            count = sum(ranks.everyones(sums.count))
            if count == 0:
                raise CalibrationError(
                    f"no calibration token reached {name}, so that its sensitivity is not known; use more samples, or "
                    "prune it by another pruner"
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
        of_model: of the linears, what the function of this name returned, or nothing.
        reacting: the linears of the block whose pruners read the sensitivities of its own loss.
        runs: as for `of_block`.
        states: as for `of_block`.
        ranks: the processes.
    """
    return {"model": of_model, "block": of_block(reacting, runs, states, ranks) if reacting else {}}


def of_model(
    access: Access, found: Architecture, names: Collection[str], batches: Sequence[Tensor], ranks: Ranks = ALONE,
    *, tokens: bool = True, progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Reactions:  # fmt: skip
    """Return the reactions of the model's loss: the summed negative log-likelihood of labels that it drew itself.

    Args:
        access: the model, its weights still dense.
        found: its blocks and linears.
        names: of the linears whose sensitivities are wanted, all inside the blocks.
        batches: token ids, each [batch, tokens].
        ranks: the processes.
        tokens: whether those of tokens are wanted. Without them the first `ROW_WINDOWS` windows do, or as many more as
            it takes to reach every linear: a row's value is a mean over tokens, of which these hold thousands.
        progress: called with how many windows are done, and how many there are at least.

    Raises:
        ArtifactError: a weight that is not finite.
        CalibrationError: a linear that no token of any process came through.
        UnsupportedModelError: a model whose blocks cannot be run one at a time, or whose numbers are not finite.
    """
    wanted = {n: x for n, x in found.linears.items() if n in names}  # in the model's order, so that processes agree
    enough = sum(map(len, batches)) if tokens else max(1, ROW_WINDOWS // ranks.size)
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
            shares[fqn] += shares_of(gradient.float()).sum(dim=(0, 1), dtype=torch.float64)
            with access.materialise(fqn):
                gradient = gatherings[fqn].backward(run, states.pop(), partial(_given, gradient))
    linears = {name: its for gathering in gatherings.values() for name, its in gathering.result(ranks).items()}
    for sums in shares.values():
        ranks.add(sums)
    return Reactions(linears, {fqn: (sums / sums.sum()).float() for fqn, sums in shares.items() if sums.any()})


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


def _given(gradient: Tensor, _: Tensor) -> Tensor:
    return gradient


def _of_likelihood(
    model: nn.Module, blocks: Mapping[str, nn.Module], ids: Tensor, state: Tensor, generator: torch.Generator
) -> Tensor:
    """Return the gradient of the loss with respect to what leaves the last block [batch, tokens, width]."""
    gradients = []
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
        gradients.append(torch.autograd.grad(loss, x)[0])
    return torch.cat(gradients)
