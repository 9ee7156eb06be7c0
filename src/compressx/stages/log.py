"""The lines that a run writes while it goes: to the logger `compressx`, and to `run.log` in its folder.

A line where a stage begins, one for every block, and one every half minute in between. The logger gets what its level
lets pass; `run.log` always gets them, with the warnings of libraries.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

from compressx.api.names import in_short
from compressx.api.record import BlockReport, RunReport, grouped
from compressx.planning.plan import Plan
from compressx.recipe.schema import LoadedRecipe
from compressx.runtime.errors import CompressxError, printable
from compressx.runtime.files import os_errors_named
from compressx.runtime.machine import command
from compressx.runtime.timing import peak_gpu_bytes, peak_resident_bytes

LOG = logging.getLogger("compressx")


class _Format(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


FORMAT = _Format("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
NAME = "run.log"

_LIBRARIES = ("datasets", "huggingface_hub", "transformers")
_EVERY = 30.0
"""Seconds between two lines of one stage."""
_UNLIMITED = 2**31


class _Forwarding(logging.Handler):
    """Passes lines on that parts of compressx log by themselves, such as `runtime.cache`, to the files of a run."""

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self.log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a line on, unless it is the run's own."""
        if record.name != LOG.name:
            for handler in self.log.handlers:
                handler.handle(record)


