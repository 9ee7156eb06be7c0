"""Silence the terminal output of libraries."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
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
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            patch.object(tqdm, "__init__", no_bar),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
