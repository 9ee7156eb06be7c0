"""The stages that train: each block's kept weights as it is pruned, and the whole model's afterwards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from compressx.api.record import FinetuneReport, RunReport
from compressx.data.windows import fingerprint
from compressx.models.access import InMemory, weights_fingerprint
from compressx.models.architecture import architecture_of, find_blocks, positions_of, text_config
from compressx.models.blockwise import skipped
from compressx.models.checkpoint import find_checkpoint
from compressx.models.export import refuse_overwriting
from compressx.models.loading import load_skeleton, vocabularies_differ
from compressx.models.streaming import free_memory, open_model
from compressx.planning.plan import Plan
from compressx.planning.targets import matching_planned
from compressx.recipe.schema import LoadedRecipe, Recipe
from compressx.recipe.sections import Finetune
from compressx.recipe.sources import ModelSource
from compressx.report.section import Column, Section, counted, number_of, table
from compressx.runtime.errors import CompressxError, Mistakes, RecipeError, UnsupportedModelError
from compressx.stages.state import RunState, Stage
from compressx.training.finetune import finetune, split_sequences, total_steps

_SECONDS = Column("seconds", ".1f")

_WIDE = 4
"""Bytes of a float32: weights are trained in it, whatever their dtype."""

LESS_MEMORY = {
    "finetune": "lower finetune.batch_size or sequence_length, or set finetune.lora: {rank: 16}, "
    "finetune.gradient_checkpointing: true or finetune.teacher: none"
}
"""What takes less memory, by the name of the stage."""


class BlockReconstruction(Stage):
    """Train each block's kept weights. The work is done block by block, by `blocks.prune.prune_model`."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse training without text, without a block, or with steps that cannot be shared."""
        settings, text = state.recipe.reconstruct_block, state.recipe.calibration
        if settings is None:
            return
        count = state.processes
        samples, size = (0, 0) if text is None else (text.samples, text.batch_size)
        step, each = size * count, f" for each of {count} processes" if count > 1 else ""
        for wrong, key, why in (
            (plan is not None and text is None, (),
             "blocks are trained on calibration text, but the recipe has no calibration; add one, such as "
             "calibration: {dataset: wikitext, samples: 128}"),
            (plan is not None and not any(linear.block for linear in plan.linears), (),
             "it has no effect: all linears that the rules match are outside the decoder blocks; leave it out"),
            (text is not None and samples // count <= size, (),
             f"no batch is left to hold out: {samples} calibration sequences are one batch of {size}{each}; expected "
             f"calibration.samples of {step + count} or more, or a smaller calibration.batch_size"),
            (text is not None and settings.batch_size % step, ("batch_size",),
             f"a step of {settings.batch_size} sequences is no whole number of calibration batches of {size}{each}; "
             f"expected a multiple of {step}, or a smaller calibration.batch_size"),
        ):  # fmt: skip
            if wrong:
                mistakes.add(RecipeError(f"{state.loaded.where('reconstruct_block', *key)}: {why}"))

    def sentences(self, report: RunReport) -> Iterator[str]:
        """Say that the blocks were trained."""
        if any(block.reconstruction is not None for block in report.blocks):
            yield "After it was pruned, each block's kept weights were trained towards the dense block's output."

    def sections(self, report: RunReport) -> Iterator[Section]:
        """Yield what training did to the error of each block's output."""
        rows = [
            (number_of(block), x.before, x.after, f"{x.history.index(x.after)} of {len(x.history) - 1}", x.seconds)
            for block in report.blocks
            if (x := block.reconstruction) is not None
        ]
        if rows:
            before, after = Column("before", ".4g"), Column("after", ".4g")
            yield Section(
                "Block reconstruction",
                "Squared relative error of each block's output on calibration text that was held out, before and "
                "after its kept weights were trained: what the pruned blocks give against what the dense ones gave, "
                "channels counting as the model's loss reacts to them, the mean over tokens.",
                table(["block", before, after, Column("best pass", "s"), _SECONDS], rows),
                brief=counted(rows, "block"),
            )


