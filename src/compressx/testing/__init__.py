"""For authors of plugins: tiny random models of every architecture, and checks of what a plugin promises.

`check_plugin(spec)` is one test for the whole contract of what a plugin offers.
"""

from compressx.testing.conformance import ConformanceError, Outcome, check_plugin, conformance
from compressx.testing.models import TINY_CONFIGS, save_tiny_model, tiny_model, tiny_text, tiny_tokens

__all__ = [
    "TINY_CONFIGS",
    "ConformanceError",
    "Outcome",
    "check_plugin",
    "conformance",
    "save_tiny_model",
    "tiny_model",
    "tiny_text",
    "tiny_tokens",
]
