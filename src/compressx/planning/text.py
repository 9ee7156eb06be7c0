"""Checks of a recipe's text settings: calibration where it is needed, and window and batch sizes."""

from __future__ import annotations

from torch import nn

from compressx.models.architecture import text_config
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import RecipeError


def check_text(loaded: LoadedRecipe, skeleton: nn.Module, needed: bool) -> None:
    """Refuse a recipe that lacks required calibration or has unusable window or batch sizes.

    Args:
        loaded: the recipe with its places in the file.
        skeleton: the model; only its config is read.
        needed: whether a pruner observes text or reads sensitivities, which are measured on it.

    Raises:
        RecipeError: missing calibration, windows longer than the model's positions, or training steps that are not a
            whole number of calibration batches; with file, line and column.
    """
    recipe = loaded.recipe
    if recipe.calibration is None and recipe.allocation is not None and recipe.allocation.measures:
        raise RecipeError(
            f"{loaded.where('allocation')}: {recipe.allocation.method} measures {recipe.allocation.measures} on "
            "calibration text, but the recipe has no calibration; add one, such as calibration: {dataset: wikitext, "
            "samples: 32}"
        )
    if recipe.calibration is None and needed:
        raise RecipeError(f"{loaded.where()}: the recipe has no calibration, but its pruners need one")
    if recipe.calibration is None and recipe.reconstruct_block is not None:
        raise RecipeError(
            f"{loaded.where('reconstruct_block')}: blocks are trained on calibration text, but the recipe has no "
            "calibration; add one, such as calibration: {dataset: wikitext, samples: 128}"
        )
    if recipe.calibration is not None and recipe.reconstruct_block is not None:
        step, batch = recipe.reconstruct_block.batch_size, recipe.calibration.batch_size
        if step % batch:
            raise RecipeError(
                f"{loaded.where('reconstruct_block', 'batch_size')}: a step of {step} windows is not a whole number of "
                f"calibration batches; expected a multiple of calibration.batch_size ({batch})"
            )
    positions = getattr(text_config(skeleton), "max_position_embeddings", None)
    perplexity = recipe.evaluate.token_perplexity if recipe.evaluate is not None else None
    windows = {("calibration",): recipe.calibration, ("evaluate", "token_perplexity"): perplexity}
    for place, settings in windows.items():
        if settings is not None and positions is not None and settings.sequence_length > positions:
            raise RecipeError(
                f"{loaded.where(*place, 'sequence_length')}: sequence_length {settings.sequence_length} is longer than "
                f"the model's {positions} positions"
            )
