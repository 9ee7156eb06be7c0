"""The lines that a run writes: to the logger `compressx`, and to `run.log` in its folder.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from compressx.api.record import BlockReport, RunReport
from compressx.runtime.code import __version__, library_versions
from compressx.runtime.errors import CompressxError, printable
from compressx.runtime.files import os_errors_named
from compressx.runtime.machine import command, machine
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


class RunLog(logging.Handler):
    """The log of one run. As a handler it also takes the lines of libraries and of parts of compressx.

    Args:
        first: whether this process writes; the others are silent.
    """

    def __init__(self, *, first: bool = True) -> None:
        super().__init__()
        self.first = first
        self.early: list[logging.LogRecord] = []  # until there is a folder for them
        self.file: logging.FileHandler | None = None
        self.stage, self.begun, self.done, self.reported = "", 0.0, 0, 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to the file."""
        if self.file is None:
            self.early.append(record)
        else:
            self.file.handle(record)

    def write(self, level: int, text: str, *, shown: bool = True) -> None:
        """Write a line, to the file only unless `shown`; details (DEBUG) only if the logger lets them pass."""
        passes = LOG.isEnabledFor(level)
        if self.first and text and (passes or level >= logging.INFO):
            record = LOG.makeRecord(LOG.name, level, __file__, 0, text, (), None)
            (LOG if shown and passes else self).handle(record)  # the logger passes it on to this handler

    def open(self, folder: Path) -> None:
        """Write `run.log` in a folder from now on, beginning with the lines so far; what is there is kept."""
        if self.first:
            with os_errors_named("write", folder / NAME):
                self.file = _File(folder / NAME, encoding="utf-8")
            self.file.setFormatter(FORMAT)
            for record in self.early:
                self.file.handle(record)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
        self.file = None
        super().close()

    def header(self, device: torch.device) -> None:
        """Write what is run, on what, and with what."""
        versions = {"compressx": __version__, **library_versions()}
        self.write(logging.INFO, f"command: {command()}")
        self.write(logging.INFO, f"machine: {machine(device)}")
        self.write(logging.INFO, "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()))

    def step(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Write a line if a stage begins, or if the last line is long ago."""
        now = time.perf_counter()
        if stage != self.stage:
            self.stage, self.begun, self.done, self.reported = stage, now, done, now
            self._line(stage, note, _peak())
        elif now - self.reported >= _EVERY:
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
        for layer in report.layers:
            self.write(
                logging.DEBUG,
                f"{layer.name}  {layer.pruner}  {layer.pattern}  sparsity {layer.sparsity:.4f}  {layer.seconds:.2f} s  "
                + "  ".join(f"{name} {value:.4g}" for name, value in layer.info.items()),
            )

    def figures(self, name: str, figures: Mapping[str, Any]) -> None:
        """Write what was measured."""
        shown = {key: x.get("token_perplexity") if isinstance(x, Mapping) else x for key, x in figures.items()}
        self._line(name, *(f"{key} {value:.6g}" for key, value in shown.items() if isinstance(value, int | float)))

    def finished(self, report: RunReport) -> None:
        """Write the sparsity, and how long each stage took."""
        spent = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report.seconds.items())
        part = f" of {report.linears}" if report.linears.endswith(")") else ""
        self._line("finished", f"{report.share} {report.sparsity:.2%}{part}", f"seconds: {spent}", _peak())

    def _line(self, *fields: str) -> None:
        self.reported = time.perf_counter()
        self.write(logging.INFO, "  ".join(field for field in fields if field))

    def _left(self, done: int, total: int) -> str:
        """Estimate how long the stage still takes, at its speed so far."""
        if done <= self.done:
            return ""
        seconds = (time.perf_counter() - self.begun) / (done - self.done) * (total - done)
        return f"{seconds / 60:.0f} min left" if seconds >= 120 else f"{seconds:.0f} s left"


@contextlib.contextmanager
def run_log(*, first: bool) -> Iterator[RunLog]:
    """Yield the log of a run, which also gets the warnings of libraries, and how the run ends if it fails."""
    log = RunLog(first=first)
    show = warnings.showwarning

    # Not logging.captureWarnings, by which warnings would no longer be shown, and callers no longer find them.
    def showwarning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        log.write(logging.WARNING, f"{category.__name__}: {message}", shown=False)
        show(message, category, *place, **more)

    loggers = [LOG, *map(logging.getLogger, _LIBRARIES)] if first else []
    for logger in loggers:
        logger.addHandler(log)
    try:
        with patch.object(warnings, "showwarning", showwarning):
            yield log
    except BaseException as error:
        known = isinstance(error, CompressxError | KeyboardInterrupt)
        reason = f"{type(error).__name__} {error}".strip() if known else "".join(traceback.format_exception(error))
        log.write(logging.ERROR, f"the run ended: {reason}", shown=False)
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(log)
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
        with contextlib.suppress(OSError):  # what could not be written is reported
            super().close()


def _peak() -> str:
    gpu = peak_gpu_bytes()
    return f"peak {peak_resident_bytes() / 2**30:.2f} GiB" + (f", on the GPU {gpu / 2**30:.2f} GiB" if gpu else "")
