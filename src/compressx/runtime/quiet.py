"""Silence the terminal output of libraries."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

_LOGGERS = ("datasets", "huggingface_hub", "lm_eval", "transformers")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress warnings, log messages below ERROR, progress bars and prints.

    Progress bars are disabled in tqdm's constructor, because lm-eval has no option for it.
    """
    from tqdm.std import tqdm

    start_bar = tqdm.__init__

    def no_bar(self: Any, *args: Any, **kwargs: Any) -> None:
        start_bar(self, *args, **{**kwargs, "disable": True})

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    _set(loggers, [logging.ERROR] * len(loggers))
    try:
        with (
            warnings.catch_warnings(),
            patch.object(tqdm, "__init__", no_bar),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        _set(loggers, levels)


def _set(loggers: Sequence[logging.Logger], levels: Sequence[int]) -> None:
    for logger, level in zip(loggers, levels, strict=True):
        if logger.level != level:  # every change empties the caches of all loggers
            logger.setLevel(level)
