"""The most bytes that each stage of pruning holds on a pretended accelerator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any
from unittest.mock import patch

from tests.accelerator import Record, pretended_accelerator

from compressx.blocks import prune, select
from compressx.blocks.fisher import fisher_diagonal
from compressx.pipeline import pruning
from compressx.pipeline.run import run

PASSES = "prune: passes and statistics"


def peaks(written: dict[str, Any]) -> dict[str, float]:
    """Run a recipe on the accelerator; return the peaks by the names that stages of an estimate have."""
    found: dict[str, float] = {}
    with pretended_accelerator() as device:
        gc.collect()
        with (
            patch.object(select, "ask", _measured(device, found, select.ask, lambda plugin: f"prune: {plugin}")),
            patch.object(prune._Pruning, "inside", _measured(device, found, prune._Pruning.inside, lambda _: PASSES)),
            patch.object(pruning, "fisher_diagonal", _calibrating(device, found)),
        ):
            run(written, device="cuda")
    return found


def _calibrating(device: Record, found: dict[str, float]) -> Callable[..., Any]:
    """Return a function that also notes the peak while mean squared gradients are measured."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        device.forget_peak()
        result = fisher_diagonal(*args, **kwargs)
        found["calibrate"] = float(device.peak_bytes)
        device.forget_peak()
        return result

    return measured


def _measured(
    device: Record, found: dict[str, float], call: Callable[..., Any], name_of: Callable[[Any], str]
) -> Callable[..., Any]:
    """Return a function that also notes the peak while it runs, and the one before it, under their names."""

    def note(name: str) -> None:
        found[name] = max(found.get(name, 0.0), float(device.peak_bytes))
        device.forget_peak()

    @wraps(call)
    def measured(*args: Any, **kwargs: Any) -> Any:
        name = name_of(args[0])
        if name == PASSES:
            device.forget_peak()
        else:
            note(PASSES)
        result = call(*args, **kwargs)
        note(name)
        return result

    return measured
