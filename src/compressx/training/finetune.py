"""Sparse fine-tuning: the remaining weights, or adapters of them, are trained with the masks held.

Dropped weights are zero and get no gradient, so they stay exactly zero. A step depends only on the settings and its
number, which seed its sequences and its dropout. So a checkpoint needs only weights, optimizer state and losses.
Where the recipe gives minutes, the learning rate also depends on the time. A 16-bit model is trained in float32 and
rounded once, at the end; its matmuls may be in bfloat16.

With a vocabulary of 49152 the logits of one sequence of 2048 tokens take 400 MB in float32, and autograd keeps several
copies. So a loss is computed a few rows at a time together with its gradient in closed form, and only the gradient is
kept. A chunk of rows fits into a CPU's last-level cache, because it is read a dozen times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressx.api.record import FinetuneReport, HeldOutLoss
from compressx.masks.maskset import MaskSet
from compressx.models.arithmetic import matmuls_in
from compressx.models.shards import read_tensors, write_tensors
from compressx.recipe.sections import Finetune
from compressx.runtime.errors import ArtifactError, CalibrationError, memory_named
from compressx.runtime.quiet import quiet_libraries
from compressx.training.trainable import check_trained, own_checkpointing_off, scales, trainable

_LARGEST_NORM = 1.0
"""Maximum norm of a step's gradient, a customary value."""

_BETAS = (0.9, 0.95)
"""Adam's decay rates. A training has a few hundred steps, too few for the usual second value of 0.999."""

_HELD_OUT_AT_ONCE = 4
"""Most held-out sequences in a batch; fewer if `batch_size` is less, which is lowered where memory is short."""

WARMUP = 0.1
"""Fraction of a training in which the learning rate rises."""

_CHECKS = 4
"""How often the held-out loss is measured during a training, besides once before it."""

_BACK_OFF = 0.25
"""The learning rate is multiplied by this after each held-out loss that is no new minimum."""

_NO_TARGET = -100
"""Target of a sequence's last token, which has no next token."""

_LOGITS_AT_ONCE = 2**21
"""Logits converted to float32 at a time: 8 MiB, some 40 rows of a large vocabulary."""

_LOGITS_AT_ONCE_ON_ACCELERATOR = 2**26
"""The same on an accelerator, where every chunk costs a few kernel launches: 256 MiB."""


def finetune(
    model: Any, masks: MaskSet, sequences: Tensor, settings: Finetune, *, teacher: Any | None = None,
    matmul_dtype: torch.dtype | None = None, checkpoint: Path | None = None,
    progress: Callable[[int, int, float], None] | None = None, note: Callable[[str], None] = lambda _: None,
) -> FinetuneReport:  # fmt: skip
    """Train the remaining weights of a pruned model, or adapters, in place; dropped ones stay zero.

    Args:
        model: a pruned transformers causal language model; keeps its dtypes and modes.
        masks: its masks.
        sequences: int64 [sequences, tokens].
        settings: the recipe's `finetune` section.
        teacher: the model that `settings.teacher` names; not changed.
        matmul_dtype: of both models' matmuls; that of each one's weights when absent.
        checkpoint: a file to resume from if it exists, updated during training.
        progress: called with the steps done, the total and the last loss.
        note: called with a sentence when training returns to earlier weights.
    """
    prepared = trainable(model, model, masks, norms=settings.norms, lora=settings.lora, seed=settings.seed)
    with (
        own_checkpointing_off(model), prepared as parameters, _training_mode(model, settings.gradient_checkpointing)
    ):  # fmt: skip
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter in parameters}
        steps = _Steps(model, teacher, sequences, settings, trained, matmul_dtype, note)
        steps.run(checkpoint, progress)
        count = sum(p.numel() for p in trained.values())
        if settings.lora is None:  # of masked weights only the kept ones
            count -= sum(int((~entry.keep).sum()) for entry in masks.values())
    check_trained(model, masks, settings.learning_rate)
    drawn = (len(steps.seen), sequences.shape[1])
    return FinetuneReport(
        settings.taught_by, count, len(steps.losses), drawn, tuple(steps.losses), tuple(steps.held_out)
    )


