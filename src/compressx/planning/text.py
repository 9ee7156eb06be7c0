"""Checks of a recipe's text settings: calibration where it is needed, and window and batch sizes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from compressx.models.architecture import text_config
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import RecipeError


def text_mistakes(loaded: LoadedRecipe, skeleton: nn.Module, needed: bool) -> Iterator[RecipeError]:
    """Yield an error for missing calibration, and for each window or batch size that cannot be used.

    Args:
        loaded: the recipe with its places in the file.
        skeleton: the model; only its config is read.
        needed: whether a pruner observes text or reads sensitivities, which are measured on it.

    Yields:
        Errors with file, line and column: missing calibration, windows longer than the model's positions, training
        steps that are not a whole number of calibration batches.
    """
    recipe = loaded.recipe
    if recipe.calibration is None and recipe.allocation is not None:
        yield RecipeError(
            f"{loaded.where('allocation')}: {recipe.allocation.method} measures {recipe.allocation.measures} on "
            "calibration text, but the recipe has no calibration; add one, such as calibration: {dataset: wikitext, "
            "samples: 32}"
        )
    elif recipe.calibration is None and needed:
        yield RecipeError(
            f"{loaded.where()}: the recipe has no calibration, but its pruners need one; add one, such as "
            "calibration: {dataset: wikitext, samples: 128}"
        )
    elif recipe.calibration is None and recipe.reconstruct_block is not None:
        yield RecipeError(
            f"{loaded.where('reconstruct_block')}: blocks are trained on calibration text, but the recipe has no "
            "calibration; add one, such as calibration: {dataset: wikitext, samples: 128}"
        )
    if recipe.calibration is not None and recipe.reconstruct_block is not None:
        step, batch = recipe.reconstruct_block.batch_size, recipe.calibration.batch_size
        if step % batch:
            yield RecipeError(
                f"{loaded.where('reconstruct_block', 'batch_size')}: a step of {step} windows is not a whole number of "
                f"calibration batches; expected a multiple of calibration.batch_size ({batch})"
            )
    positions = getattr(text_config(skeleton), "max_position_embeddings", None)
    calibration = recipe.calibration
    if calibration is not None and positions is not None and (length := calibration.sequence_length) > positions:
        yield RecipeError(
            f"{loaded.where('calibration', 'sequence_length')}: sequence_length {length} is longer than the model's "
            f"{positions} positions; set it to {positions} or less"
        )
