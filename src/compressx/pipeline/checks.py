"""Checks of a recipe's parts before weights are loaded: output, disk space, text, tasks, model and tokenizer."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressx.data.chat import require_template
from compressx.data.documents import check_dataset, local_files
from compressx.models.architecture import find_blocks, text_config
from compressx.models.checkpoint import Checkpoint, find_checkpoint, keep_settings
from compressx.models.export import check_output, not_written, room_for, save_model
from compressx.models.generate import first_token
from compressx.models.loading import dtype_of, load_skeleton, load_tokenizer
from compressx.pipeline.journal import differing
from compressx.pipeline.sizes import disk_bytes
from compressx.planning.plan import Plan
from compressx.recipe.document import Step, path_text
from compressx.recipe.parts import Parts
from compressx.recipe.schema import LoadedRecipe, Recipe, load_recipe
from compressx.recipe.sources import ModelSource
from compressx.runtime.errors import ArtifactError, CalibrationError, CompressxError, Mistakes, UnsupportedModelError
from compressx.runtime.ranks import refuse_few_windows


@dataclass(frozen=True, eq=False)
class FoundModel:
    """A model without its weights.

    Attributes:
        checkpoint: where its weights are.
        skeleton: the transformers model on the meta device.
        tokenizer: its tokenizer.
    """

    checkpoint: Checkpoint
    skeleton: Any
    tokenizer: Any

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the weights are loaded in."""
        return dtype_of(self.checkpoint, self.skeleton.config)


def check_parts(parts: Parts, mistakes: Mistakes, *, replace: bool = False) -> FoundModel | None:
    """Check the output folder, the datasets and the model, each by itself.

    Returns:
        The model, or None if there is none or it has a mistake.
    """
    if parts.output is not None:
        with mistakes.collected(), parts.at("output"):
            check_output(parts.output, replace=replace)
    chats = check_datasets(parts, mistakes)
    if parts.model is None:
        return None
    found = None
    with mistakes.collected(), parts.at("model"):
        checkpoint = find_checkpoint(parts.model)
        skeleton = load_skeleton(checkpoint)
        find_blocks(skeleton)
        found = FoundModel(checkpoint, skeleton, None)
    if found is not None:
        with mistakes.collected(), parts.at("model"):
            found = dataclasses.replace(found, tokenizer=load_tokenizer(found.checkpoint))
            check_tokenizer(parts, found.skeleton, found.tokenizer, chats, mistakes)
            check_saving(found)
    return found


def check_saving(found: FoundModel) -> None:
    """Save everything but weights to a temporary folder, as the end of a run does.

    Raises:
        ArtifactError: values that transformers loads and does not save, or a file that cannot be read.
    """
    model = copy.copy(found.skeleton)
    model.config = copy.deepcopy(model.config)  # saving changes it
    with tempfile.TemporaryDirectory(prefix="compressx-") as folder:
        save_model(model, found.tokenizer, Path(folder) / "model", {})
        keep_settings(found.checkpoint, Path(folder) / "model")


def check_datasets(parts: Parts, mistakes: Mistakes) -> list[tuple[Step, ...]]:
    """Check the datasets without reading them; return the places of those known to hold chats."""
    chats = []
    for place, dataset in parts.datasets.items():
        with mistakes.collected(), parts.at(*place):
            if check_dataset(dataset):
                chats.append(place)
    return chats


def check_tokenizer(
    parts: Parts, skeleton: Any, tokenizer: Any, chats: Sequence[tuple[Step, ...]], mistakes: Mistakes
) -> None:
    """Refuse chats without a chat template, and generated text without a token to begin with."""
    for place, dataset in parts.datasets.items():
        with mistakes.collected(), parts.at(*place):
            if place in chats:
                require_template(tokenizer)
            if dataset.generate is not None:
                first_token(tokenizer, skeleton)


def check_teacher(source: ModelSource, tokens: int | None, skeleton: Any) -> None:
    """Refuse a teacher whose predictions cannot be compared with the model's.

    Raises:
        CompressxError: no such model.
        UnsupportedModelError: another vocabulary, or too few positions.
    """
    teacher = load_skeleton(find_checkpoint(source))
    positions = getattr(text_config(teacher), "max_position_embeddings", None)
    if tokens is not None and positions is not None and tokens > positions:
        raise UnsupportedModelError(
            f"the teacher has {positions} positions, and windows have {tokens} tokens; lower sequence_length, or "
            "choose another teacher"
        )
    given, own = (text_config(model).vocab_size for model in (teacher, skeleton))
    if given != own:
        raise UnsupportedModelError(
            f"the teacher has a vocabulary of {given} tokens and the model one of {own}; expected the same vocabulary"
        )