CHECKPOINT_EVERY = 50
"""Steps between checkpoints."""


class _Steps:
    """The optimizer steps of one fine-tuning run, resumable from a checkpoint.

    Attributes:
        seen: sequences to train on, int64 [sequences, tokens].
        losses: of every step.
        held_out: losses on the held-out sequences, `unseen`.
    """

    def __init__(
        self, model: Any, teacher: Any | None, sequences: Tensor, settings: Finetune,
        trained: Mapping[str, nn.Parameter], matmul_dtype: torch.dtype | None, note: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.model, self.teacher, self.settings, self.trained = model, teacher, settings, trained
        self.matmul_dtype, self.note = matmul_dtype, note
        self.seen, self.unseen = torch.split(sequences, list(split_sequences(len(sequences), settings.held_out)))
        self.device = next(model.parameters()).device
        groups = [{"params": [p], "scale": s} for p, s in zip(trained.values(), scales(trained), strict=True)]
        self.optimizer = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=0.0, fused=True)
        self.losses: list[float] = []
        self.held_out: list[HeldOutLoss] = []
        self.best: dict[str, Tensor] = {}  # the weights of the lowest held-out loss
        self.seconds_before = 0.0  # of training, before an interruption
        self.started = time.perf_counter()

    def run(self, checkpoint: Path | None, progress: Callable[[int, int, float], None] | None) -> None:
        """Do the remaining steps, and end with the best weights."""
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)
        if not self.held_out:
            self._measure_held_out()
        done = fraction_done(self.settings, len(self.losses), self.seconds)
        while done < 1.0:
            rate = learning_rate(self.settings, done) * backed_off([x.loss for x in self.held_out])
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["scale"]
            self.losses.append(self._step(len(self.losses)))
            done, before = fraction_done(self.settings, len(self.losses), self.seconds), done
            if math.floor(before * _CHECKS) < math.floor(done * _CHECKS):
                self._measure_held_out()
            if checkpoint is not None and (len(self.losses) % CHECKPOINT_EVERY == 0 or done == 1.0):
                write_tensors(checkpoint, self._state())
            if progress is not None:
                steps = len(self.losses)
                progress(steps, total_steps(self.settings, steps, done), self.losses[-1])
        self._return_to_best()

    @torch.no_grad()
    def _return_to_best(self) -> None:
        for name, value in self.best.items():
            self.trained[name].copy_(value)

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self.seconds_before + time.perf_counter() - self.started

    def _step(self, number: int) -> float:
        ids = batch(self.seen, number, self.settings).to(self.device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed((self.settings.seed + number) % 2**63)  # for dropout
            loss = self._loss(ids)
            loss.backward()  # type: ignore[no-untyped-call]
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), _LARGEST_NORM))
        value = float(loss.detach())
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise CalibrationError(
                f"step {number + 1} of fine-tuning: the loss is {value} and the norm of its gradient {norm}; "
                f"learning_rate {self.settings.learning_rate:g} is too large, or the pruned model's weights are broken"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value

    @torch.no_grad()
    def _measure_held_out(self) -> None:
        """Measure the loss on the unseen sequences, if there are any, and keep the weights if it is the lowest.

        Otherwise go on from the best weights at a lower rate: a rate that suits one model is too high for another.
        """
        if not len(self.unseen):
            return
        self.model.eval()
        batches = torch.split(self.unseen, min(_HELD_OUT_AT_ONCE, self.settings.batch_size))
        losses = [float(self._loss(ids.to(self.device))) * len(ids) for ids in batches]
        self.model.train()
        loss = math.fsum(losses) / len(self.unseen)
        lowest = min((x.loss for x in self.held_out), default=math.inf)
        self.held_out.append(HeldOutLoss(len(self.losses), loss, self.seconds))
        if loss < lowest:
            self.best = {name: parameter.detach().clone() for name, parameter in self.trained.items()}
        elif self.best:
            self.note(f"held-out loss {loss:.4g}, not below {lowest:.4g}: back to those weights, at a lower rate")
            self._return_to_best()
            self.optimizer.state.clear()  # moments of the steps that are undone

    def _loss(self, batch: Tensor) -> Tensor:
        """Return the loss of sequences [batch, tokens]."""
        # A context per step: narrow copies of the parameters are kept until it exits.
        with matmuls_in(self.matmul_dtype, self.model, self.device, cache=True):
            logits = self.model(batch, use_cache=False).logits  # [batch, tokens, vocabulary]
        if self.teacher is None:
            return next_token_loss(logits, batch)
        with torch.no_grad(), matmuls_in(self.matmul_dtype, self.teacher, self.device, cache=True):
            target = self.teacher(batch, use_cache=False).logits
        return distillation_loss(logits.flatten(0, 1), target.flatten(0, 1))

    def _state(self) -> dict[str, Tensor]:
        """Return the content of a checkpoint: weights, optimizer state, and what was measured so far."""
        measured = [[x.step, x.loss, x.seconds] for x in self.held_out]
        state = {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "held_out": torch.tensor(measured, dtype=torch.float64),
            "seconds": torch.tensor(self.seconds, dtype=torch.float64),
        }
        for name, parameter in self.trained.items():
            state[f"value.{name}"] = parameter.detach().contiguous()
            state |= {f"{kind}.{name}": x.contiguous() for kind, x in self.optimizer.state[parameter].items()}
        return state | {f"best.{name}": value.contiguous() for name, value in self.best.items()}

    @torch.no_grad()
    def _load(self, checkpoint: Path) -> None:
        state = read_tensors(checkpoint)
        try:
            with memory_named(str(checkpoint)):
                self.losses = state.pop("losses").tolist()
                self.held_out = [HeldOutLoss(int(n), loss, s) for n, loss, s in state.pop("held_out").tolist()]
                self.seconds_before = float(state.pop("seconds"))
                for name, parameter in self.trained.items():
                    parameter.copy_(state.pop(f"value.{name}"))
                for key, value in state.items():
                    kind, _, name = key.partition(".")
                    into = self.best if kind == "best" else self.optimizer.state[self.trained[name]]
                    into[name if kind == "best" else kind] = value.to(self.device)
        except (KeyError, RuntimeError) as error:
            raise ArtifactError(f"{checkpoint} is damaged ({error!r}); start over with --restart") from error


@contextmanager
def _training_mode(model: Any, gradient_checkpointing: bool) -> Iterator[None]:
    """Put a model in training mode, which gradient checkpointing in transformers requires; restore it afterwards."""
    training = {module: module.training for module in model.modules()}
    if gradient_checkpointing:
        with quiet_libraries():  # newer versions warn that the method is renamed
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        for module, before in training.items():
            module.training = before


def fraction_done(settings: Finetune, steps: int, seconds: float) -> float:
    """Return the fraction of a training that is done, 1.0 when it is over.

    A training by time is over when the time for half a step does not remain; it has at least one step.
    """
    if settings.minutes is None:
        return steps / settings.total_steps
    limit = 60.0 * settings.minutes
    over = steps > 0 and seconds + seconds / steps / 2 >= limit
    return 1.0 if over else min(seconds / limit, math.nextafter(1.0, 0.0))


def total_steps(settings: Finetune, steps: int, done: float) -> int:
    """Return how many steps a training has; of one by time, an estimate from the fraction that is `done`."""
    if settings.minutes is None:
        return settings.total_steps
    return max(steps, round(steps / done)) if steps else 1


def learning_rate(settings: Finetune, done: float) -> float:
    """Return the learning rate after a fraction of a training: a linear warm-up, then a cosine to zero."""
    if done < WARMUP:
        return settings.learning_rate * (0.1 + 0.9 * done / WARMUP)
    along = (done - WARMUP) / (1.0 - WARMUP)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * along))


