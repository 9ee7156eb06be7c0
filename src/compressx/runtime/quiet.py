"""Silence for the libraries that talk to the terminal while we use them."""

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
    """Hold back the warnings, log messages below ERROR, progress bars and prints of the libraries called within.

    Progress bars are tqdm's, switched off at their one constructor, since lm-eval leaves its callers no other way.
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
