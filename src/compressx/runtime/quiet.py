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

    with contextlib.ExitStack() as restored:
        for logger in map(logging.getLogger, _LOGGERS):
            if logger.level != logging.ERROR:  # every change empties the caches of all loggers
                restored.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.ERROR)
        restored.enter_context(warnings.catch_warnings(action="ignore"))
        restored.enter_context(patch.object(tqdm, "__init__", no_bar))
        restored.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield
