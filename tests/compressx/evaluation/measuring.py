"""An `evaluate` section as a recipe has it, and what is measured by it."""

from __future__ import annotations

from functools import cache
from typing import Any

from compressx.evaluation.evaluators import options_of, read_evaluators, run_evaluators
from compressx.plugins.manager import load_plugins
from compressx.recipe.document import from_python

plugins = cache(load_plugins)


def evaluators(**sections: Any) -> dict[str, Any]:
    """Return the options of each evaluator."""
    return options_of(from_python({"evaluate": sections}, "<dict>"), plugins())


def read(settings: Any, tokenizer: Any, model: Any) -> Any:
    return read_evaluators(settings, plugins(), tokenizer, model)


def measure(access: Any, tokenizer: Any, settings: Any, fingerprint: str | None = None) -> Any:
    return run_evaluators(access, tokenizer, read(settings, tokenizer, access.model), fingerprint=fingerprint)
