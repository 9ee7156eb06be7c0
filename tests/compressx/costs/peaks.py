"""The most bytes that each stage of pruning holds on a pretended accelerator."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from compressx.blocks import prune, select
from compressx.pipeline.run import run
from compressx.testing import pretended_accelerator
from compressx.testing.accelerator.counts import Record


def peaks(written: dict[str, Any]) -> dict[str, float]:
    """Run a recipe on the accelerator; return the peaks by the names that stages of an estimate have."""
    found: dict[str, float] = {}
    with pretended_accelerator() as device:
        gc.collect()
        with (
            patch.object(select, "ask", _timed(device, found, select.ask)),
            patch.object(prune._Pruning, "inside", _timed(device, found, prune._Pruning.inside)),
            patch("compressx.report.figures.draw", lambda *_: ()),
        ):
            run(written, device="cuda")
    return found


def _timed(device: Record, found: dict[str, float], call: Any) -> Any:
    asks = call is select.ask

    def timed(*args: Any, **kwargs: Any) -> Any:
        if not asks:
            device.forget_peak()
        with _entered(device, found, f"prune: {args[0]}" if asks else "") if asks else _passes(device, found):
            return call(*args, **kwargs)

    return timed


@contextmanager
def _passes(device: Record, found: dict[str, float]) -> Iterator[None]:
    yield
    _noted(device, found, "prune: passes and statistics")


@contextmanager
def _entered(device: Record, found: dict[str, float], name: str) -> Iterator[None]:
    _noted(device, found, "prune: passes and statistics")
    yield
    _noted(device, found, name)


def _noted(device: Record, found: dict[str, float], name: str) -> None:
    found[name] = max(found.get(name, 0.0), float(device.peak_bytes))
    device.forget_peak()
