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
    if recipe.calibration is None and needed:
        yield RecipeError(
            f"{loaded.where()}: the recipe has no calibration, but its pruners need one; add one, such as "
            "calibration: {dataset: wikitext, samples: 128}"
        )
    positions = getattr(text_config(skeleton), "max_position_embeddings", None)
    calibration = recipe.calibration
    if calibration is not None and positions is not None and (length := calibration.sequence_length) > positions:
        yield RecipeError(
            f"{loaded.where('calibration', 'sequence_length')}: sequence_length {length} is longer than the model's "
            f"{positions} positions; set it to {positions} or less"
        )
