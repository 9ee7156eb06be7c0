"""Everything about a recipe that can be found wrong before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressx.allocation.units import settled
from compressx.data.documents import check_dataset
from compressx.data.windows import read_calibration
from compressx.evaluation.harness import check_tasks
from compressx.evaluation.perplexity import Texts, read_texts
from compressx.models.architecture import text_config
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.export import check_output
from compressx.models.loading import load_skeleton
from compressx.planning.make import make_plan
from compressx.planning.plan import Plan
from compressx.plugins.manager import Plugins
from compressx.recipe.schema import LoadedRecipe, load_recipe, recipe_from_dict
from compressx.runtime.errors import ArtifactError, RecipeError, UnsupportedModelError
from compressx.training.finetune import training_windows


@dataclass(frozen=True)
class Prepared:
    """What a checked recipe comes to: a model that was found, and what happens to each of its linears."""

    checkpoint: Checkpoint
    plan: Plan


def loaded_recipe(recipe: LoadedRecipe | Path | str | Mapping[str, Any], overrides: Sequence[str]) -> LoadedRecipe:
    """Read and check a recipe that is not read yet.

    Raises:
        RecipeError: what is wrong with it.
    """
    if isinstance(recipe, Path | str):
        return load_recipe(Path(recipe), overrides)
    if overrides:
        raise RecipeError("overrides only go with the path of a recipe")
    return recipe if isinstance(recipe, LoadedRecipe) else recipe_from_dict(dict(recipe))


def prepare(loaded: LoadedRecipe, plugins: Plugins) -> Prepared:
    """Find every mistake that can be found before weights are loaded."""
    recipe = loaded.recipe
    with loaded.at("output"):
        check_output(recipe.output)
    for place, dataset in recipe.datasets().items():
        with loaded.at(*place):
            check_dataset(dataset)
    with loaded.at("model"):
        checkpoint = find_checkpoint(recipe.model)
        skeleton = load_skeleton(checkpoint)
    output = recipe.output.expanduser().resolve()
    if (checkpoint_path := Path(checkpoint.location)).exists() and checkpoint_path.resolve().is_relative_to(output):
        raise ArtifactError(
            f"{loaded.where('output')}: output {recipe.output} would replace the model that it is made from; "
            "name another folder"
        )
    planned = make_plan(loaded, plugins, skeleton)
    with loaded.at("allocation", "target"):
        planned = settled(planned)
    refuse_nothing_held_out(loaded, 1)
    _check_finetune(loaded, skeleton)
    if recipe.evaluate is not None and recipe.evaluate.lm_eval is not None:
        with loaded.at("evaluate", "lm_eval", "tasks"):
            check_tasks(recipe.evaluate.lm_eval)
    return Prepared(checkpoint, planned)


@dataclass(frozen=True, eq=False)
class RunTexts:
    """All text of a run, as token ids.

    Attributes:
        calibration: [windows, tokens], if the plan needs any.
        training: what is fine-tuned on, if the model is.
        evaluation: what is evaluated on, if anything is.
    """

    calibration: Tensor | None
    training: Tensor | None
    evaluation: Texts | None


def read_all(loaded: LoadedRecipe, planned: Plan, tokenizer: Any, *, evaluated: bool = True) -> RunTexts:
    """Read and count the windows of every text that a recipe names; of evaluation only where it is `evaluated`.

    Raises:
        CalibrationError: text that cannot be had, or is too short.
    """
    recipe, calibration = loaded.recipe, None
    with loaded.at("calibration"):
        if (its := recipe.calibration) is not None and planned.needs_calibration:
            calibration = read_calibration(
                its.dataset, tokenizer, samples=its.samples, sequence_length=its.sequence_length, seed=its.seed,
                bos=its.bos,
            )  # fmt: skip
    with loaded.at("finetune"):
        training = training_windows(recipe, tokenizer, calibration)
    with loaded.at("evaluate"):
        evaluation = read_texts(recipe.evaluate, tokenizer) if recipe.evaluate is not None and evaluated else None
    return RunTexts(calibration, training, evaluation)


def _check_finetune(loaded: LoadedRecipe, skeleton: Any) -> None:
    """Refuse fine-tuning without text, with windows longer than the model's positions, or of a model left on disk."""
    recipe = loaded.recipe
    settings = recipe.finetune
    if settings is None:
        return
    if recipe.model.streaming is True:
        refuse_streamed(loaded)
    if settings.dataset is None and recipe.calibration is None:
        raise RecipeError(
            f"{loaded.where('finetune')}: there is no text to train on: the recipe has no calibration, and finetune "
            "no dataset; add one of them, such as finetune.dataset: wikitext"
        )
    if settings.gradient_checkpointing and not skeleton.supports_gradient_checkpointing:
        raise UnsupportedModelError(
            f"{loaded.where('finetune')}: {type(skeleton).__name__} does not support gradient checkpointing; set "
            "finetune.gradient_checkpointing: false, which takes more memory"
        )
    positions = getattr(text_config(skeleton), "max_position_embeddings", None)
    if settings.dataset is not None and positions is not None and settings.window > positions:
        raise RecipeError(
            f"{loaded.where('finetune', 'sequence_length')}: sequence_length {settings.window} is longer than the "
            f"model's {positions} positions"
        )


def refuse_streamed(loaded: LoadedRecipe) -> None:
    """Refuse to fine-tune a model whose weights stay on disk.

    Raises:
        RecipeError: the recipe has a `finetune` section.
    """
    if loaded.recipe.finetune is not None:
        given = loaded.recipe.model.streaming
        why = "which finds it too large for the free memory" if given == "auto" else "which leaves them on disk"
        raise RecipeError(
            f"{loaded.where('finetune')}: fine-tuning needs all weights in memory, and model.streaming is "
            f"{str(given).lower()} at {loaded.where('model', 'streaming')}, {why}; set it to false, or drop finetune"
        )


def refuse_nothing_held_out(loaded: LoadedRecipe, processes: int) -> None:
    """Refuse block reconstruction that would be judged by the text that it learns from.

    Raises:
        RecipeError: one batch of calibration text, or less, for some process.
    """
    calibration, settings = loaded.recipe.calibration, loaded.recipe.reconstruct_block
    if calibration is None or settings is None or calibration.samples // processes > calibration.batch_size:
        return
    each = f" for each of {processes} processes" if processes > 1 else ""
    raise RecipeError(
        f"{loaded.where('reconstruct_block')}: no batch could be held out: {calibration.samples} calibration windows "
        f"are one batch of {calibration.batch_size}{each}; expected calibration.samples of "
        f"{(calibration.batch_size + 1) * processes} or more, or a smaller calibration.batch_size"
    )


def refuse_uneven_steps(loaded: LoadedRecipe, processes: int) -> None:
    """Refuse steps of block reconstruction that so many processes cannot share: they would be larger, and fewer.

    Raises:
        RecipeError: a step that is no whole number of calibration batches on each process.
    """
    calibration, settings = loaded.recipe.calibration, loaded.recipe.reconstruct_block
    if calibration is None or settings is None or settings.batch_size % (calibration.batch_size * processes) == 0:
        return
    smaller, rest = divmod(settings.batch_size, processes)
    raise RecipeError(
        f"{loaded.where('reconstruct_block', 'batch_size')}: a step of {settings.batch_size} windows cannot be shared "
        f"by {processes} processes in calibration batches of {calibration.batch_size}; expected a multiple of "
        f"{calibration.batch_size * processes}" + ("" if rest else f", or calibration.batch_size: {smaller}")
    )