def refuse_overwriting(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Refuse an output folder that holds the input model, packed or not, the teacher of fine-tuning, or text.

    Raises:
        ArtifactError: names the folder.
    """
    held = [("input model", Path(checkpoint.location)), ("input model", recipe.model.path)]
    if recipe.finetune is not None and isinstance(recipe.finetune.teacher, ModelSource):
        held.append(("teacher of finetune", recipe.finetune.teacher.path))
    for place, dataset in recipe.datasets().items():
        with contextlib.suppress(CalibrationError):  # which `check_datasets` reports
            held += [(f"text of {path_text(place)}", file) for file in local_files(dataset)]
    output = recipe.output.expanduser().resolve()
    for what, path in held:
        if path is not None and (model := path.expanduser()).exists() and model.resolve().is_relative_to(output):
            raise ArtifactError(f"output {recipe.output} would overwrite the {what}; name another folder")


def is_finished(
    loaded: LoadedRecipe, advice: str = "choose another output, or replace it with --replace", *, replace: bool = False
) -> bool:
    """Return whether the output folder holds a finished run of a recipe.

    Raises:
        ArtifactError: it holds one of another recipe, and not `replace`; the message ends with the advice.
    """
    changed = _changed(loaded)
    if changed and not replace:
        raise ArtifactError(f"{loaded.recipe.output} was written by another recipe ({'; '.join(changed)}); {advice}")
    return changed == []


def earlier_run(loaded: LoadedRecipe) -> str:
    """Describe the finished run that a run of a recipe replaces, and what else is in its folder; empty without one."""
    if (changed := _changed(loaded)) is None:
        return ""
    whose = f"of another recipe ({'; '.join(changed)})" if changed else "of the same recipe"
    with_it = f", and with it {others}" if (others := not_written(loaded.recipe.output)) else ""
    return f"the finished run in {loaded.recipe.output}, {whose}{with_it}"


def _changed(loaded: LoadedRecipe) -> list[str] | None:
    """Name values, three at most, in which the recipe of the finished run in the output differs; None without one."""
    recipe = loaded.recipe
    written = recipe.output.expanduser() / "recipe.yaml"
    if not written.is_file():
        return None
    # `output` may be written differently there, such as a relative path; `auto` is there as what was taken.
    known = {"output": recipe.output} | ({"compute_dtype": "auto"} if recipe.compute_dtype == "auto" else {})
    try:
        earlier = load_recipe(written).recipe.model_copy(update=known)
    except CompressxError as error:
        return [str(error).partition("\n")[0]]
    was, now = (x.model_dump(mode="json", by_alias=True, exclude_none=True) for x in (earlier, recipe))
    lines = [line for key in {**now, **was} for line in differing(key, was.get(key), now.get(key))]
    return [*lines[:3], f"and {len(lines) - 3} more"] if len(lines) > 3 else lines


def check_shares(loaded: LoadedRecipe, planned: Plan, processes: int) -> None:
    """Refuse fewer calibration windows than processes, if the plan calibrates."""
    calibration = loaded.recipe.calibration
    if planned.needs_calibration and calibration is not None:
        with loaded.at("calibration"):
            refuse_few_windows(calibration.samples, processes)


def check_space(loaded: LoadedRecipe, found: FoundModel, planned: Plan) -> None:
    """Refuse an output for which the disk has no room. What earlier runs left for the same output counts as free.

    Raises:
        ArtifactError: names all sizes in bytes.
    """
    throughout, beside = disk_bytes(loaded.recipe, planned, found.skeleton, found.dtype.itemsize)
    needed, output = sum(throughout.values()) + max(beside.values()), loaded.recipe.output
    folder, free = room_for(output)
    if free < needed:
        listed = ", ".join(f"{name} {size}" for name, size in throughout.items())
        *some, last = (f"{name} {size}" for name, size in beside.items())
        raise ArtifactError(
            f"output {output} needs {needed} bytes: {listed}, and the largest of {', '.join(some)}, and {last}; "
            f"{folder} has {free} bytes free. Free some space there, or choose another disk"
        )