class RunLog:
    """The log of one run.

    Args:
        first: whether this process writes; the others are silent.
        file: a second file to write, or None.

    Raises:
        ArtifactError: `file` cannot be written.
    """

    def __init__(self, *, first: bool = True, file: Path | None = None) -> None:
        self.first = first
        # Lines are kept until there is a folder for them.
        self.early = MemoryHandler(_UNLIMITED, flushLevel=_UNLIMITED)
        self.handlers: list[logging.Handler] = [self.early]
        if file is not None and first:
            self.handlers.append(_file_handler(file.expanduser()))
        self.stage, self.begun, self.done, self.told = "", 0.0, 0, 0.0

    def write(self, level: int, text: str, *, shown: bool = True) -> None:
        """Write a line, to the files only unless `shown`; details (DEBUG) only if the logger lets them pass."""
        if not self.first or (level < logging.INFO and not LOG.isEnabledFor(level)):
            return
        record = LOG.makeRecord(LOG.name, level, __file__, 0, text, (), None)
        for handler in self.handlers:
            handler.handle(record)
        if shown and LOG.isEnabledFor(level):
            LOG.handle(record)

    def open(self, folder: Path) -> None:
        """Write `run.log` in a folder from now on, beginning with the lines so far; what is there stays."""
        if self.first:
            self.early.setTarget(_file_handler(folder / NAME))
            self.early.capacity = 1
            self.early.flush()

    def close(self) -> None:
        """Close the files."""
        for handler in (*self.handlers, self.early.target):
            if handler is not None:
                handler.close()
        self.handlers = []

    def header(self, machine: str, versions: Mapping[str, str]) -> None:
        """Write what is run, on what, and with what."""
        self.write(logging.INFO, f"command: {command()}")
        self.write(logging.INFO, f"machine: {machine}")
        self.write(logging.INFO, "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))

    def step(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Write a line if a stage begins, or if the last line is long ago."""
        now = time.perf_counter()
        if stage != self.stage:
            self.stage, self.begun, self.done, self.told = stage, now, done, now
            self._line(stage, note, _peak())
        elif now - self.told >= _EVERY:
            self._line(f"{stage} {done} of {total}", note, self._left(done, total), _peak())

    def block(self, report: BlockReport, done: int, total: int) -> None:
        """Write a line for a pruned block, and one for each of its linears if details are asked for."""
        error, trained = report.output_error, report.reconstruction
        self._line(
            f"{self.stage} {done} of {total}",
            report.fqn or "outside the blocks",
            "" if error is None else f"output error {error:.4g}",
            "" if trained is None else f"held-out error {trained.before:.4g}, reconstructed {trained.after:.4g}",
            f"{report.seconds:.1f} s", self._left(done, total), _peak(),
        )  # fmt: skip
        for line in _of_layers(report):
            self.write(logging.DEBUG, line)

    def figures(self, name: str, figures: Mapping[str, Any]) -> None:
        """Write what was measured."""
        shown = {key: x.get("token_perplexity") if isinstance(x, Mapping) else x for key, x in figures.items()}
        self._line(name, *(f"{key} {value:.6g}" for key, value in shown.items() if isinstance(value, int | float)))

    def finished(self, report: RunReport) -> None:
        """Write the sparsity, and how long each stage took."""
        spent = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items())
        part = f" of {report.linears}" if report.linears.endswith(")") else ""
        self._line("finished", f"{report.share} {report.sparsity:.2%}{part}", f"seconds: {spent}", _peak())

    def rules(self, loaded: LoadedRecipe, plan: Plan) -> None:
        """Write which rule takes which linears, and why others are left alone."""
        for rule in plan.rules:
            if not (taken := [x for x in plan.linears if x.rule is rule]):
                continue
            patterns = ", ".join(dict.fromkeys(plan.shown_pattern(x) for x in taken))
            names = f"{taken[0].name} ... {taken[-1].name}" if len(taken) > 1 else taken[0].name
            place = f"prune[{rule.index}] at {loaded.where('prune', rule.index)}"
            self.write(logging.DEBUG, f"{place}: {rule.label}, {patterns}, {len(taken)} linears: {names}")
        for name, reason in plan.skipped.items():
            self.write(logging.DEBUG, f"not pruned: {name}: {reason}")
        if plan.warning:
            self.write(logging.WARNING, plan.warning)

    def _line(self, *fields: str) -> None:
        self.told = time.perf_counter()
        self.write(logging.INFO, "  ".join(field for field in fields if field))

    def _left(self, done: int, total: int) -> str:
        """Estimate how long the stage still takes, at its speed so far."""
        if done <= self.done:
            return ""
        seconds = (time.perf_counter() - self.begun) / (done - self.done) * (total - done)
        return f"{seconds / 60:.0f} min left" if seconds >= 120 else f"{seconds:.0f} s left"


@contextlib.contextmanager
def run_log(*, first: bool, file: Path | None) -> Iterator[RunLog]:
    """Yield the log of a run, which also gets the warnings of libraries, and how the run ends if it fails.

    Raises:
        ArtifactError: `file` cannot be written.
    """
    log = RunLog(first=first, file=file)
    show = warnings.showwarning

    def showwarning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        log.write(logging.WARNING, f"{category.__name__}: {message}", shown=False)
        show(message, category, *place, **more)

    libraries = [logging.getLogger(name) for name in _LIBRARIES] if first else []
    parts = _Forwarding(log)
    try:
        if first:
            LOG.addHandler(parts)
        for library in libraries:
            library.addHandler(log.early)
        with patch.object(warnings, "showwarning", showwarning):
            yield log
    except BaseException as error:
        known = isinstance(error, CompressxError | KeyboardInterrupt)
        told = f"{type(error).__name__} {error}".strip() if known else "".join(traceback.format_exception(error))
        log.write(logging.ERROR, f"the run ended: {told}", shown=False)
        raise
    finally:
        LOG.removeHandler(parts)
        for library in libraries:
            library.removeHandler(log.early)
        log.close()


class _File(logging.FileHandler):
    """A log file; when it cannot be written any more, it is left out with a warning: no log may cost the model."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self.addFilter(lambda _: False)
        LOG.warning("the log %s cannot be written and is left out: %s", self.baseFilename, error.strerror)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what could not be written is told
            super().close()


def _file_handler(path: Path) -> logging.FileHandler:
    with os_errors_named("write", path):
        handler = _File(path, encoding="utf-8")
    handler.setFormatter(FORMAT)
    return handler


def _peak() -> str:
    gpu = peak_gpu_bytes()
    return f"peak {peak_resident_bytes() / 2**30:.2f} GiB" + (f", on the GPU {gpu / 2**30:.2f} GiB" if gpu else "")


def _of_layers(report: BlockReport) -> Iterator[str]:
    """Yield a line for each linear with its pruner's figures, and one for curves that linears share."""
    for layer in report.layers:
        figures = "  ".join(f"{k} {v:.4g}" for k, v in layer.info.items())
        yield (f"{layer.name}  {layer.pruner}  {layer.pattern}  sparsity {layer.sparsity:.4f}  "
               f"{layer.seconds:.2f} s  {figures}").rstrip()  # fmt: skip
    for layers, history in grouped((layer, layer.history) for layer in report.layers):
        yield f"{in_short([x.name for x in layers])}  " + "; ".join(
            f"{name} {_curve(values)}" for name, values in history.items()
        )
    if report.reconstruction is not None:
        yield f"{report.fqn}  held-out error {_curve(report.reconstruction.history)}"


def _curve(values: Sequence[float], shown: int = 5) -> str:
    """Write a curve's first and last value and a few between, evenly apart."""
    last = len(values) - 1
    steps = sorted({round(i * last / (shown - 1)) for i in range(shown)})
    between = " ... " if len(steps) < len(values) else " "
    return between.join(f"{values[i]:.3g}" for i in steps) + f" ({len(values)} steps)"
