"""The advice that goes with memory that ran out: which keys of the recipe to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from compressx.recipe.schema import Recipe
from compressx.runtime.errors import OutOfMemoryError, memory_named
from compressx.stages.state import RunState


@contextlib.contextmanager
def memory_advised(state: RunState, *, streams: bool = True) -> Iterator[None]:
    """Name the stage in the error of memory that ran out, and the keys of the recipe to change.

    Args:
        state: of the run.
        streams: whether the model can be streamed from disk.

    Raises:
        OutOfMemoryError: in place of the errors of torch, numpy and Python.
    """
    try:
        with memory_named("an array"):
            yield
    except OutOfMemoryError as error:
        advice = _advice(state.recipe, state.timing.stage, streams=streams)
        raise OutOfMemoryError(f"{state.timing.stage}: {error}; {advice}") from error


def _advice(recipe: Recipe, stage: str, *, streams: bool) -> str:
    """Say which keys of the recipe decide the memory of a stage."""
    lower: dict[str, object] = {}
    change: list[str] = []
    tuned, source = recipe.finetune, recipe.model
    if stage == "finetune" and tuned is not None:
        lower = _lower(tuned, "finetune", "batch_size", "sequence_length")
        lower |= {} if tuned.draw else _lower(recipe.calibration, "calibration", "sequence_length")
        change += [] if tuned.lora is not None else ["finetune.lora: {rank: 16}"]
        change += [] if tuned.gradient_checkpointing else ["finetune.gradient_checkpointing: true"]
        change += [] if tuned.teacher == "none" else ["finetune.teacher: none"]
    elif stage.startswith("evaluate"):
        for name, options in (recipe.evaluate or {}).items():
            lower |= _lower(options, f"evaluate.{name}", "batch_size", "sequence_length")
    elif stage in {"calibrate", "allocate", "prune"} and recipe.calibration is not None:
        lower = _lower(recipe.calibration, "calibration", "batch_size", "samples", "sequence_length")
        change += [] if recipe.calibration.memory_limit else ["calibration.memory_limit: 4GB"]
    gguf = source.package is not None or (source.path is not None and source.path.suffix == ".gguf")
    if streams and tuned is None and source.streaming is not True and not gguf:
        change.append("model.streaming: true")
    told = [*(f"lower {key} ({value})" for key, value in lower.items()), *(f"set {key}" for key in change)]
    return ", or ".join(told) if told else "free some memory, or use a machine with more"


def _lower(settings: object, section: str, *names: str) -> dict[str, object]:
    """Return the values of a section's keys that can be lowered."""
    values = {f"{section}.{name}": getattr(settings, name, None) for name in names}
    return {key: value for key, value in values.items() if value not in {None, 1}}
