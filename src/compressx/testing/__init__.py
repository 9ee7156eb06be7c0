"""For authors of plugins: tiny random models of every architecture, and checks of what a plugin promises.

`check_pruner(spec)` and `check_selector(spec)` are one test each for the whole contract;
`pretended_accelerator()` runs code for `cuda` on a machine without a GPU;
`pytest_plugins = ["compressx.testing.fixtures"]` in a conftest gives models and tokens as fixtures.
"""

from compressx.testing.accelerator.counts import Counts, Record
from compressx.testing.accelerator.pretended import pretended_accelerator
from compressx.testing.conformance import ConformanceError, Outcome, check_pruner, check_selector, conformance
from compressx.testing.models import TINY_CONFIGS, save_tiny_model, tiny_model, tiny_text, tiny_tokens

__all__ = [
    "TINY_CONFIGS",
    "ConformanceError",
    "Counts",
    "Outcome",
    "Record",
    "check_pruner",
    "check_selector",
    "conformance",
    "pretended_accelerator",
    "save_tiny_model",
    "tiny_model",
    "tiny_text",
    "tiny_tokens",
]
