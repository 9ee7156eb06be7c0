"""For authors of pruners: tiny random models of every architecture, and checks of what a pruner promises.

`check_pruner(spec)` is one test for the whole contract; `pytest_plugins = ["compressx.testing.fixtures"]` in a conftest
gives models and tokens as fixtures.
"""

from compressx.testing.conformance import ConformanceError, Outcome, check_pruner, conformance
from compressx.testing.models import TINY_CONFIGS, save_tiny_model, tiny_model, tiny_text, tiny_tokens

__all__ = [
    "TINY_CONFIGS",
    "ConformanceError",
    "Outcome",
    "check_pruner",
    "conformance",
    "save_tiny_model",
    "tiny_model",
    "tiny_text",
    "tiny_tokens",
]