class FineTuning(Stage):
    """Train the kept weights of the whole model, or adapters, with the masks held."""

    def check(self, state: RunState, plan: Plan | None, mistakes: Mistakes) -> None:
        """Refuse training without text or PEFT, a teacher that does not fit, and what the memory cannot hold."""
        loaded, settings, skeleton = state.loaded, state.recipe.finetune, state.skeleton
        if settings is None or skeleton is None:
            return
        mistakes.add(*_mistakes(loaded, settings, skeleton))
        if isinstance(settings.teacher, ModelSource):
            text = settings.draw or state.recipe.calibration
            if state.checkpoint is not None:  # a model in memory has no output
                with mistakes.collected(), loaded.at("output"):
                    refuse_overwriting(state.recipe.output, "teacher of finetune", settings.teacher.path)
            with mistakes.collected(), loaded.at("finetune", "teacher"):
                _check_teacher(settings.teacher, 0 if text is None else text.sequence_length, skeleton, state.tokenizer)
        if plan is not None:
            with mistakes.collected():
                _check_adapters(loaded, settings, skeleton, [linear.name for linear in plan.linears])
        if plan is not None and state.measured:
            with mistakes.collected():
                _refuse_large_finetuning(state, settings, plan)

    def run(self, state: RunState) -> None:
        """Train, from the checkpoint of an interrupted run if there is one."""
        settings, sequences = state.recipe.finetune, state.training
        if settings is None or sequences is None:
            return

        def progress(done: int, total: int, loss: float) -> None:
            state.report_progress("finetune", done, total, f"loss {loss:.4g}")

        state.report_progress("finetune", 0, total_steps(settings, 0, 0.0))
        with state.loaded.at("finetune"):
            teacher = state.dense(False).model if settings.teacher == "dense" else None
            if isinstance(settings.teacher, ModelSource):
                teacher = open_model(find_checkpoint(settings.teacher), False, state.device).model
            checkpoint = None if state.folder is None else _checkpoint(state, settings, sequences, teacher)
            model = state.access.model
            blocks = find_blocks(model)
            with skipped({fqn: blocks[fqn] for fqn in state.plan.dropped}):  # they would take as long as the others
                state.results["finetune"] = finetune(
                    model, state.store.masks(), sequences, settings, teacher=teacher, matmul_dtype=state.matmul_dtype,
                    checkpoint=checkpoint, progress=progress, note=state.note,
                )  # fmt: skip

    def sentences(self, report: RunReport) -> Iterator[str]:
        """Say how the model was trained."""
        if report.finetune is not None:
            yield f"The kept weights were fine-tuned with masks held: {_summary(report.finetune)}"

    def sections(self, report: RunReport) -> Iterator[Section]:
        """Yield the loss on held-out text."""
        if (tuned := report.finetune) is not None:
            rows = [(x.step, x.seconds / 60, x.loss) for x in tuned.held_out]
            columns = [Column("steps", "d"), Column("minutes", ".1f"), Column("held-out loss", ".4g")]
            yield Section("Fine-tuning", _summary(tuned), table(columns, rows))


def _summary(tuned: FinetuneReport) -> str:
    """Return how a model was fine-tuned, in one sentence."""
    count, tokens = tuned.windows
    taught_by = "the dense model" if tuned.teacher == "dense" else tuned.teacher
    loss = "next-token loss" if tuned.teacher == "none" else f"divergence from {taught_by}"
    first, last = tuned.losses[0], tuned.losses[-1]
    measured = f"{first:.4g} at the first, {last:.4g} at the last"
    if tuned.held_out:
        kept = min(tuned.held_out, key=lambda x: x.loss)
        measured = f"on held-out sequences {tuned.held_out[0].loss:.4g} before, {kept.loss:.4g} after {kept.step} steps"
    return (
        f"{tuned.steps} steps on {count} sequences of {tokens} tokens, {tuned.trained / 1e6:.3g} M numbers trained: "
        f"{loss} {measured}."
    )


def checkpoint_bytes(recipe: Recipe, planned: Plan) -> int:
    """Return the size of a checkpoint of fine-tuning: values, two moments and the best values; 0 without."""
    return 0 if recipe.finetune is None else 4 * _WIDE * _trained_weights(recipe.finetune, planned)


def _trained_weights(settings: Finetune, planned: Plan) -> int:
    """Count the weights that fine-tuning trains, dropped ones included; without gains of norms and biases."""
    if settings.lora is None:
        return sum(x.weights for x in planned.linears)
    adapted = [x for x in planned.linears if any(fnmatchcase(x.name, target) for target in settings.lora.targets)]
    return settings.lora.rank * sum(sum(x.shape) for x in adapted)


def finetuning_bytes(state: RunState, settings: Finetune, planned: Plan) -> dict[str, int]:
    """Return the bytes that fine-tuning takes at the same time, by part; a lower bound, without most activations."""
    own, itemsize, text = _count(state.skeleton), state.dtype.itemsize, settings.draw or state.recipe.calibration
    samples, length = (0, 0) if text is None else (text.samples, text.sequence_length)
    trained, learns = _trained_weights(settings, planned), settings.teacher != "none"
    teacher = state.skeleton
    if isinstance(settings.teacher, ModelSource):
        teacher = load_skeleton(find_checkpoint(settings.teacher))
    others = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1 if state.device.type == "cpu" else 0
    logits = settings.batch_size * length * text_config(state.skeleton).vocab_size
    parts = {
        "weights": _WIDE * (own + (0 if settings.lora is None else trained)),
        "gradients": _WIDE * trained,
        "moments": 2 * _WIDE * trained,
        "best weights": _WIDE * trained if split_sequences(samples, settings.held_out)[1] else 0,
        "masks": sum(x.weights for x in planned.linears),
        "teacher": itemsize * _count(teacher) if learns else 0,
        "logits": 2 * logits * (3 if learns else 2),  # both models' and their gradient, of two bytes each or more
        "models of the other processes": others * own * itemsize,
    }
    return {name: size for name, size in parts.items() if size}