def backed_off(losses: Sequence[float]) -> float:
    """Return the factor of the learning rate after held-out losses, in the order in which they were measured."""
    return _BACK_OFF ** sum(not loss < min(losses[:i]) for i, loss in enumerate(losses) if i)  # NaN is no minimum


def split_sequences(sequences: int, held_out: int) -> tuple[int, int]:
    """Return how many sequences to train on and how many to hold out: the wanted number, at most an eighth."""
    unseen = min(held_out, sequences // 8)
    return sequences - unseen, unseen


def batch(sequences: Tensor, step: int, settings: Finetune) -> Tensor:
    """Return the sequences of a step [batch_size, tokens]; each epoch has its own order."""
    drawn = range(step * settings.batch_size, (step + 1) * settings.batch_size)
    orders = {
        epoch: torch.randperm(len(sequences), generator=torch.Generator().manual_seed((settings.seed + epoch) % 2**63))
        for epoch in {i // len(sequences) for i in drawn}
    }
    return sequences[torch.stack([orders[i // len(sequences)][i % len(sequences)] for i in drawn])]


def distillation_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)), the mean over rows (Hinton et al., arXiv 1503.02531, T = 1).

    Args:
        student: logits [n, vocabulary], which receive the gradient.
        teacher: logits [n, vocabulary], constants, on the same device.

    Returns:
        A scalar, at least float32 and non-negative up to rounding. `backward` can be called once.
    """

    def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        # With p and q the teacher's and the student's probabilities, the loss is sum p (log p - log q) and its gradient
        # q - p.
        wanted = targets.to(logits.dtype, copy=True)
        wanted, predicted = wanted.log_softmax(dim=-1), logits.log_softmax(dim=-1)
        p = torch.exp(wanted)
        loss = torch.dot(p.flatten(), wanted.sub_(predicted).flatten())
        return loss, predicted.exp_().sub_(p)

    return _in_chunks(student, teacher, len(student), summed)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of all tokens but the first of each sequence, as `distillation_loss`.

    Args:
        logits: [sequences, tokens, vocabulary].
        ids: int64 [sequences, tokens].
    """
    following = functional.pad(ids[:, 1:], (0, 1), value=_NO_TARGET).flatten()

    def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = logits.requires_grad_()
            loss = functional.cross_entropy(leaf, targets, reduction="sum", ignore_index=_NO_TARGET)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    # Slicing the last token off the logits would copy them.
    return _in_chunks(logits.flatten(0, 1), following, ids.numel() - len(ids), summed)


class _InChunks(torch.autograd.Function):
    """A mean over chunks of rows that computes its gradient in the forward pass and keeps nothing else.

    `summed` takes logits [rows, vocabulary], which it may overwrite, and targets; it returns the summed loss and its
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, count: int,
        summed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor:  # fmt: skip
        at_once = _LOGITS_AT_ONCE if logits.device.type == "cpu" else _LOGITS_AT_ONCE_ON_ACCELERATOR
        rows = max(1, at_once // logits.shape[-1])
        dtype = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        ctx.gradient = torch.empty_like(logits)
        parts = (torch.split(logits.detach(), rows), torch.split(targets, rows), torch.split(ctx.gradient, rows))
        for chunk, target, into in zip(*parts, strict=True):
            loss, gradient = summed(chunk.to(dtype, copy=True), target)
            into.copy_(gradient.div_(count))
            total += loss
        return (total / count).to(dtype)

    @staticmethod
    def backward(ctx: Any, *scales: Tensor) -> tuple[Tensor, None, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(scales[0]), None, None, None


_in_chunks: Callable[..., Tensor] = _InChunks.apply
