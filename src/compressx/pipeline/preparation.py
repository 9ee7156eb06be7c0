"""The checks of a recipe before weights are loaded, and reading its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressx.allocation.units import settled
from compressx.data.documents import check_dataset
from compressx.data.windows import read_calibration
from compressx.evaluation.harness import check_chat_template
from compressx.evaluation.perplexity import Texts, read_texts
from compressx.evaluation.tasks import check_tasks
from compressx.models.architecture import text_config
from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.models.export import check_output
from compressx.models.loading import load_skeleton
from compressx.pipeline.tracking import check_trackers
from compressx.planning.make import make_plan
from compressx.planning.plan import Plan
from compressx.plugins.manager import Plugins
from compressx.recipe.schema import LoadedRecipe, load_recipe, recipe_from_dict
from compressx.runtime.errors import ArtifactError, RecipeError, UnsupportedModelError
from compressx.training.finetune import training_windows


@dataclass(frozen=True)
class Prepared:
    """A checked recipe: the model's checkpoint and the plan for its linears."""

    checkpoint: Checkpoint
    plan: Plan


def loaded_recipe(recipe: LoadedRecipe | Path | str | Mapping[str, Any], overrides: Sequence[str]) -> LoadedRecipe:
    """Load a recipe from a path or mapping; return a loaded one as it is.

    Raises:
        RecipeError: an invalid recipe.
    """
    if isinstance(recipe, Path | str):
        return load_recipe(Path(recipe), overrides)
    if overrides:
        raise RecipeError("overrides need a recipe given as a path")
    return recipe if isinstance(recipe, LoadedRecipe) else recipe_from_dict(dict(recipe))


def prepare(loaded: LoadedRecipe, plugins: Plugins) -> Prepared:
    """Check a recipe as far as possible without loading weights, and plan it."""
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
            f"{loaded.where('output')}: output {recipe.output} would overwrite the input model; name another folder"
        )
    planned = make_plan(loaded, plugins, skeleton)
    with loaded.at("allocation", "target"):
        planned = settled(planned)
    refuse_nothing_held_out(loaded, 1)
    if recipe.track is not None:
        with loaded.at("track"):
            check_trackers(recipe.track)
    _check_finetune(loaded, skeleton)
    if recipe.evaluate is not None and recipe.evaluate.lm_eval is not None:
        with loaded.at("evaluate", "lm_eval", "tasks"):
            check_tasks(recipe.evaluate.lm_eval)
    return Prepared(checkpoint, planned)


@dataclass(frozen=True, eq=False)
class RunTexts:
    """All text of a run, as token ids.

    Attributes:
        calibration: [windows, tokens], or None if the plan needs none.
        training: text to fine-tune on [windows, tokens], or None.
        evaluation: text to evaluate on, or None.
    """

    calibration: Tensor | None
    training: Tensor | None
    evaluation: Texts | None


def read_all(loaded: LoadedRecipe, planned: Plan, tokenizer: Any, *, evaluated: bool = True) -> RunTexts:
    """Read every text of a recipe and check that there is enough of it; evaluation text only if `evaluated`.

    Raises:
        CalibrationError: text that cannot be read, or is too short.
        RecipeError: the tokenizer has not the chat template that is asked for.
    """
    recipe, calibration = loaded.recipe, None
    with loaded.at("calibration"):
        if (settings := recipe.calibration) is not None and planned.needs_calibration:
            calibration = read_calibration(
                settings.dataset, tokenizer, samples=settings.samples, sequence_length=settings.sequence_length,
                seed=settings.seed, bos=settings.bos,
            )  # fmt: skip
    with loaded.at("finetune"):
        training = training_windows(recipe, tokenizer, calibration)
    if recipe.evaluate is not None and recipe.evaluate.lm_eval is not None:
        with loaded.at("evaluate", "lm_eval", "apply_chat_template"):
            check_chat_template(recipe.evaluate.lm_eval, tokenizer)
    with loaded.at("evaluate"):
        evaluation = read_texts(recipe.evaluate, tokenizer) if recipe.evaluate is not None and evaluated else None
    return RunTexts(calibration, training, evaluation)


def _check_finetune(loaded: LoadedRecipe, skeleton: Any) -> None:
    """Refuse fine-tuning without text, with windows longer than the model's context, or with streamed weights."""
    recipe = loaded.recipe
    settings = recipe.finetune
    if settings is None:
        return
    if recipe.model.streaming is True:
        refuse_streamed(loaded)
    if settings.dataset is None and recipe.calibration is None:
        raise RecipeError(
            f"{loaded.where('finetune')}: no text to train on: the recipe has neither calibration nor "
            "finetune.dataset; add one, such as finetune.dataset: wikitext"
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
    """Refuse to fine-tune a model whose weights are streamed from disk.

    Raises:
        RecipeError: the recipe has a `finetune` section.
    """
    if loaded.recipe.finetune is not None:
        given = loaded.recipe.model.streaming
        why = "which finds the model too large for the free memory" if given == "auto" else "which keeps them on disk"
        raise RecipeError(
            f"{loaded.where('finetune')}: fine-tuning needs all weights in memory, and model.streaming is "
            f"{str(given).lower()} at {loaded.where('model', 'streaming')}, {why}; set it to false, or remove finetune"
        )


def refuse_nothing_held_out(loaded: LoadedRecipe, processes: int) -> None:
    """Refuse block reconstruction that would have to evaluate on its training text.

    Raises:
        RecipeError: a process would get one calibration batch or less.
    """
    calibration, settings = loaded.recipe.calibration, loaded.recipe.reconstruct_block
    if calibration is None or settings is None or calibration.samples // processes > calibration.batch_size:
        return
    each = f" for each of {processes} processes" if processes > 1 else ""
    raise RecipeError(
        f"{loaded.where('reconstruct_block')}: no batch is left to hold out: {calibration.samples} calibration windows "
        f"are one batch of {calibration.batch_size}{each}; expected calibration.samples of "
        f"{(calibration.batch_size + 1) * processes} or more, or a smaller calibration.batch_size"
    )


def refuse_uneven_steps(loaded: LoadedRecipe, processes: int) -> None:
    """Refuse a block reconstruction batch size that does not divide evenly among the processes.

    Steps would otherwise be larger, and fewer.

    Raises:
        RecipeError: a step is not a whole number of calibration batches on each process.
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
