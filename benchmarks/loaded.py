"""Load models of benchmarks by hub id, folder, or `.gguf` file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressx.models.checkpoint import Checkpoint, find_checkpoint
from compressx.recipe.sources import ModelSource


def source(model: str) -> dict[str, str]:
    """Return the `model` section of a recipe."""
    return {"path": model} if Path(model).exists() else {"id": model}


def checkpoint(model: str, dtype: str = "float32") -> Checkpoint:
    """Find a model's checkpoint, to be loaded in a dtype."""
    return find_checkpoint(ModelSource.model_validate({**source(model), "dtype": dtype}))


def load(model: str) -> tuple[Any, Any]:
    """Load a model in float32 and its tokenizer."""
    from compressx.models.loading import load_model, load_tokenizer

    found = checkpoint(model)
    return load_model(found), load_tokenizer(found)
