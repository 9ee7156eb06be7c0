"""Experiment trackers, through accelerate: settings, every block, losses, and what was measured.

A tracker that fails is left out from then on, with a warning. The run goes on.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compressx.api.record import BlockReport, total_sparsity
from compressx.pipeline.log import RunLog
from compressx.recipe.schema import LoadedRecipe
from compressx.recipe.tracking import Track
from compressx.runtime.errors import CompressxError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def check_trackers(settings: Track) -> None:
    """Refuse trackers whose package is not installed.

    Raises:
        CompressxError: the message has the command that installs them.
    """
    from accelerate.tracking import get_available_trackers

    installed = {str(tracker) for tracker in get_available_trackers()}
    if missing := [name for name in settings.to if name not in installed]:
        several = "trackers" if len(missing) > 1 else "tracker"
        raise CompressxError(f"{several} {', '.join(missing)} not installed; pip install {' '.join(missing)}")


class Tracking:
    """The trackers of one run; none until `start`.

    Args:
        log: gets the warnings, and what trackers print.
    """

    def __init__(self, log: RunLog) -> None:
        self.log = log
        self.trackers: list[Any] = []
        self.steps = 0

    def start(self, loaded: LoadedRecipe, folder: Path, more: Mapping[str, str]) -> None:
        """Start the recipe's trackers, and log the settings.

        Args:
            loaded: the recipe.
            folder: gets TensorBoard's files.
            more: logged beside the recipe.
        """
        settings = loaded.recipe.track
        if settings is None:
            return
        from accelerate import PartialState

        PartialState()  # accelerate's trackers ask it which process logs
        name = loaded.recipe.output.expanduser().resolve().name
        self.trackers = [_made(tracker, settings.project, name, folder) for tracker in settings.to]
        values = {**_flat(loaded.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)), **more}
        self._each(lambda tracker: tracker.start())
        self._each(lambda tracker: tracker.store_init_configuration(values))

    def skip(self, steps: int) -> None:
        """Pass over steps that an interrupted run has logged, so that each number means the same in both runs."""
        self.steps += steps

    def values(self, values: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers as the next step, or as a given one, which others then follow."""
        if self.trackers and values:
            self.steps = self.steps if step is None else step
            self._each(lambda tracker: tracker.log(dict(values), step=self.steps))
            self.steps += 1

    def block(self, report: BlockReport) -> None:
        """Log a pruned block."""
        values = {
            "block/index": float(report.index),
            "block/sparsity": total_sparsity(report.layers),
            "block/seconds": report.seconds,
        }
        if report.output_error is not None:
            values["block/output_error"] = report.output_error
        if (trained := report.reconstruction) is not None:
            values |= {"reconstruction/before": trained.before, "reconstruction/after": trained.after}
        self.values(values)

    def figures(self, name: str, figures: Mapping[str, Any]) -> None:
        """Log what was measured of a model."""
        found = _flat(figures)
        self.values({f"{name}/{key}": float(x) for key, x in found.items() if isinstance(x, int | float)})

    def close(self) -> None:
        """End the trackers' runs."""
        self._each(lambda tracker: tracker.finish())
        self.trackers = []

    def _each(self, call: Callable[[Any], None]) -> None:
        for tracker in [*self.trackers]:
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    call(tracker)
            except Exception as error:  # noqa: BLE001 - no tracker may cost the model
                self.trackers.remove(tracker)
                message = f"the tracker {tracker.name} failed and is left out: {type(error).__name__}: {error}"
                self.log.write(logging.WARNING, message)
            for line in filter(None, map(str.strip, _COLOURS.sub("", printed.getvalue()).splitlines())):
                self.log.write(logging.INFO, f"{tracker.name}: {line}")


def _made(name: str, project: str, run: str, folder: Path) -> Any:
    """Make a tracker of accelerate; the arguments that name a run differ between them."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        return kind(name, folder)  # files in `tensorboard/` of the output
    return kind(project, **{"run_name" if name == "mlflow" else "name": run})


def _flat(values: Any, path: str = "") -> dict[str, Any]:
    """Write nested mappings and lists as one mapping, such as `prune.0.sparsity`."""
    if not isinstance(values, Mapping | list | tuple):
        return {path: values}
    items = values.items() if isinstance(values, Mapping) else enumerate(values)
    return {key: x for name, value in items for key, x in _flat(value, f"{path}.{name}".lstrip(".")).items()}