def _refuse_large_finetuning(state: RunState, settings: Finetune, planned: Plan) -> None:
    """Refuse fine-tuning that cannot fit in the free memory, before anything is pruned."""
    parts, free = finetuning_bytes(state, settings, planned), free_memory(state.device)
    if state.checkpoint is None:  # the model is in memory already
        free += _count(state.skeleton) * state.dtype.itemsize
    if (total := sum(parts.values())) > free:
        by_part = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items())
        raise RecipeError(
            f"{state.loaded.where('finetune')}: fine-tuning needs at least {_gb(total)} of memory ({by_part}), but "
            f"{state.device} has {_gb(free)}; set finetune.lora: {{rank: 16}} or finetune.teacher: none, lower "
            "finetune.batch_size, or remove finetune"
        )


def _count(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _checkpoint(state: RunState, settings: Finetune, sequences: torch.Tensor, teacher: Any | None) -> Path:
    """Return the file for a training's checkpoint, and remove those of other trainings of the same pruned model.

    The dense model is the same for all of them, but another teacher may have changed where it is.
    """
    chosen = settings.model_dump_json(exclude={"dataset", "samples", "sequence_length", "bos"})
    taught = weights_fingerprint(InMemory(teacher)) if isinstance(settings.teacher, ModelSource) else ""
    name = hashlib.sha256(f"{chosen} {fingerprint(sequences)} {taught} {state.matmul_dtype}".encode()).hexdigest()[:16]
    checkpoint = state.store.blocks / f"finetune-{name}.safetensors"
    for other in {*state.store.blocks.glob("finetune-*.safetensors")} - {checkpoint}:
        other.unlink()
    return checkpoint


def _mistakes(loaded: LoadedRecipe, settings: Finetune, skeleton: Any) -> Iterator[CompressxError]:
    """Yield an error for fine-tuning without text or PEFT, and for one that the model does not support."""
    draw, length = settings.draw, 0 if settings.draw is None else settings.draw.sequence_length
    positions = positions_of(skeleton)
    for wrong, key, kind, why in (
        (draw is None and loaded.recipe.calibration is None, (), RecipeError,
         "no text to train on: the recipe has neither calibration nor finetune.dataset; add one, such as "
         "finetune.dataset: wikitext"),
        (settings.lora is not None and find_spec("peft") is None, ("lora",), RecipeError,
         "lora needs PEFT, which is not installed; pip install peft, or remove lora to train the weights themselves"),
        (settings.gradient_checkpointing and not skeleton.supports_gradient_checkpointing, (), UnsupportedModelError,
         f"{type(skeleton).__name__} does not support gradient checkpointing; set finetune.gradient_checkpointing: "
         "false, which takes more memory"),
        (length > positions, ("sequence_length",), RecipeError,
         f"sequence_length {length} is longer than the model's {positions} positions; set it to {positions} or less"),
    ):  # fmt: skip
        if wrong:
            yield kind(f"{loaded.where('finetune', *key)}: {why}")


def _check_teacher(source: ModelSource, tokens: int, skeleton: Any, tokenizer: Any) -> None:
    """Refuse a teacher whose predictions cannot be compared with the model's."""
    found = load_skeleton(checkpoint := find_checkpoint(source))
    wrong = vocabularies_differ(checkpoint, found, skeleton, tokenizer)
    if tokens > (positions := positions_of(found)):
        wrong = f"{positions} positions, and sequences have {tokens} tokens; lower sequence_length, or choose another"
    if wrong:
        raise UnsupportedModelError(f"the teacher has {wrong}")


def _check_adapters(loaded: LoadedRecipe, settings: Finetune, skeleton: Any, planned: Sequence[str]) -> None:
    """Refuse a glob of `lora.targets` that matches no pruned linear, or fused experts."""
    linears = architecture_of(skeleton).linears
    for index, target in enumerate(() if settings.lora is None else settings.lora.targets):
        with loaded.at("finetune", "lora", "targets", index):
            for name in matching_planned(target, planned):
                if name in linears and linears[name].expert is not None:
                    raise RecipeError(
                        f"{target!r} matches {name}, one of several experts in one parameter, which cannot have an "
                        'adapter; expected targets without experts, such as "*.q_proj", or no lora'
                    )
